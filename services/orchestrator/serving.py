"""Serving and what can end it: stop requests, worker loss, service loss, faults (S1 4.11, 9.15, 9.17; design.md 6 row 22)."""

from __future__ import annotations

from common.actors import Ctx
from common.addresses import Role
from common.limits import (
    DEAD_WORKER_FAULT_MS,
    LEASE_MS,
    LEASE_TTL_MS,
    STDERR_TAIL_LINES,
    WORKER_SILENT_MS_SERVING,
    WORKER_SILENT_MS_STARTUP,
)
from common.messages.provision import NodeExited
from common.messages.serve import ResumeServing, SuspendServing
from common.messages.service import Lease
from services.orchestrator.base import Worker
from services.orchestrator.closing import CLOSING, Closing

LEASE_TIMER = "run:lease"
SILENT_TIMER = "run:silent"


class Serving(Closing):
    """Supervision of a run from the first worker on."""

    def __init__(self) -> None:
        super().__init__()
        self._suspended = False

    @property
    def active(self) -> bool:
        """S1 9.15: the phases in which the loss of a worker is fatal."""
        return self.phase not in CLOSING

    # --- leases -----------------------------------------------------------------------------------------------
    def renew_lease(self, ctx: Ctx) -> None:
        """From the main loop on purpose: if it hangs, the lease ends and everybody stops by himself."""
        ctx.timer(LEASE_TIMER, LEASE_MS)
        holders = [self.service(ctx, role) for role in (Role.PROVISIONER, Role.GATEWAY)]
        holders += [worker.node_actor for worker in self.workers.values()]
        for holder in holders:
            if holder:
                ctx.send(holder, Lease(ttl_ms=LEASE_TTL_MS))

    # --- stop requests ----------------------------------------------------------------------------------------
    def stop_requested(self, source: str, ctx: Ctx) -> None:
        """Controlled shutdown (S1 9.17, 10.14): success while serving, an error of the phase during start-up."""
        if not self.active:
            self.hurry(ctx)
            return
        self.result.shutdown_source = source
        if self.phase == "serving":
            self.close(ctx)
        else:
            self.fail(ctx, f"shutdown requested while waiting for {self.waiting_for}")

    # --- worker loss ------------------------------------------------------------------------------------------
    def node_exited(self, msg: NodeExited, ctx: Ctx) -> None:
        """A worker ended without being asked to (S1 9.15)."""
        if not self.active:
            return
        when = {
            "serving": "while serving prompts",
            "stage": "while loading weights",
            "rpc": "while loading weights",
        }.get(self.phase, "before ready")
        how = msg.reason or (f"exit status {msg.status}" if msg.status is not None else "no exit status")
        tail = msg.stderr_tail[-STDERR_TAIL_LINES:]
        self.result.stderr_tail = tail
        last = next((line for line in reversed(tail) if line.strip()), "")
        error = f"node {msg.node_id} exited {when}: {how}"
        if last:
            error += f"; its last line was: {last.strip()[:200]}"
        phase = {"serving": "serve_prompts", "stage": "weights_loaded"}.get(self.phase, "node_runtime_ready")
        self.fail(ctx, error, phase=phase, detail={"node_id": msg.node_id, "status": msg.status, "stderr_tail": tail})

    def members_changed(self, ctx: Ctx) -> None:
        """SWIM's verdicts: Dead suspends at once, fails the run only after the silence limit; Unknown never does."""
        for worker in self.workers.values():
            if not worker.node_key:
                continue
            state = ctx.views.members.state(worker.node_key)
            if state in ("dead", "left") and worker.dead_since_ms is None and worker.alive:
                worker.dead_since_ms = ctx.now_ms
                ctx.timer(SILENT_TIMER, DEAD_WORKER_FAULT_MS)
            elif state == "alive":
                worker.alive = True
                worker.dead_since_ms = None
        self._serve_or_suspend(ctx)

    def check_silent(self, ctx: Ctx) -> None:
        """Workers that are Dead for long: fault the active request after 5 s, the run after 60 (30 at start-up)."""
        limit_ms = WORKER_SILENT_MS_SERVING if self.phase == "serving" else WORKER_SILENT_MS_STARTUP
        silent = [worker for worker in self.workers.values() if worker.dead_since_ms is not None]
        for worker in silent:
            if ctx.now_ms - (worker.dead_since_ms or 0) >= limit_ms and self.active:
                self.fail(
                    ctx, f"node {worker.node_id} has been silent for {limit_ms // 1000} s", phase=self._fault_phase()
                )
                return
        if silent and self.active:
            ctx.timer(SILENT_TIMER, 1000)
        self._serve_or_suspend(ctx)

    def _fault_phase(self) -> str:
        return "serve_prompts" if self.phase == "serving" else self.phase

    def _lost(self, worker: Worker, ctx: Ctx) -> bool:
        return worker.dead_since_ms is not None and ctx.now_ms - worker.dead_since_ms >= DEAD_WORKER_FAULT_MS

    def _serve_or_suspend(self, ctx: Ctx) -> None:
        gateway = self.service(ctx, Role.GATEWAY)
        if self.phase != "serving" or not gateway:
            return
        lost = [worker for worker in self.workers.values() if self._lost(worker, ctx)]
        if lost and not self._suspended:
            self._suspended = True
            self.record(ctx, "serve_prompts", "observed", {"suspended_by": [worker.node_id for worker in lost]})
            ctx.send(gateway, SuspendServing(error=f"node {lost[0].node_id} does not answer"))
        elif not lost and self._suspended:
            self._suspended = False
            self.record(ctx, "serve_prompts", "observed", {"resumed": True})
            ctx.send(gateway, ResumeServing())

    # --- service loss -----------------------------------------------------------------------------------------
    def service_lost(self, role: Role, how: str, ctx: Ctx) -> None:
        """A service that holds run state ended (table of design.md 2); the others come back by themselves."""
        if not self.active:
            return
        if role is Role.GATEWAY:
            self.rpc_open = False
            self.fail(ctx, f"the prompt gateway {how}", phase=self._fault_phase())
        elif role is Role.PROVISIONER:
            self.provider_touched = False
            self.fail(ctx, f"the provisioner {how}; its workers are stopped by the ledger", phase=self._fault_phase())
        else:
            self.fail(ctx, f"{role} {how}", phase=self._fault_phase())
