"""Start-up, phase by phase in S1's order (4.1-4.10): services, provider, workers, readiness, acknowledgement, weights,
prompt RPC. Each phase ends in the next one, or in `fail`."""

from __future__ import annotations

from common.actors import Ctx
from common.addresses import Role, short
from common.limits import (
    ACK_LIMIT_MS,
    ACK_RESEND_MS,
    PROVIDER_START_MS,
    READINESS_SILENCE_MS,
    STAGE_PROVISION_RESEND_MS,
    STAGE_SILENCE_MS,
)
from common.messages.node_agent import ProvisionStage, RuntimeReadyAck, StageProvisionWire
from common.messages.orchestrator import ObservePlanAvailable, ObservePoolReady, StageAssignment
from common.messages.provision import CompleteBootstrap, NodeProvisionSpec, NodeStarted, PrepareProvider, StartNode
from common.messages.report import NodeRuntimeReady, StageProgress
from common.messages.serve import OpenPromptRpc
from common.messages.stream import DatastreamSubscribe, ExpectFlow
from services.orchestrator.actor import ExpectNode
from services.orchestrator.base import SERVICES_OF_A_RUN, Worker
from services.orchestrator.serving import SILENT_TIMER, Serving

ACK_TIMER = "run:ack"
STAGE_TIMER = "run:stage"
DIRECT_INBOUND_EDGE, DIRECT_OUTBOUND_EDGE = 1, 2
"""Direct mode has no edges; these ids stand in the wire as in the original (rust-swactor.md 4.6)."""
PROVIDER_START_LIMIT_MS = {"vastai": 900_000}
"""A rented machine boots and pulls an image; everything else starts within PROVIDER_START_MS."""


