"""A broker whole but for its sockets: the broker core, its own node behind a LocalDoor, and the router's uplink. Pure.

`common/broker_host.py` runs it on ZeroMQ, `tests/sim` on virtual time; what goes out goes through `Ports`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Protocol

from common.actors import Actor
from common.addresses import Plane, Role
from common.broker import LOCAL, UPLINK, Broker, NodeBound, NodeGone
from common.codec import BadEnvelope, decode_body, decode_envelope, decode_header, tag_of
from common.datagram import datagram_frame
from common.link import Link, LinkEffect, LinkReset, LinkSend, LocalDoor
from common.messages.bus import Pong, Reintroduce, Welcome
from common.node import Identity, Node

if TYPE_CHECKING:
    import random

_LINK_TAGS = frozenset({tag_of(Welcome), tag_of(Pong), tag_of(Reintroduce)})
BROKER_TICK_MS = 1000


class Ports(Protocol):
    """The sockets, as a broker sees them."""

    @property
    def tapped(self) -> bool:
        """Whether anybody listens at the tap."""

    def send(self, plane: Plane, conn: bytes, frame: bytes) -> str:
        """ "" when accepted, "full" when the peer does not read, "gone" when the connection is no more."""

    def send_uplink(self, plane: Plane, frame: bytes) -> bool:
        """To the relay; False: not now."""

    def reset_uplink(self, plane: Plane) -> None:
        """A new socket for this plane of the uplink."""

    def mirror(self, plane: Plane, direction: str, verdict: str, frame: bytes) -> None:
        """To the tap."""


class BrokerNode:
    """Router or relay. make_actor(broker, has_uplink) builds the broker's own actor, whose address is the node key."""

    def __init__(
        self,
        identity: Identity,
        broker: Broker,
        ports: Ports,
        make_actor: Callable[[Broker, bool], Actor],
        *,
        rng: random.Random,
        new_address: Callable[[], bytes],
        uplink_key: bytes = b"",
        uplink_planes: Iterable[Plane] = (),
        uplink_event: Callable[[bytes, int], object] | None = None,
        validate: bool = False,
    ) -> None:
        self.broker, self.ports, self._identity, self._validate = broker, ports, identity, validate
        self.node = Node(
            identity,
            rng=rng,
            new_address=new_address,
            broker_key=identity.key,
            door=LocalDoor(identity.key, identity.boot, is_router=identity.role is Role.ROUTER),
            validate=validate,
        )
        self.uplink: Link | None = None
        self._uplink_key, self._uplink_event, self._uplink_boot = uplink_key, uplink_event, 0
        if uplink_key:
            broker.relay_key = uplink_key
            broker.beyond.add(uplink_key)
            self.uplink = Link(identity.boot, identity.logical_id, uplink_planes)
        self.touched = True
        """Whether something came for this broker's own node or actor, not only for forwarding."""
        self._next_tick_ms = 0
        self._gone: list[bytes] = []
        self._make_actor = make_actor
        self.actor = b""

    def start(self) -> None:
        """Spawn the actor; once the node knows the time."""
        actor = self._make_actor(self.broker, self.uplink is not None)
        self.actor = self.node.spawn(actor, name=self._identity.role, address=self._identity.key)

    # --- in ---------------------------------------------------------------------------------------------------
    def on_frame(
        self, plane: Plane, conn: bytes, data: bytes, key: Callable[[], bytes], now_ms: int, wall_ms: int
    ) -> None:
        """A frame of a connection at the door."""
        target, verdict = self.broker.on_frame(plane, conn, key, data, now_ms)
        self._pass(plane, target, verdict, data, now_ms, wall_ms)

    def on_uplink_frame(self, plane: Plane, data: bytes, now_ms: int, wall_ms: int) -> None:
        """A frame of the relay."""
        assert self.uplink is not None
        self.uplink.heard(plane, now_ms)
        try:
            header = decode_header(data)
            if header.src_node == self._uplink_key and not header.src_boot and header.tag in _LINK_TAGS:
                message = decode_body(header.tag, decode_envelope(data).body)
                if isinstance(message, Welcome | Pong | Reintroduce):
                    self._uplink_effects(self.uplink.on_message(plane, message, now_ms))
                return
        except BadEnvelope:
            return
        target, verdict = self.broker.from_uplink(plane, data)
        self._pass(plane, target, verdict, data, now_ms, wall_ms)

    def on_uplink_refused(self, plane: Plane, now_ms: int) -> None:
        """The relay does not know this router's key (yet)."""
        assert self.uplink is not None
        self._uplink_effects(self.uplink.on_refused(plane, now_ms))

    def _pass(self, plane: Plane, target: bytes | None, verdict: str, data: bytes, now_ms: int, wall_ms: int) -> None:
        if target is LOCAL:
            self.touched = True
            self.node.on_frame(plane, data, now_ms, wall_ms)
        elif target is UPLINK:
            if not self.ports.send_uplink(plane, data):
                verdict = "full"
        elif target is not None:
            verdict = self._forward(plane, target, data) or verdict
        self.broker.passed[plane, verdict] += 1
        if self.ports.tapped:
            self.ports.mirror(plane, "in", verdict, data)

    def _forward(self, plane: Plane, conn: bytes, frame: bytes) -> str:
        failed = self.ports.send(plane, conn, frame)
        if failed == "gone":
            self.broker.lost(plane, conn)
        return failed

    # --- time -------------------------------------------------------------------------------------------------
    def note_time(self, now_ms: int) -> None:
        """After the frames of a turn: silent nodes, and what the broker core has to tell its actor."""
        if now_ms >= self._next_tick_ms:
            self._next_tick_ms = now_ms + BROKER_TICK_MS
            self.broker.tick(now_ms)
        events, self.broker.events = self.broker.events, []
        for event in events:
            self.touched = True
            if isinstance(event, NodeBound) and event.role is Role.ROUTER:
                self.node.meet(event.key, event.boot)
            self.node.deliver(self.actor, event)
            if isinstance(event, NodeGone) and event.reason != "silent":
                self.node.forget(event.key)
                self._gone.append(event.key)
        self.touched = self.touched or bool(self.broker.out)

    def transmit(self, now_ms: int, wall_ms: int) -> None:
        """The node's frames, the broker's own replies, then the uplink's pings."""
        # Of several that leave at once the actor tells each of the others' end before it hears of its own.
        gone, self._gone = self._gone, []
        for key in gone:
            if not self.broker.knows(key):
                self.node.forget(key)
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
                self.touched = True
                self.node.on_frame(plane, frame, now_ms, wall_ms)
                continue
            if conn == UPLINK:
                verdict = "forwarded" if self.ports.send_uplink(plane, frame) else "full"
            else:
                verdict = self._forward(plane, conn, frame) or "forwarded"
            self.broker.passed[plane, verdict] += 1
            if self.ports.tapped:
                self.ports.mirror(plane, "out", verdict, frame)
        if self.uplink is not None:
            self._uplink_effects(self.uplink.tick(now_ms))
        if self._validate:
            self.broker.check()

    def next_deadline(self) -> int | None:
        """When a turn must start."""
        times = [self.node.next_deadline(), self._next_tick_ms]
        if self.uplink is not None:
            times.append(self.uplink.next_deadline())
        return min((at for at in times if at is not None), default=None)

    def _uplink_effects(self, effects: list[LinkEffect]) -> None:
        assert self.uplink is not None
        for effect in effects:
            if isinstance(effect, LinkReset):
                self.ports.reset_uplink(effect.plane)
            elif isinstance(effect, LinkSend):
                frame = datagram_frame(self._identity, self._uplink_key, effect.message, id=self.node.system.new_id())
                self.ports.send_uplink(effect.plane, frame)
        boot = self.uplink.broker_boot if self.uplink.up else 0
        if boot != self._uplink_boot:
            self._uplink_boot = boot
            self.touched = True
            if boot:
                self.node.meet(self._uplink_key, boot)
            if self._uplink_event is not None:
                self.node.deliver(self.actor, self._uplink_event(self._uplink_key, boot))
