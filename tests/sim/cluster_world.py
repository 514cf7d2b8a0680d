"""The whole cluster's processes and network on virtual time: the network of bus_world, hosts whose effects are done.

What a host does here is `common/host.py` without sockets: frames in, actors, effects, frames out; an Exit drains for at
most EXIT_DRAIN_MS and says goodbye. Invariants that hold at each event are `watch`ed after each turn of a process.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable
from typing import Any

from common.addresses import KEY_BYTES, Plane, Role
from common.codec import Message
from common.datastream import Drain, Emit, ObserverActor
from common.effects import Effect, Exit, Log, Observed, OwnerGone, StopSignal
from common.limits import EXIT_DRAIN_MS
from common.node import PLANES, Node
from common.redact import Redactor
from tests.sim.bus_world import (
    WALL_MS,
    BusWorld,
    Connection,
    Dialler,
    Door,
    Member,
    Pipe,
    Process,
    key_of,
)

SECRET = "hf_PLANTEDsecretNeverSeen0123456789"
"""Every worker has it in its launch file and prints it; no emitted byte may hold it."""
FORGED = "FORGED"
"""Stands in what another run, node, stage or request says (cluster_forge): no client and no run may hear of it."""
PROMPT_MARK = "pmark"
"""Stands in every prompt's text; no record may hold it (S1 8.5)."""
EFFECT_ROUNDS_MAX = 1000
SERVICE_ROLES = (
    Role.RESOLVER,
    Role.MEMBERSHIP,
    Role.PROVISIONER,
    Role.GATEWAY,
    Role.COLLECTOR,
    Role.ORCHESTRATOR,
)


class Violation(AssertionError):
    """Something that must never be the case is the case."""


class Owners(dict[bytes, bytes]):
    """The router's routes, and all that it ever had: what a worker's `routed` may rest on."""

    def __init__(self, ever: set[tuple[bytes, bytes]]) -> None:
        super().__init__()
        self._ever = ever

    def __setitem__(self, actor: bytes, node: bytes) -> None:
        self._ever.add((actor, node))
        super().__setitem__(actor, node)


class ClusterDoor(Door):
    """Router or relay; every frame that it forwards is part of the digest."""

    def __init__(self, world: ClusterWorld, role: Role, boot: int) -> None:
        super().__init__(world, role, boot)
        self.broker.owners = Owners(world.ever_routed)

    def mirror(self, plane: Plane, direction: str, verdict: str, frame: bytes) -> None:
        world = self.world
        assert isinstance(world, ClusterWorld)
        world.note_frame(f"{self.name} {int(plane)} {direction} {verdict}", frame)
        world.verdicts[verdict] = world.verdicts.get(verdict, 0) + 1

    def turn(self) -> None:
        super().turn()
        self.pure.node.check()


class ForgingNode(Node):
    """What cluster_forge says in somebody's name is not his: he does not hear that it could not be delivered."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.forged: list[Message] = []

    def forge(self, src: bytes, dst: bytes, message: Message) -> None:
        """Send in the name of this node's actor `src`."""
        self.forged.append(message)
        self.system.post(dst, message, src=src)

    def _sender_failed(self, src: bytes, dst: bytes, message: Message, reason: str) -> None:
        if not any(message is forged for forged in self.forged):
            super()._sender_failed(src, dst, message, reason)


