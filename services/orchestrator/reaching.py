"""Services and workers that a message could not be delivered to (S1 10.12; design.md 2, 6 row 22).

A bus that is away for a while is nobody's end: what a service was told is said again, in order, until it counts as
lost. A worker is told everything again anyway, so of it only the time counts.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from common.actors import Ctx
from common.addresses import Role
from common.codec import Message
from common.effects import SendFailed
from common.limits import OWN_RETRY_MS, UNROUTABLE_HOLD_MS, WORKER_SILENT_MS_SERVING, WORKER_SILENT_MS_STARTUP
from common.messages.serve import HoldServing
from services.orchestrator.base import Phase, RunBase, Worker

UNREACHED_TIMER = "run:unreached"
FINAL_REASONS = frozenset({"refused", "unsupported"})
REACHED_MS = 2 * UNROUTABLE_HOLD_MS  # a repetition that fails does so within one hold


@dataclass(slots=True)
class Unreached:
    """A partner. phase, error: of the last message that failed; waiting: what is said again, the oldest first."""

    phase: Phase
    error: str
    since_ms: int
    failed_ms: int
    waiting: list[Message] = field(default_factory=list)


class Reaching(RunBase):
    """Sending to services, and for how long a partner may be out of reach."""

    def __init__(self) -> None:
        super().__init__()
        self._unreached: dict[Role | bytes, Unreached] = {}
        """Services by role, workers by the address of their node actor."""

    def say(self, role: Role, message: Message, ctx: Ctx) -> None:
        """Send it, or behind what this service has yet to hear."""
        unreached = self._unreached.get(role)
        if unreached is None or not unreached.waiting:
            ctx.send(self.service(ctx, role), message)
            return
        if isinstance(message, HoldServing):
            unreached.waiting.clear()  # of an attempt to serve that is over
        unreached.waiting.append(message)

    def not_reached(self, partner: Role | Worker, failed: SendFailed, error: str, ctx: Ctx) -> None:
        """A message failed, not for one of FINAL_REASONS. error: what the run ends with if that lasts."""
        key = partner.node_actor if isinstance(partner, Worker) else partner
        unreached = self._unreached.get(key)
        if unreached is None:
            unreached = self._unreached[key] = Unreached(self.phase, error, ctx.now_ms, ctx.now_ms)
            ctx.timer(UNREACHED_TIMER, OWN_RETRY_MS)
        unreached.phase, unreached.error, unreached.failed_ms = self.phase, error, ctx.now_ms
        if isinstance(partner, Role):
            unreached.waiting.append(failed.message)

    def reach_again(self, ctx: Ctx) -> None:
        """UNREACHED_TIMER."""
        if not self.active:
            return
        for key, unreached in list(self._unreached.items()):
            worker = next((worker for worker in self.workers.values() if worker.node_actor == key), None)
            is_workers = not isinstance(key, Role)
            if is_workers and (worker is None or worker.exited or worker.dead_since_ms is not None):
                del self._unreached[key]  # its loss is known otherwise
            elif ctx.now_ms - unreached.failed_ms >= REACHED_MS:
                del self._unreached[key]
            elif ctx.now_ms - unreached.since_ms >= self.silent_limit_ms():
                del self._unreached[key]
                self.undeliverable(ctx, unreached.error, worker, unreached.phase)
                if not self.active:
                    return
            elif isinstance(key, Role):
                waiting, unreached.waiting = unreached.waiting, []
                for message in waiting:
                    ctx.send(self.service(ctx, key), message)
        if self._unreached:
            ctx.timer(UNREACHED_TIMER, OWN_RETRY_MS)

    def undeliverable(self, ctx: Ctx, error: str, worker: Worker | None, phase: Phase) -> None:
        """It stays so: the end of the run, or of an attempt to replace this worker (restart.py)."""
        raise NotImplementedError

    def silent_limit_ms(self) -> int:
        """How long a partner may be out of reach."""
        return WORKER_SILENT_MS_SERVING if self.phase is Phase.SERVING else WORKER_SILENT_MS_STARTUP
