"""The way from a plugin's thread to the actor: in order, in batches, bounded, and never without the end."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

from services.provisioner.plugin import Exited, ProviderLine, StdoutLine
from services.provisioner.sink import BATCH_OBSERVATIONS_MAX, NodeSink
from services.provisioner.state import NodeObserved


class Loop:
    """call_soon of a loop that turns only when told."""

    def __init__(self) -> None:
        self.calls: deque[Callable[[], None]] = deque()
        self.events: list[NodeObserved] = []

    def turn(self) -> None:
        for _ in range(len(self.calls)):
            self.calls.popleft()()

    @property
    def seen(self) -> list[object]:
        return [item for event in self.events for item in event.observations]


def test_many_lines_are_few_events_in_order() -> None:
    loop = Loop()
    sink = NodeSink("h", loop.calls.append, loop.events.append)
    for number in range(600):
        sink(StdoutLine(str(number)))
    assert len(loop.calls) == 1
    while loop.calls:
        loop.turn()
    assert loop.seen == [StdoutLine(str(number)) for number in range(600)]
    assert [len(event.observations) for event in loop.events] == [BATCH_OBSERVATIONS_MAX, BATCH_OBSERVATIONS_MAX, 88]
    assert {event.handle_id for event in loop.events} == {"h"}


def test_a_flood_is_cut_counted_and_its_end_always_told() -> None:
    loop = Loop()
    sink = NodeSink("h", loop.calls.append, loop.events.append, pending_max=10, room_wait_ms=1)
    for number in range(13):
        sink(StdoutLine(str(number)))
    sink(Exited(0, "exited with status 0"))
    loop.turn()
    lost = ProviderLine("3 lines dropped: the worker writes faster than we read")
    assert loop.seen == [*(StdoutLine(str(number)) for number in range(10)), lost, Exited(0, "exited with status 0")]


def test_a_worker_that_writes_too_fast_waits_for_room() -> None:
    loop = Loop()
    sink = NodeSink("h", loop.calls.append, loop.events.append, pending_max=1, room_wait_ms=10_000)
    sink(StdoutLine("first"))
    writer = threading.Thread(target=sink, args=(StdoutLine("second"),))
    writer.start()
    writer.join(0.05)
    assert writer.is_alive()
    loop.turn()
    writer.join(60)
    loop.turn()
    assert loop.seen == [StdoutLine("first"), StdoutLine("second")]
