"""The shutdown sequence, each step bounded (S1 4.12, 9.16, 10.13; design.md 4).

CloseRpc → StopRun → StopNodes → exit record → RunEnded → Flush → RunOver. Steps that do not apply are skipped; a
second signal skips to StopNodes.
"""

from __future__ import annotations

from common.actors import Ctx
from common.addresses import Role
from common.limits import (
    FLUSH_MS,
    PROVIDER_STOP_LIMIT_MS,
    RPC_CLOSED_MS,
    STAGE_STOPPED_MS,
)
from common.messages.node_agent import StopRun
from common.messages.provision import NodesStopped, NodeStopped, StopNodes
from common.messages.serve import CloseRpc
from common.messages.service import RunEnded
from common.messages.stream import Flush
from services.orchestrator.base import SERVICES_OF_A_RUN, RunBase, RunOver

STEP_TIMER = "close:step"
CLOSING = ("closing rpc", "stopping stages", "stopping nodes", "flushing", "over")


class Closing(RunBase):
    """From the first reason to end until RunOver."""

    def close(self, ctx: Ctx) -> None:
        """Begin, once."""
        if self.phase in CLOSING:
            return
        self.no_limit(ctx)
        source = self.result.shutdown_source or ("error" if self.result.error else "completed")
        self.record(ctx, "shutdown", "started", {"source": source, "phase": self.phase})
        gateway = self.service(ctx, Role.GATEWAY)
        if self.rpc_open and gateway:
            self._step(ctx, "closing rpc", RPC_CLOSED_MS)
            reason = self.result.error or "the orchestrator is shutting down"
            ctx.send(gateway, CloseRpc(reason=reason))
        else:
            self.stop_stages(ctx)

    def hurry(self, ctx: Ctx) -> None:
        """A second signal: no more grace."""
        if self.phase in ("closing rpc", "stopping stages"):
            self._stop_nodes(ctx, fast=True)
        elif self.phase == "stopping nodes" and (provisioner := self.service(ctx, Role.PROVISIONER)):
            ctx.send(provisioner, StopNodes(fast=True))
        elif self.phase == "flushing":
            self._over(ctx)

    def _step(self, ctx: Ctx, phase: str, limit_ms: int) -> None:
        self.phase = phase
        ctx.timer(STEP_TIMER, limit_ms)

    def step_timed_out(self, ctx: Ctx) -> None:
        """The step's answer did not come: what was owed is recorded, the sequence goes on."""
        match self.phase:
            case "closing rpc":
                self.stop_stages(ctx)
            case "stopping stages":
                self._stop_nodes(ctx)
            case "stopping nodes":
                error = f"provider stop: no answer from the provisioner within {PROVIDER_STOP_LIMIT_MS // 1000} s"
                self._nodes_stopped(NodesStopped(first_error=error), ctx)
            case "flushing":
                self._over(ctx)

    # --- steps ------------------------------------------------------------------------------------------------
    def stop_stages(self, ctx: Ctx) -> None:
        """StopRun to every worker that can still hear it."""
        reachable = [
            worker
            for worker in self.workers.values()
            if worker.acked and not worker.stopped and ctx.views.routes.owner(worker.node_actor)
        ]
        if not reachable:
            self._stop_nodes(ctx)
            return
        self._step(ctx, "stopping stages", STAGE_STOPPED_MS)
        for worker in reachable:
            ctx.send(worker.node_actor, StopRun(run_id=self.run_id))

    def stage_stopped(self, stage_index: int, ctx: Ctx) -> None:
        """One stage has released everything."""
        if (worker := self.workers.get(stage_index)) is not None:
            worker.stopped = True
        if self.phase == "stopping stages" and all(w.stopped for w in self.workers.values() if w.acked):
            self._stop_nodes(ctx)

    def _stop_nodes(self, ctx: Ctx, *, fast: bool = False) -> None:
        provisioner = self.service(ctx, Role.PROVISIONER)
        if not self.provider_touched:
            self._finish(ctx)
            return
        if not provisioner:
            if self.workers:
                self.result.stop_error = "provider stop: the provisioner is gone; the next start stops what is left"
            self._finish(ctx)
            return
        self._step(ctx, "stopping nodes", PROVIDER_STOP_LIMIT_MS)
        self.record(ctx, "provider_stop", "started", {"provider": self.config.provider})
        ctx.send(provisioner, StopNodes(fast=fast))

    def node_stopped(self, msg: NodeStopped, ctx: Ctx) -> None:
        """One handle's stop ended."""
        detail = {"provider": self.config.provider, "node_id": msg.node_id}
        if msg.error:
            self.record(ctx, "provider_stop", "failed", {**detail, "error": msg.error}, msg.node_id)
        else:
            self.record(ctx, "provider_stop", "ready", detail, msg.node_id)

    def _nodes_stopped(self, msg: NodesStopped, ctx: Ctx) -> None:
        if msg.first_error and not self.result.stop_error:
            self.result.stop_error = msg.first_error
            self.record(ctx, "provider_stop", "failed", {"provider": self.config.provider, "error": msg.first_error})
        self._finish(ctx)

    def nodes_stopped(self, msg: NodesStopped, ctx: Ctx) -> None:
        """All handles were attempted."""
        if self.phase == "stopping nodes":
            self._nodes_stopped(msg, ctx)

    def _finish(self, ctx: Ctx) -> None:
        if self.result.status == 0:
            self.record(ctx, "orch_exit", "ready", {"result": "ok"})
        else:
            detail = {
                "result": "error",
                "error": self.result.text,
                "phase": self.result.faulted_phase or "provider_stop",
                "stderr_tail": self.result.stderr_tail,
            }
            self.record(ctx, "orch_exit", "failed", detail)
        self._step(ctx, "flushing", FLUSH_MS)
        for role in SERVICES_OF_A_RUN:
            if address := self.service(ctx, role):
                ctx.send(address, RunEnded(status=self.result.status, error=self.result.text))
        collector = self.service(ctx, Role.COLLECTOR)
        if collector:
            ctx.send(collector, Flush())
        else:
            self._over(ctx)

    def flushed(self, error: str, ctx: Ctx) -> None:
        """The archive has everything that the collector received."""
        if self.phase == "flushing":
            self._over(ctx)

    def _over(self, ctx: Ctx) -> None:
        if self.phase != "over":
            self.phase = "over"
            ctx.cancel(STEP_TIMER)
            ctx.effect(RunOver(self.result.status, self.result.text))
