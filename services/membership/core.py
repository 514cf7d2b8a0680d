"""The membership service: a SWIM member that publishes what it believes (S1 4.6, 7.7, S2 6.2; design.md 2).

Its main actor's address is its SWIM address too, so that a joiner finds it by the well-known name alone. After a
restart it has a new boot and an empty table; the agents see the new route and join again by themselves.
"""

from __future__ import annotations

from typing import Any, ClassVar

from common.actors import Ctx
from common.addresses import Role, short
from common.config_slices import MembershipSlice
from common.effects import Exit, Log, SendFailed, StopSignal
from common.limits import RESYNC_MS
from common.messages.bus import Delta, MemberEntry, Snapshot, ViewItem, Watch
from common.messages.member import (
    MemberChanged,
    MemberUpdate,
    NameRegister,
    NameRegistered,
    NameResolve,
    NameResolved,
)
from common.messages.service import RunEnded
from common.records import CHANNEL_SWIM, SOURCE_ORCHESTRATOR, bootstrap_record
from common.service_actor import ServiceActor
from common.swim.actor import SWIM_TIMER, SwimHost
from common.swim.config import NAME_BYTES_MAX, PROFILES
from common.swim.core import SWIM_MESSAGES
from common.swim.outputs import Forgotten, NameChanged, Output, Transition, Updated
from common.views import ViewTable

WATCHERS_MAX = 1024  # one per node and view; more is a node that forgets its own actors
RESYNC_TIMER = "membership:resync"
DEFAULT_RUN_ID = 1  # S1 7.1
DEFAULT_NODE_ID = 1  # the direct worker and the orchestrator share it (design.md 3)


