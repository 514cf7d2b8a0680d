"""Serves each service its slice of the configuration, and nobody another one's (S1 7.1; design.md 2)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from common.actors import Ctx
from common.addresses import Role
from common.effects import Log
from common.messages.bus import RouteEntry
from common.messages.config import ConfigFailed, ConfigGet, ConfigSlice
from common.messages.service import ServiceFailed
from common.service_actor import ServiceActor


class ConfigResolverActor(ServiceActor):
    """slices: role → JSON. error: one sentence; with it every request is answered by ConfigFailed (hosted mode).

    mid_run: an earlier life has served the orchestrator, which therefore does not ask: it is told the error.
    """

    ROLE = Role.RESOLVER
    SLICE = None
    Incoming = (*ServiceActor.SERVICE_INCOMING, ConfigGet)

    def __init__(
        self,
        *,
        digest: str = "",
        slices: Mapping[str, bytes] | None = None,
        error: str = "",
        notes: tuple[str, ...] = (),
        mid_run: bool = False,
    ) -> None:
        super().__init__()
        self._untold = mid_run and bool(error)
        self._digest_served = digest
        self._slices = dict(slices or {})
        self._error = error
        self._notes = notes
        self._refused: set[tuple[bytes, str]] = set()

    def on_start(self, ctx: Ctx) -> None:
        """Ready at once: the configuration was resolved before the bus was joined. A wrong one is said aloud too."""
        super().on_start(ctx)
        if self._error:
            ctx.effect(Log("error", self._error))
        for note in self._notes:
            ctx.effect(Log("info", note))

    def receive(self, msg: Any, ctx: Ctx) -> None:
        """Answer ConfigGet; the rest is every service's."""
        if isinstance(msg, ConfigGet):
            self._serve(msg.part, ctx)
        else:
            super().receive(msg, ctx)

    def on_view(self, view: str, ctx: Ctx) -> None:
        """The orchestrator is there: it would wait for services that never get their slices."""
        if self._untold and self.orchestrator:
            self._untold = False
            ctx.send(self.orchestrator, ServiceFailed(service=self.ROLE, phase="config", error=self._error))

    def _serve(self, part: str, ctx: Ctx) -> None:
        """Unanswered while the sender's role is unknown: its route may be on its way, and it asks again."""
        roles = _roles_of(ctx)
        if not roles:
            return
        if part not in roles:
            # Not answered: a ConfigFailed would tell an honest service that its configuration is wrong.
            if (ctx.sender_node, part) not in self._refused:
                self._refused.add((ctx.sender_node, part))
                ctx.effect(Log("warning", f"refused the slice of {part} to a node whose role is {sorted(roles)[0]}"))
        elif self._error:
            ctx.reply(ConfigFailed(error=self._error))
        elif part in self._slices:
            ctx.reply(ConfigSlice(part=part, digest=self._digest_served, slice_json=self._slices[part]))
        else:
            ctx.reply(ConfigFailed(error=f"there is no configuration for a {part}"))

    def check(self) -> None:
        """Either slices or an error, and the own slice of nobody unknown."""
        assert bool(self._error) != bool(self._slices)
        assert all(part in set(Role) for part in self._slices)


def _roles_of(ctx: Ctx) -> set[str]:
    """The roles under which the sender's node was admitted, from the broker-verified routes."""
    items = ctx.views.routes.items.values()
    return {str(item.role) for item in items if isinstance(item, RouteEntry) and item.node == ctx.sender_node}
