"""Planned execution in a run: the plan before any worker, token endpoints before any stage (S1 4.4, 5.3, 9.3, 9.8).

The plan is made by a job, since it looks at a file. After the acknowledgement the gateway binds token-out and dials
token-in; then the stages are provisioned one after the other by stages.py, each with its wire of the plan. The prompt
RPC opens after every StageReady and both token endpoints (design.md 6 row 36).
"""

from __future__ import annotations

from typing import Any, ClassVar

from common.actors import Ctx
from common.addresses import NONCE_BYTES, Role
from common.effects import JobDone, RunJob
from common.hub_file import full_name
from common.limits import HUB_HEADER_MS, PLAN_LIMIT_MS, PROVIDER_START_MS
from common.messages.node_agent import StageProvisionWire, StopRun
from common.messages.orchestrator import (
    EndpointWire,
    ObserveEndpointFault,
    ObserveTokenEndpointsStopped,
    ObserveTokenInEndpointReady,
    ObserveTokenOutEndpointReady,
)
from common.messages.provision import NodeProvisionSpec
from common.messages.serve import (
    OpenPromptRpc,
    OpenTokenIn,
    OpenTokenOut,
    TokenEndpointFailed,
    TokenEndpointReady,
    TokenOutListening,
)
from services.orchestrator.actor import StageLeftOut
from services.orchestrator.base import Phase, Worker
from services.orchestrator.planner import (
    PlanError,
    RunPlan,
    inbound_wire,
    node_specs,
    outbound_wire,
    plan_placed,
    stage_wire,
)
from services.orchestrator.planner_facts import PLAN_JOB, is_on_hub
from services.orchestrator.planner_uneven import WorkerMeasure, place
from services.orchestrator.startup import StartUp

TOKEN_ENDPOINTS = ("TokenIn", "TokenOut")


