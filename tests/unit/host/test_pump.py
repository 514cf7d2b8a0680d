"""The pump (S1 5.1, 9.14): one turn moves frames in, runs actors, moves frames out; nothing that waits stops it."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest

from common.actors import Actor, Ctx
from common.addresses import Plane, Role
from common.effects import Exit, JobDone, RunJob
from common.host import Host
from common.limits import HANDLER_MS_MAX
from common.security import init
from tests.support.bus import RealBus
from tests.support.echo import Sink, Source

ENOUGH = 20


class Ticker(Actor):
    """Ticks each 10 ms and starts one job, which waits for ENOUGH ticks; the handler itself can be made long."""

    Incoming: ClassVar[tuple[type, ...]] = (JobDone,)

    def __init__(self, *, job: bool = False, blocks_s: float = 0.0) -> None:
        self.ticks = 0
        self.done: list[JobDone] = []
        self._job, self._blocks_s = job, blocks_s
        self.enough = threading.Event()

    def on_start(self, ctx: Ctx) -> None:
        ctx.timer("tick", 10)
        if self._job:
            ctx.effect(RunJob("wait", "one", {"event": self.enough}))

    def on_timer(self, key: str, ctx: Ctx) -> None:
        self.ticks += 1
        if self.ticks == ENOUGH:
            self.enough.set()
        time.sleep(self._blocks_s)
        ctx.timer("tick", 10)

    def receive(self, msg: Any, ctx: Ctx) -> None:
        self.done.append(msg)
        ctx.effect(Exit(0))


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Host]:
    """A host whose router is not there: the pump needs nobody."""
    made = Host.from_bus_file(init(tmp_path / "r", relay=False)[Role.GATEWAY])
    made.jobs["wait"] = lambda event: event.wait(60)
    yield made


@pytest.mark.spec("S1 9.14")
def test_waiting_work_never_stops_the_pump(host: Host) -> None:
    ticker = Ticker(job=True)
    host.spawn(ticker)
    assert host.run() == 0
    assert [done.error for done in ticker.done] == [""]
    assert ticker.ticks >= ENOUGH and ticker.done[0].result, "timers went on while the job waited on its thread"


@pytest.mark.spec("S1 9.14")
def test_the_watchdog_counts_a_handler_that_blocks(host: Host) -> None:
    ticker = Ticker(blocks_s=2 * HANDLER_MS_MAX / 1000)
    host.spawn(ticker)
    while ticker.ticks < 3:
        host.turn()
    host.close()
    assert host.loop.slow_turns >= 3


@pytest.mark.spec("S1 5.1", "S1 6", "S1 9.14")
def test_actor_messages_move_only_while_the_pump_runs(tmp_path: Path) -> None:
    """A frame that arrived is handled in the next turn and not before; what a handler sends leaves in the same turn."""
    bus = RealBus(tmp_path / "r")
    try:
        other, agent = bus.agent(1), bus.agent(0)
        sink = Sink()
        address = other.spawn(sink)
        bus.until(lambda: agent.node.views.routes.owner(address) and agent.node.link.is_up(Plane.PROMPT), 60)
        source = Source(address, 1, text="echo")
        agent.spawn(source)
        bus.until(lambda: source.sent, 60, agent)
        started = time.monotonic()
        while time.monotonic() - started < 0.3:
            bus.pump(agent)
        assert sink.got == [], "the other node did not turn, so nothing was handled there"
        bus.until(lambda: sink.got == [1], 60, other)
        bus.until(lambda: source.replies == [1], 60)
    finally:
        bus.close()
