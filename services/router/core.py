"""The router's own actor: the route view, admission, and what it knows of the relay (design.md 3; S1 6.1, 6.2, 7.7)."""

from __future__ import annotations

from typing import Any, ClassVar

import msgspec

from common.actors import Actor, Ctx
from common.addresses import Role
from common.broker import Admission, Broker, NodeBound, NodeGone
from common.effects import Exit, Log, OwnerGone, SendFailed, StopSignal
from common.limits import ADMIT_RESEND_MS, BUS_COUNTS_FIRST_MS, BUS_COUNTS_MS, RESYNC_MS
from common.messages.bus import (
    Admit,
    Admitted,
    Delta,
    PathEntry,
    PeerDown,
    PeerUp,
    Register,
    Revoke,
    Revoked,
    RouteEntry,
    Snapshot,
    Unregister,
    ViewItem,
    Watch,
)
from common.messages.stream import Observation, Observe
from common.records import CHANNEL_ENVELOPES
from common.views import ViewTable

EARLY_MAX = 1024
_RESEND = "resend"
_RESYNC = "resync"
_COUNTS = "counts"


class UplinkChanged:
    """Event of the shell: the link to the relay came up (its key and boot) or went down (boot 0)."""

    __slots__ = ("boot", "relay_key")

    def __init__(self, relay_key: bytes, boot: int) -> None:
        self.relay_key, self.boot = relay_key, boot


