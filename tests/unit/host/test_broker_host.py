"""The broker's own turn does for its actor what every host's does."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any, ClassVar

from common.actors import Actor, Ctx
from common.addresses import Role
from common.broker_host import BrokerHost
from common.bus import mint_keypair
from common.door import free_ports, tcp_endpoints
from common.effects import JobDone, OwnerGone, RunJob
from common.security import BusFile

LIMIT_MS = 300
WATCHED_S = 1.5
TURNS_MAX = 500  # a broker that nobody needs takes some 20 a second; one that spins, ten thousand


class Hasty(Actor):
    """Asks for work that takes longer than it waits."""

    Incoming: ClassVar[tuple[type, ...]] = (OwnerGone, JobDone)

    def __init__(self) -> None:
        self.done: list[JobDone] = []

    def receive(self, msg: Any, ctx: Ctx) -> None:
        """One message; see `Incoming`."""
        if isinstance(msg, JobDone):
            self.done.append(msg)
        else:
            ctx.effect(RunJob("slow", "", limit_ms=LIMIT_MS))


def test_a_late_job_is_told_and_the_broker_rests_again(tmp_path: Path) -> None:
    """Its limit stayed due for ever: a relay that had once saved its state took a whole core from then on."""
    actor, keys = Hasty(), mint_keypair()
    bus_file = BusFile(
        role=Role.RELAY,
        logical_id=Role.RELAY,
        run_dir=tmp_path,
        broker_key=keys.public,
        endpoints=tcp_endpoints(f"127.0.0.1:{free_ports('127.0.0.1')}"),
        keys=keys,
        tap="inproc://tap",
        allow={keys.public: Role.RELAY},
    )
    host = BrokerHost(bus_file, Role.RELAY, lambda broker, _: actor)
    host.jobs["slow"] = lambda: time.sleep(WATCHED_S)
    try:
        host.node.system.broadcast(OwnerGone())
        until = time.monotonic() + 30
        while not actor.done and time.monotonic() < until:
            host.turn()
        assert [(done.kind, done.error) for done in actor.done] == [("slow", f"timed out after {LIMIT_MS} ms")]
        until, turns = time.monotonic() + WATCHED_S, 0
        while time.monotonic() < until:
            host.turn()
            turns += 1
        assert turns <= TURNS_MAX
        assert len(actor.done) == 1, "what comes after the limit is dropped"
    finally:
        host.close()
