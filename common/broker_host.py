"""The host of a broker: `common/broker_node.py` on ROUTER sockets, tap, ZAP and the router's DEALERs to the relay."""

from __future__ import annotations

import os
import random
import secrets
import time
from collections.abc import Callable

import msgspec

from common.actors import Actor
from common.addresses import Plane, Role
from common.broker import Broker, static_admissions
from common.broker_node import BrokerNode
from common.bus import DRAIN_FRAMES_MAX, BrokerSockets, Bus, Dealers
from common.host import EFFECT_ROUNDS_MAX, BaseHost, new_boot
from common.node import Identity
from common.security import BusFile, SecurityError

WAITED_NS = 25_000  # a poll that finds something at once takes a fifth of this
TAP_LOOK_MS = 1000
"""How long a new listener at the tap may wait. It is not polled for: each socket there slows every turn."""
TAP_LOOK_YOUNG_MS, TAP_YOUNG_MS = 10, 3000
"""Who listens from the start of a run wants its first words, too."""


class _Ports:
    """The sockets of one broker."""

    sockets: BrokerSockets
    uplink: Dealers | None = None
    wall_ms = 0

    @property
    def tapped(self) -> bool:
        return self.sockets.tapped

    def send(self, plane: Plane, conn: bytes, frame: bytes) -> str:
        return self.sockets.send(plane, conn, frame)

    def send_uplink(self, plane: Plane, frame: bytes) -> bool:
        return self.uplink is not None and self.uplink.send(plane, frame)

    def reset_uplink(self, plane: Plane) -> None:
        if self.uplink is not None:
            self.uplink.reset(plane)

    def mirror(self, plane: Plane, direction: str, verdict: str, frame: bytes) -> None:
        """Tap record: a msgpack array [wall_ms, plane, direction, verdict, frame]; see tools/tap."""
        self.sockets.mirror(msgspec.msgpack.encode((self.wall_ms, int(plane), direction, verdict, frame)))


class BrokerHost(BaseHost):
    """Router or relay. make_actor builds the broker's own actor, whose address is the node key."""

    def __init__(
        self,
        bus_file: BusFile,
        role: Role,
        make_actor: Callable[[Broker, bool], Actor],
        *,
        owner_fd: int | None = None,
        uplink_event: Callable[[bytes, int], object] | None = None,
    ) -> None:
        if bus_file.role is not role:
            raise SecurityError(f"this is the bus file of {bus_file.role}, not of {role}")
        key = bus_file.keys.public
        identity = Identity(key, role, new_boot(), bus_file.logical_id)
        self.broker = Broker(key, identity.boot, role, static_admissions(role, bus_file.allow))
        self._ports = _Ports()
        self.pure = BrokerNode(
            identity,
            self.broker,
            self._ports,
            make_actor,
            rng=random.Random(secrets.randbits(64)),
            new_address=lambda: secrets.token_bytes(32),
            uplink_key=bus_file.uplink_key if bus_file.uplink_endpoints else b"",
            uplink_planes=bus_file.uplink_endpoints,
            uplink_event=uplink_event,
            validate=os.environ.get("SMQ_VALIDATE") == "1",
        )
        bus = Bus()
        super().__init__(identity, self.pure.node, owner_fd=owner_fd, bus=bus, run_dir=bus_file.run_dir)
        self.sockets = self._ports.sockets = BrokerSockets(
            bus,
            {
                plane: [endpoint, *([bus_file.door[plane]] if plane in bus_file.door else [])]
                for plane, endpoint in bus_file.endpoints.items()
            },
            bus_file.tap,
            bus_file.keys,
            self.broker.admits,
            lambda peer: self.broker.admits(peer) and self.broker.admitted[peer].role is Role.TAP,
        )
        if bus_file.uplink_endpoints:
            self._ports.uplink = Dealers(bus, bus_file.uplink_endpoints, bus_file.uplink_key, bus_file.keys)
        self._due_ms = 0
        self._tap_at_ms = self._young_until_ms = 0
        self._budget = DRAIN_FRAMES_MAX
        self.pure.start()

    def turn(self) -> None:
        """One turn. While the router waits for work it takes one frame a turn: to try for a second one before going
        back to wait costs more than the rest of the turn. Once work waits for it, it takes ever more."""
        now_ms = self.loop.now_ms()
        began = time.monotonic_ns()
        self.ready = self.loop.turn(min(self.deadlines(now_ms)) - now_ms)
        waited = time.monotonic_ns() - began > WAITED_NS
        self._budget = 1 if waited else min(4 * self._budget, DRAIN_FRAMES_MAX)
        started = self.loop.now_ms()
        self.pump()
        self.loop.note_turn(self.loop.now_ms() - started)

    def pump(self) -> None:
        """As every host's, but a turn that only forwarded skips actors and sessions: they have nothing to do."""
        now_ms, wall_ms = self.loop.now_ms(), self.loop.wall_ms()
        self._ports.wall_ms = wall_ms
        self.receive(now_ms, wall_ms)
        if now_ms < self._due_ms and not self.pure.touched and not self.node.system.busy:
            return
        self.pure.touched = False
        self.expire(now_ms)
        for _ in range(EFFECT_ROUNDS_MAX):
            self.node.tick(now_ms, wall_ms)
            effects = self.node.take_effects()
            for address, effect in effects:
                self._handlers[type(effect)](address, effect)
            if not effects:
                break
        self.transmit(now_ms)
        deadline = self.pure.next_deadline()
        self._due_ms = min([*super().deadlines(now_ms), *([] if deadline is None else [deadline])])

    def deadlines(self, now_ms: int) -> list[int]:
        """When a turn must start: at once if an event came between the turns."""
        return [now_ms if self.pure.touched or self.node.system.busy else self._due_ms]

    def receive(self, now_ms: int, wall_ms: int) -> bool:
        """Handshakes, then frames of every plane; forwards on the way."""
        ready = self.ready
        if self.sockets.zap in ready:
            self.sockets.answer_zap()
        if now_ms >= self._tap_at_ms:
            self._young_until_ms = self._young_until_ms or now_ms + TAP_YOUNG_MS
            self._tap_at_ms = now_ms + (TAP_LOOK_YOUNG_MS if now_ms < self._young_until_ms else TAP_LOOK_MS)
            self.sockets.drain_tap()

        def on_frame(plane: Plane, conn: bytes, data: bytes, key: Callable[[], bytes]) -> None:
            self.pure.on_frame(plane, conn, data, key, now_ms, wall_ms)

        more = self.sockets.receive(ready, self.broker.is_bound, on_frame, self._budget)
        if (uplink := self._ports.uplink) is not None:
            for plane in uplink.refused(ready):
                self.pure.on_uplink_refused(plane, now_ms)
            if uplink.receive(lambda plane, data: self.pure.on_uplink_frame(plane, data, now_ms, wall_ms), ready):
                more = True
        self.pure.note_time(now_ms)
        return more

    def transmit(self, now_ms: int) -> None:
        """See BrokerNode.transmit."""
        self.pure.transmit(now_ms, self.loop.wall_ms())

    def shut(self) -> None:
        """What has arrived is acknowledged; then close the uplink, then the door."""
        self.node.goodbye()
        self.transmit(self.loop.now_ms())
        if self._ports.uplink is not None:
            self._ports.uplink.close()
        self.sockets.close()
