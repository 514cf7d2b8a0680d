"""`mvp-replay`: feed a recording of mvp-tap into the orchestrator's core and show where its records or the types of its
messages differ.

The core runs on the recording's own time with the addresses and views of that run. What is not on the bus (a stop word
on stdin, a signal, a service that was restarted) is taken from the run's own records, which are. Two things are
compared: which types of messages the core sends to which parts (all workers count as one), and its bootstrap records by
phase, status and node, in order but for ORDER_SLACK places. Contents are not compared. How often a type was sent is
shown where it differs, but is no divergence: resends depend on how fast the other side was.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from common.actors import ActorSystem
from common.addresses import Role
from common.codec import BadEnvelope, Message, decode_body, decode_envelope
from common.effects import JobDone, Observed, RunJob, StopSignal, ViewChanged
from common.envelope import Envelope
from common.messages.bus import Delta, Register, RouteEntry, Snapshot, ViewItem
from common.messages.node_agent import StopRun
from common.messages.provision import StopNodes
from common.messages.serve import CloseRpc
from common.messages.stream import Observe
from common.records import CHANNEL_BOOTSTRAP
from common.views import Views, item_key
from services.orchestrator.core import RunActor, ServiceRestarted, StopLine
from services.orchestrator.planner import PlanError
from services.orchestrator.planner_facts import PLAN_JOB, make_plan
from tools.tap import TapError, recorded
from tools.tap_records import parse

PROGRAM = "mvp-replay"
EXAMPLES = """\
example:
  mvp-tap --wait --record run.tap      before the run is started
  mvp-replay run.tap                   after it
"""
NOT_COMPARED = frozenset({"Observe", "Gap", "Register", "Unregister", "Watch", "ConfigGet", "Hello", "Goodbye"})
"""Of the node, not of the core: its link, its routes, its records' batches."""
CLOSING = (CloseRpc, StopRun, StopNodes)
SAME = "the same types of messages to the same parts, and the same records"
SHOWN_MAX = 20
ORDER_SLACK = 8  # records: what came over two planes, or in the same millisecond, may have been handled the other way


class ReplayError(ValueError):
    """The recording cannot be replayed; one sentence."""


@dataclass(frozen=True, slots=True)
class Passed:
    """One envelope of the recording."""

    at_ms: int
    envelope: Envelope
    message: Message


@dataclass(frozen=True, slots=True)
class Step:
    """A bootstrap record: (phase, status, node), and when."""

    at_ms: int
    phase: str
    status: str
    node_id: Any

    @property
    def key(self) -> tuple[str, str, Any]:
        """What is compared."""
        return self.phase, self.status, self.node_id


@dataclass(slots=True)
class Outcome:
    """Recorded against replayed. recorded, replayed: (destination, type) → how often it was sent.

    unknown: of the inputs, how many went to addresses that the core does not have; they do nothing.
    """

    inputs: int = 0
    unknown: int = 0
    recorded: Counter[tuple[str, str]] = field(default_factory=Counter)
    replayed: Counter[tuple[str, str]] = field(default_factory=Counter)
    recorded_steps: list[Step] = field(default_factory=list)
    replayed_steps: list[Step] = field(default_factory=list)
    error: str = ""
    reordered: int = 0
    """Records that are the same, but in another order."""

    def divergences(self) -> list[str]:
        """Sentences; empty where core and recording say the same."""
        found = [] if not self.error else [f"the core failed: {self.error}"]
        left = list(enumerate(self.replayed_steps))
        for at, was in enumerate(self.recorded_steps):
            same = next((one for one in left if one[1].key == was.key and abs(one[0] - at) <= ORDER_SLACK), None)
            if same is None:
                now = next((step for number, step in left if number >= at), None)
                found.append(
                    f"record {at + 1}: recorded {_step(was)}, replayed {_step(now) if now else 'nothing more'}"
                )
                break
            self.reordered += same[0] != at
            left.remove(same)
        else:
            if left:
                found.append(f"only the replay has the record {_step(left[0][1])}")
        for what in sorted(self.recorded.keys() | self.replayed.keys()):
            if bool(self.recorded[what]) != bool(self.replayed[what]):
                who = "recorded only" if self.recorded[what] else "replayed only"
                found.append(f"{who}: {what[1]} to {what[0]}")
        return found

    def amounts(self) -> list[str]:
        """Sentences about what was sent in both, but not equally often."""
        both = sorted(self.recorded.keys() & self.replayed.keys())
        return [
            f"{self.recorded[what]} recorded, {self.replayed[what]} replayed: {what[1]} to {what[0]}"
            for what in both
            if self.recorded[what] != self.replayed[what]
        ]