class RouterActor(Actor):
    """Owns the views "routes" and "paths" and the admission table; its address is the router's node key."""

    Incoming: ClassVar[tuple[type, ...]] = (
        Register,
        Unregister,
        Watch,
        Admit,
        Revoke,
        Admitted,
        Revoked,
        PeerUp,
        PeerDown,
        NodeBound,
        NodeGone,
        UplinkChanged,
        SendFailed,
        OwnerGone,
        StopSignal,
    )

    def __init__(self, broker: Broker, *, relay: bool) -> None:
        self._broker = broker
        self._routes = ViewTable("routes")
        self._paths = ViewTable("paths")
        self._watchers: dict[str, set[bytes]] = {"routes": set(), "paths": set()}
        self._behind: set[tuple[str, bytes]] = set()
        self._early: dict[bytes, PeerUp] = {}
        """What the relay said of workers that this incarnation has not been told to admit yet."""
        self._boots: dict[bytes, int] = {}
        self._relay_expected = relay
        self._relay_key = b""
        self._relay_boot = 0
        self._workers: dict[bytes, Admit] = {}
        self._counted = 0
        self._waiting: dict[bytes, set[bytes]] = {}
        self._revoking: dict[bytes, set[bytes]] = {}

    # --- messages ---------------------------------------------------------------------------------------------
    def receive(self, msg: Any, ctx: Ctx) -> None:
        """One message; see `Incoming`."""
        match msg:
            case Register():
                self._register(msg, ctx)
            case Unregister():
                entry = self._routes.items.get(msg.address)
                if isinstance(entry, RouteEntry) and entry.node == ctx.sender_node:
                    self._change(self._routes, [], [msg.address], ctx, "unregistered")
            case Watch() if msg.view in self._watchers:
                self._watchers[msg.view].add(ctx.sender)
                table = self._routes if msg.view == "routes" else self._paths
                ctx.reply(table.snapshot())
            case Admit():
                self._admit(msg, ctx)
            case Revoke():
                self._revoke(msg, ctx)
            case Admitted():
                for waiting in sorted(self._waiting.pop(msg.key, set())):
                    ctx.send(waiting, msg)
            case Revoked():
                for waiting in sorted(self._revoking.pop(msg.key, set())):
                    ctx.send(waiting, msg)
            case PeerUp():
                if msg.node in self._broker.admitted:
                    self._broker.beyond.add(msg.node)
                    self._incarnation(msg.node, msg.boot, ctx)
                elif len(self._early) < EARLY_MAX:
                    self._early[msg.node] = msg
            case NodeBound() if msg.key in self._broker.admitted or msg.key == self._relay_key:
                # Else it was revoked between its Hello and this word of it.
                self._incarnation(msg.key, msg.boot, ctx)
            case PeerDown() if msg.node in self._early:
                del self._early[msg.node]
            case PeerDown() if msg.boot >= self._boots.get(msg.node, 0):
                self._broker.beyond.discard(msg.node)
                self._gone(msg.node, msg.reason, ctx)
            case NodeGone() if msg.boot >= self._boots.get(msg.key, 0):
                self._gone(msg.key, msg.reason, ctx)
            case UplinkChanged():
                self._uplink(msg, ctx)
            case SendFailed():
                self._send_failed(msg, ctx)
            case OwnerGone():
                ctx.effect(Exit(0))
            case StopSignal():
                ctx.effect(Exit(0))
            case _:
                pass

    def on_timer(self, key: str, ctx: Ctx) -> None:
        """Admissions and revocations that the relay has not confirmed; watchers that missed something."""
        if key == _RESEND:
            self._tell_relay(ctx)
            return
        if key == _COUNTS:
            self._count(ctx)
            return
        behind, self._behind = self._behind, set()
        for view, watcher in sorted(behind):
            self._watchers[view].add(watcher)
            ctx.send(watcher, (self._routes if view == "routes" else self._paths).snapshot())

    def _count(self, ctx: Ctx) -> None:
        """What has passed, as a record: straight to the collector, since a broker has no observer. A lost one is
        replaced by the next."""
        routes = (item for item in self._routes.items.values() if isinstance(item, RouteEntry))
        collector = next((route for route in routes if route.name == Role.COLLECTOR), None)
        if collector is None:
            return
        passed: dict[str, dict[str, int]] = {}
        for (plane, verdict), count in sorted(self._broker.passed.items()):
            passed.setdefault(plane.name.lower(), {})[verdict] = count
        payload = msgspec.json.encode({"broker": str(Role.ROUTER), "passed": passed})
        self._counted += 1
        record = Observation(producer_seq=self._counted, channel=CHANNEL_ENVELOPES, payload=payload)
        ctx.send(collector.address, Observe(records=[record]), node=collector.node)
        ctx.timer(_COUNTS, BUS_COUNTS_MS)

    def _send_failed(self, msg: SendFailed, ctx: Ctx) -> None:
        """A watcher that missed a Delta hears nothing of it by itself: it gets the whole view once it can be reached.
        Watchers that are gone are taken off by NodeGone, PeerDown and newer incarnations."""
        if isinstance(msg.message, Delta | Snapshot) and msg.dst in self._watchers[msg.message.view]:
            self._watchers[msg.message.view].discard(msg.dst)
            if msg.reason != "peer_lost":
                self._behind.add((msg.message.view, msg.dst))
                ctx.timer(_RESYNC, RESYNC_MS)

    # --- routes -----------------------------------------------------------------------------------------------
    def _register(self, msg: Register, ctx: Ctx) -> None:
        admission = self._broker.admitted.get(ctx.sender_node)
        if admission is None or msg.boot < self._boots.get(ctx.sender_node, 0):
            return
        name = msg.name if msg.name == admission.role else ""
        entry = self._routes.items.get(msg.address)
        if isinstance(entry, RouteEntry) and entry.node != ctx.sender_node:
            # 32 random bytes do not collide: somebody claims another node's address.
            ctx.effect(Log("warning", f"{ctx.sender_node[:8].hex()} claims an address of {entry.node[:8].hex()}"))
            return
        self._incarnation(ctx.sender_node, msg.boot, ctx)
        route = RouteEntry(
            address=msg.address,
            node=ctx.sender_node,
            boot=msg.boot,
            generation=msg.generation,
            role=admission.role,
            name=name,
        )
        self._change(self._routes, [route], [], ctx)
        if name == Role.COLLECTOR:
            ctx.timer(_COUNTS, BUS_COUNTS_FIRST_MS)

    def _incarnation(self, key: bytes, boot: int, ctx: Ctx) -> None:
        """A newer boot of a node: what the older one hosted is unroutable at once."""
        if boot <= self._boots.get(key, 0):
            return
        if key in self._boots:
            self._unwatch(key)
        self._boots[key] = boot
        self._change(self._routes, [], self._hosted(key, below=boot), ctx, "superseded")

    def _gone(self, key: bytes, reason: str, ctx: Ctx) -> None:
        """Goodbye and revocation end the routes; silence does not (a frozen worker comes back by itself, and watches
        again when its link does)."""
        self._unwatch(key)
        if reason in ("goodbye", "revoked"):
            self._change(self._routes, [], self._hosted(key), ctx, reason)

    def _hosted(self, key: bytes, below: int | None = None) -> list[bytes]:
        return [
            address
            for address, entry in self._routes.items.items()
            if isinstance(entry, RouteEntry) and entry.node == key and (below is None or entry.boot < below)
        ]

    def _unwatch(self, key: bytes) -> None:
        for view, watchers in self._watchers.items():
            watchers.discard(key)
            self._behind.discard((view, key))

    def _change(
        self, table: ViewTable, changed: list[ViewItem], removed: list[bytes], ctx: Ctx, reason: str = ""
    ) -> None:
        delta = table.change(changed, removed, reason)
        if delta is None:
            return
        if table is self._routes:
            for key in delta.removed:
                self._broker.owners.pop(key, None)
            for item in delta.changed:
                if isinstance(item, RouteEntry):
                    self._broker.owners[item.address] = item.node
        for watcher in sorted(self._watchers[table.view]):
            ctx.send(watcher, delta)

    # --- admission --------------------------------------------------------------------------------------------
    def _admit(self, msg: Admit, ctx: Ctx) -> None:
        if msg.role is not Role.AGENT:
            ctx.effect(Log("warning", f"refused to admit a key as {msg.role}: only agents are admitted at run time"))
            return
        self._broker.admit(msg.key, Admission(msg.role, msg.run, msg.node_id, msg.logical_id))
        self._workers[msg.key] = msg
        if (early := self._early.pop(msg.key, None)) is not None:
            self._broker.beyond.add(msg.key)
            self._incarnation(msg.key, early.boot, ctx)
        if self._relay_expected:
            self._waiting.setdefault(msg.key, set()).add(ctx.sender)
            self._tell_relay(ctx)
        else:
            ctx.reply(Admitted(key=msg.key))

    def _revoke(self, msg: Revoke, ctx: Ctx) -> None:
        known = self._workers.pop(msg.key, None)
        self._waiting.pop(msg.key, None)
        if known is not None:
            self._broker.revoke(msg.key)
            self._broker.beyond.discard(msg.key)
            self._gone(msg.key, "revoked", ctx)
            self._boots.pop(msg.key, None)
        if self._relay_expected and known is not None:
            self._revoking.setdefault(msg.key, set()).add(ctx.sender)
            self._tell_relay(ctx)
        else:
            ctx.reply(Revoked(key=msg.key))

    def _tell_relay(self, ctx: Ctx) -> None:
        if self._relay_boot:
            for key in self._waiting:
                ctx.send(self._relay_key, self._workers[key])
            for key in self._revoking:
                ctx.send(self._relay_key, Revoke(key=key))
        if self._waiting or self._revoking:
            ctx.timer(_RESEND, ADMIT_RESEND_MS)

    def _uplink(self, msg: UplinkChanged, ctx: Ctx) -> None:
        fresh = msg.boot and msg.boot != self._relay_boot
        self._relay_key = msg.relay_key or self._relay_key
        self._relay_boot = msg.boot
        if fresh:
            # The relay's tables are soft state: everything is said again.
            for admit in self._workers.values():
                ctx.send(self._relay_key, admit)
            self._tell_relay(ctx)
        path = PathEntry(broker=ctx.address, next_hop=self._relay_key, up=bool(msg.boot))
        self._change(self._paths, [path], [], ctx)

    def check(self) -> None:
        """Invariants: the broker's owner table is the route view; only admitted nodes have a boot or lie beyond."""
        assert self._boots.keys() <= self._broker.admitted.keys() | {self._relay_key}
        assert self._broker.beyond <= self._broker.admitted.keys() | {self._broker.relay_key}
        assert self._broker.owners == {
            address: entry.node for address, entry in self._routes.items.items() if isinstance(entry, RouteEntry)
        }
