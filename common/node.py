"""The node: one process on the bus as a pure core — its actors, its sessions, its link, its views (design.md 3, 4).

Everything a service, an agent or a broker's own actor has in common. Frames and ticks come in; `frames` and `resets` go
out. Routing is by actor address: local, else by the route view, else by who wrote to us (S2 4.2 step 6), else held 5 s.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from common.actors import Actor, ActorSystem, Outbound
from common.addresses import NO_RUN, Plane, Role
from common.codec import (
    BadEnvelope,
    Message,
    UnknownTag,
    decode_body,
    decode_envelope,
    encode_body,
    encode_envelope,
    tag_of,
)
from common.effects import Effect, SendFailed, ViewChanged
from common.envelope import ENVELOPE_VERSION, Envelope
from common.limits import LINK_DOWN_FAILS_SENDS_MS, UNROUTABLE_HOLD_MS
from common.link import Link, LinkEffect, LinkReset, LinkSend, LocalDoor
from common.messages.bus import (
    Delta,
    Goodbye,
    NoSuchActor,
    Pong,
    Register,
    Reintroduce,
    Snapshot,
    StaleRoute,
    Undeliverable,
    Unregister,
    Unsupported,
    Watch,
    Welcome,
)
from common.session import Failure, Item, Session
from common.views import Views

if TYPE_CHECKING:
    import random

LEARNED_ADDRESSES_MAX = 4096  # reply addresses without a route; the oldest is forgotten
RECENT_MESSAGES_MAX = 1024  # sent messages kept so that a late NoSuchActor still finds its sender
PLANES: tuple[Plane, ...] = (Plane.CONTROL, Plane.PROMPT, Plane.STREAM)
"""The planes that a node without edges dials; engines and gateways add EDGE with the pipeline."""


@dataclass(frozen=True, slots=True)
class Identity:
    """Who this node is. boot: this process's incarnation, larger than every earlier one's (wall-clock ms)."""

    key: bytes
    role: Role
    boot: int
    logical_id: str
    run: bytes = NO_RUN


@dataclass(slots=True)
class _Held:
    until_ms: int
    out: Outbound


class Node:
    """The bus stack of one process. Feed it with on_frame, on_refused and tick; then take frames, resets, effects."""

    def __init__(
        self,
        identity: Identity,
        *,
        rng: random.Random,
        new_address: Callable[[], bytes],
        broker_key: bytes,
        planes: Iterable[Plane] = PLANES,
        door: LocalDoor | None = None,
        validate: bool = False,
    ) -> None:
        self.identity = identity
        self.run = identity.run
        """The nonce stamped on what this node sends; the orchestrator sets its run's."""
        self.broker_key = broker_key
        self.link: Link | LocalDoor = door or Link(identity.boot, identity.logical_id, planes)
        self.views = Views()
        self.system = ActorSystem(
            node=identity.key,
            boot=identity.boot,
            rng=rng,
            views=self.views,
            new_address=new_address,
            registrar=self,
            validate=validate,
        )
        self.frames: list[tuple[Plane, bytes]] = []
        self.resets: list[Plane] = []
        self.neighbours: dict[bytes, int] = {}
        """Node mailboxes that need no route: brokers, by key, with their boots."""
        self.counters: dict[str, int] = {}
        self._validate = validate
        self._sessions: dict[tuple[bytes, Plane], Session] = {}
        self._held: deque[_Held] = deque()
        self._learned: OrderedDict[bytes, tuple[bytes, int]] = OrderedDict()
        self._recent: OrderedDict[int, tuple[bytes, bytes, Message]] = OrderedDict()
        self._watched: dict[str, tuple[bytes, int]] = {}
        self._lane_was_up: set[Plane] = set()
        self.now_ms = 0
        self.wall_ms = 0

    # --- the host's side --------------------------------------------------------------------------------------
    def at(self, now_ms: int, wall_ms: int) -> None:
        """Tell the time without letting anything happen: before the first actor is spawned, its timers count from it."""
        self.now_ms, self.wall_ms = now_ms, wall_ms
        self.system.now_ms, self.system.wall_ms = now_ms, wall_ms

    def spawn(self, actor: Actor, name: str = "", address: bytes | None = None) -> bytes:
        """Start an actor; see ActorSystem.spawn."""
        return self.system.spawn(actor, name, address)

    def deliver(self, address: bytes, event: object) -> bool:
        """Hand an event of the shell to an actor; handled at the next `tick` or `on_frame`."""
        return self.system.deliver(address, event)

    def take_effects(self) -> list[tuple[bytes, Effect]]:
        """Effects since the last call."""
        taken = self.system.effects[:]
        self.system.effects.clear()
        return taken

    def take_frames(self) -> list[tuple[Plane, bytes]]:
        """Frames for the door broker since the last call."""
        taken, self.frames = self.frames, []
        return taken

    def take_resets(self) -> list[Plane]:
        """Sockets to rebuild since the last call."""
        taken, self.resets = self.resets, []
        return taken

    def goodbye(self) -> None:
        """Leave: routes and bindings go at once."""
        self._datagram(self.broker_key, Goodbye(), Plane.CONTROL)

    def tick(self, now_ms: int, wall_ms: int) -> None:
        """Let time pass: link, timers, actors, retransmissions."""
        self.now_ms, self.wall_ms = now_ms, wall_ms
        self._link_effects(self.link.tick(now_ms))
        self._settle()

    def on_refused(self, plane: Plane) -> None:
        """The socket monitor saw a failed handshake."""
        self._link_effects(self.link.on_refused(plane, self.now_ms))

    def next_deadline(self) -> int | None:
        """When tick has something to do, monotonic ms; None: nothing is due."""
        times = [self.link.next_deadline(), self.system.next_deadline()]
        for (_, plane), session in self._sessions.items():
            if self.link.is_up(plane):
                times.append(session.next_deadline())
        if self._held:
            times.append(self._held[0].until_ms)
        return min((at for at in times if at is not None), default=None)

    # --- frames in --------------------------------------------------------------------------------------------
    def on_frame(self, plane: Plane, data: bytes, now_ms: int, wall_ms: int) -> None:
        """One frame from the door broker. Bad bytes are counted and dropped."""
        self.now_ms, self.wall_ms = now_ms, wall_ms
        try:
            envelope = decode_envelope(data)
        except BadEnvelope:
            self._count("bad_envelope")
            return
        if envelope.dst_node != self.identity.key:
            self._count("foreign_node")
            return
        self.link.heard(plane, now_ms)
        self._receive(plane, envelope)

    def _receive(self, plane: Plane, envelope: Envelope) -> None:
        if envelope.dst_boot and envelope.dst_boot != self.identity.boot:
            # Meant for an earlier incarnation: our ack tells the sender our boot.
            if envelope.plane_seq:
                self._emit(plane, self._session(envelope.src_node, plane).ack_frame())
            self._count("foreign_boot")
            return
        if not envelope.plane_seq and not envelope.src_boot:
            # A broker core speaks for itself, outside of any session.
            self._dispatch(plane, envelope)
            return
        session = self._session(envelope.src_node, plane)
        if envelope.src_boot < session.peer_boot:
            self._count("stale_boot")
            return
        self._fail(session.note_boot(envelope.src_boot))
        if envelope.dst_boot:
            session.on_ack(envelope.ack)
        if not envelope.plane_seq:
            self._dispatch(plane, envelope)
        else:
            for ready in session.on_envelope(envelope, self.now_ms):
                self._dispatch(plane, ready)

    def _dispatch(self, plane: Plane, envelope: Envelope) -> None:
        try:
            message = decode_body(envelope.tag, envelope.body)
        except UnknownTag:
            self._count("unknown_tag")
            unsupported = Unsupported(unknown_tag=envelope.tag)
            self._datagram(envelope.src_node, unsupported, plane, envelope.id, envelope.src_boot)
            return
        except BadEnvelope:
            self._count("bad_body")
            return
        if envelope.src and self.views.routes.owner(envelope.src) is None:
            self._learned[envelope.src] = (envelope.src_node, envelope.src_boot)
            self._learned.move_to_end(envelope.src)
            if len(self._learned) > LEARNED_ADDRESSES_MAX:
                self._learned.popitem(last=False)
        if self.system.hosts(envelope.dst):
            delivered = self.system.deliver(
                envelope.dst, message, src=envelope.src, src_node=envelope.src_node, id=envelope.id
            )
            if not delivered:
                self._count("mailbox_full")
        elif envelope.dst == self.identity.key:
            self._mailbox(plane, envelope, message)
        elif envelope.plane_seq:
            gone = NoSuchActor(address=envelope.dst)
            self._datagram(envelope.src_node, gone, plane, envelope.id, envelope.src_boot)

    def _mailbox(self, plane: Plane, envelope: Envelope, message: Message) -> None:
        """The node's own mailbox: link, views and delivery failures."""
        match message:
            case Welcome() | Pong() | Reintroduce() if envelope.src_node == self.broker_key:
                self._link_effects(self.link.on_message(plane, message, self.now_ms))
            case Snapshot() | Delta():
                self._view_update(message, envelope.src_node)
            case Undeliverable():
                for (peer, lane), session in self._sessions.items():
                    if lane is plane and peer == message.dst_node:
                        self._fail(session.on_undeliverable(envelope.corr, message.reason, self.now_ms))
            case StaleRoute():
                self._learned.pop(message.address, None)
                for (_, lane), session in self._sessions.items():
                    if lane is plane:
                        self._fail(session.on_undeliverable(envelope.corr, "refused", self.now_ms))
            case NoSuchActor():
                self._learned.pop(message.address, None)
                self._fail_recent(envelope.corr, "unroutable")
            case Unsupported():
                self._fail_recent(envelope.corr, "unsupported")
            case _:
                pass

    # --- views ------------------------------------------------------------------------------------------------
    def _view_update(self, update: Snapshot | Delta, publisher: bytes) -> None:
        try:
            replica = self.views.by_name(update.view)
        except KeyError:
            return
        if self._watched.get(update.view, (b"", 0))[0] != publisher:
            return
        if not replica.apply(update):
            self._watched.pop(update.view, None)
        self._view_changed(update.view)

    def _view_changed(self, view: str) -> None:
        if view == "routes":
            # A newer incarnation in the routes ends sessions with the older one.
            boots: dict[bytes, int] = {}
            for route in self.views.routes.entries():
                boots[route.node] = max(route.boot, boots.get(route.node, 0))
            for (peer, _), session in self._sessions.items():
                if peer in boots:
                    self._fail(session.note_boot(boots[peer]))
        for address in list(self.system.watchers.get(view, [])):
            self.system.deliver(address, ViewChanged(view))

    def _subscribe(self) -> None:
        """Watch what is wanted at whoever publishes it now; again when the publisher's boot changes."""
        if isinstance(self.link, LocalDoor) or not self.link.up:
            return
        for view in sorted({"routes"} | self.system.wanted_views):
            if view in ("routes", "paths"):
                publisher, boot, actor = self.link.router_key, self.link.router_boot, self.link.router_key
            else:
                route = self.views.routes.named(Role.MEMBERSHIP)
                if route is None:
                    if self._watched.pop(view, None) and self.views.by_name(view).known:
                        self.views.by_name(view).forget()
                        self._view_changed(view)
                    continue
                publisher, boot, actor = route.node, route.boot, route.address
            if self._watched.get(view) == (publisher, boot):
                continue
            self._watched[view] = (publisher, boot)
            if self.views.by_name(view).known and view != "routes":
                self.views.by_name(view).forget()
                self._view_changed(view)
            self._send(Outbound(self.identity.key, actor, Watch(view=view), 0), publisher, boot)

    # --- registration (Registrar) -----------------------------------------------------------------------------
    def registered(self, address: bytes, generation: int, name: str) -> None:
        """An actor started: its route is published once the router is known, and after each router restart."""
        if self.link.router_key:
            self._register(address, generation, name)

    def unregistered(self, address: bytes, generation: int) -> None:
        """An actor stopped: its route goes."""
        if self.link.router_key:
            out = Outbound(
                self.identity.key, self.link.router_key, Unregister(address=address, generation=generation), 0
            )
            self._send(out, self.link.router_key, self.link.router_boot)

    def _register(self, address: bytes, generation: int, name: str) -> None:
        register = Register(address=address, boot=self.identity.boot, generation=generation, name=name)
        out = Outbound(self.identity.key, self.link.router_key, register, 0)
        self._send(out, self.link.router_key, self.link.router_boot)

    # --- sending ----------------------------------------------------------------------------------------------
    def _link_effects(self, effects: Iterable[LinkEffect]) -> None:
        for effect in effects:
            if isinstance(effect, LinkSend):
                self._datagram(self.broker_key, effect.message, effect.plane)
            elif isinstance(effect, LinkReset):
                self.resets.append(effect.plane)
            else:
                self.neighbours[self.link.router_key] = self.link.router_boot
                if self.link.router_key:
                    self._fail(self._session(self.link.router_key, effect.plane).note_boot(self.link.router_boot))
                for (_, plane), session in self._sessions.items():
                    if plane is effect.plane:
                        session.resend_now(self.now_ms)
                if effect.fresh_router:
                    for address, generation, name in self.system.addresses():
                        self._register(address, generation, name)
        was, self.views.link_up = self.views.link_up, self.link.up
        if was != self.link.up:
            self._view_changed("paths")

    def _settle(self) -> None:
        """Run actors and move what they sent until nothing changes; then collect frames."""
        for _ in range(100):
            self._subscribe()
            self.system.run(self.now_ms, self.wall_ms)
            if not self.system.outbound and not self._held_due():
                break
            outbound, self.system.outbound = self.system.outbound, []
            for out in outbound:
                self._route(out)
        down = self.link.down_since_ms
        if down is not None and self.now_ms - down >= LINK_DOWN_FAILS_SENDS_MS:
            for session in self._sessions.values():
                self._fail(session.fail_all("link_down"))
            self.system.run(self.now_ms, self.wall_ms)
        for (_, plane), session in self._sessions.items():
            if self.link.is_up(plane):
                self.frames.extend((plane, frame) for frame in session.poll(self.now_ms))
            if self._validate:
                session.check()

    def settle(self) -> None:
        """After on_frame calls: run actors and collect what they send."""
        self._settle()

    def _held_due(self) -> bool:
        """Retry what had no route; fail what waited 5 s. True if anything moved."""
        moved = False
        for _ in range(len(self._held)):
            held = self._held.popleft()
            if self._find(held.out.dst) is not None:
                self._route(held.out)
                moved = True
            elif self.now_ms >= held.until_ms:
                self._sender_failed(held.out.src, held.out.dst, held.out.message, "unroutable")
                moved = True
            else:
                self._held.append(held)
        return moved

    def _find(self, dst: bytes) -> tuple[bytes, int] | None:
        """The node and boot that host an actor, or None."""
        if dst in self.neighbours:
            return dst, self.neighbours[dst]
        if route := self.views.routes.owner(dst):
            return route.node, route.boot
        return self._learned.get(dst)

    def _route(self, out: Outbound) -> None:
        found = self._find(out.dst)
        if found is not None:
            self._send(out, *found)
        elif not type(out.message).DATAGRAM:
            self._held.append(_Held(self.now_ms + UNROUTABLE_HOLD_MS, out))

    def _send(self, out: Outbound, node: bytes, boot: int) -> None:
        if node == self.identity.key:
            # The router's own node registers and watches at its own actor.
            self.system.deliver(out.dst, out.message, src=out.src, src_node=node)
            return
        plane = type(out.message).PLANE
        if type(out.message).DATAGRAM:
            self._datagram(node, out.message, plane, out.corr, boot, out.src, out.dst)
            return
        session = self._session(node, plane)
        if boot < session.peer_boot:
            # The route is older than what we know of the node: its new routes are on their way.
            self._held.append(_Held(self.now_ms + UNROUTABLE_HOLD_MS, out))
            return
        self._fail(session.note_boot(boot))
        item = Item(
            self.system.new_id(),
            self.run,
            out.src,
            out.dst,
            out.corr,
            out.message,
            tag_of(type(out.message)),
            encode_body(out.message),
        )
        if not session.send(item):
            self._sender_failed(out.src, out.dst, out.message, "queue_full")
            return
        self._recent[item.id] = (out.src, out.dst, out.message)
        if len(self._recent) > RECENT_MESSAGES_MAX:
            self._recent.popitem(last=False)

    def _datagram(
        self,
        node: bytes,
        message: Message,
        plane: Plane,
        corr: int = 0,
        boot: int = 0,
        src: bytes = b"",
        dst: bytes = b"",
    ) -> None:
        session = self._sessions.get((node, plane))
        ack = session.received if session and boot == session.peer_boot else 0
        self._emit(
            plane,
            datagram_frame(
                self.identity,
                node,
                message,
                id=self.system.new_id(),
                run=self.run,
                src=src,
                dst=dst,
                dst_boot=boot if ack else 0,
                corr=corr,
                ack=ack,
            ),
        )

    def _emit(self, plane: Plane, frame: bytes) -> None:
        self.frames.append((plane, frame))

    def _session(self, peer: bytes, plane: Plane) -> Session:
        found = self._sessions.get((peer, plane))
        if found is None:
            found = self._sessions[peer, plane] = Session(self.identity.key, self.identity.boot, peer, plane)
        return found

    # --- failures ---------------------------------------------------------------------------------------------
    def _fail(self, failures: Iterable[Failure]) -> None:
        for failure in failures:
            item = failure.item
            self._sender_failed(item.src, item.dst, item.message, failure.reason)

    def _fail_recent(self, id: int, reason: str) -> None:
        if found := self._recent.pop(id, None):
            self._sender_failed(*found, reason)

    def _sender_failed(self, src: bytes, dst: bytes, message: Message, reason: str) -> None:
        self._count(f"failed_{reason}")
        if src == self.identity.key and isinstance(message, Watch):
            self._watched.pop(message.view, None)
        elif self.system.hosts(src):
            self.system.deliver(src, SendFailed(dst, message, reason))

    def _count(self, what: str) -> None:
        self.counters[what] = self.counters.get(what, 0) + 1

    @property
    def unsettled(self) -> int:
        """Messages accepted but not yet acknowledged by their receivers (what a clean exit waits for)."""
        return sum(session.outstanding for session in self._sessions.values()) + len(self._held)

    def snapshot(self) -> Mapping[str, object]:
        """What a person wants to see of this node."""
        return {"link_up": self.link.up, "sessions": len(self._sessions), "counters": dict(self.counters)}


def datagram_frame(
    identity: Identity,
    node: bytes,
    message: Message,
    *,
    id: int,
    run: bytes = NO_RUN,
    src: bytes = b"",
    dst: bytes = b"",
    dst_boot: int = 0,
    corr: int = 0,
    ack: int = 0,
) -> bytes:
    """One datagram (plane_seq and base 0). src and dst default to the mailboxes of the two nodes."""
    return encode_envelope(
        Envelope(
            ENVELOPE_VERSION,
            tag_of(type(message)),
            id,
            run,
            identity.key,
            identity.boot,
            src or identity.key,
            node,
            dst_boot,
            dst or node,
            corr,
            0,
            0,
            ack,
            msgspec.Raw(encode_body(message)),
        )
    )
