"""Actors: state machines that take messages one at a time and answer through their context (design.md 4, S1 6).

Pure: no clock, no socket; randomness and time are injected. One bounded FIFO for the whole system keeps the order per
(sender, receiver); a local send is handled after the current handler returns. What is not local leaves as `Outbound`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from common.codec import Message, decode_body, encode_body, tag_of
from common.effects import Effect, Observed, SendFailed
from common.limits import MAILBOX_MESSAGES_MAX
from common.views import Views

if TYPE_CHECKING:
    import random

SHELL = b""
"""The sender of events that come from outside the actor system (the shell, the node, timers)."""


class Actor:
    """Base of all actors. `Incoming` is the closed set of types it receives; anything else is refused before it.

    Handlers must not block (S1 9.14) and touch the world only through ctx.
    """

    Incoming: ClassVar[tuple[type, ...]] = ()

    def on_start(self, ctx: Ctx) -> None:
        """Called once, before any message."""

    def receive(self, msg: Any, ctx: Ctx) -> None:
        """Handle one message of Incoming."""
        raise NotImplementedError

    def on_timer(self, key: str, ctx: Ctx) -> None:
        """A timer set with ctx.timer(key, ...) is due. A cancelled or re-set timer never fires for its old time."""

    def on_stop(self, ctx: Ctx) -> None:
        """Called when the actor stops; sends and effects still go out."""

    def check(self) -> None:
        """Raise AssertionError if an invariant of the state is broken (run after each message under validation)."""


@dataclass(frozen=True, slots=True)
class Outbound:
    """A message for an actor that is not here. corr: id of the message that caused it. node: the host of dst, where
    the sender knows it; else the routes say."""

    src: bytes
    dst: bytes
    message: Message
    corr: int
    node: bytes = b""


@dataclass(slots=True)
class _Delivery:
    dst: bytes
    msg: Any
    src: bytes
    src_node: bytes
    id: int
    corr: int


@dataclass(slots=True)
class _Slot:
    actor: Actor
    generation: int
    name: str
    queued: int = 0


class Registrar(Protocol):
    """Told of every actor that starts or stops, so that its route can be published."""

    def registered(self, address: bytes, generation: int, name: str) -> None:
        """The actor exists from now on."""

    def unregistered(self, address: bytes, generation: int) -> None:
        """The actor is gone."""


class Ctx:
    """What a handler may do. Valid during one handler call only."""

    def __init__(self, system: ActorSystem, address: bytes, delivery: _Delivery | None) -> None:
        self._system = system
        self.address = address
        """The actor's own address."""
        self.sender = delivery.src if delivery else SHELL
        """Who sent the message; SHELL for events."""
        self.sender_node = delivery.src_node if delivery else b""
        """The broker-verified node of the sender; empty for local messages."""
        self.corr = delivery.corr if delivery else 0
        """Id of the message that this one answers, or 0."""
        self._cause = 0
        if delivery is not None:
            # What an actor here was told by another one here has the cause of that: the last message that a tap saw.
            is_local = delivery.src_node in (b"", system.node)
            self._cause = delivery.corr if is_local else delivery.id

    @property
    def now_ms(self) -> int:
        """Monotonic milliseconds; only differences mean anything."""
        return self._system.now_ms

    @property
    def wall_ms(self) -> int:
        """Unix milliseconds, for records that people read; never for ordering or timeouts."""
        return self._system.wall_ms

    @property
    def rng(self) -> random.Random:
        """The system's seeded generator."""
        return self._system.rng

    @property
    def views(self) -> Views:
        """Read-only replicas of routes, members, paths and names."""
        return self._system.views

    @property
    def node(self) -> bytes:
        """This node's key."""
        return self._system.node

    @property
    def boot(self) -> int:
        """This process's incarnation."""
        return self._system.boot

    def send(self, dst: bytes, msg: Any, node: bytes = b"") -> None:
        """Send to a local or remote actor. Remote messages must be of the catalogue; failure comes as SendFailed.

        node: where dst is, whatever the routes say: the verified sender owns its reply address (design.md 6 row 37).
        """
        self._system.post(dst, msg, src=self.address, corr=self._cause, node=node)

    def reply(self, msg: Any) -> None:
        """Send to the sender of the current message."""
        self.send(self.sender, msg)

    def spawn(self, actor: Actor, name: str = "") -> bytes:
        """Start an actor; its on_start runs before its first message. name: a well-known name for the route view."""
        return self._system.spawn(actor, name)

    def stop(self, address: bytes | None = None) -> None:
        """Stop an actor (default: this one) after the current handler."""
        self._system.stop(address or self.address)

    def timer(self, key: str, delay_ms: int) -> None:
        """(Re)set this actor's timer `key` to fire on_timer(key) in delay_ms."""
        self._system.set_timer(self.address, key, delay_ms)

    def cancel(self, key: str) -> None:
        """Forget the timer; unknown keys are fine."""
        self._system.cancel_timer(self.address, key)

    def watch(self, view: str) -> None:
        """Receive ViewChanged(view) from now on; the node subscribes to the view's publisher if it has not yet."""
        self._system.watch(self.address, view)

    def effect(self, effect: Effect) -> None:
        """Hand an effect to the shell."""
        if (perform := self._system.at_once.get(type(effect))) is not None:
            perform(self.address, effect)
        else:
            self._system.effects.append((self.address, effect))

    def observe(self, channel: str, payload: bytes, source: str = "") -> None:
        """Emit a record on the orchestrator's datastream (common/records.py builds the payloads)."""
        self._system.effects.append((self.address, Observed(channel, payload, source)))


