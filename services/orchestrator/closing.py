"""The shutdown sequence, each step bounded (S1 4.12, 9.16, 10.13; design.md 4).

CloseRpc → StopRun → StopNodes → exit record → RunEnded → Flush → RunOver. Steps that do not apply are skipped, a step
whose partner is gone ends at once; a second request to stop skips to StopNodes.
"""

from __future__ import annotations

from common.actors import Ctx
from common.addresses import Role
from common.limits import (
    FLUSH_MS,
    PROVIDER_STOP_LIMIT_MS,
    RPC_CLOSED_MS,
    STAGE_STOPPED_MS,
    provider_stop_ms,
)
from common.messages.node_agent import StopRun
from common.messages.provision import NodesStopped, NodeStopped, StopNodes
from common.messages.serve import CloseRpc
from common.messages.service import RunEnded
from common.messages.stream import Flush
from services.orchestrator.actor import EndRun
from services.orchestrator.base import CLOSING, SERVICES_OF_A_RUN, Phase, RunOver, Worker
from services.orchestrator.reaching import Reaching

STEP_TIMER = "close:step"
LEASE_TIMER = "run:lease"
STOP_LEFT = "the next start of the provider stops what is left"


class Closing(Reaching):
    """From the first reason to end until RunOver."""

    def __init__(self) -> None:
        super().__init__()
        self._stopping: set[int] = set()
        """Stages whose StageStopped is awaited."""
        self._stop_unanswered = ""
        """Why the provisioner cannot answer StopNodes, empty while it can."""

    def close(self, ctx: Ctx) -> None:
        """Begin, once."""
        if not self.active:
            return
        self.no_limit(ctx)
        source = self.result.shutdown_source or ("error" if self.result.error else "completed")
        self.record(ctx, "shutdown", "started", {"source": source, "phase": self.phase})
        if self.actor_address:
            ctx.send(self.actor_address, EndRun(self.result.error))
        gateway = self.service(ctx, Role.GATEWAY)
        if self.rpc_open and gateway:
            self._step(ctx, Phase.CLOSING_RPC, RPC_CLOSED_MS)
            reason = self.result.error or "the orchestrator is shutting down"
            ctx.send(gateway, CloseRpc(reason=reason))
        else:
            self._stop_stages(ctx)

    def hurry(self, ctx: Ctx) -> None:
        """A second request to stop: no more grace."""
        match self.phase:
            case Phase.CLOSING_RPC | Phase.STOPPING_STAGES:
                self._stop_nodes(ctx, fast=True)
            case Phase.STOPPING_NODES:
                ctx.send(self.service(ctx, Role.PROVISIONER), StopNodes(fast=True))
            case Phase.FLUSHING:
                self._over(ctx)

    def _step(self, ctx: Ctx, phase: Phase, limit_ms: int) -> None:
        self.phase = phase
        ctx.timer(STEP_TIMER, limit_ms)

    def step_timed_out(self, ctx: Ctx) -> None:
        """The step's answer did not come: what was owed is recorded, the sequence goes on."""
        match self.phase:
            case Phase.CLOSING_RPC:
                self._stop_stages(ctx)
            case Phase.STOPPING_STAGES:
                self._stop_nodes(ctx)
            case Phase.STOPPING_NODES:
                self._stop_failed(ctx, f"no answer from the provisioner within {self._stop_limit_ms // 1000} s")
            case Phase.FLUSHING:
                self._over(ctx)

    def partner_gone(self, role: Role, how: str, ctx: Ctx) -> None:
        """A service ended while the run ends: what it still owes never comes."""
        if role is Role.GATEWAY and self.phase is Phase.CLOSING_RPC:
            self._stop_stages(ctx)
        elif role is Role.PROVISIONER:
            self._stop_unanswered = self._stop_unanswered or f"the provisioner {how}"
            if self.phase is Phase.STOPPING_NODES:
                self._stop_failed(ctx, self._stop_unanswered)
        elif role is Role.COLLECTOR and self.phase is Phase.FLUSHING:
            self._over(ctx)

    def step_undelivered(self, message: object, dst: bytes, reason: str, ctx: Ctx) -> None:
        """A message of the shutdown sequence did not arrive: as if its partner were gone."""
        how = f"cannot be reached: {reason.replace('_', ' ')}"
        match message:
            case CloseRpc():
                self.partner_gone(Role.GATEWAY, how, ctx)
            case StopRun():
                for worker in self.workers.values():
                    if worker.node_actor == dst:
                        self._stop_awaited_no_more(worker, ctx)
            case StopNodes():
                self.partner_gone(Role.PROVISIONER, how, ctx)
            case Flush():
                self.partner_gone(Role.COLLECTOR, how, ctx)

    # --- steps ------------------------------------------------------------------------------------------------
    def rpc_closed(self, ctx: Ctx) -> None:
        """Every prompt has its terminal and no client is served any more."""
        if self.phase is Phase.CLOSING_RPC:
            self.rpc_open = False
            self._stop_stages(ctx)

    def _stop_stages(self, ctx: Ctx) -> None:
        """StopRun to every worker that knows us; wait for those that can still answer."""
        told = [worker for worker in self.workers.values() if worker.acked and not worker.exited]
        self._stopping = {worker.stage_index for worker in told if worker.dead_since_ms is None}
        for worker in told:
            ctx.send(worker.node_actor, StopRun(run_id=self.run_id))
        if self._stopping:
            self._step(ctx, Phase.STOPPING_STAGES, STAGE_STOPPED_MS)
        else:
            self._stop_nodes(ctx)

    def _stop_awaited_no_more(self, worker: Worker, ctx: Ctx) -> None:
        self._stopping.discard(worker.stage_index)
        if self.phase is Phase.STOPPING_STAGES and not self._stopping:
            self._stop_nodes(ctx)

    def stage_stopped(self, stage_index: int, ctx: Ctx) -> None:
        """One stage has released everything."""
        if (worker := self.workers.get(stage_index)) is not None:
            self._stop_awaited_no_more(worker, ctx)

    def exited_while_closing(self, worker: Worker, stderr_tail: list[str], ctx: Ctx) -> None:
        """Its last lines explain the error that ended the run: an engine's fault is told before its worker exits."""
        worker.exited = True
        if self.result.error and not self.result.stderr_tail:
            self.result.stderr_tail = stderr_tail
        self._stop_awaited_no_more(worker, ctx)

    @property
    def _stop_limit_ms(self) -> int:
        # Above the provisioner's own limit, so that its error is the one that is reported.
        return max(PROVIDER_STOP_LIMIT_MS, provider_stop_ms(self.provider or "") + 10_000)

    def _stop_nodes(self, ctx: Ctx, *, fast: bool = False) -> None:
        if not self.provider_touched:
            self._finish(ctx)
            return
        self._step(ctx, Phase.STOPPING_NODES, self._stop_limit_ms)
        self.record(ctx, "provider_stop", "started", {"provider": self.provider})
        if self._stop_unanswered:
            self._stop_failed(ctx, self._stop_unanswered)
        else:
            ctx.send(self.service(ctx, Role.PROVISIONER), StopNodes(fast=fast))

    def _stop_failed(self, ctx: Ctx, why: str) -> None:
        error = f"{why}; {STOP_LEFT}" if self.workers else why
        self._nodes_stopped(NodesStopped(first_error=error), ctx)

    def node_stopped(self, msg: NodeStopped, ctx: Ctx) -> None:
        """One handle's stop ended."""
        detail = {"provider": self.provider, "node_id": msg.node_id}
        if msg.error:
            self.record(ctx, "provider_stop", "failed", {**detail, "error": msg.error}, msg.node_id)
        else:
            self.record(ctx, "provider_stop", "ready", detail, msg.node_id)

    def nodes_stopped(self, msg: NodesStopped, ctx: Ctx) -> None:
        """All handles were attempted."""
        if self.phase is Phase.STOPPING_NODES:
            self._nodes_stopped(msg, ctx)

    def _nodes_stopped(self, msg: NodesStopped, ctx: Ctx) -> None:
        detail = {"provider": self.provider, "stopped": msg.stopped}
        if msg.first_error:
            self.result.stop_error = f"provider stop: {msg.first_error}"
            self.record(ctx, "provider_stop", "failed", {**detail, "error": msg.first_error})
        else:
            self.record(ctx, "provider_stop", "ready", detail)
        self._finish(ctx)

    def _finish(self, ctx: Ctx) -> None:
        if self.result.status == 0:
            self.record(ctx, "orch_exit", "ready", {"result": "ok"})
        else:
            detail = {
                "result": "error",
                "error": self.result.text,
                "phase": self.result.faulted_phase or Phase.STOPPING_NODES,
                "stderr_tail": self.result.stderr_tail,
            }
            self.record(ctx, "orch_exit", "failed", detail)
        self._step(ctx, Phase.FLUSHING, FLUSH_MS)
        ctx.cancel(LEASE_TIMER)  # a lease after RunEnded would be one of the next run
        for role in SERVICES_OF_A_RUN:
            if address := self.service(ctx, role):
                ctx.send(address, RunEnded(status=self.result.status, error=self.result.text))
        if collector := self.service(ctx, Role.COLLECTOR):
            ctx.send(collector, Flush())
        else:
            self._over(ctx)

    def flushed(self, ctx: Ctx) -> None:
        """The archive has everything that the collector received."""
        if self.phase is Phase.FLUSHING:
            self._over(ctx)

    def _over(self, ctx: Ctx) -> None:
        self.phase = Phase.OVER
        ctx.cancel(STEP_TIMER)
        ctx.effect(RunOver(self.result.status, self.result.text))

    def check(self) -> None:
        """Invariants of the end."""
        assert self.phase not in CLOSING or not self._limit_error
        assert self.phase in CLOSING or not self._stopping