def _step(step: Step) -> str:
    return f"{step.phase} {step.status} of node {step.node_id} at {step.at_ms / 1000:+.3f} s"


# --- the recording ------------------------------------------------------------------------------------------------
def read(path: Path) -> tuple[list[Passed], int]:
    """Each envelope once, as the router saw it, and how many of its entries were none that can be decoded.

    Raises TapError, OSError.
    """
    seen: set[tuple[bytes, int, int, int]] = set()
    found: list[Passed] = []
    undecodable = 0
    for entry in recorded(path):
        if entry is None or entry[0] != "router":
            continue
        line = parse(*entry)
        try:
            envelope = decode_envelope(msgspec.msgpack.decode(entry[1])[4])
            message = decode_body(envelope.tag, envelope.body)
        except (BadEnvelope, msgspec.MsgspecError, IndexError, TypeError):
            undecodable += 1
            continue
        key = (envelope.src_node, envelope.src_boot, envelope.id, envelope.tag)
        if envelope.id and key in seen:
            continue
        seen.add(key)
        found.append(Passed(line.wall_ms, envelope, message))
    return found, undecodable


def _routes(passed: Sequence[Passed]) -> Iterator[RouteEntry]:
    for one in passed:
        if isinstance(one.message, Snapshot | Delta) and one.message.view == "routes":
            items = one.message.items if isinstance(one.message, Snapshot) else one.message.changed
            yield from (item for item in items if isinstance(item, RouteEntry))


class Addresses:
    """The actor addresses of the recorded orchestrator, in the order in which they were spawned."""

    def __init__(self, passed: Sequence[Passed]) -> None:
        main = next((route for route in _routes(passed) if route.name == Role.ORCHESTRATOR), None)
        if main is None:
            raise ReplayError("the recording knows no orchestrator: record a run from its start (mvp-tap --wait)")
        self.node, self.boot, self.main = main.node, main.boot, main.address
        known = {route.generation: route.address for route in _routes(passed) if route.node == self.node}
        for one in passed:
            if isinstance(one.message, Register) and one.envelope.src_node == self.node:
                known[one.message.generation] = one.message.address
        self.spawned = [known[number] for number in sorted(known) if number >= main.generation]


