"""SWIM on the actor runtime: `SwimHost` for an actor that is a member beside other duties (the membership service),
`SwimActor` for one that is nothing else (the agent)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from common.actors import Actor, Ctx
from common.addresses import Role
from common.effects import Log, SendFailed, ViewChanged
from common.messages.bus import RouteEntry
from common.messages.member import (
    MemberId,
    MemberUpdate,
    NameRegister,
    NameRegistered,
    NameResolve,
    NameResolved,
    SwimPing,
    SwimPingReq,
    SwimPushPull,
)
from common.swim.config import SwimConfig
from common.swim.core import SWIM_MESSAGES, SwimCore
from common.swim.outputs import Left, NameChanged, Output, Send, Superseded, Transition, Updated
from common.swim.spreader import Seed

SWIM_TIMER = "swim"
LINK_RECHECK_MS = 250  # a pause must end even if the word that the link is back was lost with the link


class SwimHost:
    """Drives a SwimCore from an actor's handlers. Each method sends what is to be sent and returns the other outputs.

    The actor's own address is the member's SWIM address; ctx.node and ctx.boot are its identity. The owner calls
    `start` once, `receive` for SWIM_MESSAGES, `on_timer` for SWIM_TIMER, `on_view` for "routes" and "paths".
    """

    def __init__(
        self, *, logical_id: str, role: Role, config: SwimConfig, ctx: Ctx, metadata: dict[str, str] | None = None
    ) -> None:
        own = MemberUpdate(
            member=MemberId(node=ctx.node, boot=ctx.boot),
            state="alive",
            incarnation=0,
            swim_actor=ctx.address,
            logical_id=logical_id,
            role=role,
            metadata=metadata or {},
        )
        self.core = SwimCore(own, config, ctx.rng, ctx.now_ms)
        self.refused = 0
        """Messages whose sender was not the node that they name."""

    def start(self, ctx: Ctx) -> list[Output]:
        """Watch routes (where to join) and paths (whether to pause), and begin."""
        ctx.watch("routes")
        ctx.watch("paths")
        return self.on_view(ctx)

    def receive(self, msg: Any, ctx: Ctx) -> list[Output]:
        """A SWIM message. The broker has verified ctx.sender_node; a member speaks for itself only."""
        if isinstance(msg, SwimPing | SwimPingReq | SwimPushPull) and msg.sender.member.node != ctx.sender_node:
            self.refused += 1
            return []
        return self._do(self.core.on_message(msg, ctx.sender, ctx.now_ms), ctx)

    def on_timer(self, ctx: Ctx) -> list[Output]:
        """SWIM_TIMER is due."""
        return self._do(self._check_link(ctx) + self.core.tick(ctx.now_ms), ctx)

    def on_view(self, ctx: Ctx) -> list[Output]:
        """Routes or paths changed: find the seed, pause or resume."""
        seed = ctx.views.routes.named(Role.MEMBERSHIP)
        out = self._check_link(ctx)
        if seed is not None and seed.node != ctx.node:
            out += self.core.set_seed(Seed(seed.node, seed.boot, seed.address), ctx.now_ms)
        return self._do(out + self.core.tick(ctx.now_ms), ctx)

    def leave(self, ctx: Ctx) -> list[Output]:
        """Say goodbye; `Left` among the outputs, now or within config.leave_ms, ends it."""
        return self._do(self.core.leave(ctx.now_ms), ctx)

    def set_metadata(self, metadata: dict[str, str], ctx: Ctx) -> list[Output]:
        """Replace our metadata. Raises ValueError beyond METADATA_BYTES_MAX."""
        return self._do(self.core.set_metadata(metadata, ctx.now_ms), ctx)

    def register_name(self, name: str, address: bytes, ctx: Ctx) -> list[Output]:
        """Bind a name for the sender of the current message, or for ourselves when it is local."""
        node = b"" if ctx.sender_node in (b"", ctx.node) else ctx.sender_node
        out = self.core.register_name(
            name, address, ctx.wall_ms, ctx.now_ms, node=node, boot=self._boot_of(node, address, ctx)
        )
        return self._do(out, ctx)

    def unregister_name(self, name: str, ctx: Ctx) -> list[Output]:
        """Give up a name of ours."""
        return self._do(self.core.unregister_name(name, ctx.now_ms), ctx)

    def forget_departed(self, ctx: Ctx) -> list[Output]:
        """Drop the dead and the left: the run is over."""
        return self._do(self.core.forget_departed(ctx.now_ms), ctx)

    def _boot_of(self, node: bytes, address: bytes, ctx: Ctx) -> int:
        """The incarnation that hosts an address: as routed, else as SWIM knows the node, else 0 (unknown)."""
        route = ctx.views.routes.owner(address)
        if isinstance(route, RouteEntry) and route.node == node:
            return route.boot
        member = self.core.member(node)
        return member.update.member.boot if member else 0

    def _check_link(self, ctx: Ctx) -> list[Output]:
        if not ctx.views.link_up or ctx.views.paths.any_down():
            return self.core.pause(ctx.now_ms)
        return self.core.resume(ctx.now_ms)

    def _do(self, outputs: list[Output], ctx: Ctx) -> list[Output]:
        rest: list[Output] = []
        for output in outputs:
            if isinstance(output, Send):
                ctx.send(output.dst, output.message)
            else:
                rest.append(output)
            if isinstance(output, Superseded):
                ctx.effect(Log("error", f"boot {output.boot} runs with this node's key; this older process is silent"))
        due = self.core.next_deadline()
        if self.core.paused:
            ctx.timer(SWIM_TIMER, LINK_RECHECK_MS)
        elif due is None:
            ctx.cancel(SWIM_TIMER)
        else:
            ctx.timer(SWIM_TIMER, due - ctx.now_ms)
        return rest


@dataclass(frozen=True, slots=True)
class Leave:
    """Event for a SwimActor: leave the cluster; the owner gets `Left`, at latest after config.leave_ms."""


@dataclass(frozen=True, slots=True)
class SetMetadata:
    """Event for a SwimActor: replace the member's metadata."""

    metadata: dict[str, str]


