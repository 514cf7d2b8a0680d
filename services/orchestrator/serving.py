"""Serving and what can end a run: stop requests, worker loss, service loss, faults (S1 4.11, 9.15, 9.17; design.md 6
row 22)."""

from __future__ import annotations

from common.actors import Ctx
from common.addresses import Role
from common.limits import (
    DEAD_WORKER_FAULT_MS,
    LEASE_MS,
    LEASE_TTL_MS,
    STDERR_TAIL_LINES,
    lease_ttl_ms,
    network_profile,
)
from common.messages.provision import NodeExited
from common.messages.report import StageFault
from common.messages.serve import PromptActive, ResumeServing, SuspendServing
from common.messages.service import Lease
from common.records import CHANNEL_PROMPT, prompt_record
from services.orchestrator.base import WHEN, Phase, Worker
from services.orchestrator.closing import LEASE_TIMER, Closing

SILENT_TIMER = "run:silent"
SILENT_LOOK_MS = 1000


class Serving(Closing):
    """Supervision of a run from the first worker on."""

    def __init__(self) -> None:
        super().__init__()
        self._suspension = ""
        """What the gateway is to fault prompts with; empty while it serves."""
        self._stop_requests = 0
        self._prompt: PromptActive | None = None
        """Which request the gateway works on, so that its one fault is on record if the gateway dies."""
        self._gateway_kept_ms: int | None = None
        """When the gateway was last heard; None before it serves."""

    @property
    def restarting(self) -> bool:
        """Serving has begun, and lost workers are being replaced (restart.py)."""
        return False

    @property
    def restarts(self) -> bool:
        """[runtime] on_worker_loss = "restart"."""
        return self.config is not None and self.config.on_worker_loss == "restart"

    # --- leases -----------------------------------------------------------------------------------------------
    def renew_lease(self, ctx: Ctx) -> None:
        """From the main loop on purpose: if it hangs, the lease ends and everybody stops by himself."""
        ctx.timer(LEASE_TIMER, LEASE_MS)
        for role in (Role.PROVISIONER, Role.GATEWAY):
            if service := self.service(ctx, role):
                ctx.send(service, Lease(ttl_ms=LEASE_TTL_MS))
        for worker in self.workers.values():
            if worker.node_actor:
                ctx.send(worker.node_actor, Lease(ttl_ms=lease_ttl_ms(network_profile(self.provider or ""))))
        self._check_gateway(ctx)

    def lease_kept(self, ctx: Ctx) -> None:
        """The gateway's answer to a lease: it can be reached."""
        if ctx.sender == self.service(ctx, Role.GATEWAY):
            self.gateway_heard(ctx)

    def gateway_heard(self, ctx: Ctx) -> None:
        """By the answer to a lease, or by what it says of serving: it may hang before its first answer."""
        self._gateway_kept_ms = ctx.now_ms

    def _check_gateway(self, ctx: Ctx) -> None:
        """A gateway that hangs has no exit status and no SWIM: only its silence tells. While this process's own way to
        the bus is broken, that says nothing."""
        if self._gateway_kept_ms is None or not self.active:
            return
        if not ctx.views.link_up:
            self._gateway_kept_ms = ctx.now_ms
        limit_ms = self.silent_limit_ms()
        if ctx.now_ms - self._gateway_kept_ms >= limit_ms:
            self.service_lost(Role.GATEWAY, f"did not answer for {limit_ms // 1000} s {self.when()}", ctx)

    # --- stop requests ----------------------------------------------------------------------------------------
    def stop_requested(self, source: str, ctx: Ctx) -> None:
        """Controlled shutdown (S1 9.17, 10.14): success while serving, an error of the phase during start-up. The
        first request during an end that has another reason changes nothing; a second one hurries."""
        self._stop_requests += 1
        if not self.active:
            if self._stop_requests > 1:
                self.hurry(ctx)
            return
        self.result.shutdown_source = source
        if self.phase is Phase.SERVING or self.restarting:
            self.close(ctx)
        else:
            self.fail(ctx, f"shutdown requested while waiting for {self.waiting_for}")

    # --- worker loss ------------------------------------------------------------------------------------------
    def node_exited(self, msg: NodeExited, ctx: Ctx) -> None:
        """A worker ended without being asked to (S1 9.15)."""
        worker = self.worker_of(msg.stage_index, msg.node_id)
        if worker is None or worker.attempt != msg.attempt:
            return
        tail = msg.stderr_tail[-STDERR_TAIL_LINES:]
        if not self.active:
            self.exited_while_closing(worker, tail, ctx)
            return
        worker.exited = True
        how = msg.reason or (f"exit status {msg.status}" if msg.status is not None else "no exit status")
        last = next((line.strip() for line in reversed(tail) if line.strip()), "")
        self.result.stderr_tail = tail
        self.lost(
            ctx,
            f"{self.name_of(worker)} exited {self.when()}: {how}"
            + (f"; its last line was: {last[:200]}" if last else ""),
            worker,
            status=msg.status,
            stderr_tail=tail,
        )

    def when(self) -> str:
        """How an error says at what time a worker was lost."""
        return WHEN.get(self.phase, "before ready")

    def stage_faulted(self, report: StageFault, ctx: Ctx) -> None:
        """S1 4.9: a start-up failure before serving, a runtime failure after."""
        worker = self.workers[report.stage_index]
        error = f"node {worker.node_id} stage {report.stage_index} faulted {self.when()}: {report.reason}"
        self.fail(ctx, error, worker=worker)

    def members_changed(self, ctx: Ctx) -> None:
        """SWIM's verdicts: Dead suspends, and fails the run only after the silence limit; Unknown decides nothing."""
        for worker in self.workers.values():
            state = ctx.views.members.state(worker.node_key)
            if state in ("dead", "left") and worker.dead_since_ms is None:
                worker.dead_since_ms = ctx.now_ms
                ctx.timer(SILENT_TIMER, DEAD_WORKER_FAULT_MS)
            elif state in ("alive", "suspect"):
                worker.dead_since_ms = None
        self._serve_or_suspend(ctx)

    def check_silent(self, ctx: Ctx) -> None:
        """Workers that are Dead for long: fault the active request after 5 s, the run after 60 (30 at start-up)."""
        silent = [worker for worker in self.workers.values() if worker.dead_since_ms is not None]
        if not silent or not self.active:
            return
        limit_ms = self.silent_limit_ms()
        for worker in silent:
            # While membership restarts it reads Unknown, which never fails a run (design.md 2).
            is_dead = ctx.views.members.state(worker.node_key) in ("dead", "left")
            if is_dead and ctx.now_ms - (worker.dead_since_ms or 0) >= limit_ms:
                error = f"{self.name_of(worker)} was lost {self.when()}: dead in SWIM for {limit_ms // 1000} s"
                self.lost(ctx, error, worker)
                return
        ctx.timer(SILENT_TIMER, SILENT_LOOK_MS)
        self._serve_or_suspend(ctx)

    def _serve_or_suspend(self, ctx: Ctx) -> None:
        """The gateway follows SWIM by itself; this is the run's own word, so that both stop for the same reason."""
        if self.phase is not Phase.SERVING or self.restarts:
            return  # where lost workers are replaced, the gateway holds its prompt by itself
        lost = [
            worker
            for worker in self.workers.values()
            if worker.dead_since_ms is not None and ctx.now_ms - worker.dead_since_ms >= DEAD_WORKER_FAULT_MS
        ]
        if lost and not self._suspension:
            self._suspension = f"{self.name_of(lost[0])} does not answer"
            self.record(ctx, "serve_prompts", "observed", {"suspended_by": [worker.node_id for worker in lost]})
            self._say_suspension(ctx)
        elif not lost and self._suspension:
            self._suspension = ""
            self.record(ctx, "serve_prompts", "observed", {"resumed": True})
            self._say_suspension(ctx)

    def _say_suspension(self, ctx: Ctx) -> None:
        word = SuspendServing(error=self._suspension) if self._suspension else ResumeServing()
        self.say(Role.GATEWAY, word, ctx)

    def worker_restarted(self, worker: Worker, readiness_id: int, ctx: Ctx) -> None:
        """It reports a new runtime after the old one was acknowledged: stage, weights and requests of that are gone."""
        error = (
            f"{self.name_of(worker)} lost its runtime {self.when()}: it reports readiness {readiness_id} after "
            f"readiness {worker.readiness_id} was acknowledged"
        )
        self.lost(ctx, error, worker)

    # --- service loss -----------------------------------------------------------------------------------------
    def service_lost(self, role: Role, how: str, ctx: Ctx) -> None:
        """A service that holds run state ended (table of design.md 2); the others come back by themselves."""
        if role is Role.GATEWAY:
            self.rpc_open = False
            self._fault_orphan(f"the prompt gateway {how}", ctx)
        self.partner_gone(role, how, ctx)
        if role is Role.PROVISIONER:
            how += "; its workers end with it, and the next start of the provider stops what is left"
        self.fail(ctx, f"the {str(role).replace('_', ' ')} {how}")

    def prompt_active(self, msg: PromptActive, ctx: Ctx) -> None:
        """The gateway's slot: taken, or free again."""
        self._prompt = None if msg.ended else msg
        self.gateway_heard(ctx)

    def _fault_orphan(self, error: str, ctx: Ctx) -> None:
        """The gateway can end this request no more: its one terminal fault is on record here (design.md 2)."""
        if (orphan := self._prompt) is not None:
            self._prompt = None
            detail = {"prompt_id": orphan.prompt_id, "error": error}
            record = prompt_record("prompt_complete", "failed", self.run_id, self.node_id, orphan.request_id, detail)
            ctx.observe(CHANNEL_PROMPT, record)
