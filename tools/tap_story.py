"""What a message caused, as a tree: `mvp-tap --tree ID`. Pure.

An envelope's cause is the one whose id its `corr` repeats, and which its sender had received. What an actor says after
a timer or an event of its shell (a token of the engine) has no such cause; it hangs below the first envelope with the
same request id that its sender had received.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field

from tools.tap_records import Line, Names, printable

KEPT_MAX = 200_000  # of a live run: some minutes of a busy one
ALIKE_SHOWN = 3  # the first of a row of the same type; the rest is counted
DEPTH_MAX = 40


@dataclass(slots=True)
class Event:
    """One envelope, however many brokers it passed."""

    line: Line
    brokers: list[str]
    verdicts: list[str]
    parent: Event | None = None
    children: list[Event] = field(default_factory=list)

    @property
    def request(self) -> int | None:
        """The request id of its body."""
        body = self.line.body
        found = body.get("request_id") if isinstance(body, dict) else None
        return found if isinstance(found, int) and not isinstance(found, bool) else None


class Story:
    """Envelopes in the order of the taps, linked to their causes."""

    def __init__(self) -> None:
        self._events: OrderedDict[tuple[bytes, int, int], Event] = OrderedDict()
        self._received: dict[tuple[bytes, int], list[Event]] = {}
        """(node, id) → what that node received with this id, from whomever."""
        self._requests: dict[tuple[bytes, int], Event] = {}
        """(node, request id) → the first envelope with it that the node received."""
        self.forgotten = 0

    def add(self, line: Line) -> None:
        """The next record of a tap."""
        if line.bad:
            return
        key = (line.src_node, line.id, line.tag)
        if (known := self._events.get(key)) is not None:
            if line.broker not in known.brokers:
                known.brokers.append(line.broker)
            known.verdicts.append(line.verdict)
            return
        event = self._events[key] = Event(line, [line.broker], [line.verdict])
        event.parent = self._cause(event)
        if event.parent is not None:
            event.parent.children.append(event)
        self._received.setdefault((line.dst_node, line.id), []).append(event)
        if event.request is not None:
            self._requests.setdefault((line.dst_node, event.request), event)
        if len(self._events) > KEPT_MAX:
            self._forget()

    def _cause(self, event: Event) -> Event | None:
        line = event.line
        found = self._received.get((line.src_node, line.corr), []) if line.corr else []
        answered = [other for other in found if other.line.src_node == line.dst_node]
        if found:
            return (answered or found)[-1]
        if event.request is None:
            return None
        return self._requests.get((line.src_node, event.request))

    def _forget(self) -> None:
        _, event = self._events.popitem(last=False)
        self.forgotten += 1
        received = self._received[event.line.dst_node, event.line.id]
        received.remove(event)
        if not received:
            del self._received[event.line.dst_node, event.line.id]
        if event.request is not None and self._requests.get((event.line.dst_node, event.request)) is event:
            del self._requests[event.line.dst_node, event.request]

    # --- telling ----------------------------------------------------------------------------------------------
    def tell(self, wanted: int, names: Names) -> Iterator[str]:
        """The trees of message or request `wanted`, as lines; nothing if it did not pass."""
        chosen = [event for event in self._events.values() if wanted in (event.line.id, event.request)]
        told: set[int] = set()
        for event in chosen:
            if id(event) in told or (event.parent is not None and self._is_chosen(event.parent, wanted)):
                continue
            above = list(_above(event))
            for depth, ancestor in enumerate(reversed(above)):
                yield _shown(ancestor, event.line.wall_ms, depth, names)
            yield from self._below(event, event.line.wall_ms, len(above), names, told)
        if chosen and self.forgotten:
            yield f"({self.forgotten} older envelopes were forgotten)"

    def _is_chosen(self, event: Event, wanted: int) -> bool:
        return any(wanted in (one.line.id, one.request) for one in (event, *_above(event)))

    def _below(self, event: Event, zero_ms: int, depth: int, names: Names, told: set[int]) -> Iterator[str]:
        told.add(id(event))
        yield _shown(event, zero_ms, depth, names)
        if depth >= DEPTH_MAX:
            return
        kinds: dict[str, list[Event]] = {}
        for child in event.children:
            alike = kinds.setdefault(child.line.type, [])
            alike.append(child)
            if len(alike) <= ALIKE_SHOWN or child.children:
                yield from self._below(child, zero_ms, depth + 1, names, told)
        for kind, alike in kinds.items():
            hidden = [child for child in alike[ALIKE_SHOWN:] if not child.children]
            if hidden:
                told.update(map(id, hidden))
                first, last = hidden[0].line.wall_ms - zero_ms, hidden[-1].line.wall_ms - zero_ms
                yield f"{first:+8d} ms  {'  ' * (depth + 1)}{kind} {len(hidden)} more, until {last:+d} ms"


def _above(event: Event) -> Iterator[Event]:
    seen = 0
    while event.parent is not None and seen < DEPTH_MAX:
        event, seen = event.parent, seen + 1
        yield event


def _shown(event: Event, zero_ms: int, depth: int, names: Names) -> str:
    line = event.line
    bad = {verdict for verdict in event.verdicts if verdict not in ("forwarded", "local")}
    request = f" request {event.request}" if event.request is not None else ""
    return printable(
        f"{line.wall_ms - zero_ms:+8d} ms  {'  ' * depth}{line.type} "
        f"{names.of(line.src_node, line.src)} → {names.of(line.dst_node, line.dst)} #{line.id}{request}"
        + (f" ({', '.join(sorted(bad))})" if bad else "")
    )
