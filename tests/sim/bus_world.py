"""Router, relay, gateway and workers on virtual time: the real cores, a seeded network that behaves as ZeroMQ does.

Per connection first in, first out; nothing is doubled or reordered. Faults are those of anchors.md A4, A5 and E2:
delay, stall, a cut that loses what is under way and an end that does not notice for a while, a full pipe, a crashed
broker with empty queues and a new boot, a frozen node, a restarted node, a refused handshake.
"""

from __future__ import annotations

import hashlib
import heapq
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar

from common.actors import Actor, Ctx
from common.addresses import Plane, Role
from common.broker import Broker, static_admissions
from common.broker_node import BrokerNode
from common.effects import SendFailed, ViewChanged
from common.messages.bus import Admit, Admitted, Revoke, Revoked
from common.node import PLANES, Identity, Node
from services.relay.core import RelayActor
from services.router.core import RouterActor, UplinkChanged
from tests.support.echo import Sink

WALL_MS = 1_800_000_000_000
TURN_MS = 1  # how long after its wake-up a process acts


def key_of(name: str) -> bytes:
    return name.encode().ljust(32, b"-")


@dataclass(slots=True)
class Pipe:
    """One direction of a connection."""

    frames: deque[tuple[int, bytes]] = field(default_factory=deque)
    last_ms: int = 0


@dataclass(slots=True)
class Connection:
    """A DEALER at a ROUTER. cut: frames vanish; each end notices on its own."""

    conn: bytes
    key: bytes
    plane: Plane
    up: Pipe = field(default_factory=Pipe)
    down: Pipe = field(default_factory=Pipe)
    established: bool = False
    cut: bool = False
    door_knows: bool = False


class Process:
    """Whatever runs: it wakes when something is there or due, and does nothing while frozen."""

    def __init__(self, world: BusWorld, name: str) -> None:
        self.world, self.name = world, name
        self.alive, self.frozen_until = True, 0
        self._wake_at = -1

    def wake(self, at_ms: int) -> None:
        at_ms = max(at_ms, self.world.now + TURN_MS)
        if self._wake_at < 0 or at_ms < self._wake_at:
            self._wake_at = at_ms
            self.world.at(at_ms, lambda: self._woken(at_ms))

    def _woken(self, at_ms: int) -> None:
        if not self.alive or self._wake_at != at_ms:
            return
        self._wake_at = -1
        if self.world.now < self.frozen_until:
            self.wake(self.frozen_until)
            return
        self.turn()

    def turn(self) -> None:
        raise NotImplementedError


class Dialler:
    """The DEALERs of one process towards one door."""

    def __init__(self, owner: Process, door: str, key: bytes) -> None:
        self.owner, self.door, self.key = owner, door, key
        self.connections: dict[Plane, Connection] = {}
        self.refused: list[Plane] = []

    def open(self, plane: Plane) -> None:
        world = self.owner.world
        old = self.connections.pop(plane, None)
        if old is not None:
            world.drop(self.door, old)
        self._try(plane, None)

    def _try(self, plane: Plane, known: Connection | None) -> None:
        """libzmq connects by itself, again and again; but never again after a refusal."""
        world = self.owner.world
        connection = Connection(world.fresh_conn(), self.key, plane)
        self.connections[plane] = connection

        def established() -> None:
            if self.connections.get(plane) is not connection or not self.owner.alive or connection.cut:
                return
            door = world.door_for(self)
            if door is None or not door.alive:
                world.at(world.now + world.reconnect_ms(), lambda: self._retry(plane, connection))
            elif not door.broker.admits(self.key):
                self.refused.append(plane)
                self.owner.wake(world.now)
            else:
                connection.established = True
                door.connections[connection.conn] = connection
                connection.door_knows = True
                self.owner.wake(world.now)

        world.at(world.now + world.handshake_ms(), established)

    def _retry(self, plane: Plane, connection: Connection) -> None:
        if self.connections.get(plane) is connection and self.owner.alive:
            self._try(plane, connection)

    def lost(self, plane: Plane, connection: Connection) -> None:
        """This end has noticed: it dials anew."""
        self._retry(plane, connection)

    def send(self, plane: Plane, frame: bytes) -> bool:
        connection = self.connections.get(plane)
        if connection is None or not connection.established or len(connection.up.frames) >= self.owner.world.hwm:
            return False
        if not connection.cut:
            self.owner.world.carry(connection, connection.up, frame, lambda: self._brought(connection))
        return True

    def _brought(self, connection: Connection) -> Process | None:
        door = self.owner.world.doors.get(self.door)
        if door is not None:
            door.brought[connection.plane, connection.conn] = connection
        return door

    def receive(self) -> list[tuple[Plane, bytes]]:
        now = self.owner.world.now
        found: list[tuple[Plane, bytes]] = []
        for plane in PLANES:
            connection = self.connections.get(plane)
            if connection is None:
                continue
            frames = connection.down.frames
            while frames and frames[0][0] <= now:
                found.append((plane, frames.popleft()[1]))
        return found

    def close(self) -> None:
        for connection in self.connections.values():
            self.owner.world.drop(self.door, connection)
        self.connections.clear()


