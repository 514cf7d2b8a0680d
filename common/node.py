"""The node: one process on the bus as a pure core — its actors, its sessions, its link, its views (design.md 3, 4).

Everything a service, an agent or a broker's own actor has in common. Frames and ticks come in; `frames` and `resets` go
out. Routing is by actor address: local, else by the route view, else by who wrote to us (S2 4.2 step 6), else held 5 s.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from common.actors import Actor, ActorSystem, Outbound
from common.addresses import NO_RUN, Plane, Role
from common.codec import (
    BadEnvelope,
    Message,
    UnknownTag,
    decode_body,
    decode_envelope,
    encode_body,
    tag_of,
)
from common.datagram import datagram_frame
from common.effects import Effect, SendFailed, ViewChanged
from common.envelope import Envelope
from common.held import Held
from common.limits import (
    ENVELOPE_BYTES_MAX,
    LINK_DOWN_FAILS_SENDS_MS,
    UNROUTABLE_HOLD_MS,
)
from common.link import Link, LinkEffect, LinkReset, LinkSend, LinkUp, LocalDoor
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
from common.session import Failure, Item
from common.session_table import SessionTable
from common.standing import Standing
from common.views import Views

if TYPE_CHECKING:
    import random

LEARNED_ADDRESSES_MAX = 4096  # reply addresses without a route; the oldest is forgotten
SETTLE_ROUNDS_MAX = 100  # actors that answer each other's failures for ever must not stop the pump
HEADER_BYTES_MAX = 512  # what an envelope adds to its body
REVOKED = "revoked"  # Delta.reason: the node is gone for good
PLANES: tuple[Plane, ...] = (Plane.CONTROL, Plane.PROMPT, Plane.EDGE, Plane.STREAM)
"""The planes that every node dials; EDGE carries what engines and gateway cannot send directly."""


@dataclass(frozen=True, slots=True)
class Identity:
    """Who this node is. boot: this process's incarnation, larger than every earlier one's (wall-clock ms)."""

    key: bytes
    role: Role
    boot: int
    logical_id: str
    run: bytes = NO_RUN


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
        self._sessions = SessionTable(identity.key, identity.boot)
        self._held = Held()
        self._found_new = False
        self._learned: OrderedDict[bytes, tuple[bytes, int]] = OrderedDict()
        self._standing = Standing(self.system, self.views, self.link, self._send, self._unknown)
        self.now_ms = 0
        self.wall_ms = 0

    # --- the host's side --------------------------------------------------------------------------------------
    def at(self, now_ms: int, wall_ms: int) -> None:
        """Tell the time and let nothing happen: before the first actor is spawned, whose timers count from it."""
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
        taken, self.system.effects = self.system.effects, []
        return taken

    def take_frames(self) -> list[tuple[Plane, bytes]]:
        """Frames for the door broker since the last call."""
        taken, self.frames = self.frames, []
        return taken

    def take_resets(self) -> list[Plane]:
        """Sockets to rebuild since the last call."""
        taken, self.resets = self.resets, []
        return taken

    def ask_for_acks(self) -> None:
        """A node that leaves does not wait until its peers acknowledge by themselves."""
        self.frames += self._sessions.repeated_last()

    def goodbye(self, planes: Iterable[Plane] = PLANES) -> None:
        """Leave: what has arrived is acknowledged, then routes and bindings go at once. One Goodbye a plane, because
        planes overtake each other and an ack behind the Goodbye would be dropped."""
        self.frames += self._sessions.owed_acks()
        if isinstance(self.link, LocalDoor):
            return
        for plane in planes:
            self._datagram(self.broker_key, Goodbye(), plane)

    def meet(self, key: bytes, boot: int) -> None:
        """A broker's own node: the other broker is there, with this boot."""
        self.neighbours[key] = boot
        self._found_new = True

    def forget(self, peer: bytes) -> None:
        """A broker's own node: this peer said Goodbye or was revoked."""
        self._fail(self._sessions.forget(peer, "unroutable"))

    def tick(self, now_ms: int, wall_ms: int) -> None:
        """Let time pass: link, timers, actors, retransmissions."""
        self.now_ms, self.wall_ms = now_ms, wall_ms
        self._link_effects(self.link.tick(now_ms))
        self._settle()

    def run_actors(self, now_ms: int, wall_ms: int) -> None:
        """Handle what was delivered, in the middle of a turn; what is sent leaves with the next tick."""
        self.now_ms, self.wall_ms = now_ms, wall_ms
        self.system.run(now_ms, wall_ms)

    def on_refused(self, plane: Plane) -> None:
        """The socket monitor saw a failed handshake."""
        self._link_effects(self.link.on_refused(plane, self.now_ms))

    def next_deadline(self) -> int | None:
        """When tick has something to do, monotonic ms; None: nothing is due."""
        times = [
            self.link.next_deadline(),
            self.system.next_deadline(),
            self._sessions.next_deadline(self.link.is_up),
            self._held.next_deadline(),
            self._standing.next_deadline(),
        ]
        if self.system.outbound:
            times.append(self.now_ms)
        return min([at for at in times if at is not None], default=None)

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
                self._emit(plane, self._sessions.get(envelope.src_node, plane).ack_frame())
            self._count("foreign_boot")
            return
        if not envelope.plane_seq and not envelope.src_boot:
            # A broker core speaks for itself, outside of any session.
            self._dispatch(plane, envelope)
            return
        session = self._sessions.get(envelope.src_node, plane)
        if envelope.src_boot < session.peer_boot:
            self._count("stale_boot")
            return
        session.used_ms = self.now_ms
        self._fail(session.note_boot(envelope.src_boot))
        if not envelope.plane_seq:
            # Before the ack: a NoSuchActor names a message that the same envelope acknowledges.
            self._dispatch(plane, envelope)
        if envelope.dst_boot:
            session.on_ack(envelope.ack, self.now_ms)
        if envelope.plane_seq:
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
        if envelope.src_boot and self.views.routes.owner(envelope.src) is None:
            home = (envelope.src_node, envelope.src_boot)
            if self._learned.get(envelope.src) != home:
                self._learned[envelope.src] = home
                self._found_new = True
                if len(self._learned) > LEARNED_ADDRESSES_MAX:
                    self._learned.popitem(last=False)
            self._learned.move_to_end(envelope.src)
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
                if session := self._sessions.known(message.dst_node, plane):
                    self._fail(session.on_undeliverable(envelope.corr, message.reason, self.now_ms))
            case StaleRoute():
                self._stale_route(plane, envelope.corr, message.address)
            case NoSuchActor():
                self._learned.pop(message.address, None)
                self._fail_sent(plane, envelope, "unroutable")
            case Unsupported():
                self._fail_sent(plane, envelope, "unsupported")
            case _:
                pass

    def _stale_route(self, plane: Plane, id: int, address: bytes) -> None:
        """The router knows another owner of `address`: go there, if the view or a reply address says where."""
        self._learned.pop(address, None)
        for session in self._sessions.of_plane(plane):
            for failure in session.on_undeliverable(id, "refused", self.now_ms):
                found, item = self._reach(address, plane), failure.item
                if found is not None and found[0] != session.peer:
                    self._send(Outbound(item.src, item.dst, item.message, item.corr), *found)
                else:
                    self._sender_failed(item.src, item.dst, item.message, "unroutable")

    # --- views ------------------------------------------------------------------------------------------------
    def _view_update(self, update: Snapshot | Delta, publisher: bytes) -> None:
        try:
            replica = self.views.by_name(update.view)
        except KeyError:
            return
        if not self._standing.publishes(update.view, publisher):
            return
        revoked = self._revoked_by(update)
        if not replica.apply(update):
            self._standing.missed(update.view, self.now_ms)
        self._view_changed(update.view)
        self._end_revoked(revoked)

    def _revoked_by(self, update: Snapshot | Delta) -> dict[bytes, bytes]:
        """Actors that this update takes away for good, and their nodes: a revoked key never comes back."""
        if update.view != "routes" or isinstance(update, Snapshot) or update.reason != REVOKED:
            return {}
        owners = ((address, self.views.routes.owner(address)) for address in update.removed)
        return {address: owner.node for address, owner in owners if owner is not None}

    def _end_revoked(self, revoked: dict[bytes, bytes]) -> None:
        """Who has sent something there is told now, not after a hold."""
        for address in revoked:
            self._learned.pop(address, None)
        for node in dict.fromkeys(revoked.values()):
            self._fail(self._sessions.forget(node, "unroutable"))

    def _view_changed(self, view: str) -> None:
        if view == "routes":
            # A newer incarnation in the routes ends sessions with the older one.
            boots: dict[bytes, int] = {}
            for route in self.views.routes.entries():
                boots[route.node] = max(route.boot, boots.get(route.node, 0))
            self._fail(self._sessions.note_boots(boots))
            self._found_new = True
        for address in list(self.system.watchers.get(view, [])):
            self.system.deliver(address, ViewChanged(view))

    def _unknown(self, view: str) -> None:
        """Nobody publishes this view now: it reads unknown until the next Snapshot."""
        if self.views.by_name(view).known:
            self.views.by_name(view).forget()
            self._view_changed(view)

    # --- registration (Registrar) -----------------------------------------------------------------------------
    def registered(self, address: bytes, generation: int, name: str) -> None:
        """An actor started: its route is published once the router is known, and after each router restart."""
        self._found_new = True
        self._standing.register(address, generation, name)

    def unregistered(self, address: bytes, generation: int) -> None:
        """An actor stopped: its route goes."""
        self._standing.unregister(address, generation)

    # --- sending ----------------------------------------------------------------------------------------------
    def _link_effects(self, effects: Iterable[LinkEffect]) -> None:
        for effect in effects:
            if isinstance(effect, LinkSend):
                self._datagram(self.broker_key, effect.message, effect.plane)
            elif isinstance(effect, LinkReset):
                self.resets.append(effect.plane)
            else:
                self._link_up(effect)
        was_up, were = self.views.link_up, (self.views.link_up, self.views.prompt_link_up)
        now = self.link.up, self.link.up and self.link.is_up(Plane.PROMPT)
        if were != now:
            self.views.link_up, self.views.prompt_link_up = now
            if was_up and not self.link.up:
                self.views.routes.current = False
            self._view_changed("paths")

    def _link_up(self, effect: LinkUp) -> None:
        router, boot = self.link.router_key, self.link.router_boot
        if router:
            self.neighbours[router] = boot
            self._found_new = True
            self._fail(self._sessions.get(router, effect.plane).note_boot(boot))
        for session in self._sessions.of_plane(effect.plane):
            session.resend_now(self.now_ms)
        if effect.plane is Plane.CONTROL or effect.fresh_router:
            self._standing.watch_all_again(self.now_ms)
        if effect.fresh_router:
            self._standing.fresh_router()

    def _dead(self, plane: Plane) -> bool:
        """The plane has been down for so long that sends on it fail."""
        down = self.link.down_since(plane)
        return down is not None and self.now_ms - down >= LINK_DOWN_FAILS_SENDS_MS

    def _settle(self) -> None:
        """Run actors and move what they sent until nothing changes; then collect frames."""
        self._sessions.sweep(self.now_ms)
        if not self.link.whole:
            for plane in Plane:
                if self._dead(plane):
                    for session in self._sessions.of_plane(plane):
                        self._fail(session.fail_all("link_down"))
        for _ in range(SETTLE_ROUNDS_MAX):
            self._standing.turn(self.now_ms)
            self._release_held()
            self.system.run(self.now_ms, self.wall_ms)
            if not self.system.outbound:
                break
            outbound, self.system.outbound = self.system.outbound, []
            for out in outbound:
                self._route(out, self.now_ms + UNROUTABLE_HOLD_MS)
        self._sessions.poll(self.now_ms, self.link.is_up, self.frames)
        if self._validate:
            self.check()

    def settle(self) -> None:
        """After on_frame calls: run actors and collect what they send."""
        self._settle()

    def _release_held(self) -> None:
        """Send what has a way now; fail what has waited 5 s. In order: nothing overtakes what is held before it."""
        if self._found_new:
            self._found_new = False
            for out, until_ms in self._held.take_all():
                self._route(out, until_ms)
        for out in self._held.expired(self.now_ms):
            self._sender_failed(out.src, out.dst, out.message, "unroutable")

    def _reach(self, dst: bytes, plane: Plane) -> tuple[bytes, int] | None:
        """The node and boot that host an actor, or None. A route older than what is known of its node is none."""
        if dst in self.neighbours:
            return dst, self.neighbours[dst]
        if route := self.views.routes.owner(dst):
            found = (route.node, route.boot)
        elif (learned := self._learned.get(dst)) is not None:
            found = learned
        else:
            return None
        session = self._sessions.known(found[0], plane)
        return None if session is not None and found[1] < session.peer_boot else found

    def _route(self, out: Outbound, hold_until_ms: int) -> None:
        if out.node:
            session = self._sessions.known(out.node, type(out.message).PLANE)
            self._send(out, out.node, session.peer_boot if session else 0)
            return
        if self.system.hosts(out.dst):
            self.system.post(out.dst, out.message, src=out.src, corr=out.corr)
            return
        plane = type(out.message).PLANE
        datagram = type(out.message).DATAGRAM
        if (datagram or not self._held.blocks(out.dst, plane)) and (found := self._reach(out.dst, plane)) is not None:
            self._send(out, *found)
        elif datagram:
            self._count("datagram_unroutable")
        elif self.views.routes.went.get(out.dst) == REVOKED:
            self._sender_failed(out.src, out.dst, out.message, "unroutable")
        elif not self._held.add(out, hold_until_ms):
            self._sender_failed(out.src, out.dst, out.message, "queue_full")

    def _send(self, out: Outbound, node: bytes, boot: int) -> None:
        if node == self.identity.key:
            # The router's own node registers and watches at its own actor.
            self.system.deliver(out.dst, out.message, src=out.src, src_node=node)
            return
        plane = type(out.message).PLANE
        if type(out.message).DATAGRAM:
            self._datagram(node, out.message, plane, out.corr, boot, out.src, out.dst)
            return
        if self._dead(plane):
            self._sender_failed(out.src, out.dst, out.message, "link_down")
            return
        session = self._sessions.get(node, plane)
        self._fail(session.note_boot(boot))
        item = Item(
            self.system.new_id(),
            self.run,
            out.src or self.identity.key,
            out.dst,
            out.corr,
            out.message,
            tag_of(type(out.message)),
            encode_body(out.message),
        )
        if len(item.body) + HEADER_BYTES_MAX > ENVELOPE_BYTES_MAX:
            # Every broker would cut the connection that brings it, again and again.
            self._count("too_large")
            self._sender_failed(out.src, out.dst, out.message, "refused")
        elif not session.send(item):
            self._sender_failed(out.src, out.dst, out.message, "queue_full")
        else:
            session.used_ms = self.now_ms

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
        session = self._sessions.known(node, plane)
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

    # --- failures ---------------------------------------------------------------------------------------------
    def _fail(self, failures: Iterable[Failure]) -> None:
        for failure in failures:
            item = failure.item
            self._sender_failed(item.src, item.dst, item.message, failure.reason)

    def _fail_sent(self, plane: Plane, answer: Envelope, reason: str) -> None:
        """The peer has no use for message `corr`."""
        session = self._sessions.known(answer.src_node, plane)
        if session is not None and (item := session.item(answer.corr)) is not None:
            self._sender_failed(item.src, item.dst, item.message, reason)

    def _sender_failed(self, src: bytes, dst: bytes, message: Message, reason: str) -> None:
        self._count(f"failed_{reason}")
        if src == self.identity.key and isinstance(message, Watch | Register | Unregister):
            self._standing.failed(message, self.now_ms)
        elif self.system.hosts(src):
            self.system.deliver(src, SendFailed(dst, message, reason))

    def _count(self, what: str) -> None:
        self.counters[what] = self.counters.get(what, 0) + 1

    @property
    def unsettled(self) -> int:
        """Messages accepted but not yet acknowledged by their receivers (what a clean exit waits for)."""
        return self._sessions.unsettled + len(self._held)

    def check(self) -> None:
        """Invariants of the node (run after each turn under validation)."""
        self._sessions.check()
        self._held.check()
        assert len(self._learned) <= LEARNED_ADDRESSES_MAX

    def snapshot(self) -> Mapping[str, object]:
        """What a person wants to see of this node."""
        return {"link_up": self.link.up, "sessions": len(self._sessions), "counters": dict(self.counters)}
