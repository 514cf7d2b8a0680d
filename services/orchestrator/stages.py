"""Stages, weights and the prompt RPC: from acknowledged workers to serving (S1 4.8-4.10, 9.4, 9.7)."""

from __future__ import annotations

from common.actors import Ctx
from common.addresses import Role, short
from common.limits import PROVIDER_START_MS, STAGE_PROVISION_RESEND_MS, STAGE_SILENCE_MS
from common.messages.node_agent import ProvisionStage, StageProvisionWire
from common.messages.report import StageProgress
from common.messages.serve import OpenPromptRpc
from services.orchestrator.base import Phase, Worker
from services.orchestrator.serving import SILENT_TIMER, Serving

STAGE_TIMER = "run:stage"
DIRECT_INBOUND_EDGE, DIRECT_OUTBOUND_EDGE = 1, 2
"""Direct mode has no edges; these ids stand in the wire as in the original (rust-swactor.md 4.6)."""
RECORD_EVERY_SENDS = 15  # as the original: the first send and then one in 15
PROGRESS_RECORD_MS = 1000  # progress comes at up to 10 Hz; the archive need not hold all of it


class Stages(Serving):
    """One stage after the other (S1 9.8), then the RPC."""

    def __init__(self) -> None:
        super().__init__()
        self._active_stage = 0
        self._attempt = 0
        self._progress_recorded: tuple[int, str, int] = (0, "", 0)

    # --- stages and weights (4.8, 4.9, 9.7) -------------------------------------------------------------------
    def begin_stages(self, ctx: Ctx) -> None:
        """Every worker is ready, acknowledged and handed over."""
        self.phase, self.waiting_for = Phase.WEIGHTS, "weights"
        stages = [
            {
                "node_id": wire.node_id,
                "stage_index": wire.stage_index,
                "layer_range": {"start": wire.layer_start, "end_exclusive": wire.layer_end_exclusive},
                "inbound_edge_id": wire.inbound_edge_id,
                "outbound_edge_id": wire.outbound_edge_id,
            }
            for wire in (self.stage_wire(worker) for worker in self.workers.values())
        ]
        detail = {"stage_count": len(stages), "stages": stages, "model_id": self.config.model_id}
        self.record(ctx, "stage_provision", "started", detail)
        self.record(ctx, "weights_loaded", "started", {"model_id": self.config.model_id, "expected": len(stages)})
        self._activate(min(self.workers), "stage provisioning", ctx)

    def _activate(self, stage_index: int, what: str, ctx: Ctx) -> None:
        self._active_stage, self._attempt = stage_index, 0
        self._stage_limit(what, ctx)
        self.provision_stage(ctx)

    def _stage_limit(self, what: str, ctx: Ctx) -> None:
        worker = self.workers[self._active_stage]
        limit_s = STAGE_SILENCE_MS // 1000
        error = f"weights: node {worker.node_id} stage {worker.stage_index} made no progress in {what} for {limit_s} s"
        self.limit(ctx, STAGE_SILENCE_MS, error)

    def stage_wire(self, worker: Worker) -> StageProvisionWire:
        """S1 6.6 for direct execution."""
        config = self.config
        return StageProvisionWire(
            run_id=config.run_id,
            authorized_orchestrator=self.actor_address,
            node_id=worker.node_id,
            stage_index=worker.stage_index,
            stage_count=1,
            layer_start=0,
            layer_end_exclusive=config.layer_end_exclusive,
            inbound_edge_id=DIRECT_INBOUND_EDGE,
            outbound_edge_id=DIRECT_OUTBOUND_EDGE,
            model_id=config.model_id,
            gguf_source=config.gguf_source,
            tokenizer=config.tokenizer,
            max_context=config.max_context,
            generation=self.generation,
        )

    def provision_stage(self, ctx: Ctx) -> None:
        """To the one active stage, each second until weights or fault."""
        if self.phase is not Phase.WEIGHTS:
            return
        worker = self.workers[self._active_stage]
        self._attempt += 1
        if self._attempt == 1 or self._attempt % RECORD_EVERY_SENDS == 0:
            loaded = sum(worker.weights for worker in self.workers.values())
            detail = {
                "attempt": self._attempt,
                "stage_count": len(self.workers),
                "stage_index": worker.stage_index,
                "loaded_stage_count": loaded,
            }
            self.record_route(ctx, worker, self._attempt)
            self.record(ctx, "stage_provision_send", "sent", detail, worker.node_id)
        ctx.send(worker.node_actor, ProvisionStage(provision=self.stage_wire(worker)))
        ctx.timer(STAGE_TIMER, STAGE_PROVISION_RESEND_MS)

    def stage_progress(self, msg: StageProgress, ctx: Ctx) -> None:
        """The worker is busy: the silence limit starts anew."""
        if self.phase is not Phase.WEIGHTS or msg.stage_index != self._active_stage:
            return
        self._stage_limit(msg.phase, ctx)
        stage_index, phase, at_ms = self._progress_recorded
        if (stage_index, phase) != (msg.stage_index, msg.phase) or ctx.now_ms - at_ms >= PROGRESS_RECORD_MS:
            self._progress_recorded = (msg.stage_index, msg.phase, ctx.now_ms)
            detail = {"phase": msg.phase, "done": msg.done, "total": msg.total, "stage_index": msg.stage_index}
            self.record(ctx, "stage_provision_wait", "observed", detail, msg.node_id)

    def weights_ready(self, stage_index: int, ctx: Ctx) -> None:
        """A stage has its weights: the next unloaded stage begins."""
        worker = self.workers[stage_index]
        if self.phase is not Phase.WEIGHTS or worker.weights:
            return
        worker.weights = True
        detail = {"source": "actor_weights_ready", "stage_index": stage_index}
        self.record(ctx, "weights_loaded", "observed", detail, worker.node_id)
        self._next_stage(ctx)

    def stage_is_ready(self, stage_index: int, generation: int, ctx: Ctx) -> None:
        """Every readiness fact of the stage holds (design.md 6 row 36)."""
        if self.phase is Phase.WEIGHTS and generation == self.generation:
            self.workers[stage_index].stage_ready = True
            self._next_stage(ctx)

    def _next_stage(self, ctx: Ctx) -> None:
        ordered = sorted(self.workers.items())
        unloaded = [index for index, worker in ordered if not worker.weights]
        unready = [index for index, worker in ordered if not worker.stage_ready]
        if unloaded:
            if unloaded[0] != self._active_stage:
                self._activate(unloaded[0], "stage provisioning", ctx)
        elif unready:
            if unready[0] != self._active_stage:
                self._activate(unready[0], "stage readiness", ctx)
            else:
                self._stage_limit("stage readiness", ctx)
        else:
            ctx.cancel(STAGE_TIMER)
            detail = {"source": "actor_stage_ready", "stages": len(self.workers)}
            self.record(ctx, "weights_loaded", "ready", detail)
            self.open_rpc(ctx)

    # --- prompt RPC (4.10, 9.4) -------------------------------------------------------------------------------
    def open_rpc(self, ctx: Ctx) -> None:
        """S1 4.10: weights and stages are ready."""
        self.phase, self.waiting_for = Phase.RPC, "the prompt RPC"
        error = f"the prompt gateway did not open the prompt RPC within {PROVIDER_START_MS // 1000} s"
        self.limit(ctx, PROVIDER_START_MS, error)
        self.record(ctx, "prompt_rpc", "started", {"bind": self.config.rpc_bind})
        ordered = [worker for _, worker in sorted(self.workers.items())]
        self.rpc_open = True
        self.say(Role.GATEWAY, self.prompt_rpc(ordered), ctx)

    def prompt_rpc(self, ordered: list[Worker]) -> OpenPromptRpc:
        """What the gateway has to know to serve in direct mode; ordered: by stage."""
        return OpenPromptRpc(
            run_id=self.run_id,
            node_id=self.node_id,
            mode="direct",
            encode_actor=ordered[0].node_actor,
            decode_actor=ordered[-1].node_actor,
            nodes=[worker.node_key for worker in ordered],
            restart=self.config.on_worker_loss == "restart",
        )

    def rpc_ready(self, addr: str, ctx: Ctx) -> None:
        """Serving begins."""
        if self.phase is not Phase.RPC:
            return
        self.no_limit(ctx)
        self.gateway_heard(ctx)
        first = self.workers[min(self.workers)]
        self.record(ctx, "prompt_rpc", "ready", {"addr": addr})
        self.record(ctx, "prompt_loop", "ready", {"addr": addr, "node_actor": short(first.node_actor)})
        self.phase, self.waiting_for = Phase.SERVING, "prompts"
        self.record(ctx, "serve_prompts", "started", {"mode": "single_active_prompt"})
        ctx.timer(SILENT_TIMER, 0)  # a worker may have been lost a moment ago

    def rpc_failed(self, error: str, ctx: Ctx) -> None:
        """A start-up failure (S1 10.9)."""
        if self.phase is Phase.RPC and not self.restarting:
            self.rpc_open = False
            self.fail(ctx, f"prompt RPC: {error}")