class ActorSystem:
    """All actors of one node. The shell calls `deliver`, then `run`; then takes `effects` and `outbound`."""

    def __init__(
        self,
        *,
        node: bytes,
        boot: int,
        rng: random.Random,
        views: Views,
        new_address: Callable[[], bytes],
        registrar: Registrar | None = None,
        validate: bool = False,
    ) -> None:
        self.node = node
        self.boot = boot
        self.rng = rng
        self.views = views
        self.now_ms = 0
        self.wall_ms = 0
        self.effects: list[tuple[bytes, Effect]] = []
        self.at_once: dict[type[Effect], Callable[[bytes, Any], None]] = {}
        """Effects that a shell performs while the handler still runs, for their latency: a write that cannot fail and
        answers with events only."""
        self.outbound: list[Outbound] = []
        self.watchers: dict[str, list[bytes]] = {}
        self.wanted_views: set[str] = set()
        self._new_address = new_address
        self._registrar = registrar
        self._validate = validate
        self._slots: dict[bytes, _Slot] = {}
        self._queue: deque[_Delivery] = deque()
        self._timers: dict[tuple[bytes, str], int] = {}
        self._next_id = 1
        self._generation = 0
        self._stopping: list[bytes] = []

    # --- life -------------------------------------------------------------------------------------------------
    def spawn(self, actor: Actor, name: str = "", address: bytes | None = None) -> bytes:
        """Start an actor and return its address (a random one unless given)."""
        address = address or self._new_address()
        self._generation += 1
        self._slots[address] = _Slot(actor, self._generation, name)
        if self._registrar:
            self._registrar.registered(address, self._generation, name)
        actor.on_start(Ctx(self, address, None))
        return address

    def stop(self, address: bytes) -> None:
        """Stop an actor after the current handler."""
        self._stopping.append(address)

    def hosts(self, address: bytes) -> bool:
        """Whether this address is local."""
        return address in self._slots

    def actor(self, address: bytes) -> Actor:
        """The actor itself (for tests and snapshots)."""
        return self._slots[address].actor

    def addresses(self) -> list[tuple[bytes, int, str]]:
        """(address, generation, name) of every actor: what is registered again after a router restart."""
        return [(address, slot.generation, slot.name) for address, slot in self._slots.items()]

    # --- messages ---------------------------------------------------------------------------------------------
    def new_id(self) -> int:
        """The next message id of this node and boot."""
        self._next_id += 1
        return self._next_id

    def post(self, dst: bytes, msg: Any, *, src: bytes = SHELL, corr: int = 0, node: bytes = b"") -> None:
        """Queue a local message or hand a remote one to the node."""
        if dst in self._slots and node in (b"", self.node):
            if self._validate and isinstance(msg, Message):
                msg = decode_body(tag_of(type(msg)), encode_body(msg))
            self._enqueue(_Delivery(dst, msg, src, b"" if src == SHELL else self.node, self.new_id(), corr))
        elif isinstance(msg, Message):
            self.outbound.append(Outbound(src, dst, msg, corr, node))

    def deliver(self, dst: bytes, msg: Any, *, src: bytes = SHELL, src_node: bytes = b"", id: int = 0) -> bool:
        """Queue a message that came over the bus, or an event of the shell. False: no such actor or it is full."""
        slot = self._slots.get(dst)
        if slot is None or slot.queued >= MAILBOX_MESSAGES_MAX:
            return False
        self._enqueue(_Delivery(dst, msg, src, src_node, id or self.new_id(), id))
        return True

    def broadcast(self, msg: Any) -> None:
        """Queue an event for every actor whose Incoming has its type."""
        for address, slot in list(self._slots.items()):
            if isinstance(msg, slot.actor.Incoming):
                self._enqueue(_Delivery(address, msg, SHELL, b"", self.new_id(), 0))

    def _enqueue(self, delivery: _Delivery) -> None:
        slot = self._slots[delivery.dst]
        if slot.queued >= MAILBOX_MESSAGES_MAX:
            if delivery.src in self._slots and isinstance(delivery.msg, Message):
                failed = SendFailed(delivery.dst, delivery.msg, "queue_full")
                self._queue.append(_Delivery(delivery.src, failed, SHELL, b"", self.new_id(), delivery.id))
                self._slots[delivery.src].queued += 1
            return
        slot.queued += 1
        self._queue.append(delivery)

    def watch(self, address: bytes, view: str) -> None:
        """Register a watcher of a view; `wanted_views` tells the node what to subscribe to."""
        self.wanted_views.add(view)
        if address not in self.watchers.setdefault(view, []):
            self.watchers[view].append(address)

    # --- time -------------------------------------------------------------------------------------------------
    def set_timer(self, address: bytes, key: str, delay_ms: int) -> None:
        """One timer per (actor, key); setting it again moves it."""
        self._timers[address, key] = self.now_ms + max(0, delay_ms)

    def cancel_timer(self, address: bytes, key: str) -> None:
        """Forget a timer."""
        self._timers.pop((address, key), None)

    def next_deadline(self) -> int | None:
        """When the earliest timer is due, in monotonic ms, or None."""
        if self._queue:
            return self.now_ms
        return min(self._timers.values(), default=None)

    @property
    def busy(self) -> bool:
        """Whether a message waits to be handled or to leave."""
        return bool(self._queue or self.outbound)

    # --- running ----------------------------------------------------------------------------------------------
    def run(self, now_ms: int, wall_ms: int) -> None:
        """Fire due timers, then handle messages until none is left."""
        self.now_ms, self.wall_ms = now_ms, wall_ms
        self._reap()
        due = sorted((at, address, key) for (address, key), at in self._timers.items() if at <= now_ms)
        for at, address, key in due:
            if self._timers.get((address, key)) == at:
                del self._timers[address, key]
                if slot := self._slots.get(address):
                    slot.actor.on_timer(key, Ctx(self, address, None))
                    self._after(slot)
                    self._drain()
        self._drain()

    def _drain(self) -> None:
        while self._queue or self._stopping:
            self._reap()
            if not self._queue:
                return
            delivery = self._queue.popleft()
            slot = self._slots.get(delivery.dst)
            if slot is None:
                self._not_handled(delivery, "unroutable")
                continue
            slot.queued -= 1
            if isinstance(delivery.msg, slot.actor.Incoming):
                slot.actor.receive(delivery.msg, Ctx(self, delivery.dst, delivery))
                self._after(slot)
            else:
                self._not_handled(delivery, "refused")

    def _not_handled(self, delivery: _Delivery, reason: str) -> None:
        """A local message to an actor that stopped before its turn, or that does not take this type."""
        sender = self._slots.get(delivery.src)
        if sender is not None and isinstance(delivery.msg, Message) and SendFailed in sender.actor.Incoming:
            failed = SendFailed(delivery.dst, delivery.msg, reason)
            self._enqueue(_Delivery(delivery.src, failed, SHELL, b"", self.new_id(), delivery.id))

    def _after(self, slot: _Slot) -> None:
        if self._validate:
            slot.actor.check()

    def _reap(self) -> None:
        while self._stopping:
            address = self._stopping.pop(0)
            slot = self._slots.get(address)
            if slot is None:
                continue
            slot.actor.on_stop(Ctx(self, address, None))
            del self._slots[address]
            for key in [key for key in self._timers if key[0] == address]:
                del self._timers[key]
            for watchers in self.watchers.values():
                if address in watchers:
                    watchers.remove(address)
            if self._registrar:
                self._registrar.unregistered(address, slot.generation)


class Inbox(Actor):
    """A queue endpoint (S1 6.3): buffers what it accepts until drained; decides nothing."""

    def __init__(self, *accepts: Any, limit: int = MAILBOX_MESSAGES_MAX) -> None:
        self.Incoming = accepts  # type: ignore[misc]  # per instance: an inbox of what its owner wants
        self._pending: deque[tuple[bytes, Any]] = deque(maxlen=limit)

    def receive(self, msg: Any, ctx: Ctx) -> None:
        """Buffer (sender, message)."""
        self._pending.append((ctx.sender, msg))

    @property
    def state(self) -> str:
        """S1 6.3: "empty" or "pending"; drained is empty again."""
        return "pending" if self._pending else "empty"

    def drain(self) -> list[tuple[bytes, Any]]:
        """Everything pending, in order; the inbox is empty afterwards."""
        drained = list(self._pending)
        self._pending.clear()
        return drained