class MembershipActor(ServiceActor):
    """Publisher of the views "members" and "names", reporter of transitions, keeper of the name registry."""

    ROLE = Role.MEMBERSHIP
    SLICE = MembershipSlice
    Incoming: ClassVar[tuple[type, ...]] = (
        *ServiceActor.SERVICE_INCOMING,
        *SWIM_MESSAGES,
        Watch,
        NameRegister,
        NameResolve,
        SendFailed,
    )

    def __init__(self) -> None:
        super().__init__()
        self.host: SwimHost | None = None
        """None until the config slice is here; SWIM messages before it are dropped, joiners repeat theirs."""
        self._tables = {view: ViewTable(view) for view in ("members", "names")}
        self._watchers: dict[str, dict[bytes, None]] = {view: {} for view in self._tables}  # ordered sets
        self._behind: dict[tuple[str, bytes], None] = {}
        self._told_boot = 0

    # --- life -------------------------------------------------------------------------------------------------
    def on_config(self, config: MembershipSlice, ctx: Ctx) -> None:
        """The profile is known: become a member."""
        profile = PROFILES.get(config.profile)
        if profile is None:
            ctx.effect(Log("error", f"no membership profile {config.profile!r}; known: {', '.join(PROFILES)}"))
            return
        self.host = SwimHost(logical_id=self.ROLE, role=self.ROLE, config=profile, ctx=ctx)
        self._publish(self.host.start(ctx), ctx)
        self._brief_orchestrator(ctx)
        self.ready(ctx)

    def on_view(self, view: str, ctx: Ctx) -> None:
        """Routes or paths: the host pauses or resumes; a new orchestrator hears of everyone."""
        if self.host is not None:
            self._publish(self.host.on_view(ctx), ctx)
        self._brief_orchestrator(ctx)

    def on_run_ended(self, msg: RunEnded, ctx: Ctx) -> None:
        """The dead and the left of the run are forgotten; who still lives may leave in its own time."""
        if self.host is not None:
            self._publish(self.host.forget_departed(ctx), ctx)

    def on_stop_signal(self, signal: StopSignal, ctx: Ctx) -> None:
        """Leave, so that no agent counts a stopped service among the dead."""
        if self.host is not None:
            self._publish(self.host.leave(ctx), ctx)
        ctx.effect(Exit(0))

    def on_timer(self, key: str, ctx: Ctx) -> None:
        """The SWIM core's deadline, or the base class's timers."""
        if key == SWIM_TIMER and self.host is not None:
            self._publish(self.host.on_timer(ctx), ctx)
        elif key == RESYNC_TIMER:
            behind, self._behind = self._behind, {}
            hosts = {route.node for route in ctx.views.routes.entries()}
            for view, watcher in behind:
                if watcher in hosts:
                    self._watchers[view][watcher] = None
                    ctx.send(watcher, self._tables[view].snapshot())
        else:
            super().on_timer(key, ctx)

    def _missed(self, view: str, watcher: bytes, reason: str, ctx: Ctx) -> None:
        """A watcher that missed an update would be stale for ever: it gets the whole view once it can be reached."""
        if self._watchers[view].pop(watcher, False) is None and reason != "peer_lost":
            self._behind[view, watcher] = None
            ctx.timer(RESYNC_TIMER, RESYNC_MS)

    def check(self) -> None:
        """The SWIM core's invariants, and that both views show what it believes."""
        if self.host is None:
            return
        self.host.core.check()
        believed = {update.member.node: update for update in self.host.core.members()}
        shown = self._tables["members"].items
        assert shown.keys() == believed.keys(), "the member view has other members than the table"
        for node, item in shown.items():
            assert isinstance(item, MemberEntry) and item.state == believed[node].state, "the member view is stale"
        assert self._tables["names"].items.keys() == {entry.name.encode() for entry in self.host.core.names()}

    # --- messages ---------------------------------------------------------------------------------------------
    def receive(self, msg: Any, ctx: Ctx) -> None:
        """Handle one message of Incoming."""
        match msg:
            case Watch():
                self._watch(msg.view, ctx)
            case SendFailed():
                super().receive(msg, ctx)
                if isinstance(msg.message, Snapshot | Delta):
                    self._missed(msg.message.view, msg.dst, msg.reason, ctx)
            case NameRegister():
                self._register(msg, ctx)
            case NameResolve():
                entry = self.host.core.resolve_name(msg.name) if self.host else None
                ctx.reply(NameResolved(name=msg.name, address=entry.address if entry else b""))
            case _ if isinstance(msg, SWIM_MESSAGES):
                if self.host is not None:
                    self._publish(self.host.receive(msg, ctx), ctx)
            case _:
                super().receive(msg, ctx)

    def _watch(self, view: str, ctx: Ctx) -> None:
        if view not in self._tables:
            return  # routes and paths are the router's
        watchers = self._watchers[view]
        if len(watchers) < WATCHERS_MAX or ctx.sender in watchers:
            watchers[ctx.sender] = None
            ctx.reply(self._tables[view].snapshot())

    def _register(self, msg: NameRegister, ctx: Ctx) -> None:
        """Unanswered while we are not a member or the name is none: the asker's own limit ends its wait."""
        if self.host is None or not 0 < len(msg.name.encode()) <= NAME_BYTES_MAX:
            return
        self._publish(self.host.register_name(msg.name, msg.address, ctx), ctx)
        ctx.reply(NameRegistered(name=msg.name))

    # --- publishing -------------------------------------------------------------------------------------------
    def _publish(self, outputs: list[Output], ctx: Ctx) -> None:
        for output in outputs:
            match output:
                case Transition():
                    if self._is_current(output):
                        self._change("members", [self._entry(output.update, output.reason, ctx)], [], ctx)
                    if output.peer.node != ctx.node:
                        self._report(output, ctx)
                case Updated():
                    self._change("members", [self._entry(output.update, "", ctx)], [], ctx)
                case Forgotten():
                    self._change("members", [], [output.peer.node], ctx)
                case NameChanged():
                    gone = [] if output.entry else [output.name.encode()]
                    self._change("names", [output.entry] if output.entry else [], gone, ctx)
                case _:
                    pass  # Left and Superseded: the process is on its way out, or said so in its log

    def _is_current(self, transition: Transition) -> bool:
        """False for the end of a boot that a newer one, whose own transition follows, has superseded."""
        return transition.to_state == transition.update.state

    def _change(self, view: str, changed: list[ViewItem], removed: list[bytes], ctx: Ctx) -> None:
        delta = self._tables[view].change(changed, removed)
        if delta is not None:
            for watcher in self._watchers[view]:
                ctx.send(watcher, delta)

    def _entry(self, update: MemberUpdate, reason: str, ctx: Ctx) -> MemberEntry:
        """The view's item. The role is the router's word where it has one: gossip is only a member's own claim."""
        node = update.member.node
        route = ctx.views.routes.owner(update.swim_actor)
        if not reason:
            shown = self._tables["members"].items.get(node)
            reason = shown.reason if isinstance(shown, MemberEntry) else ""
        return MemberEntry(
            node=node,
            boot=update.member.boot,
            logical_id=update.logical_id,
            role=route.role if route is not None else _role(update.role),
            state=update.state,
            incarnation=update.incarnation,
            reason=reason,
            metadata=update.metadata,
        )

    def _report(self, transition: Transition, ctx: Ctx) -> None:
        """The record of S1 8.3, and the message to the orchestrator."""
        update = transition.update
        detail = {
            "peer": short(transition.peer.node),
            "logical_id": update.logical_id,
            "boot": transition.peer.boot,
            "incarnation": update.incarnation,
            "from": transition.from_state,
            "to": transition.to_state,
            "reason": transition.reason,
        }
        record = bootstrap_record(
            "membership_transition",
            "observed",
            _number(update.metadata, "run_id", DEFAULT_RUN_ID),
            _number(update.metadata, "node_id", DEFAULT_NODE_ID),
            detail,
        )
        ctx.observe(CHANNEL_SWIM, record, SOURCE_ORCHESTRATOR)
        if self.orchestrator:
            ctx.send(self.orchestrator, _changed(transition))

    def _brief_orchestrator(self, ctx: Ctx) -> None:
        """Tell an orchestrator that came after the transitions where everybody stands."""
        route = ctx.views.routes.named(Role.ORCHESTRATOR)
        if route is None or route.boot == self._told_boot or self.host is None:
            return
        self._told_boot = route.boot
        for update in self.host.core.members():
            if update.member.node != ctx.node:
                now = Transition(update.member, "unknown", update.state, "state when the orchestrator came", update)
                ctx.send(route.address, _changed(now))


def _changed(transition: Transition) -> MemberChanged:
    return MemberChanged(
        peer=transition.peer.node,
        boot=transition.peer.boot,
        logical_id=transition.update.logical_id,
        from_state=transition.from_state,
        to_state=transition.to_state,
        reason=transition.reason,
        incarnation=transition.update.incarnation,
    )


def _role(text: str) -> Role:
    """The role that a member claims; who claims none of ours is an agent."""
    try:
        return Role(text)
    except ValueError:
        return Role.AGENT


def _number(metadata: dict[str, str], key: str, default: int) -> int:
    """A record's id out of a member's metadata; the default for anything that is no number of u32."""
    text = metadata.get(key, "")
    return int(text) if text.isascii() and text.isdigit() and len(text) <= 9 else default