class SimHost(Member):
    """A service, the orchestrator or an agent. `perform` gives effects a handler; `on_exit` hears of the end."""

    NODE = ForgingNode
    node: ForgingNode

    def __init__(self, world: ClusterWorld, name: str, role: Role, door: str, boot: int, skew_ms: int = 0) -> None:
        self.skew_ms = skew_ms
        self.redactor = Redactor([])
        self.status: int | None = None
        self.error = ""
        self.on_exit: list[Callable[[SimHost], None]] = []
        self.before_turn: list[Callable[[], None]] = []
        """What its sockets outside of the bus have to do in each turn."""
        self.emit_to = b""
        self.back_ms = 100
        """How long after its end a supervisor starts it again."""
        self._signals = 0
        self._closing_until = -1
        self._drained = False
        super().__init__(world, name, role, door, boot)
        self.role = role
        self.cluster = world
        self.node.at(world.now, self.wall())
        self.observer = self.node.spawn(ObserverActor(lambda data: self.redactor.redact(data)))
        self.handlers: dict[type[Effect], Callable[[bytes, Any], None]] = {
            Observed: self._observed,
            Log: self._log,
            Exit: self._exit,
        }

    def wall(self) -> int:
        return WALL_MS + self.world.now + self.skew_ms

    # --- what the shells of this process use --------------------------------------------------------------------
    def deliver(self, address: bytes, event: object) -> None:
        """An event of the shell; nothing happens if the process is gone."""
        if self.alive:
            self.node.deliver(address, event)
            self.wake(self.world.now)

    def later(self, ms: int, call: Callable[[], None]) -> None:
        """`call` in this process after `ms`; never after its end."""

        def due() -> None:
            if self.alive:
                call()

        self.world.at(self.world.now + ms, due)

    def perform(self, kind: type[Effect], handler: Callable[[bytes, Any], None]) -> None:
        self.handlers[kind] = handler

    def signal(self, name: str = "SIGTERM") -> None:
        self._signals += 1
        self.node.system.broadcast(StopSignal(name, self._signals))
        self.wake(self.world.now)

    def owner_gone(self) -> None:
        self.node.system.broadcast(OwnerGone())
        self.wake(self.world.now)

    # --- effects ------------------------------------------------------------------------------------------------
    def _observed(self, address: bytes, effect: Observed) -> None:
        self.node.deliver(self.emit_to or self.observer, Emit(effect.channel, effect.payload, effect.source))

    def _log(self, _: bytes, effect: Log) -> None:
        self.cluster.note(f"{self.name} log {effect.level} {effect.text}")
        self.cluster.emitted(effect.text.encode(), f"a log line of {self.name}")

    def _exit(self, _: bytes, effect: Exit) -> None:
        if self.status is None:
            self.status, self.error = effect.status, effect.error
            self.cluster.emitted(effect.error.encode(), f"the last words of {self.name}")

    # --- turning ------------------------------------------------------------------------------------------------
    def turn(self) -> None:
        now, wall = self.world.now, self.wall()
        for call in tuple(self.before_turn):
            call()
        refused, self.dialler.refused = self.dialler.refused, []
        for plane in refused:
            self.node.on_refused(plane)
        for plane, data in self.dialler.receive():
            self.node.on_frame(plane, data, now, wall)
        for _ in range(EFFECT_ROUNDS_MAX):
            self.node.tick(now, wall)
            effects = self.node.take_effects()
            for address, effect in effects:
                self.handlers[type(effect)](address, effect)
            if not effects or not self.node.system.busy:
                break
        else:
            raise Violation(f"{self.name}: effects cause effects without end")
        if self.status is not None and not self._drained:
            self._drained, self._closing_until = True, now + EXIT_DRAIN_MS
            self.node.system.broadcast(Drain())
            self.node.tick(now, wall)
        self._transmit()
        self.cluster.after_turn(self)
        if self._drained and (not self.node.unsettled or not self.node.link.up or now >= self._closing_until):
            self.node.goodbye()
            self._transmit()
            self.end(self.status or 0)
            return
        at = self.node.next_deadline()
        if self._drained:
            at = self._closing_until if at is None else min(at, self._closing_until)
        if at is not None:
            self.wake(at)

    def _transmit(self) -> None:
        for plane in self.node.take_resets():
            self.dialler.open(plane)
        for plane, frame in self.node.take_frames():
            self.dialler.send(plane, frame)

    def end(self, status: int) -> None:
        """The process is gone: of itself, or killed (a negative status)."""
        if not self.alive:
            return
        self.alive, self.status = False, status
        self.cluster.note(f"{self.name} ended {status}")
        self.dialler.close()
        for call in self.on_exit:
            call(self)


