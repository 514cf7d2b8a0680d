"""The two stages of scenario.py: virtual time, and processes on ZeroMQ."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from common.actors import Actor
from common.addresses import Plane, Role
from tests.conformance.scenario import Answerer
from tests.sim.bus_world import BusWorld, Member
from tests.support.bus import RealBus

FOREVER_MS = 10**9
OTHER = b"answerer of agent 1".ljust(32, b"-")


class SimStage:
    """BusWorld: the real cores, the network model of issue 5."""

    patience = 1.0

    def __init__(self, *, relay: bool, seed: int) -> None:
        self.world = BusWorld(seed, relay=relay)
        self.world.members["agent 1"].alive = False
        self.world.members["agent 1"].dialler.close()

    def gateway(self) -> Member:
        return self.world.members[Role.GATEWAY]

    def agent(self) -> Member:
        return self.world.members["agent 0"]

    def spawn(self, peer: Any, actor: Actor) -> bytes:
        peer.node.at(self.world.now, 0)
        address: bytes = peer.node.spawn(actor)
        peer.wake(self.world.now)
        return address

    def start_other(self) -> bytes:
        member = self.world.start_member("agent 1", Role.AGENT, self.agent().dialler.door)
        member.node.spawn(Answerer(), address=OTHER)
        return OTHER

    def kill_other(self) -> None:
        member = self.world.members["agent 1"]
        member.alive = False
        member.dialler.close()

    def crash_router(self) -> None:
        self.world.crash_door(Role.ROUTER)

    def start_router(self) -> None:
        self.world.start_door(Role.ROUTER)

    def half_open(self, peer: Any) -> None:
        for plane in (Plane.CONTROL, Plane.PROMPT):
            self.world.cut(peer.dialler.connections[plane], door_notices_ms=60_000)

    def stop(self, peer: Any) -> None:
        self.world.freeze(peer, FOREVER_MS)

    def go_on(self, peer: Any) -> None:
        peer.frozen_until, peer._wake_at = self.world.now, -1
        peer.wake(self.world.now)

    def now(self) -> float:
        return self.world.now / 1000

    def until(self, fact: Callable[[], object], limit_s: float) -> float:
        began = self.world.now
        assert self.world.run(int(limit_s * 1000), fact), f"not true within {limit_s} s"
        return (self.world.now - began) / 1000

    def wait(self, seconds: float) -> None:
        self.world.run(int(seconds * 1000))

    def close(self) -> None:
        """Nothing is left."""


class RealStage:
    """Router, relay and agent 1 as processes; gateway and agent 0 in this one, pumped in turn."""

    patience = 10.0

    def __init__(self, directory: Path, *, relay: bool) -> None:
        self._bus = RealBus(directory, relay=relay)
        self._gateway, self._agent = self._bus.service(Role.GATEWAY), self._bus.agent()
        self._other: subprocess.Popen[bytes] | None = None
        self._stopped: list[Any] = []
        self._left_open: list[tuple[Any, Any, Any]] = []

    def gateway(self) -> Any:
        return self._gateway

    def agent(self) -> Any:
        return self._agent

    def spawn(self, peer: Any, actor: Actor) -> bytes:
        address: bytes = peer.spawn(actor)
        return address

    def start_other(self) -> bytes:
        door, keys = self._bus.bus_file(Role.PROVISIONER), self._bus.agent_keys[1]
        told = {
            "keys": [keys.public.hex(), keys.secret.hex()],
            "broker": door.worker_key.hex(),
            "endpoints": {int(plane): endpoint for plane, endpoint in door.worker_endpoints.items()},
            "address": OTHER.hex(),
        }
        command = [sys.executable, "-P", "-m", "tests.conformance.peer"]
        environ = {**os.environ, "PEER": json.dumps(told)}
        self._other = subprocess.Popen(command, env=environ, cwd=Path(__file__).parents[2])
        return OTHER

    def kill_other(self) -> None:
        assert self._other is not None
        self._other.send_signal(signal.SIGKILL)
        self._other.wait()
        self._other = None

    def crash_router(self) -> None:
        self._bus.kill(Role.ROUTER)

    def start_router(self) -> None:
        self._bus.start(Role.ROUTER)

    def half_open(self, peer: Any) -> None:
        """New sockets beside the old ones, as after a NAT table lost the connection: the old side is never told."""
        for plane in (Plane.CONTROL, Plane.PROMPT):
            self._left_open.append((peer, peer.dealers._sockets[plane], peer.dealers._monitors[plane]))
            peer.dealers._open(plane)

    def stop(self, peer: Any) -> None:
        self._stopped.append(peer)

    def go_on(self, peer: Any) -> None:
        self._stopped.remove(peer)

    def _running(self) -> list[Any]:
        return [host for host in self._bus.hosts if host not in self._stopped]

    def now(self) -> float:
        return time.monotonic()

    def until(self, fact: Callable[[], object], limit_s: float) -> float:
        return self._bus.until(fact, limit_s * self.patience, *self._running())

    def wait(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            self._bus.pump(*self._running())

    def close(self) -> None:
        """End every process that was started."""
        if self._other is not None:
            self.kill_other()
        for peer, socket, monitor in self._left_open:
            for leaving in (socket, monitor):
                peer.bus.poller.unregister(leaving)
            socket.disable_monitor()
            monitor.close(0)
            socket.close(0)
        self._bus.close()