# --- the core -----------------------------------------------------------------------------------------------------
class Replay:
    """The orchestrator's core on a recording. Raises ReplayError when it holds no start."""

    def __init__(self, passed: Sequence[Passed]) -> None:
        self._passed = passed
        self._addresses = addresses = Addresses(passed)
        self._outcome = Outcome()
        self._start_ms = passed[0].at_ms
        self._random = random.Random(0)
        spawned = iter(addresses.spawned)
        self._views = Views()
        self._views.link_up = True
        self.system = ActorSystem(
            node=addresses.node,
            boot=addresses.boot,
            rng=self._random,
            views=self._views,
            new_address=lambda: next(spawned, b"") or self._random.randbytes(32),
        )
        nonce = next((one.envelope.run for one in self._mine() if any(one.envelope.run)), b"")
        self._routes: dict[bytes, ViewItem] = {item_key(route): route for route in self._before()}
        self.system.now_ms, self.system.wall_ms = 0, self._start_ms
        self.system.spawn(RunActor(nonce), Role.ORCHESTRATOR)
        self._publish(Snapshot(view="routes", version=1, items=list(self._routes.values())))

    def _mine(self) -> Iterator[Passed]:
        return (one for one in self._passed if one.envelope.src_node == self._addresses.node)

    def _before(self) -> list[RouteEntry]:
        """Routes that were there before the recording began: others were told of them, and it was not."""
        brought = {
            item_key(item)
            for one in self._passed
            if isinstance(one.message, Delta)
            and one.message.view == "routes"
            and one.envelope.dst_node == self._addresses.node
            for item in one.message.changed
        }
        return [route for route in _routes(self._passed) if item_key(route) not in brought]

    def run(self) -> Outcome:
        """All of the recording."""
        inputs = sorted([*self._inputs(), *self._events()], key=lambda item: item[0])
        try:
            for at_ms, event in inputs:
                self._advance(at_ms - self._start_ms)
                self._outcome.inputs += 1
                if isinstance(event, Passed):
                    self._take(event)
                else:
                    self.system.deliver(self._addresses.main, event)
                self._settle()
            self._advance(self._passed[-1].at_ms - self._start_ms)
        except (AssertionError, LookupError, TypeError, ValueError, RuntimeError) as error:
            self._outcome.error = f"{type(error).__name__}: {error}"
        names = {route.node: route.name for route in _routes(self._passed) if route.name}
        for one in self._mine():
            kind = type(one.message).__name__
            if one.envelope.plane_seq and kind not in NOT_COMPARED:
                self._outcome.recorded[names.get(one.envelope.dst_node, "worker"), kind] += 1
        self._outcome.recorded_steps = list(self._recorded_steps())
        return self._outcome

    def _inputs(self) -> Iterator[tuple[int, Passed]]:
        for one in self._passed:
            if one.envelope.dst_node == self._addresses.node and one.envelope.plane_seq:
                yield one.at_ms, one

    def _events(self) -> Iterator[tuple[int, Any]]:
        """What came to the core past the bus, as its records tell. They travel in batches: a stop is at the latest when
        the first thing that follows from it passed."""
        closing = next((one.at_ms for one in self._mine() if isinstance(one.message, CLOSING)), 1 << 62)
        for step, detail in self._records():
            at_ms = self._start_ms + step.at_ms
            if (step.phase, step.status) == ("shutdown", "started"):
                source, at_ms = str(detail.get("source")), min(at_ms, closing)
                if source == "stdin":
                    yield at_ms - 1, StopLine("stop")
                elif source.startswith("SIG"):
                    yield at_ms - 1, StopSignal(source, 1)
            elif (step.phase, step.status) == ("service_restart", "observed"):
                yield at_ms - 1, ServiceRestarted(str(detail.get("service")), str(detail.get("how")))

    def _take(self, one: Passed) -> None:
        message, envelope = one.message, one.envelope
        if isinstance(message, Snapshot | Delta):
            self._publish(message)
        elif self.system.hosts(envelope.dst):
            self.system.deliver(envelope.dst, message, src=envelope.src, src_node=envelope.src_node, id=envelope.id)
        else:
            self._outcome.unknown += 1

    def _publish(self, update: Snapshot | Delta) -> None:
        """A view as the recorded node saw it; the first updates of a recording may follow a Snapshot before it."""
        try:
            replica = self._views.by_name(update.view)
        except KeyError:
            return
        if isinstance(update, Delta) and update.version != replica.version + 1:
            # What came in between was said before the recording began.
            items = {**self._routes, **replica.items} if update.view == "routes" else replica.items
            replica.apply(Snapshot(view=update.view, version=update.version - 1, items=list(items.values())))
        replica.apply(update)
        for address in list(self.system.watchers.get(update.view, [])):
            self.system.deliver(address, ViewChanged(update.view))

    def _advance(self, to_ms: int) -> None:
        """Time passes; each timer that becomes due is handled at its own time."""
        while (due := self.system.next_deadline()) is not None and due <= to_ms:
            self.system.now_ms = max(self.system.now_ms, due)
            self._settle()
        self.system.now_ms = max(self.system.now_ms, to_ms)

    def _settle(self) -> None:
        """Handle what is queued; take what comes out."""
        while True:
            self.system.run(self.system.now_ms, self._start_ms + self.system.now_ms)
            effects, self.system.effects = self.system.effects, []
            for address, effect in effects:
                if isinstance(effect, Observed):
                    self._observed(effect.channel, effect.payload)
                elif isinstance(effect, RunJob) and effect.kind == PLAN_JOB:
                    self.system.deliver(address, _planned(effect))
            for out in self.system.outbound:
                kind = type(out.message).__name__
                if not type(out.message).DATAGRAM and kind not in NOT_COMPARED:
                    route = self._views.routes.owner(out.dst)
                    self._outcome.replayed[(route.name if route else "") or "worker", kind] += 1
            self.system.outbound.clear()
            if not effects:
                return

    # --- records ----------------------------------------------------------------------------------------------
    def _observed(self, channel: str, payload: bytes) -> None:
        if channel == CHANNEL_BOOTSTRAP and (step := _parsed(self.system.now_ms, payload)) is not None:
            self._outcome.replayed_steps.append(step[0])

    def _records(self) -> Iterator[tuple[Step, dict[str, Any]]]:
        for one in self._mine():
            for record in one.message.records if isinstance(one.message, Observe) else []:
                if record.channel == CHANNEL_BOOTSTRAP:
                    step = _parsed(one.at_ms - self._start_ms, record.payload)
                    if step is not None:
                        yield step

    def _recorded_steps(self) -> Iterator[Step]:
        return (step for step, _ in self._records())