class Door(Process):
    """A broker process; also `Ports` of its BrokerNode."""

    tapped = True

    def __init__(self, world: BusWorld, role: Role, boot: int) -> None:
        super().__init__(world, role)
        self.connections: dict[bytes, Connection] = {}
        self.brought: dict[tuple[Plane, bytes], Connection] = {}
        """Connections over which something has come since the last turn."""
        self.uplink: Dialler | None = None
        key = key_of(role)
        broker = Broker(key, boot, role, static_admissions(role, world.static[role]))
        uplink = role is Role.ROUTER and world.with_relay
        self.pure = BrokerNode(
            Identity(key, role, boot, role),
            broker,
            self,
            (lambda b, u: RouterActor(b, relay=u)) if role is Role.ROUTER else (lambda b, u: RelayActor(b)),
            rng=random.Random(world.rng.getrandbits(64)),
            new_address=world.new_address,
            uplink_key=key_of(Role.RELAY) if uplink else b"",
            uplink_planes=PLANES if uplink else (),
            uplink_event=UplinkChanged,
            validate=True,
        )
        self.broker = broker
        self.pure.node.at(world.now, WALL_MS + world.now)
        self.pure.start()
        if uplink:
            self.uplink = Dialler(self, Role.RELAY, key)
            for plane in PLANES:
                self.uplink.open(plane)
        self.wake(world.now)

    def send(self, plane: Plane, conn: bytes, frame: bytes) -> str:
        connection = self.connections.get(conn)
        if connection is None:
            return "gone"
        if len(connection.down.frames) >= self.world.hwm:
            return "full"
        if not connection.cut:
            self.world.carry(connection, connection.down, frame, lambda: self.world.owner_of(connection))
        return ""

    def send_uplink(self, plane: Plane, frame: bytes) -> bool:
        assert self.uplink is not None
        return self.uplink.send(plane, frame)

    def reset_uplink(self, plane: Plane) -> None:
        assert self.uplink is not None
        self.uplink.open(plane)

    def mirror(self, plane: Plane, direction: str, verdict: str, frame: bytes) -> None:
        self.world.note(f"{self.name} {plane} {direction} {verdict} {len(frame)}")
        self.world.verdicts[verdict] = self.world.verdicts.get(verdict, 0) + 1

    def turn(self) -> None:
        now, wall = self.world.now, WALL_MS + self.world.now
        pure = self.pure
        brought, self.brought = sorted(self.brought.items()), {}
        for (_, conn), connection in brought:
            if self.connections.get(conn) is not connection:
                continue
            frames = connection.up.frames
            while frames and frames[0][0] <= now:
                data = frames.popleft()[1]
                pure.on_frame(connection.plane, connection.conn, data, lambda c=connection: c.key, now, wall)
        if self.uplink is not None:
            refused, self.uplink.refused = self.uplink.refused, []
            for plane in refused:
                pure.on_uplink_refused(plane, now)
            for plane, data in self.uplink.receive():
                pure.on_uplink_frame(plane, data, now, wall)
        pure.note_time(now)
        for _ in range(20):
            pure.touched = False
            pure.node.tick(now, wall)
            pure.transmit(now, wall)
            pure.node.take_effects()
            if not pure.touched and not pure.node.system.busy:
                break
        if (at := pure.next_deadline()) is not None:
            self.wake(at)


