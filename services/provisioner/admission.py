"""Which worker keys the router must know: Admit until Admitted, Revoke until Revoked, and all again after its restart.

Pure; part of the actor, whose context it gets with each call. A router's table is soft state (design.md 3).
"""

from __future__ import annotations

from dataclasses import dataclass

from common.actors import Ctx
from common.addresses import Role
from common.limits import ADMIT_RESEND_MS, WORKER_SILENT_MS_STARTUP
from common.messages.bus import Admit, Revoke

ADMIT_LIMIT_MS = WORKER_SILENT_MS_STARTUP  # a router or relay that was away for so long is lost like a worker
REVOKE_LIMIT_MS = 10_000  # the key is worthless anyway once its run has ended
ADMISSION_TIMER = "admission"


@dataclass(slots=True)
class _Entry:
    admit: Admit
    until_ms: int
    first_answered: bool = False
    router_boot: int = 0


def not_admitted(relay: bool, ctx: Ctx) -> str:
    """Why a worker cannot be started, in one sentence. relay: whether workers use one."""
    error = f"the router did not admit the worker within {ADMIT_LIMIT_MS // 1000} s"
    if relay and ctx.views.paths.none_up():
        error += "; the relay is down, or does not allow this operator's key (see RELAY.md)"
    return error


class Admissions:
    """The keys of living workers, and those that are on their way out."""

    def __init__(self) -> None:
        self._wanted: dict[bytes, _Entry] = {}
        self._revoking: dict[bytes, int] = {}

    def admit(self, admit: Admit, ctx: Ctx) -> None:
        """Begin; `admitted` tells when it is done, `repeat` when it took too long."""
        ctx.watch("paths")
        self._wanted[admit.key] = _Entry(admit, ctx.now_ms + ADMIT_LIMIT_MS)
        self.repeat(ctx)

    def admitted(self, key: bytes, ctx: Ctx) -> bool:
        """The router said Admitted. True the first time: the worker may start."""
        entry = self._wanted.get(key)
        if entry is None:
            return False
        router = ctx.views.routes.named(Role.ROUTER)
        entry.router_boot = router.boot if router is not None else 0
        first, entry.first_answered = not entry.first_answered, True
        return first

    def revoke(self, key: bytes, ctx: Ctx) -> None:
        """The worker is gone or never was: nobody may use its key any more. Repeats are fine."""
        if self._wanted.pop(key, None) is not None:
            self._revoking[key] = ctx.now_ms + REVOKE_LIMIT_MS
            self.repeat(ctx)

    def revoked(self, key: bytes) -> None:
        """The router said Revoked."""
        self._revoking.pop(key, None)

    def repeat(self, ctx: Ctx) -> list[bytes]:
        """Say what this incarnation of the router has not confirmed. Returns the keys whose first answer is overdue."""
        now = ctx.now_ms
        overdue = [key for key, entry in self._wanted.items() if not entry.first_answered and now >= entry.until_ms]
        self._revoking = {key: until for key, until in self._revoking.items() if now < until}
        router = ctx.views.routes.named(Role.ROUTER)
        open_entries = [
            entry
            for entry in self._wanted.values()
            if not entry.first_answered or (router is not None and entry.router_boot != router.boot)
        ]
        if router is not None:
            for entry in open_entries:
                ctx.send(router.address, entry.admit)
            for key in self._revoking:
                ctx.send(router.address, Revoke(key=key))
        if open_entries or self._revoking:
            ctx.timer(ADMISSION_TIMER, ADMIT_RESEND_MS)
        return overdue