class PlannedRun(StartUp):
    """Direct execution passes through unchanged."""

    PLANNED_INCOMING: ClassVar[tuple[type, ...]] = (JobDone, TokenOutListening, TokenEndpointReady, TokenEndpointFailed)

    def __init__(self, nonce: bytes) -> None:
        super().__init__(nonce)
        self.plan: RunPlan | None = None
        self._started: RunPlan | None = None
        """The plan that workers were started by; a placement by measure changes who serves which layers."""
        self._edge_tokens: dict[int, bytes] = {}
        self._endpoints: dict[int, EndpointWire] = {}
        self._token_endpoints: set[str] = set()
        self._rpc_due = False

    def planned_message(self, msg: Any, ctx: Ctx) -> None:
        """A message of PLANNED_INCOMING."""
        match msg:
            case JobDone(kind=kind) if kind == PLAN_JOB:
                self._planned(msg, ctx)
            case TokenOutListening():
                self._token_out_listening(msg, ctx)
            case TokenEndpointReady():
                self._token_endpoint_ready(msg, ctx)
            case TokenEndpointFailed() if self.active:
                self._token_endpoint_failed(msg, ctx)
            case _:
                pass

    def edge_failed(self, error: str, worker: Worker, ctx: Ctx) -> None:
        """A token edge between the gateway and this worker."""
        self.fail(ctx, error, worker=worker)

    # --- the plan (4.4) -----------------------------------------------------------------------------------------
    def make_plan(self, ctx: Ctx) -> None:
        """Planned execution begins; direct execution never comes here."""
        self.phase, self.waiting_for = Phase.PLAN, "the run plan"
        config, limit_ms = self.config, PLAN_LIMIT_MS
        detail: dict[str, Any] = {"pipeline_stages": config.pipeline_stages}
        if is_on_hub(config):
            limit_ms += HUB_HEADER_MS
            detail["header_from"] = full_name(config.gguf_source)
            self.waiting_for += f" (the header of {detail['header_from']} is fetched from the hub)"
        self.record(ctx, "run_plan", "started", detail)
        ctx.effect(RunJob(PLAN_JOB, "plan", {"config": config}, limit_ms, pool="alone"))

    def _planned(self, done: JobDone, ctx: Ctx) -> None:
        if self.phase is not Phase.PLAN:
            return
        if done.error.startswith("timed out"):
            self.fail(ctx, f"{self.waiting_for} {done.error}: a file system or a hub does not answer")
            return
        if done.error or not isinstance(done.result, RunPlan):
            self.fail(ctx, done.error or "the run planner gave no plan")
            return
        self.plan = self._started = done.result
        self._record_plan(self.plan, {}, ctx)
        self.prepare_provider(ctx)

    def _record_plan(self, plan: RunPlan, more: dict[str, Any], ctx: Ctx) -> None:
        detail = {
            "stage_count": len(plan.stages),
            "model_id": plan.facts.model_id,
            "num_layers": plan.facts.num_layers,
            "hidden_dim": plan.facts.hidden_dim,
            "max_seq_len": plan.facts.max_seq_len,
            "stages": [
                {
                    "stage_index": stage.stage_index,
                    "node_id": stage.node_id,
                    "layer_range": {"start": stage.layer_start, "end_exclusive": stage.layer_end_exclusive},
                }
                for stage in plan.stages
            ],
            "edges": [
                {"edge_id": edge.edge_id, "kind": edge.kind, "data_capacity": edge.ring_spec.data_capacity}
                for edge in plan.all_edges
            ],
        }
        self.record(ctx, "run_plan", "ready", {**detail, **more})

    def specs(self) -> list[NodeProvisionSpec]:
        """The plan's workers."""
        started, config = self._started, self.config
        if started is None:
            return super().specs()
        return node_specs(started, config.image, self.mounts(), measure=config.pipeline_placement == "measured")

    # --- placement by measure -----------------------------------------------------------------------------------
    def _place_measured(self, plan: RunPlan, ctx: Ctx) -> None:
        """[pipeline] placement = "measured": the workers are there and have said what they can do. Raises PlanError."""
        ordered = [worker for _, worker in sorted(self.workers.items())]
        mute = [worker for worker in ordered if not worker.bytes_per_s or not worker.memory_bytes]
        if mute:
            raise PlanError(
                f'[pipeline] placement = "measured" needs what each worker measures, but {self.name_of(mute[0])} did '
                'not measure memory and speed (only CPU engines do); set placement = "even"'
            )
        beside = sum(_is_local(worker) for worker in ordered)
        measures = [
            WorkerMeasure(
                worker.node_id,
                worker.memory_bytes // (beside if _is_local(worker) else 1),
                worker.bytes_per_s,
            )
            for worker in ordered
        ]
        placement = place(plan.facts, measures)
        spans = [(share.node_id, share.layer_start, share.layer_end_exclusive) for share in placement.shares]
        feedback = plan.feedback is not None
        self.plan = plan_placed(plan.facts, spans, run_id=plan.run_id, node_id=plan.node_id, feedback=feedback)
        measured = [
            {"node_id": m.node_id, "memory_bytes": m.memory_bytes, "bytes_per_s": m.bytes_per_s} for m in measures
        ]
        more = {"placement": "measured", "measured": measured, "left_out": list(placement.left_out.values())}
        self._record_plan(self.plan, more, ctx)
        for worker in ordered:
            if why := placement.left_out.get(worker.node_id):
                self.record(ctx, "run_plan", "observed", {"left_out": why}, worker.node_id)
                del self.workers[worker.stage_index]
                ctx.send(self.actor_address, StageLeftOut(worker.stage_index))
                # It releases what it holds and goes; the provisioner clears up behind it at the end of the run.
                ctx.send(worker.node_actor, StopRun(run_id=self.run_id))

    # --- token endpoints ----------------------------------------------------------------------------------------
    def begin_stages(self, ctx: Ctx) -> None:
        """The last stage's wire needs the gateway's endpoint, the first stage's edge needs its producer."""
        if self.plan is None:
            super().begin_stages(ctx)
            return
        if self.config.pipeline_placement == "measured" and not self.generation:
            try:
                self._place_measured(self.plan, ctx)
            except PlanError as error:
                self.fail(ctx, str(error), phase=Phase.PLAN)
                return
        self.waiting_for = "the token endpoints"
        self.limit(ctx, PROVIDER_START_MS, "the prompt gateway did not open the token-out endpoint")
        self._token_endpoints.clear()
        self._rpc_due = False
        self._edge_tokens = {edge.edge_id: ctx.rng.randbytes(NONCE_BYTES) for edge in self.plan.all_edges}
        for worker in self.workers.values():
            if worker.endpoint is not None:
                self._endpoints[worker.node_id] = self._reachable(worker.endpoint)
        token_out = self.plan.token_out
        message = OpenTokenOut(
            run_id=self.run_id,
            run=self.nonce,
            token_out=inbound_wire(token_out, self._edge_tokens[token_out.edge_id]),
        )
        self.rpc_open = True
        self.record(ctx, "token_endpoints", "started", {})
        self.say(Role.GATEWAY, message, ctx)

    def _reachable(self, endpoint: EndpointWire) -> EndpointWire:
        """[pipeline] edges = "relay": over the bus, whatever could be dialled."""
        if self.config.pipeline_edges != "relay":
            return endpoint
        return EndpointWire(node_key=endpoint.node_key, relay=True)

    def _token_out_listening(self, msg: TokenOutListening, ctx: Ctx) -> None:
        if self.phase is not Phase.BOOTSTRAP or self.plan is None:
            return
        self._endpoints[self.plan.node_id] = self._reachable(msg.endpoint)
        try:
            wires = [self.stage_wire(worker) for worker in self.workers.values()]
            token_in = self.plan.token_in
            wire = outbound_wire(token_in, self._edge_tokens[token_in.edge_id], self._endpoints)
        except PlanError as error:
            self.fail(ctx, str(error))
            return
        assert len(wires) == len(self.plan.stages)
        self.say(Role.GATEWAY, OpenTokenIn(run_id=self.run_id, token_in=wire), ctx)
        super().begin_stages(ctx)

    def _token_endpoint_ready(self, msg: TokenEndpointReady, ctx: Ctx) -> None:
        if msg.endpoint not in TOKEN_ENDPOINTS or not self.active:
            return
        is_known = msg.endpoint in self._token_endpoints
        self._token_endpoints.add(msg.endpoint)
        self.record(ctx, "token_endpoints", "ready", {"endpoint": msg.endpoint, "path": msg.path})
        if is_known:
            return  # it takes another way now
        fact = ObserveTokenInEndpointReady() if msg.endpoint == "TokenIn" else ObserveTokenOutEndpointReady()
        ctx.send(self.actor_address, fact)
        if self._rpc_due:
            self.open_rpc(ctx)

    def _token_endpoint_failed(self, msg: TokenEndpointFailed, ctx: Ctx) -> None:
        """The gateway's end of a token edge is over: the stage at its other end is named."""
        worker = self.workers[min(self.workers) if msg.endpoint == "TokenIn" else max(self.workers)]
        way = "to" if msg.endpoint == "TokenIn" else "from"
        edge = f"pipeline {_words(msg.endpoint)} edge {way} {self.name_of(worker)}"
        if not self.restarts:
            ctx.send(self.actor_address, ObserveEndpointFault(run_id=self.run_id, endpoint=msg.endpoint))
        self.edge_failed(f"{edge}: {msg.error}", worker, ctx)

    # --- stages and the RPC -------------------------------------------------------------------------------------
    def stage_wire(self, worker: Worker) -> StageProvisionWire:
        """S1 6.6 of the plan."""
        if self.plan is None:
            return super().stage_wire(worker)
        return stage_wire(
            self.plan,
            sorted(self.workers).index(worker.stage_index),
            orchestrator=self.actor_address,
            tokens=self._edge_tokens,
            endpoints=self._endpoints,
            generation=self.generation,
        )

    def open_rpc(self, ctx: Ctx) -> None:
        """Not before both token endpoints are there."""
        self._rpc_due = not self.token_endpoints_ready()
        if not self._rpc_due:
            super().open_rpc(ctx)

    def token_endpoints_ready(self) -> bool:
        """Both are connected, or direct execution has none."""
        return self.plan is None or len(self._token_endpoints) == len(TOKEN_ENDPOINTS)

    def rpc_closed(self, ctx: Ctx) -> None:
        """The gateway has closed the token endpoints with it."""
        if self.plan is not None:
            ctx.send(self.actor_address, ObserveTokenEndpointsStopped())
        super().rpc_closed(ctx)

    def prompt_rpc(self, ordered: list[Worker]) -> OpenPromptRpc:
        """What the gateway has to know to serve."""
        if self.plan is None:
            return super().prompt_rpc(ordered)
        return OpenPromptRpc(
            run_id=self.run_id,
            node_id=self.node_id,
            mode="pipeline",
            encode_actor=ordered[0].node_actor,
            decode_actor=ordered[-1].node_actor,
            nodes=[worker.node_key for worker in ordered],
            eos_tokens=list(self.plan.facts.eos_token_ids),
            stage_actors=[worker.node_actor for worker in ordered],
            max_context=self.plan.facts.max_seq_len,
            orchestrator=self.actor_address,
            feedback=self.plan.feedback is not None,
            restart=self.config.on_worker_loss == "restart",
        )


def _is_local(worker: Worker) -> bool:
    """It runs beside the orchestrator, and shares this machine's memory with others that do."""
    return worker.endpoint is not None and any(at.startswith("ipc://") for at in worker.endpoint.candidates)


def _words(endpoint: str) -> str:
    return {"TokenIn": "token-in", "TokenOut": "token-out"}.get(endpoint, endpoint)