class Member(Process):
    """A service or a worker."""

    NODE: ClassVar[type[Node]] = Node

    def __init__(self, world: BusWorld, name: str, role: Role, door: str, boot: int) -> None:
        super().__init__(world, name)
        self.boot = boot
        key = key_of(name)
        self.node = self.NODE(
            Identity(key, role, boot, name),
            rng=random.Random(world.rng.getrandbits(64)),
            new_address=world.new_address,
            broker_key=key_of(door),
            validate=True,
        )
        self.node.at(world.now, WALL_MS + world.now)
        self.dialler = Dialler(self, door, key)
        for plane in PLANES:
            self.dialler.open(plane)
        self.wake(world.now)

    def turn(self) -> None:
        now, wall = self.world.now, WALL_MS + self.world.now
        refused, self.dialler.refused = self.dialler.refused, []
        for plane in refused:
            self.node.on_refused(plane)
        for plane, data in self.dialler.receive():
            self.node.on_frame(plane, data, now, wall)
        self.node.tick(now, wall)
        self.node.take_effects()
        for plane in self.node.take_resets():
            self.dialler.open(plane)
        for plane, frame in self.node.take_frames():
            self.dialler.send(plane, frame)
        if (at := self.node.next_deadline()) is not None:
            self.wake(at)


class Admitter(Actor):
    """The provisioner's part: every worker key is admitted at each incarnation of the router until it says so."""

    Incoming: ClassVar[tuple[type, ...]] = (Admitted, Revoked, SendFailed, ViewChanged)

    def __init__(self, router: bytes, keys: list[bytes]) -> None:
        self.router, self.keys = router, keys
        self.confirmed: dict[bytes, int] = {}
        self.revoked: list[bytes] = []

    def on_start(self, ctx: Ctx) -> None:
        ctx.watch("routes")
        ctx.timer("say", 0)

    def on_timer(self, key: str, ctx: Ctx) -> None:
        route = ctx.views.routes.named(Role.ROUTER)
        for worker in self.keys:
            if route is not None and self.confirmed.get(worker) != route.boot:
                ctx.send(self.router, Admit(key=worker, role=Role.AGENT, run=bytes(16), node_id=1))
        ctx.timer("say", 500)

    def receive(self, msg: Any, ctx: Ctx) -> None:
        if isinstance(msg, Admitted):
            route = ctx.views.routes.named(Role.ROUTER)
            self.confirmed[msg.key] = route.boot if route else 0
        elif isinstance(msg, Revoked):
            self.revoked.append(msg.key)

    def revoke(self, key: bytes, node: Node) -> None:
        self.keys.remove(key)
        node.system.post(self.router, Revoke(key=key), src=self.address)

    address = b""


