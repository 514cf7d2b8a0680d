"""What every service has in common: its config slice, ServiceReady, the lease, the end of a run (design.md 2)."""

from __future__ import annotations

from typing import Any, ClassVar

import msgspec

from common.actors import Actor, Ctx
from common.addresses import Role
from common.config_slices import decode_slice
from common.effects import Exit, OwnerGone, SendFailed, StopSignal, ViewChanged
from common.limits import CONFIG_RESEND_MS
from common.messages.config import ConfigFailed, ConfigGet, ConfigSlice
from common.messages.service import Lease, RunEnded, ServiceReady

CONFIG_TIMER = "service:config"
LEASE_TIMER = "service:lease"
ANNOUNCE_TIMER = "service:announce"


class ServiceActor(Actor):
    """A service's main actor, spawned with name=role. Subclasses set ROLE, SLICE and Incoming (SERVICE_INCOMING + own),
    override the on_* hooks, and call super() in on_start, receive (for what they do not handle) and on_timer."""

    ROLE: ClassVar[Role]
    SLICE: ClassVar[type[msgspec.Struct] | None] = None
    SERVICE_INCOMING: ClassVar[tuple[type, ...]] = (
        ConfigSlice,
        ConfigFailed,
        Lease,
        RunEnded,
        ViewChanged,
        OwnerGone,
        StopSignal,
        SendFailed,
    )

    def __init__(self) -> None:
        self.config: Any = None
        self.orchestrator: bytes = b""
        """Address of the orchestrator's main actor, b"" while it is not routed."""
        self._announced_boot = 0
        self._asked = b""
        """Address of the resolver that was last asked for the slice."""
        self._is_ready = False

    # --- hooks ------------------------------------------------------------------------------------------------
    def on_config(self, config: Any, ctx: Ctx) -> None:
        """The slice is here. Default: ready at once; override and call self.ready(ctx) later for more."""
        self.ready(ctx)

    def on_config_failed(self, error: str, ctx: Ctx) -> None:
        """The configuration is wrong; the orchestrator says so, a service only waits for its stop."""

    def on_view(self, view: str, ctx: Ctx) -> None:
        """A watched view changed."""

    def on_lease_lost(self, ctx: Ctx) -> None:
        """No Lease within its ttl after at least one: the orchestrator hangs or is cut off."""

    def on_run_ended(self, msg: RunEnded, ctx: Ctx) -> None:
        """Settle run state; the service goes on for the next run."""

    def on_owner_gone(self, ctx: Ctx) -> None:
        """The launcher died. Default: exit at once."""
        ctx.effect(Exit(0))

    def on_stop_signal(self, signal: StopSignal, ctx: Ctx) -> None:
        """SIGTERM or SIGINT. Default: exit."""
        ctx.effect(Exit(0))

    # --- shared behaviour -------------------------------------------------------------------------------------
    def ready(self, ctx: Ctx) -> None:
        """This service can serve: say so to the orchestrator, now or when it appears."""
        self._is_ready = True
        self._announce(ctx)

    def on_start(self, ctx: Ctx) -> None:
        """Watch the routes and ask for the config slice."""
        ctx.watch("routes")
        if self.SLICE is None:
            self.ready(ctx)
        else:
            ctx.timer(CONFIG_TIMER, 0)

    def on_timer(self, key: str, ctx: Ctx) -> None:
        """Config resend, lease expiry, an announcement that did not arrive."""
        if key == CONFIG_TIMER and self.config is None:
            if resolver := ctx.views.routes.named(Role.RESOLVER):
                self._asked = resolver.address
                ctx.send(resolver.address, ConfigGet(part=self.ROLE))
            ctx.timer(CONFIG_TIMER, CONFIG_RESEND_MS)
        elif key == LEASE_TIMER:
            self.on_lease_lost(ctx)
        elif key == ANNOUNCE_TIMER:
            self._announce(ctx)

    def receive(self, msg: Any, ctx: Ctx) -> None:
        """Handle SERVICE_INCOMING."""
        match msg:
            case ConfigSlice() if self.config is None and msg.part == self.ROLE and self.SLICE is not None:
                ctx.cancel(CONFIG_TIMER)
                self.config = decode_slice(msg.slice_json, self.SLICE)
                self.on_config(self.config, ctx)
            case ConfigFailed() if self.config is None:
                self.on_config_failed(msg.error, ctx)
            case Lease():
                ctx.timer(LEASE_TIMER, msg.ttl_ms)
            case RunEnded():
                ctx.cancel(LEASE_TIMER)
                self.on_run_ended(msg, ctx)
            case ViewChanged():
                if msg.view == "routes":
                    self._routes_changed(ctx)
                self.on_view(msg.view, ctx)
            case OwnerGone():
                self.on_owner_gone(ctx)
            case StopSignal():
                self.on_stop_signal(msg, ctx)
            case SendFailed() if isinstance(msg.message, ServiceReady):
                # Told to a route that was no more, or a link was down for long: the run would wait for it in vain.
                self._announced_boot = 0
                ctx.timer(ANNOUNCE_TIMER, CONFIG_RESEND_MS)
            case _:
                pass

    def _routes_changed(self, ctx: Ctx) -> None:
        route = ctx.views.routes.named(Role.ORCHESTRATOR)
        self.orchestrator = route.address if route else b""
        resolver = ctx.views.routes.named(Role.RESOLVER)
        if self.config is None and self.SLICE is not None and resolver and resolver.address != self._asked:
            ctx.timer(CONFIG_TIMER, 0)
        self._announce(ctx)

    def _announce(self, ctx: Ctx) -> None:
        route = ctx.views.routes.named(Role.ORCHESTRATOR)
        if self._is_ready and route and route.boot != self._announced_boot:
            self._announced_boot = route.boot
            ctx.send(route.address, ServiceReady(service=self.ROLE, boot=ctx.boot))
