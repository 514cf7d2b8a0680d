"""Sends that have no way yet: held 5 s for a route, in order per receiver and plane (design.md 3). Pure."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass

from common.actors import Outbound
from common.addresses import Plane
from common.limits import HELD_MESSAGES_MAX


@dataclass(slots=True)
class _Entry:
    until_ms: int
    out: Outbound


class Held:
    """A bounded queue; its entries expire in the order in which they came."""

    def __init__(self) -> None:
        self._entries: deque[_Entry] = deque()
        self._for: Counter[tuple[bytes, Plane]] = Counter()

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, out: Outbound, until_ms: int) -> bool:
        """False: it is full, nothing was taken."""
        if len(self._entries) >= HELD_MESSAGES_MAX:
            return False
        self._entries.append(_Entry(until_ms, out))
        self._for[out.dst, type(out.message).PLANE] += 1
        return True

    def blocks(self, dst: bytes, plane: Plane) -> bool:
        """Whether something for this actor waits: what comes later must not overtake it."""
        return bool(self._entries) and self._for[dst, plane] > 0

    def take_all(self) -> list[tuple[Outbound, int]]:
        """Everything with its time, in order; for another try."""
        taken = [(entry.out, entry.until_ms) for entry in self._entries]
        self._entries.clear()
        self._for.clear()
        return taken

    def expired(self, now_ms: int) -> list[Outbound]:
        """What has waited its time."""
        gone: list[Outbound] = []
        while self._entries and self._entries[0].until_ms <= now_ms:
            out = self._entries.popleft().out
            self._for[out.dst, type(out.message).PLANE] -= 1
            gone.append(out)
        if not self._entries:
            self._for.clear()
        return gone

    def next_deadline(self) -> int | None:
        """When the next entry expires."""
        return self._entries[0].until_ms if self._entries else None

    def check(self) -> None:
        """Invariants: bounded, in order of expiry, counted right."""
        if not self._entries:
            assert not any(self._for.values())
            return
        times = [entry.until_ms for entry in self._entries]
        assert times == sorted(times) and len(times) <= HELD_MESSAGES_MAX
        assert sum(self._for.values()) == len(times)
