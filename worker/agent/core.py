"""NodeAgentActor: the orchestrator's control target on a worker (S1 6.5, 6.6, 6.9, 6.10; design.md 4).

It starts the engine, reports readiness until that is acknowledged, carries a provision to the engine, reports weights,
readiness and faults, forwards prompts, tears the stage down, and ends the worker when the engine, the lease or
whoever started it is gone. "Worker" in the names of S1's facts is the engine.
"""

from __future__ import annotations

from typing import Any

from common.actors import Actor, Ctx
from common.codec import Message
from common.datastream import Drain
from common.edges.carrier import Carried
from common.effects import Exit, OwnerGone, SendFailed, StopSignal
from common.limits import (
    LEASE_MS,
    LINGER_MS,
    PROCESS_STOP_GRACE_MS,
    RUNTIME_READY_RESEND_MS_MAX,
    STAGE_SILENCE_MS,
    STAGE_STOPPED_MS,
    WORKER_SILENT_MS_SERVING,
)
from common.messages import engine as wire
from common.messages.edge import BeginSequence
from common.messages.node_agent import (
    CancelRequest,
    DecodeTokens,
    DeviceObjectsReleased,
    EncodePrompt,
    InferPrompt,
    LocalEdgesStopped,
    MarkInboundEdgeReady,
    MarkOutboundEdgeReady,
    MarkWeightsReady,
    MarkWorkerReady,
    ObjectLoaded,
    ProvisionStage,
    RuntimeLoaded,
    RuntimeReadyAck,
    StageFailed,
    StepCompleted,
    StopRun,
    WorkerCrashed,
    WorkerRingsQuiesced,
    WorkerRoleReset,
)
from common.messages.orchestrator import (
    ObserveStageFault,
    ObserveStageReady,
    ObserveStageStopped,
    ObserveWeightsReady,
)
from common.messages.service import Lease
from common.swim.actor import Leave
from worker import stage_controller as stage
from worker.agent import readiness, vigil
from worker.agent.events import (
    EngineEvent,
    EngineExited,
    EngineHungUp,
    EngineSend,
    KillEngine,
    PageRead,
    StageReport,
    StartEngine,
    StopAsked,
    WorkerIdentity,
)
from worker.agent.orders import order
from worker.agent.readiness import READINESS_ID, Readiness
from worker.agent.records import BOOTSTRAP, EDGE, PROMPT, SHUTDOWN, STAGE, edge_detail, node_event
from worker.agent.requests import RequestDesk
from worker.agent.stage_edges import StageEdges, carry
from worker.agent.vigil import Vigil

REPORT_RESEND_MS = RUNTIME_READY_RESEND_MS_MAX  # an answer that the bus could not deliver is given again
ENGINE_GRACE_MS = PROCESS_STOP_GRACE_MS // 2  # the engine must be gone before the provisioner kills the whole group

Fact = (
    RuntimeLoaded
    | MarkWorkerReady
    | MarkWeightsReady
    | MarkInboundEdgeReady
    | MarkOutboundEdgeReady
    | ObjectLoaded
    | StepCompleted
    | WorkerCrashed
    | LocalEdgesStopped
    | WorkerRingsQuiesced
    | DeviceObjectsReleased
    | WorkerRoleReset
    | StageFailed
)
"""What this worker says about itself: accepted from this node only, however it is admitted."""
Observation = ObserveWeightsReady | ObserveStageReady | ObserveStageFault | ObserveStageStopped