class SwimActor(Actor):
    """The member of an agent. Its owner, if any, gets Transition, Updated, NameChanged, Superseded and Left events.

    Local actors may send it NameRegister, NameResolve (answered), Leave and SetMetadata. It leaves when it is stopped.
    """

    Incoming: ClassVar[tuple[type, ...]] = (
        *SWIM_MESSAGES,
        NameRegister,
        NameResolve,
        Leave,
        SetMetadata,
        ViewChanged,
        SendFailed,
    )

    def __init__(
        self,
        *,
        logical_id: str,
        config: SwimConfig,
        role: Role = Role.AGENT,
        metadata: dict[str, str] | None = None,
        owner: bytes = b"",
    ) -> None:
        self._facts: dict[str, Any] = {"logical_id": logical_id, "role": role, "metadata": metadata}
        self._config = config
        self._owner = owner
        self._host: SwimHost | None = None

    @property
    def host(self) -> SwimHost:
        """The running member. Raises RuntimeError before on_start."""
        if self._host is None:
            raise RuntimeError("the SWIM actor has not started")
        return self._host

    def on_start(self, ctx: Ctx) -> None:
        """Become a member and look for the membership service."""
        self._host = SwimHost(config=self._config, ctx=ctx, **self._facts)
        self._report(self._host.start(ctx), ctx)

    def receive(self, msg: Any, ctx: Ctx) -> None:
        """Handle one message of Incoming."""
        host = self.host
        local = ctx.sender_node in (b"", ctx.node)
        match msg:
            case ViewChanged():
                self._report(host.on_view(ctx), ctx)
            case SendFailed():
                pass  # an unanswered probe says the same, with the time that the protocol gives it
            case Leave() if local:
                self._report(host.leave(ctx), ctx)
            case SetMetadata() if local:
                self._report(host.set_metadata(msg.metadata, ctx), ctx)
            case NameRegister() if local:
                self._report(host.register_name(msg.name, msg.address, ctx), ctx)
                ctx.reply(NameRegistered(name=msg.name))
            case NameResolve() if local:
                entry = host.core.resolve_name(msg.name)
                ctx.reply(NameResolved(name=msg.name, address=entry.address if entry else b""))
            case Leave() | SetMetadata() | NameRegister() | NameResolve():
                pass  # other nodes ask the membership service
            case _:
                self._report(host.receive(msg, ctx), ctx)

    def on_timer(self, key: str, ctx: Ctx) -> None:
        """The core's next deadline."""
        self._report(self.host.on_timer(ctx), ctx)

    def on_stop(self, ctx: Ctx) -> None:
        """Leave as well as one burst of messages can."""
        if not self.host.core.has_left:
            self.host.leave(ctx)

    def check(self) -> None:
        """The core's invariants."""
        if self._host is not None:
            self._host.core.check()

    def _report(self, outputs: list[Output], ctx: Ctx) -> None:
        if not self._owner:
            return
        for output in outputs:
            if isinstance(output, Transition | Updated | NameChanged | Superseded | Left):
                ctx.send(self._owner, output)