def _parsed(at_ms: int, payload: bytes) -> tuple[Step, dict[str, Any]] | None:
    try:
        record = msgspec.json.decode(payload)
        detail = record.get("detail")
        step = Step(at_ms, str(record["phase"]), str(record["status"]), record.get("node_id"))
    except (msgspec.MsgspecError, LookupError, AttributeError):
        return None
    return step, detail if isinstance(detail, dict) else {}


def _planned(job: RunJob) -> JobDone:
    try:
        return JobDone(job.kind, job.key, make_plan(**job.args))
    except PlanError as error:
        return JobDone(job.kind, job.key, error=str(error))


# --- the program --------------------------------------------------------------------------------------------------
def main(argv: list[str] | None = None) -> int:
    """0: the same records and types of messages; 1: others, or there is nothing to replay."""
    parser = argparse.ArgumentParser(
        prog=PROGRAM,
        description="Feed a recording into the orchestrator's core and show where it differs: in the types of\n"
        "messages to each part, and in the records (phase, status, node) and their order. Contents are not compared.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("file", type=Path, metavar="FILE", help="a recording of mvp-tap from the start of a run")
    args = parser.parse_args(argv)
    try:
        passed, undecodable = read(args.file)
        if not passed:
            raise ReplayError(f"{args.file} holds no envelope of the router")
        outcome = Replay(passed).run()
    except OSError as error:
        print(f"{PROGRAM}: cannot read {args.file}: {error.strerror or error}", file=sys.stderr)
        return 1
    except (TapError, ReplayError) as error:
        print(f"{PROGRAM}: {error}", file=sys.stderr)
        return 1
    found = outcome.divergences()
    print(
        f"{outcome.inputs} inputs; {len(outcome.recorded_steps)} records and {sum(outcome.recorded.values())} messages "
        f"recorded, {len(outcome.replayed_steps)} and {sum(outcome.replayed.values())} replayed"
    )
    if undecodable:
        print(f"  {undecodable} entries of the router cannot be decoded; they were left out")
    if outcome.unknown:
        print(f"  {outcome.unknown} of the inputs went to addresses that the core does not have; they did nothing")
    for sentence in outcome.amounts()[:SHOWN_MAX]:
        print(f"  not compared: {sentence}")
    for sentence in found[:SHOWN_MAX]:
        print(f"  {sentence}")
    if outcome.reordered:
        print(
            f"  {outcome.reordered} records in another order: the tap shows when something passed, not when it was read"
        )
    in_order = " but for their order" if outcome.reordered else " in the same order"
    print(SAME + in_order if not found else f"diverges in {len(found)} places")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