class NodeAgentActor(Actor):
    """S1 6.5. publisher and swim: addresses of the local DatastreamPublisherActor and SwimActor; report_to: a local
    actor that follows the stage through StageReport, or None."""

    Incoming = (
        RuntimeReadyAck,
        ProvisionStage,
        InferPrompt,
        EncodePrompt,
        DecodeTokens,
        CancelRequest,
        BeginSequence,
        Carried,
        StopRun,
        *Fact.__args__,
        Lease,
        SendFailed,
        EngineEvent,
        EngineExited,
        EngineHungUp,
        PageRead,
        StopAsked,
        OwnerGone,
        StopSignal,
    )

    def __init__(self, identity: WorkerIdentity, publisher: bytes, swim: bytes, report_to: bytes | None = None) -> None:
        self.identity = identity
        self.publisher = publisher
        self.swim = swim
        self.report_to = report_to
        self.orchestrator = identity.orchestrator
        self.core = stage.StageController(identity.orchestrator, identity.node_id)
        self.edges = StageEdges()
        self.desk = RequestDesk(self._prompt_record)
        self.vigil = Vigil(identity)
        self.readiness = Readiness(identity, publisher)
        self.engine_running = False
        self.engine_ready = False
        self._unheard: dict[type[Message], Observation] = {}
        self._asked_by = ""
        self._exit: Exit | None = None

    # --- life -------------------------------------------------------------------------------------------------
    def on_start(self, ctx: Ctx) -> None:
        """Start the engine; without a lease from the orchestrator the worker ends itself."""
        self.engine_running = True
        self._record(ctx, BOOTSTRAP, "engine", "started", {"boot": ctx.boot})
        ctx.effect(StartEngine())
        mine = self.identity
        initialize = wire.Initialize(device=mine.device, threads=mine.threads, edge=mine.edge, measure=mine.measure)
        ctx.effect(EngineSend(initialize))
        ctx.timer("lease", self.identity.lease_ms)
        self._mind(ctx)

    def receive(self, msg: Any, ctx: Ctx) -> None:
        """One message; whatever does not match this run, node and stage is dropped with a record (S1 6.12, 9.19)."""
        if isinstance(msg, Fact) and ctx.sender_node not in (b"", ctx.node):
            self._drop(msg, "another node speaks for this worker", ctx)
            return
        match msg:
            case EngineEvent():
                self._engine_said(msg.message, ctx)
            case EngineExited():
                self._engine_exited(msg.reason, ctx)
            case EngineHungUp():
                ctx.timer("hung_up", ENGINE_GRACE_MS)
            case PageRead():
                self.vigil.page_read(msg, ctx)
            case RuntimeReadyAck():
                self._runtime_ready_ack(msg, ctx)
            case ProvisionStage():
                self._provision(msg, ctx)
            case InferPrompt():
                self.desk.infer(msg, self._infer_refusal(), ctx)
            case EncodePrompt() | DecodeTokens():
                self.desk.tokenize(msg, self._tokenizer_refusal(), ctx)
            case CancelRequest():
                self.desk.cancel(msg, self.engine_running and self.engine_ready, ctx)
            case BeginSequence():
                self.edges.begin(msg, self._tokenizer_refusal(), ctx)
            case Carried():
                ctx.effect(EngineSend(wire.EdgeCarry(peer=msg.peer, frame=msg.frame)))
            case StopRun():
                self._stop_run(msg, ctx)
            case Lease():
                ctx.timer("lease", max(msg.ttl_ms, LEASE_MS))
            case SendFailed():
                self._send_failed(msg, ctx)
            case StopAsked():
                self._shut_down(msg.source, ctx)
            case StopSignal():
                self._shut_down(msg.name, ctx)
            case OwnerGone():
                self._shut_down("whoever started this worker is gone", ctx)
            case RuntimeLoaded():
                self._runtime_loaded(msg, ctx)
            case _:
                self._apply(msg, ctx)
        self._mind(ctx)

    def on_timer(self, key: str, ctx: Ctx) -> None:
        """Reports again, coalesced progress, the look at the page; lease, hung_up, grace, stopped, exit: the end."""
        match key:
            case readiness.READY_TIMER:
                self.readiness.report(ctx)
            case "resend":
                for report in self._unheard.values():
                    ctx.send(self.orchestrator, report)
                self._unheard.clear()
                self.desk.say_again(ctx)
            case vigil.PROGRESS_TIMER:
                self.vigil.timer_due(ctx)
            case vigil.PAGE_TIMER:
                self._silence(ctx)
            case "lease":
                door = "" if ctx.views.link_up else ", and the relay or router that this worker dials does not answer"
                detail = f"node {self.identity.node_id}: no lease from the orchestrator any more{door}; it stops itself"
                self._record(ctx, SHUTDOWN, "lease", "failed", {"error": detail})
                self.desk.fail_all("the worker lost its orchestrator", ctx, engine_gone=False)
                self._leave(Exit(1, detail), ctx)
            case "grace":
                ctx.effect(KillEngine())
                self._leave(Exit(0), ctx, LINGER_MS)  # even if its death is never told
            case "hung_up" if self.engine_running:
                ctx.effect(KillEngine())
            case "stopped":
                self._shut_down("the run is stopped", ctx)
            case "exit" if self._exit:
                ctx.effect(self._exit)
        self._mind(ctx)

    def check(self) -> None:
        """Invariants of the stage and of what is owed."""
        self.core.check()
        self.desk.check()
        assert self.engine_running or not self.engine_ready, "an engine that is gone is ready"
        assert self.engine_running or not self.desk.owed, "a request of an engine that is gone"

    # --- readiness (S1 5.5, 9.6) ------------------------------------------------------------------------------
    def _runtime_loaded(self, msg: RuntimeLoaded, ctx: Ctx) -> None:
        if self._is_mine(msg.run_id, msg.node_id, msg.stage_index):
            self.readiness.loaded(msg, ctx)
        else:
            self._drop(msg, "for another run, node or stage", ctx)

    def _runtime_ready_ack(self, msg: RuntimeReadyAck, ctx: Ctx) -> None:
        if self._is_mine(msg.run_id, msg.node_id, msg.stage_index) and msg.readiness_id == READINESS_ID:
            self.readiness.acknowledge(msg, ctx)
        else:
            self._drop(msg, "for another run, node, stage or readiness", ctx)

    # --- the stage (S1 5.6, 6.6) ------------------------------------------------------------------------------
    def _provision(self, msg: ProvisionStage, ctx: Ctx) -> None:
        asked = msg.provision
        # A wrong node or orchestrator is the controller's to judge: it faults the stage (S1 6.6).
        # In a pipeline from which workers were left out, those behind them move up.
        moved_up = asked.inbound_edge is not None and asked.stage_index < self.identity.stage_index
        if asked.run_id != self.identity.run_id or not (moved_up or asked.stage_index == self.identity.stage_index):
            self._drop(msg, f"for run {asked.run_id}, stage {asked.stage_index}", ctx)
            return
        before = self.core.provision
        self._apply(msg, ctx)
        if before is None and self.core.provision is not None:
            self._record(ctx, STAGE, "provision", "started", {"model_id": asked.model_id})

    def _apply(self, fact: Message, ctx: Ctx) -> None:
        """Feed the controller and do what it says, in order."""
        for output in self.core.handle(fact):
            if self.report_to:
                ctx.send(self.report_to, StageReport(output))
            if isinstance(output, stage.Command):
                self._command(output, ctx)
            elif isinstance(output, stage.Lifecycle):
                self._lifecycle(output, ctx)

    def _command(self, command: stage.Command, ctx: Ctx) -> None:
        if self.core.fault and not isinstance(
            command, stage.StopLocalEdges | stage.ReleaseRunDeviceObjects | stage.ResetRole
        ):
            return  # the stage faulted on an earlier command of the same provision
        match command:
            case stage.EstablishInboundEdge():
                self.edges.inbound = command.edge
                self._establish(command.edge, MarkInboundEdgeReady(edge_id=command.edge_id), ctx)
            case stage.EstablishOutboundEdge():
                self.edges.outbound = command.edge
                self._establish(command.edge, MarkOutboundEdgeReady(edge_id=command.edge_id), ctx)
            case stage.RenewEdges():
                self.edges.renew(command.provision, ctx)
            case stage.StopLocalEdges():
                self.desk.fail_all("the run is being stopped", ctx, engine_gone=not self.engine_running)
                if self.edges.is_open and self.engine_running:
                    ctx.effect(EngineSend(wire.CloseEdges()))
                else:
                    self._quiesce(ctx)
            case _:
                if message := order(command):
                    ctx.effect(EngineSend(message))

    def _establish(self, edge: object, ready: Message, ctx: Ctx) -> None:
        """Direct mode has no edge to wait for: both are ready at once (design.md 4)."""
        if edge is None:
            self._apply(ready, ctx)
        elif self.core.provision is not None:
            self.edges.open(self.core.provision, ctx)

    def _lifecycle(self, event: stage.Lifecycle, ctx: Ctx) -> None:
        run_id, node_id, stage_index = self.identity.run_id, self.identity.node_id, self.identity.stage_index
        generation = self.core.provision.generation if self.core.provision else 0
        match event:
            case stage.WeightsReady():
                self._report(ObserveWeightsReady(run_id=run_id, node_id=node_id, stage_index=stage_index), ctx)
            case stage.StageReady():
                self._record(ctx, STAGE, "stage", "ready", {})
                self._report(ObserveStageReady(run_id=run_id, stage_index=stage_index, generation=generation), ctx)
            case stage.StageFault():
                reason = f"{event.reason}: {event.detail}" if event.detail else str(event.reason)
                self._record(ctx, STAGE, "stage", "failed", {"error": reason})
                fault = ObserveStageFault(run_id=run_id, stage_index=stage_index, reason=reason, generation=generation)
                self._report(fault, ctx)
                error = event.detail or f"the stage faulted: {event.reason}"
                self.desk.fail_all(error, ctx, engine_gone=not self.engine_running)
            case stage.StageStopped():
                self._record(ctx, SHUTDOWN, "stop_run", "ready", {})
                self._report(ObserveStageStopped(run_id=run_id, stage_index=stage_index), ctx)
                # Its provisioner stops a worker now; one that was started by hand has nobody and goes by itself.
                ctx.timer("stopped", STAGE_STOPPED_MS)
            case _:
                pass

    def _report(self, report: Observation, ctx: Ctx) -> None:
        self._unheard.pop(type(report), None)
        ctx.send(self.orchestrator, report)

    # --- the teardown (S1 6.5, 9.16) --------------------------------------------------------------------------
    def _stop_run(self, msg: StopRun, ctx: Ctx) -> None:
        if msg.run_id != self.identity.run_id:
            self._drop(msg, f"for run {msg.run_id}", ctx)
            return
        if self.core.stopping_run is None:
            self._record(ctx, SHUTDOWN, "stop_run", "started", {})
        self.readiness.stop(ctx)
        self._apply(msg, ctx)

    def _quiesce(self, ctx: Ctx) -> None:
        """No edge moves bytes, and nothing computes once the cancelled generation has ended."""
        if self.edges.is_open and self.engine_running:
            return  # the engine says EdgesClosed
        if self.core.state is stage.StageState.STOPPING and not self.desk.active:
            run_id = self.identity.run_id
            self._apply(LocalEdgesStopped(run_id=run_id), ctx)
            self._apply(WorkerRingsQuiesced(run_id=run_id), ctx)

    # --- prompts (S1 6.9, 6.10) -------------------------------------------------------------------------------
    def _infer_refusal(self) -> str:
        if self._exit or self._asked_by:
            return "the worker is shutting down"
        if self.core.fault:
            return f"the stage is faulted: {self.core.fault.detail or self.core.fault.reason}"
        if self.core.provision and self.core.provision.stage_count > 1:
            return "this worker holds one stage of a pipeline and cannot answer a prompt alone"
        if self.core.state is not stage.StageState.READY_IDLE:
            return f"the worker is not ready: its stage is {self.core.state}"
        return ""

    def _tokenizer_refusal(self) -> str:
        if self._exit or self._asked_by:
            return "the worker is shutting down"
        if self.core.fault:
            return f"the stage is faulted: {self.core.fault.detail or self.core.fault.reason}"
        if self.core.stopping_run is not None or not self.core.weights_ready:
            return f"the worker is not ready: its stage is {self.core.state}"
        return ""

    def _send_failed(self, msg: SendFailed, ctx: Ctx) -> None:
        """S1 6.11. Readiness repeats itself; other reports are given again; answers without a listener are ended."""
        if msg.dst != self.orchestrator:
            if self.desk.send_failed(msg, ctx):
                ctx.timer("resend", REPORT_RESEND_MS)
        elif isinstance(msg.message, Observation):
            self._unheard[type(msg.message)] = msg.message
            ctx.timer("resend", REPORT_RESEND_MS)

    # --- the engine -------------------------------------------------------------------------------------------
    def _engine_said(self, msg: Message, ctx: Ctx) -> None:
        self.vigil.moved(ctx)
        match msg:
            case wire.EngineReady():
                self.engine_ready = True
                self.readiness.edge_candidates = msg.edge_candidates
                self.readiness.memory_bytes, self.readiness.bytes_per_s = msg.memory_bytes, msg.bytes_per_s
                detail = {"backend": msg.backend, "pid": msg.pid, "elapsed_ms": msg.elapsed_ms}
                self._record(ctx, BOOTSTRAP, "engine", "ready", detail)
                self._apply(MarkWorkerReady(), ctx)
                self._runtime_loaded(self.readiness.this_runtime(ctx), ctx)
            case wire.Progress():
                self.vigil.progress(msg, ctx)
            case wire.WeightsLoaded():
                self._weights_loaded(msg, ctx)
            case wire.Released():
                self._apply(DeviceObjectsReleased(run_id=self.identity.run_id), ctx)
            case wire.RoleReset():
                self._apply(WorkerRoleReset(run_id=self.identity.run_id), ctx)
            case wire.Fatal():
                self._crash(msg.error, ctx)
            case wire.EdgeMoved():
                self._record(ctx, EDGE, "edge", "observed", edge_detail(msg))
            case wire.EdgeReady() | wire.StageFaulted() | wire.EngineBegun() | wire.EdgesClosed() | wire.EdgeCarry():
                self._edges_said(msg, ctx)
            case wire.EngineFault() if self.edges.refused(msg, ctx):
                pass
            case _:
                self.desk.engine_said(msg, ctx)
                self._quiesce(ctx)

    def _edges_said(self, msg: Message, ctx: Ctx) -> None:
        """What the engine says of its edges (S1 6.5, 6.10)."""
        match msg:
            case wire.EdgeReady() | wire.StageFaulted() if msg.generation != self.edges.generation:
                pass  # of edges that were renewed meanwhile
            case wire.EdgeReady():
                inbound = self.edges.inbound is not None and msg.edge_id == self.edges.inbound.edge_id
                self._record(ctx, STAGE, "edge", "ready", {"edge_id": msg.edge_id, "path": msg.path})
                kind = MarkInboundEdgeReady if inbound else MarkOutboundEdgeReady
                self._apply(kind(edge_id=msg.edge_id), ctx)
            case wire.StageFaulted():
                self._apply(StageFailed(reason=msg.reason, detail=msg.detail), ctx)
            case wire.EngineBegun():
                self.edges.begun(msg.request_id, self._place, ctx)
            case wire.EdgesClosed():
                self.edges.is_open = False
                self._quiesce(ctx)
            case wire.EdgeCarry():
                carry(msg, ctx)

    def _weights_loaded(self, msg: wire.WeightsLoaded, ctx: Ctx) -> None:
        detail = {
            "weights_bytes": msg.weights_bytes,
            "kv_bytes": msg.kv_bytes,
            "layers": msg.layers,
            "max_context": msg.max_context,
            "elapsed_ms": msg.elapsed_ms,
        }
        self._record(ctx, STAGE, "weights", "ready", detail)
        mine = self.identity
        ready = MarkWeightsReady(run_id=mine.run_id, node_id=mine.node_id, stage_index=self._place)
        self._apply(ready, ctx)

    def _engine_exited(self, reason: str, ctx: Ctx) -> None:
        """The engine is gone. Asked for: the end. While stopping: nothing of the stage can be left. Else a crash."""
        self.engine_running = self.engine_ready = False
        if self._asked_by:
            self.desk.fail_all("the worker is shutting down", ctx, engine_gone=True)
            self._leave(Exit(0), ctx)
        elif self.core.stopping_run is not None:
            self.desk.fail_all("the run is being stopped", ctx, engine_gone=True)
            self._quiesce(ctx)
            self._apply(DeviceObjectsReleased(run_id=self.identity.run_id), ctx)
            self._apply(WorkerRoleReset(run_id=self.identity.run_id), ctx)
            self._leave(Exit(0), ctx, LINGER_MS)
        else:
            self._crash(reason, ctx)
            self.desk.fail_all(reason, ctx, engine_gone=True)

    def _crash(self, reason: str, ctx: Ctx) -> None:
        """One StageFault, the one Fault of the active request, then the end with status 1 (design.md 4)."""
        if self._exit:
            return
        self._apply(WorkerCrashed(reason=reason), ctx)
        self.desk.fail_all(reason, ctx, engine_gone=not self.engine_running)
        self._leave(Exit(1, f"node {self.identity.node_id}: {reason}"), ctx, LINGER_MS)

    # --- silence (design.md 6 row 14) -------------------------------------------------------------------------
    def _mind(self, ctx: Ctx) -> None:
        """Only where the engine owes an answer is its silence a fault."""
        waiting = (stage.StageState.PROVISIONING, stage.StageState.WAITING)
        is_loading = self.core.state in waiting and not self.core.weights_ready
        tearing_down = self.core.state is stage.StageState.STOPPING
        serves_stage = self.edges.is_open and not is_loading
        owes = not self.engine_ready or is_loading or tearing_down or self.desk.owed or serves_stage
        self.vigil.limit_ms = WORKER_SILENT_MS_SERVING if serves_stage else STAGE_SILENCE_MS
        is_over = not self.engine_running or self._exit is not None or bool(self._asked_by)
        self.vigil.mind(owes and not is_over, is_loading and not is_over, ctx)

    def _silence(self, ctx: Ctx) -> None:
        if silent_s := self.vigil.silent_s(ctx):
            ctx.effect(KillEngine())
            self._crash(f"the engine made no progress for {silent_s} s in phase {self.vigil.phase}", ctx)

    # --- the end ----------------------------------------------------------------------------------------------
    def _shut_down(self, source: str, ctx: Ctx) -> None:
        """Settle requests, end the engine, exit 0. A second request to stop does not wait any more."""
        if self._asked_by or self._exit:
            self._leave(Exit(0), ctx)
            return
        self._asked_by = source
        self.readiness.stop(ctx)
        self._record(ctx, SHUTDOWN, "shutdown", "started", {"source": source})
        ctx.send(self.swim, Leave())  # the cluster need not find out by probing
        self.desk.fail_all("the worker is shutting down", ctx, engine_gone=False)
        if self.engine_running:
            ctx.effect(EngineSend(wire.Shutdown()))
            ctx.timer("grace", ENGINE_GRACE_MS)
        else:
            self._leave(Exit(0), ctx)

    def _leave(self, exit: Exit, ctx: Ctx, delay_ms: int = 0) -> None:
        """End the process; the first reason stands. delay_ms: as long as the loop runs, what was sent is repeated
        until it is acknowledged."""
        if self._exit is None:
            self._exit = exit
            detail = {"exit_status": exit.status, "error": exit.error}
            self._record(ctx, SHUTDOWN, "exit", "failed" if exit.status else "ready", detail)
        ctx.send(self.publisher, Drain())
        ctx.timer("exit", delay_ms)

    # --- context and records ----------------------------------------------------------------------------------
    @property
    def _place(self) -> int:
        """Which stage of the pipeline it is."""
        return self.core.provision.stage_index if self.core.provision else self.identity.stage_index

    def _is_mine(self, run_id: int, node_id: int, stage_index: int) -> bool:
        mine = self.identity
        return (run_id, node_id, stage_index) == (mine.run_id, mine.node_id, mine.stage_index)

    def _drop(self, msg: Message, why: str, ctx: Ctx) -> None:
        self._record(ctx, STAGE, "message", "dropped", {"message": type(msg).__name__, "reason": why})

    def _prompt_record(self, ctx: Ctx, phase: str, status: str, detail: dict[str, Any]) -> None:
        self._record(ctx, PROMPT, phase, status, detail)

    def _record(self, ctx: Ctx, channel: str, phase: str, status: str, detail: dict[str, Any]) -> None:
        node_event(ctx, self.identity, channel, phase, status, detail)
