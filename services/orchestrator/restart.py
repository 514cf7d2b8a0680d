"""[runtime] on_worker_loss = "restart": a lost worker is replaced while the clients wait, and serving goes on.

Only while serving: a loss during start-up ends the run as ever (S1 9.15). SERVING → RESTART (back-off; the gateway
holds the active prompt) → the start-up phases again for the lost worker, START to WEIGHTS → RPC (RestoreServing: the
gateway replays the prompt's history) → SERVING. Workers that live keep their weights and get new edges by a provision
of the next generation. At most WORKER_RESTARTS_MAX attempts in WORKER_RESTARTS_WINDOW_MS; then the run ends with the
error that it would have had without.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

import msgspec

from common.actors import Ctx
from common.addresses import Role
from common.limits import (
    DEAD_WORKER_FAULT_MS,
    PROVIDER_START_MS,
    WORKER_LOSS_NAMED_MS,
    WORKER_RESTART_BACKOFF_MS,
    WORKER_RESTARTS_MAX,
    WORKER_RESTARTS_WINDOW_MS,
    provider_start_ms,
)
from common.messages.report import StageFault
from common.messages.serve import HoldServing, RestoreServing, ServingDisturbed, ServingRestored
from services.orchestrator.actor import StageLost, StagesRenewed
from services.orchestrator.base import WHEN, Phase, Worker
from services.orchestrator.planned import PlannedRun
from services.orchestrator.serving import SILENT_TIMER

RESTART_TIMER = "run:restart"
"""The back-off is over, or nobody has named the worker behind a disturbance."""
CRASHED, EDGE_FAULT = "WorkerCrashed", "EdgeFault"


@dataclass(slots=True)
class Loss:
    """What serving is interrupted for. error, worker, detail: as the run would have failed with."""

    error: str
    worker: Worker | None
    detail: dict[str, Any]
    since_ms: int
    replace: set[int] = field(default_factory=set)
    """Stages whose worker is to be replaced."""
    attempts: int = 0


class RestartingRun(PlannedRun):
    """With on_worker_loss = "fail" nothing here ever happens."""

    RESTART_INCOMING: ClassVar[tuple[type, ...]] = (ServingDisturbed, ServingRestored)

    def __init__(self, nonce: bytes) -> None:
        super().__init__(nonce)
        self._loss: Loss | None = None
        self._restarts_ms: list[int] = []
        """When attempts began, those within the window."""

    @property
    def restarting(self) -> bool:
        """From the loss until serving goes on."""
        return self._loss is not None

    def when(self) -> str:
        """Clients have been waiting for an answer since serving began."""
        return WHEN[Phase.SERVING] if self.restarting else super().when()

    def restart_message(self, msg: Any, ctx: Ctx) -> None:
        """A message of RESTART_INCOMING."""
        match msg:
            case ServingDisturbed():
                self._disturbed(f"prompt serving failed: {msg.error}", ctx)
            case ServingRestored():
                self._restored(msg.replayed, ctx)

    # --- what went wrong ----------------------------------------------------------------------------------------
    def lost(self, ctx: Ctx, error: str, worker: Worker, **detail: Any) -> None:
        """This worker is to be replaced."""
        if self._loss is not None and self.active:
            self._loss.replace.add(worker.stage_index)
            if self._loss.attempts == 0:
                # The disturbance has a name now, or two workers went together.
                self._loss.error, self._loss.worker, self._loss.detail = error, worker, detail
                self._attempt_soon(error, ctx)
            elif self.phase is not Phase.RESTART:
                self._attempt_soon(error, ctx)
        elif self.restarts and self.phase is Phase.SERVING:
            self._loss = Loss(error, worker, detail, ctx.now_ms, {worker.stage_index})
            self._attempt_soon(error, ctx)
        else:
            super().lost(ctx, error, worker, **detail)

    def thwarted(self, ctx: Ctx, error: str, worker: Worker | None = None) -> None:
        """An attempt failed; the next one replaces the same workers."""
        if self._loss is None or not self.active:
            super().thwarted(ctx, error, worker)
        elif self.phase is not Phase.RESTART:
            if worker is not None:
                self._loss.replace.add(worker.stage_index)
            self._attempt_soon(error, ctx)

    def stage_faulted(self, report: StageFault, ctx: Ctx) -> None:
        """A crash is a loss; a broken edge is the sign of one, or needs new edges. All else is no loss of a worker."""
        kind = report.reason.partition(":")[0]
        if not self.restarting and not (self.restarts and self.phase is Phase.SERVING):
            super().stage_faulted(report, ctx)
            return
        worker = self.workers[report.stage_index]
        error = f"node {worker.node_id} stage {report.stage_index} faulted {self.when()}: {report.reason}"
        if kind == CRASHED:
            self.lost(ctx, error, worker)
        elif kind != EDGE_FAULT:
            self.fail(ctx, error, worker=worker)
        elif report.generation == self.generation:
            self.edge_failed(error, worker, ctx)

    def edge_failed(self, error: str, worker: Worker, ctx: Ctx) -> None:
        """Of a stage or of the gateway."""
        if self._loss is not None and self.active:
            self.thwarted(ctx, error)
        elif self.restarts and self.phase is Phase.SERVING:
            self._disturbed(error, ctx)
        else:
            super().edge_failed(error, worker, ctx)

    def _disturbed(self, error: str, ctx: Ctx) -> None:
        """Who is lost will be known in a moment; an edge can also break between two that live."""
        if not self.restarts or self._loss is not None or self.phase is not Phase.SERVING:
            return
        silent = {worker.stage_index for worker in self.workers.values() if worker.dead_since_ms is not None}
        self._loss = Loss(error, None, {}, ctx.now_ms, silent)
        self._hold(error, ctx)
        self.phase, self.waiting_for = Phase.RESTART, "the restart of a worker"
        ctx.timer(RESTART_TIMER, WORKER_LOSS_NAMED_MS)

    # --- attempts -----------------------------------------------------------------------------------------------
    def _hold(self, error: str, ctx: Ctx) -> None:
        self.say(Role.GATEWAY, HoldServing(error=error), ctx)

    def _attempt_soon(self, error: str, ctx: Ctx) -> None:
        """Back-off, or the end."""
        loss = self._loss
        assert loss is not None
        if loss.attempts:
            self.record(ctx, "worker_restart", "failed", {"attempt": loss.attempts, "error": error})
        if self._spent(ctx):
            self._give_up(loss, error, ctx)
            return
        # Also after a failed attempt: the gateway may have its RestoreServing, and would take the next for the same.
        self._hold(loss.error, ctx)
        self.no_limit(ctx)
        self.phase, self.waiting_for = Phase.RESTART, "the restart of a worker"
        ctx.timer(RESTART_TIMER, WORKER_RESTART_BACKOFF_MS[len(self._restarts_ms)])

    def _spent(self, ctx: Ctx) -> bool:
        self._restarts_ms = [at for at in self._restarts_ms if ctx.now_ms - at < WORKER_RESTARTS_WINDOW_MS]
        return len(self._restarts_ms) >= WORKER_RESTARTS_MAX

    def _give_up(self, loss: Loss, error: str, ctx: Ctx) -> None:
        """The error of on_worker_loss = "fail", and what was tried."""
        tried = (
            f"; after {WORKER_RESTARTS_MAX} restarts within {WORKER_RESTARTS_WINDOW_MS // 60_000} minutes the run ends"
        )
        last = f", the last failed: {error}" if loss.attempts else ""
        self.fail(ctx, f"{loss.error}{tried}{last}", phase=Phase.SERVING, worker=loss.worker, **loss.detail)

    def restart_due(self, ctx: Ctx) -> None:
        """RESTART_TIMER: replace what is lost, renew what lives."""
        loss = self._loss
        if loss is None or self.phase is not Phase.RESTART:
            return
        if not loss.replace and self.plan is None:
            # One worker without edges, that nobody says is lost: there is nothing to mend.
            self.fail(ctx, loss.error, phase=Phase.SERVING)
            return
        if self._spent(ctx):
            self._give_up(loss, loss.error, ctx)
            return
        loss.attempts += 1
        self._restarts_ms.append(ctx.now_ms)
        self.generation += 1
        ctx.send(self.actor_address, StagesRenewed())
        for worker in self.workers.values():
            worker.weights = worker.stage_ready = False
        nodes = [self.workers[stage].node_id for stage in sorted(loss.replace)]
        detail = {
            "attempt": loss.attempts,
            "cause": loss.error,
            "replaced_node_ids": nodes,
            "generation": self.generation,
            "attempts_left": WORKER_RESTARTS_MAX - len(self._restarts_ms),
        }
        self.record(ctx, "worker_restart", "started", detail, nodes[0] if nodes else None)
        if not loss.replace:
            self.phase = Phase.BOOTSTRAP
            self.begin_stages(ctx)
            return
        self.phase, self.waiting_for = Phase.START, "provider start"
        self.limit(ctx, provider_start_ms(self.config.provider), "provider start")
        for spec in self.specs():
            if spec.stage_index in loss.replace:
                attempt = self.workers[spec.stage_index].attempt + 1
                ctx.send(self.actor_address, StageLost(spec.stage_index))
                self.forget_facts(spec.stage_index)
                self.start_worker(msgspec.structs.replace(spec, attempt=attempt), ctx)

    def weights_ready(self, stage_index: int, ctx: Ctx) -> None:
        """A replaced worker that has come so far is not replaced once more for another's loss."""
        if self._loss is not None and self.phase is Phase.WEIGHTS:
            self._loss.replace.discard(stage_index)
        super().weights_ready(stage_index, ctx)

    # --- serving again ------------------------------------------------------------------------------------------
    def open_rpc(self, ctx: Ctx) -> None:
        """The RPC is open all the while; what it waits for are the new actors."""
        if self._loss is None or not self.token_endpoints_ready():
            super().open_rpc(ctx)
            return
        self.phase, self.waiting_for = Phase.RPC, "the prompt gateway"
        limit_s = PROVIDER_START_MS // 1000
        self.limit(ctx, PROVIDER_START_MS, f"the prompt gateway did not go on serving within {limit_s} s")
        ordered = [worker for _, worker in sorted(self.workers.items())]
        self.say(Role.GATEWAY, RestoreServing(run=self.prompt_rpc(ordered)), ctx)

    def _restored(self, replayed: int, ctx: Ctx) -> None:
        loss = self._loss
        if loss is None or self.phase is not Phase.RPC:
            return
        self._loss = None
        self.no_limit(ctx)
        self.phase, self.waiting_for = Phase.SERVING, "prompts"
        detail = {
            "attempt": loss.attempts,
            "cause": loss.error,
            "replayed_tokens": replayed,
            "elapsed_ms": ctx.now_ms - loss.since_ms,
        }
        self.record(ctx, "worker_restart", "ready", detail, loss.worker.node_id if loss.worker else None)
        ctx.timer(SILENT_TIMER, DEAD_WORKER_FAULT_MS)  # a worker may have been lost a moment ago