class ClusterWorld(BusWorld):
    """Doors, hosts and the network; what runs on them is started by cluster_run.Cluster."""

    def __init__(self, seed: int, *, relay: bool, hwm: int) -> None:
        self.rng = random.Random(seed)
        self.now, self.with_relay, self.hwm = 0, relay, hwm
        self.delay_ms = (0, 3)
        self.verdicts: dict[str, int] = {}
        self.doors: dict[str, Door] = {}
        self.members: dict[str, Member] = {}
        self.partitioned: dict[str, int] = {}
        """Process name → until when nothing of it gets through and no new connection comes about."""
        self.ever_routed: set[tuple[bytes, bytes]] = set()
        """(actor, node) pairs that a router has had."""
        self.watchers: list[Callable[[SimHost], None]] = []
        self.turns = 0
        self._heap = []
        self._count = self._conns = self._addresses = 0
        self._hash = hashlib.sha256()
        self._stalls: dict[bytes, int] = {}
        self._boots = 1000
        self._diallers: dict[bytes, Dialler] = {}
        services = {key_of(role): role for role in (*SERVICE_ROLES, Role.ROUTER)}
        self.static = {Role.ROUTER: services, Role.RELAY: {key_of(Role.ROUTER): Role.ROUTER}}
        self.secret = SECRET.encode()[:KEY_BYTES]

    # --- processes ------------------------------------------------------------------------------------------------
    def start_door(self, role: Role) -> Door:
        self._boots += 1
        door = self.doors[role] = ClusterDoor(self, role, self._boots)
        return door

    def start_host(self, name: str, role: Role, door: str, skew_ms: int = 0) -> SimHost:
        """A new incarnation of `name`."""
        self._boots += 1
        host = SimHost(self, name, role, door, self._boots, skew_ms)
        self.members[name] = host
        return host

    def processes(self) -> list[Process]:
        """Everything that runs, in a fixed order."""
        found: dict[str, Process] = {**self.doors, **self.members}
        return [found[name] for name in sorted(found) if found[name].alive]

    def after_turn(self, host: SimHost) -> None:
        self.turns += 1
        for watcher in self.watchers:
            watcher(host)

    # --- the network ----------------------------------------------------------------------------------------------
    def is_apart(self, *names: str) -> bool:
        """Whether one of these is partitioned from the rest."""
        return any(self.partitioned.get(name, 0) > self.now for name in names)

    def door_for(self, dialler: Dialler) -> Door | None:
        if self.partitioned and self.is_apart(dialler.owner.name, dialler.door):
            return None
        return self.doors.get(dialler.door)

    def partition(self, name: str, ms: int) -> None:
        """As a broken cable: what is under way comes after it, over the connections that nobody gave up."""
        self.partitioned[name] = self.now + ms
        for dialler in self.diallers():
            if name in (dialler.owner.name, dialler.door):
                for _, connection in sorted(dialler.connections.items()):
                    self.stall(connection, ms)

    def carry(self, connection: Connection, pipe: Pipe, frame: bytes, to: Callable[[], Process | None]) -> None:
        self.emitted(frame, "a frame")
        super().carry(connection, pipe, frame, to)

    def owner_of(self, connection: Connection) -> Process | None:
        found = self._diallers.get(connection.conn)
        if found is None or found.connections.get(connection.plane) is not connection:
            found = next((one for one in self.diallers() if one.connections.get(connection.plane) is connection), None)
            if found is None:
                return None
            self._diallers[connection.conn] = found
        return found.owner if found.owner.alive else None

    def new_address(self) -> bytes:
        """As random ones: also their first bytes tell them apart."""
        self._addresses += 1
        return hashlib.sha256(b"actor %d" % self._addresses).digest()

    # --- what leaves a process ------------------------------------------------------------------------------------
    def emitted(self, data: bytes, what: str) -> None:
        """No secret in any emitted byte (S1 8.14, 9.20)."""
        if self.secret in data:
            raise Violation(f"the secret is in {what}")

    def note_frame(self, text: str, frame: bytes) -> None:
        self._hash.update(b"%d %b\n%b" % (self.now, text.encode(), frame))

    def note_bytes(self, text: str, data: bytes) -> None:
        self.emitted(data, text)
        self.note_frame(text, data)


__all__ = ["FORGED", "PLANES", "PROMPT_MARK", "SECRET", "SERVICE_ROLES", "ClusterWorld", "SimHost", "Violation"]
