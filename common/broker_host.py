"""The host of a broker: ROUTER sockets, tap and ZAP around the broker core, and its own node behind a LocalDoor.

The router also dials the relay (one DEALER per plane, role router there); to its core that link is the UPLINK.
"""

from __future__ import annotations

import os
import random
import secrets
from collections.abc import Callable
from pathlib import Path

import msgspec

from common.actors import Actor
from common.addresses import Plane, Role
from common.broker import LOCAL, UPLINK, Admission, Broker, NodeBound, NodeGone
from common.bus import BrokerSockets, Bus, Dealers
from common.codec import BadEnvelope, decode_body, decode_envelope, decode_header, tag_of
from common.datagram import datagram_frame
from common.host import EFFECT_ROUNDS_MAX, BaseHost, new_boot
from common.link import Link, LinkEffect, LinkReset, LinkSend, LocalDoor
from common.messages.bus import Pong, Reintroduce, Welcome
from common.node import Identity, Node
from common.security import SecurityError, read_bus_file

_LINK_TAGS = frozenset({tag_of(Welcome), tag_of(Pong), tag_of(Reintroduce)})
BROKER_TICK_MS = 1000


class BrokerHost(BaseHost):
    """Router or relay. make_actor builds the broker's own actor, whose address is the node key."""

    def __init__(
        self,
        bus_path: Path,
        role: Role,
        make_actor: Callable[[Broker, bool], Actor],
        *,
        owner_fd: int | None = None,
        uplink_event: Callable[[bytes, int], object] | None = None,
    ) -> None:
        bus_file = read_bus_file(bus_path)
        if bus_file.role is not role:
            raise SecurityError(f"{bus_path} is the bus file of {bus_file.role}, not of {role}")
        key = bus_file.keys.public
        identity = Identity(key, role, new_boot(), bus_file.logical_id)
        admitted = {peer: Admission(peer_role, logical_id=peer_role) for peer, peer_role in bus_file.allow.items()}
        self.broker = Broker(key, identity.boot, role, admitted)
        node = Node(
            identity,
            rng=random.Random(secrets.randbits(64)),
            new_address=lambda: secrets.token_bytes(32),
            broker_key=key,
            door=LocalDoor(key, identity.boot, is_router=role is Role.ROUTER),
            validate=os.environ.get("SMQ_VALIDATE") == "1",
        )
        bus = Bus()
        super().__init__(identity, node, owner_fd=owner_fd, bus=bus)
        self.sockets = BrokerSockets(
            bus,
            {plane: [endpoint] for plane, endpoint in bus_file.endpoints.items()},
            bus_file.tap,
            bus_file.keys,
            self.broker.admits,
            lambda peer: self.broker.admits(peer) and self.broker.admitted[peer].role is Role.TAP,
        )
        self._uplink_event = uplink_event
        self._uplink: Dealers | None = None
        self._uplink_key = bus_file.uplink_key
        if bus_file.uplink_endpoints:
            self.broker.beyond.add(bus_file.uplink_key)
            self.broker.relay_key = bus_file.uplink_key
            self._uplink = Dealers(bus, bus_file.uplink_endpoints, bus_file.uplink_key, bus_file.keys)
            self._uplink_link = Link(identity.boot, bus_file.logical_id, bus_file.uplink_endpoints)
            self._uplink_frames: list[tuple[Plane, bytes]] = []
        self._uplink_boot = 0
        self._next_tick_ms = 0
        self._due_ms = 0
        self._touched = True
        self.actor = node.spawn(make_actor(self.broker, self._uplink is not None), name=role, address=key)

    # --- frames -----------------------------------------------------------------------------------------------
    def pump(self) -> None:
        """As every host's, but a turn that only forwarded skips actors and sessions: they have nothing to do."""
        now_ms, wall_ms = self.loop.now_ms(), self.loop.wall_ms()
        self._more = self.receive(now_ms, wall_ms)
        if now_ms < self._due_ms and not self._touched and not self.node.system.busy:
            return
        self._touched = False
        for _ in range(EFFECT_ROUNDS_MAX):
            self.node.tick(now_ms, wall_ms)
            effects = self.node.take_effects()
            for address, effect in effects:
                self._handlers[type(effect)](address, effect)
            if not effects:
                break
        self.transmit(now_ms)
        times = super().deadlines(now_ms)
        if self._uplink is not None and (uplink := self._uplink_link.next_deadline()) is not None:
            times.append(uplink)
        self._due_ms = min(times)

    def deadlines(self, now_ms: int) -> list[int]:
        """When a turn must start: at once if an event came between the turns."""
        return [now_ms if self._touched or self.node.system.busy else self._due_ms]

    def receive(self, now_ms: int, wall_ms: int) -> bool:
        """Handshakes, then frames of every plane; forwards on the way."""
        ready = self.ready
        if self.sockets.zap in ready:
            self.sockets.answer_zap()
        if self.sockets.tap in ready:
            self.sockets.drain_tap()

        def on_frame(plane: Plane, conn: bytes, data: bytes, key: Callable[[], bytes]) -> None:
            target, verdict = self.broker.on_frame(plane, conn, key, data, now_ms)
            self._pass(plane, target, verdict, data, now_ms, wall_ms)

        more = self.sockets.receive(ready, self.broker.is_bound, on_frame)
        if self._uplink is not None:
            more = self._receive_uplink(self._uplink, now_ms, wall_ms) or more
        if now_ms >= self._next_tick_ms:
            self._next_tick_ms = now_ms + BROKER_TICK_MS
            self.broker.tick(now_ms)
        self._broker_events()
        self._touched = self._touched or bool(self.broker.out)
        return more

    def _pass(self, plane: Plane, target: bytes | None, verdict: str, data: bytes, now_ms: int, wall_ms: int) -> None:
        if target is LOCAL:
            self._touched = True
            self.node.on_frame(plane, data, now_ms, wall_ms)
        elif target is UPLINK:
            if self._uplink is not None and not self._uplink.send(plane, data):
                verdict = "full"
        elif target is not None:
            verdict = self._forward(plane, target, data) or verdict
        if self.sockets.tapped:
            self._mirror(plane, "in", verdict, data, wall_ms)

    def _forward(self, plane: Plane, conn: bytes, frame: bytes) -> str:
        failed = self.sockets.send(plane, conn, frame)
        if failed == "gone":
            self.broker.lost(plane, conn)
        return failed

    def _mirror(self, plane: Plane, direction: str, verdict: str, data: bytes, wall_ms: int) -> None:
        """Tap record: a msgpack array [wall_ms, plane, direction, verdict, frame]; see tools/tap."""
        self.sockets.mirror(msgspec.msgpack.encode((wall_ms, int(plane), direction, verdict, data)))

    def _broker_events(self) -> None:
        events, self.broker.events = self.broker.events, []
        for event in events:
            self._touched = True
            if isinstance(event, NodeBound) and event.role is Role.ROUTER:
                self.node.meet(event.key, event.boot)
            self.node.deliver(self.actor, event)
            if isinstance(event, NodeGone) and event.reason != "silent":
                self.node.forget(event.key)

    def transmit(self, now_ms: int) -> None:
        """The broker's own replies, then its node's frames, then the uplink's handshake."""
        wall_ms = self.loop.wall_ms()
        for _ in range(2):
            frames = self.node.take_frames()
            for plane, frame in frames:
                target, verdict = self.broker.from_local(plane, frame)
                self._pass(plane, target, verdict, frame, now_ms, wall_ms)
            if not frames:
                break
            self.node.settle()
        replies, self.broker.out = self.broker.out, []
        for conn, plane, frame in replies:
            if conn == LOCAL:
                self.node.on_frame(plane, frame, now_ms, wall_ms)
                continue
            if conn == UPLINK:
                if self._uplink is not None:
                    self._uplink.send(plane, frame)
                continue
            verdict = self._forward(plane, conn, frame) or "forwarded"
            if self.sockets.tapped:
                self._mirror(plane, "out", verdict, frame, wall_ms)
        if self._uplink is not None:
            self._uplink_effects(self._uplink, self._uplink_link.tick(now_ms))
            for plane, frame in self._uplink_frames:
                self._uplink.send(plane, frame)
            self._uplink_frames.clear()

    # --- the router's link to the relay -------------------------------------------------------------------------
    def _receive_uplink(self, uplink: Dealers, now_ms: int, wall_ms: int) -> bool:
        for plane in uplink.refused(self.ready):
            self._uplink_effects(uplink, self._uplink_link.on_refused(plane, now_ms))

        def on_frame(plane: Plane, data: bytes) -> None:
            self._uplink_link.heard(plane, now_ms)
            try:
                header = decode_header(data)
                if header.src_node == self._uplink_key and not header.src_boot and header.tag in _LINK_TAGS:
                    message = decode_body(header.tag, decode_envelope(data).body)
                    if isinstance(message, Welcome | Pong | Reintroduce):
                        self._uplink_effects(uplink, self._uplink_link.on_message(plane, message, now_ms))
                    return
            except BadEnvelope:
                return
            target, verdict = self.broker.from_uplink(plane, data)
            self._pass(plane, target, verdict, data, now_ms, wall_ms)

        return uplink.receive(on_frame, self.ready)

    def _uplink_effects(self, uplink: Dealers, effects: list[LinkEffect]) -> None:
        for effect in effects:
            if isinstance(effect, LinkReset):
                uplink.reset(effect.plane)
            elif isinstance(effect, LinkSend):
                frame = datagram_frame(self.identity, self._uplink_key, effect.message, id=self.node.system.new_id())
                self._uplink_frames.append((effect.plane, frame))
        boot = self._uplink_link.broker_boot if self._uplink_link.up else 0
        if boot != self._uplink_boot:
            self._uplink_boot = boot
            self._touched = True
            if boot:
                self.node.meet(self._uplink_key, boot)
            if self._uplink_event is not None:
                self.node.deliver(self.actor, self._uplink_event(self._uplink_key, boot))

    def shut(self) -> None:
        """What has arrived is acknowledged; then close the uplink, then the door."""
        self.node.goodbye()
        self.transmit(self.loop.now_ms())
        if self._uplink is not None:
            self._uplink.close()
        self.sockets.close()