class StartUp(Serving):
    """From the configuration to the open prompt RPC."""

    def __init__(self) -> None:
        super().__init__()
        self.nonce = b""
        self._active_stage = 0
        self._attempt = 0
        self._flow_serial = 0

    # --- services (4.1-4.3) -----------------------------------------------------------------------------------
    def begin_if_complete(self, ctx: Ctx) -> None:
        """All services are ready and the configuration is here."""
        if self.phase != "services" or self.config is None:
            return
        missing = [role for role in SERVICES_OF_A_RUN if role not in self.services_ready]
        if missing:
            self.waiting_for = f"services ({', '.join(missing)})"
            return
        config = self.config
        self.record(ctx, "config", "ready", {**self.config_detail(), "boot": ctx.boot, "notes": config.notes})
        self.record(ctx, "services", "ready", {"services": [str(role) for role in SERVICES_OF_A_RUN]})
        self.record(ctx, "orchestrator_report_actor", "ready", {})
        self.record(ctx, "orchestrator_actor", "ready", {"actor": short(self.actor_address)})
        if config.cached_model is not None or config.pipeline_stages > 1:
            self.phase = "run_plan"
            self.fail(
                ctx,
                "planned execution (pipeline_stages > 1 or [model] cached_path) is not built yet; "
                "set pipeline_stages = 1 and name the file with [model] gguf_local_path",
            )
            return
        self._prepare_provider(ctx)

    # --- provider (4.5, 7.5) ----------------------------------------------------------------------------------
    def _prepare_provider(self, ctx: Ctx) -> None:
        self.phase, self.waiting_for = "node_provisioner", "the provider"
        self.limit(ctx, PROVIDER_START_MS, f"provider {self.config.provider} was not ready in time")
        self.provider_touched = True
        message = PrepareProvider(run_id=self.run_id, provider=self.config.provider)
        ctx.send(self.service(ctx, Role.PROVISIONER), message)

    def provider_prepared(self, reconciled: int, ctx: Ctx) -> None:
        """The provider can start workers; leftovers of earlier runs are stopped."""
        if self.phase != "node_provisioner":
            return
        detail = {"provider": self.config.provider, "owner": "provisioner", "reconciled": reconciled}
        self.record(ctx, "node_provisioner", "ready", detail)
        self._start_workers(ctx)

    def specs(self) -> list[NodeProvisionSpec]:
        """One per worker; direct execution has one (S1 4.5, design.md 6 row 18)."""
        config = self.config
        return [
            NodeProvisionSpec(
                run_id=config.run_id, node_id=config.node_id, stage_index=config.stage_index, image=config.image
            )
        ]

    def _start_workers(self, ctx: Ctx) -> None:
        specs = self.specs()
        self.phase, self.waiting_for = "provider_start", "provider start"
        node_ids = [spec.node_id for spec in specs]
        detail = {
            "provider": self.config.provider,
            "image": self.config.image,
            "relay_mode": self.config.relay_mode,
            "docker_gpus": self.config.docker_gpus,
            "env_keys": sorted({key for spec in specs for key in spec.env}),
            "worker_count": len(specs),
            "worker_node_ids": node_ids,
        }
        self.record(ctx, "node_spec", "ready", detail)
        stages = [StageAssignment(stage_index=spec.stage_index, node_id=spec.node_id) for spec in specs]
        ctx.send(self.actor_address, ObservePlanAvailable(run_id=self.run_id, stages=stages))
        limit_ms = PROVIDER_START_LIMIT_MS.get(self.config.provider, PROVIDER_START_MS)
        self.limit(ctx, limit_ms, f"provider start: no worker was started within {limit_ms // 1000} s")
        for spec in specs:
            self.workers[spec.stage_index] = Worker(spec.node_id, spec.stage_index)
            started = {"provider": self.config.provider, "image": spec.image, "stage_index": spec.stage_index}
            self.record(ctx, "provider_start", "started", started, spec.node_id)
            start = StartNode(spec=spec, orchestrator=self.actor_address, run=self.nonce)
            ctx.send(self.service(ctx, Role.PROVISIONER), start)

    def node_started(self, msg: NodeStarted, ctx: Ctx) -> None:
        """The guard owns this worker's handle; its bus key is known before it says a word."""
        worker = self.workers.get(msg.stage_index)
        if worker is None or worker.node_id != msg.node_id or worker.node_key or not self.active:
            return
        worker.node_key = msg.node_key
        ctx.send(self.actor_address, ExpectNode(msg.node_id, msg.stage_index, msg.node_key))
        detail = {"provider": self.config.provider, "stage_index": msg.stage_index, "handle": msg.handle}
        self.record(ctx, "provider_start", "ready", detail, msg.node_id)
        self.progress(ctx)
        if self.phase == "provider_start" and all(worker.node_key for worker in self.workers.values()):
            self._await_readiness(ctx)

    # --- readiness barrier (4.6, 9.5) -------------------------------------------------------------------------
    def _await_readiness(self, ctx: Ctx) -> None:
        self.phase, self.waiting_for = "node_runtime_ready", "node ready"
        node_ids = [worker.node_id for worker in self.workers.values()]
        ctx.send(self.actor_address, ObservePoolReady(nodes=node_ids))
        started = {"worker_count": len(node_ids), "node_ids": node_ids}
        self.record(ctx, "node_runtime_ready", "started", started)
        self._explain_barrier(ctx)
        self.check_barrier(ctx)

    def _explain_barrier(self, ctx: Ctx) -> None:
        """The limit's error says which of the three facts is missing, for whom."""
        missing: list[str] = []
        for worker in self.workers.values():
            lacks = [
                text
                for fact, text in (
                    (worker.endpoint is not None, "no runtime-ready report"),
                    (worker.alive, "not alive in SWIM"),
                    (worker.routed or worker.endpoint is None, "no route to its node actor"),
                )
                if not fact
            ]
            if lacks:
                missing.append(f"node {worker.node_id}: {', '.join(lacks)}")
        limit_s = READINESS_SILENCE_MS // 1000
        self.limit(ctx, READINESS_SILENCE_MS, f"no worker readiness for {limit_s} s ({'; '.join(missing)})")

    def runtime_ready(self, msg: NodeRuntimeReady, ctx: Ctx) -> None:
        """The first fact; a later report of the same node replaces it, a new readiness_id starts over."""
        worker = self.workers[msg.stage_index]
        if worker.readiness_id != msg.readiness_id or worker.node_actor != msg.node_actor:
            worker.acked = False
            detail = {
                "endpoint": short(msg.endpoint.node_key),
                "node_actor": short(msg.node_actor),
                "stage_index": msg.stage_index,
                "readiness_id": msg.readiness_id,
            }
            self.record(ctx, "node_runtime_ready", "ready", detail, worker.node_id)
        worker.endpoint = msg.endpoint
        worker.node_actor, worker.publisher = msg.node_actor, msg.datastream_publisher
        worker.readiness_id = msg.readiness_id
        self.check_barrier(ctx)

    def check_barrier(self, ctx: Ctx) -> None:
        """Join the three facts; called whenever one of them may have changed."""
        if self.phase != "node_runtime_ready":
            return
        changed = False
        for worker in self.workers.values():
            alive = ctx.views.members.state(worker.node_key) == "alive"
            owner = ctx.views.routes.owner(worker.node_actor) if worker.node_actor else None
            # The endpoint's key must be the one that was minted for this worker: nobody else counts as it.
            same_node = worker.endpoint is not None and worker.endpoint.node_key == worker.node_key
            routed = owner is not None and owner.node == worker.node_key and same_node
            if alive and not worker.alive:
                detail = {"node": short(worker.node_key), "readiness_id": worker.readiness_id}
                self.record(ctx, "node_swim", "ready", detail, worker.node_id)
            if routed and not worker.routed:
                detail = {"node_actor": short(worker.node_actor), "node": short(worker.node_key)}
                self.record(ctx, "node_route", "ready", detail, worker.node_id)
            changed |= (alive, routed) != (worker.alive, worker.routed)
            worker.alive, worker.routed = alive, routed
        if changed:
            self._explain_barrier(ctx)
        if all(worker.ready for worker in self.workers.values()):
            self._acknowledge(ctx)

    # --- acknowledgement (4.7, 9.6) ---------------------------------------------------------------------------
    def _acknowledge(self, ctx: Ctx) -> None:
        self.phase, self.waiting_for = "runtime_ready_ack", "runtime-ready acknowledgement"
        waiting = ", ".join(
            f"node {worker.node_id} stage {worker.stage_index} readiness {worker.readiness_id}"
            for worker in self.workers.values()
        )
        error = f"runtime-ready acknowledgement did not come within {ACK_LIMIT_MS // 1000} s: {waiting}"
        self.limit(ctx, ACK_LIMIT_MS, error)
        for worker in self.workers.values():
            self._expect_flow(worker, ctx)
        self.send_acks(ctx)

    def _expect_flow(self, worker: Worker, ctx: Ctx) -> None:
        """Tell the collector whose frames to take; again with a new flow after a collector restart."""
        collector = self.service(ctx, Role.COLLECTOR)
        if not collector:
            return
        self._flow_serial += 1
        flow = self._flow_serial.to_bytes(8, "little") + worker.node_id.to_bytes(8, "little")
        token = ctx.rng.randbytes(16)
        expect = ExpectFlow(flow_id=flow, token=token, node_id=worker.node_id, run_id=self.run_id)
        ctx.send(collector, expect)
        subscribe = DatastreamSubscribe(collector=collector, flow_id=flow, token=token)
        ctx.send(worker.publisher, subscribe)
        worker.subscribed = True

    def subscribe_again(self, ctx: Ctx) -> None:
        """The collector has a new incarnation."""
        for worker in self.workers.values():
            if worker.subscribed and self.active:
                self._expect_flow(worker, ctx)

    def send_acks(self, ctx: Ctx) -> None:
        """To every worker that has not confirmed; repeated until all have."""
        for worker in self.workers.values():
            if worker.acked:
                continue
            worker.acks_sent += 1
            detail = {
                "node_actor": short(worker.node_actor),
                "readiness_id": worker.readiness_id,
                "attempt": worker.acks_sent,
            }
            self.record(ctx, "runtime_ready_ack", "sent", detail, worker.node_id)
            ack = RuntimeReadyAck(
                run_id=self.run_id,
                node_id=worker.node_id,
                stage_index=worker.stage_index,
                readiness_id=worker.readiness_id,
            )
            ctx.send(worker.node_actor, ack)
        ctx.timer(ACK_TIMER, ACK_RESEND_MS)

    def acknowledged(self, stage_index: int, readiness_id: int, ctx: Ctx) -> None:
        """One worker confirmed; stale readiness ids do not count."""
        worker = self.workers[stage_index]
        if worker.acked or worker.readiness_id != readiness_id or self.phase != "runtime_ready_ack":
            return
        worker.acked = True
        detail = {"readiness_id": readiness_id, "attempts": worker.acks_sent}
        self.record(ctx, "runtime_ready_ack", "ready", detail, worker.node_id)
        if all(worker.acked for worker in self.workers.values()):
            ctx.cancel(ACK_TIMER)
            self.phase, self.waiting_for = "complete_bootstrap", "bootstrap completion"
            self.limit(ctx, PROVIDER_START_MS, "complete_bootstrap was not answered by the provisioner")
            ctx.send(self.service(ctx, Role.PROVISIONER), CompleteBootstrap())

    # --- stages and weights (4.8, 4.9, 9.7) -------------------------------------------------------------------
    def bootstrap_completed(self, error: str, ctx: Ctx) -> None:
        """The provider has handed the workers over (design.md 6 row 39)."""
        if self.phase != "complete_bootstrap":
            return
        if error:
            self.fail(ctx, f"complete_bootstrap failed: {error}")
            return
        self.phase, self.waiting_for = "stage", "weights"
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
        self._active_stage, self._attempt = min(self.workers), 0
        self._stage_limit(ctx, "stage provisioning")
        self.provision_stage(ctx)

    def _stage_limit(self, ctx: Ctx, what: str) -> None:
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
        )

    def provision_stage(self, ctx: Ctx) -> None:
        """To the one active stage (S1 9.8), each second until weights or fault."""
        if self.phase != "stage":
            return
        worker = self.workers[self._active_stage]
        self._attempt += 1
        if self._attempt == 1 or self._attempt % 15 == 0:
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
        if self.phase == "stage" and msg.stage_index == self._active_stage:
            self._stage_limit(ctx, msg.phase)
            detail = {"phase": msg.phase, "done": msg.done, "total": msg.total, "stage_index": msg.stage_index}
            self.record(ctx, "stage_provision_wait", "observed", detail, msg.node_id)

    def weights_ready(self, stage_index: int, ctx: Ctx) -> None:
        """The active stage has its weights: the next unloaded stage begins."""
        worker = self.workers[stage_index]
        if self.phase != "stage" or worker.weights:
            return
        worker.weights = True
        detail = {"source": "actor_weights_ready", "stage_index": stage_index}
        self.record(ctx, "weights_loaded", "observed", detail, worker.node_id)
        self._next_stage(ctx)

    def stage_is_ready(self, stage_index: int, ctx: Ctx) -> None:
        """Every readiness fact of the stage holds (design.md 6 row 36)."""
        self.workers[stage_index].stage_ready = True
        self._next_stage(ctx)

    def _next_stage(self, ctx: Ctx) -> None:
        if self.phase != "stage":
            return
        unloaded = [index for index, worker in sorted(self.workers.items()) if not worker.weights]
        if unloaded:
            if unloaded[0] != self._active_stage:
                self._active_stage, self._attempt = unloaded[0], 0
                self._stage_limit(ctx, "stage provisioning")
                self.provision_stage(ctx)
        elif all(worker.stage_ready for worker in self.workers.values()):
            ctx.cancel(STAGE_TIMER)
            detail = {"source": "actor_stage_ready", "stages": len(self.workers)}
            self.record(ctx, "weights_loaded", "ready", detail)
            self._open_rpc(ctx)

    # --- prompt RPC (4.10, 9.4) -------------------------------------------------------------------------------
    def _open_rpc(self, ctx: Ctx) -> None:
        self.phase, self.waiting_for = "rpc", "the prompt RPC"
        self.limit(ctx, PROVIDER_START_MS, "the prompt gateway did not open the prompt RPC")
        self.record(ctx, "prompt_rpc", "started", {"bind": self.config.rpc_bind})
        ordered = [worker for _, worker in sorted(self.workers.items())]
        message = OpenPromptRpc(
            run_id=self.run_id,
            node_id=self.node_id,
            mode="direct",
            encode_actor=ordered[0].node_actor,
            decode_actor=ordered[-1].node_actor,
            nodes=[worker.node_key for worker in ordered],
        )
        self.rpc_open = True
        ctx.send(self.service(ctx, Role.GATEWAY), message)

    def rpc_ready(self, addr: str, ctx: Ctx) -> None:
        """Serving begins."""
        if self.phase != "rpc":
            return
        self.no_limit(ctx)
        self.record(ctx, "prompt_rpc", "ready", {"addr": addr})
        self.record(
            ctx,
            "prompt_loop",
            "ready",
            {"addr": addr, "node_actor": short(next(iter(self.workers.values())).node_actor)},
        )
        self.phase, self.waiting_for = "serving", "prompts"
        self.record(ctx, "serve_prompts", "started", {"mode": "single_active_prompt"})
        ctx.timer(SILENT_TIMER, 0)

    def rpc_failed(self, error: str, ctx: Ctx) -> None:
        """A start-up failure (S1 10.9)."""
        if self.phase == "rpc":
            self.rpc_open = False
            self.fail(ctx, f"prompt RPC: {error}", phase="prompt_rpc")