class BusWorld:
    """Times are ms from 0. `at` schedules, `run` lets time pass, `digest` is of everything that passed a broker."""

    def __init__(self, seed: int, *, relay: bool = True, agents: int = 2, hwm: int = 2000) -> None:
        self.rng = random.Random(seed)
        self.now, self.with_relay, self.hwm = 0, relay, hwm
        self.delay_ms: tuple[int, int] = (0, 3)
        self.verdicts: dict[str, int] = {}
        self.doors: dict[str, Door] = {}
        self.members: dict[str, Member] = {}
        self._heap: list[tuple[int, int, Callable[[], None]]] = []
        self._count = self._conns = self._addresses = 0
        self._hash = hashlib.sha256()
        self._stalls: dict[bytes, int] = {}
        self._boots = 1000
        services = {key_of(role): role for role in (Role.GATEWAY, Role.PROVISIONER, Role.ROUTER, Role.COLLECTOR)}
        self.static = {Role.ROUTER: services, Role.RELAY: {key_of(Role.ROUTER): Role.ROUTER}}
        self.start_door(Role.ROUTER)
        if relay:
            self.start_door(Role.RELAY)
        self.agents = [f"agent {index}" for index in range(agents)]
        for role in (Role.GATEWAY, Role.PROVISIONER):
            self.start_member(role, role, Role.ROUTER)
        self.admitter = Admitter(key_of(Role.ROUTER), [key_of(name) for name in self.agents])
        self.admitter.address = self.members[Role.PROVISIONER].node.spawn(self.admitter)
        for name in self.agents:
            self.start_member(name, Role.AGENT, Role.RELAY if relay else Role.ROUTER)

    # --- processes ----------------------------------------------------------------------------------------------
    def start_door(self, role: Role) -> Door:
        self._boots += 1
        door = self.doors[role] = Door(self, role, self._boots)
        return door

    def crash_door(self, role: Role) -> None:
        """SIGKILL: all its connections and queues are gone; the other ends notice after a while."""
        door = self.doors[role]
        door.alive = False
        for connection in list(door.connections.values()):
            self.cut(connection)
        if door.uplink is not None:
            door.uplink.close()

    def start_member(self, name: str, role: Role, door: str) -> Member:
        self._boots += 1
        member = self.members[name] = Member(self, name, role, door, self._boots)
        return member

    def restart_member(self, name: str) -> Member:
        old = self.members[name]
        old.alive = False
        old.dialler.close()
        return self.start_member(name, old.node.identity.role, old.dialler.door)

    def freeze(self, process: Process, ms: int) -> None:
        process.frozen_until = self.now + ms

    # --- the network ----------------------------------------------------------------------------------------------
    def diallers(self) -> list[Dialler]:
        found = [member.dialler for member in self.members.values() if member.alive]
        return found + [door.uplink for door in self.doors.values() if door.alive and door.uplink is not None]

    def door_for(self, dialler: Dialler) -> Door | None:
        """Who answers when `dialler` knocks."""
        return self.doors.get(dialler.door)

    def owner_of(self, connection: Connection) -> Process | None:
        for dialler in self.diallers():
            if dialler.connections.get(connection.plane) is connection:
                return dialler.owner
        return None

    def carry(self, connection: Connection, pipe: Pipe, frame: bytes, to: Callable[[], Process | None]) -> None:
        at = max(self.now + self.rng.randint(*self.delay_ms), pipe.last_ms, self._stalls.get(connection.conn, 0))
        pipe.last_ms = at
        pipe.frames.append((at, frame))

        def arrived() -> None:
            process = to()
            if process is not None and not connection.cut:
                process.wake(self.now)

        self.at(at, arrived)

    def stall(self, connection: Connection, ms: int) -> None:
        """Nothing comes through for a while, then everything at once."""
        self._stalls[connection.conn] = self.now + ms

    def cut(self, connection: Connection, *, door_notices_ms: int = 0, silently_ms: int = 0) -> None:
        """The connection is gone with all that was under way. The dialler notices within 50-1500 ms (later by
        silently_ms: a NAT table forgot it), the door when told; until then both accept what nobody will get."""
        connection.cut = True
        connection.up.frames.clear()
        connection.down.frames.clear()
        for dialler in self.diallers():
            if dialler.connections.get(connection.plane) is connection:
                notice = self.now + self.rng.randint(50, 1500) + silently_ms
                self.at(notice, lambda d=dialler: d.lost(connection.plane, connection))
        self.at(self.now + door_notices_ms, lambda: self._door_forgets(connection))

    def _door_forgets(self, connection: Connection) -> None:
        for door in self.doors.values():
            door.connections.pop(connection.conn, None)

    def drop(self, door: str, connection: Connection) -> None:
        """Closed by the dialler: the door sees it at once; what is under way to it still arrives."""
        connection.down.frames.clear()
        at = self.now + self.delay_ms[1] + 1
        self.at(max(at, connection.up.last_ms + 1), lambda: self._door_forgets(connection))

    def fresh_conn(self) -> bytes:
        self._conns += 1
        return b"\x00" + self._conns.to_bytes(4, "big")

    def new_address(self) -> bytes:
        self._addresses += 1
        return b"actor" + self._addresses.to_bytes(27, "big")

    def handshake_ms(self) -> int:
        return self.rng.randint(2, 8)

    def reconnect_ms(self) -> int:
        return self.rng.randint(100, 300)

    # --- time -----------------------------------------------------------------------------------------------------
    def at(self, at_ms: int, call: Callable[[], None]) -> None:
        self._count += 1
        heapq.heappush(self._heap, (at_ms, self._count, call))

    def run(self, ms: int, until: Callable[[], object] = lambda: False) -> bool:
        """Let time pass until `until` or for `ms`; whether it came true."""
        end = self.now + ms
        heap, pop = self._heap, heapq.heappop
        while heap and heap[0][0] <= end:
            if heap[0][0] > self.now and until():
                return True
            self.now, _, call = pop(heap)
            call()
        self.now = end
        return bool(until())

    def note(self, text: str) -> None:
        self._hash.update(f"{self.now} {text}\n".encode())

    def digest(self) -> str:
        return self._hash.hexdigest()


class Book(Sink):
    """What one actor got, by (sender's boot, number): the order within an incarnation is what the bus promises."""

    def __init__(self) -> None:
        super().__init__()
        self.streams: dict[str, list[int]] = {}

    def receive(self, msg: Any, ctx: Ctx) -> None:
        super().receive(msg, ctx)
        if not isinstance(msg, SendFailed):
            self.streams.setdefault(msg.text, []).append(msg.request_id)
