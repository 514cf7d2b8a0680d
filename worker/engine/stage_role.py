"""The main thread's half of a pipeline stage: the step half of the stage table around the model (design.md 4).

Records of the inbound edge become ObjectLoaded facts of this process's own StageController; what it orders is
computed at once and completed, and the record's bytes are credited. Whatever goes wrong is one StageFaulted.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from common.addresses import KEY_BYTES
from common.codec import Message
from common.edge_records import Record
from common.messages.engine import (
    Cancel,
    Cancelled,
    CloseEdges,
    EdgesClosed,
    EngineBegin,
    EngineBegun,
    EngineFault,
    OpenEdges,
    StageFaulted,
)
from common.messages.node_agent import (
    LocalPath,
    MarkInboundEdgeReady,
    MarkOutboundEdgeReady,
    MarkWeightsReady,
    MarkWorkerReady,
    ObjectLoaded,
    ProvisionStage,
    StageFailed,
    StageProvisionWire,
    StepCompleted,
)
from common.messages.node_agent import Sampling as WireSampling
from worker import stage_controller as stage
from worker.engine.errors import EngineError
from worker.engine.feedback import Compute, FeedbackGate, FeedbackMismatch, fed_back
from worker.engine.mailbox import Mailbox
from worker.engine.progress import Phase, ProgressPage
from worker.engine.stage_port import EdgeObject, EdgeOpened, StagePort

if TYPE_CHECKING:
    from worker.engine.engine import Engine
    from worker.engine.fast_path import FastPath, Forecast
    from worker.engine.sampler import Sampling
    from worker.engine.stage_steps import StageSteps

NOT_LOADED = "the engine has no weights loaded"


class StageRole:
    """send: to the agent; sampling: the wire's sampling as the sampler takes it (raises EngineError)."""

    def __init__(
        self,
        mailbox: Mailbox,
        port: StagePort,
        page: ProgressPage,
        send: Callable[[Message], None],
        sampling: Callable[[WireSampling | None], Sampling | None],
    ) -> None:
        self._mailbox, self._port, self._page, self._send, self._sampling = mailbox, port, page, send, sampling
        self._edges: OpenEdges | None = None
        self._controller: stage.StageController | None = None
        self._engine: Engine | None = None
        self._steps: StageSteps | None = None
        self._gate: FeedbackGate | None = None
        """Of the first stage, where tokens are fed back directly."""
        self._is_done = False
        """The fast path has computed the step that is being executed."""
        port.forecast, port.fast_record = self._forecast, self._fast_record
        self.handlers: dict[type, Callable[[Any], None]] = {
            OpenEdges: self._open,
            EdgeOpened: self._opened,
            EdgeObject: self._object,
            EngineBegin: self._begin,
            Cancel: self._cancel,
            CloseEdges: self._close,
        }

    # --- readiness --------------------------------------------------------------------------------------------
    def _open(self, message: OpenEdges) -> None:
        if self._steps is not None and self._steps.request_id is not None:
            self._mailbox.forget(self._steps.request_id)  # the port gave it up with the edges before
        self._edges = message
        orchestrator = message.orchestrator.ljust(KEY_BYTES, b"\0")
        controller = self._controller = stage.StageController(orchestrator, message.node_id)
        wire = StageProvisionWire(
            run_id=message.run_id,
            authorized_orchestrator=orchestrator,
            node_id=message.node_id,
            stage_index=message.stage_index,
            stage_count=message.stage_count,
            layer_start=0,
            inbound_edge_id=message.inbound.edge_id,
            outbound_edge_id=message.outbound.edge_id,
            inbound_edge=message.inbound,
            outbound_edge=message.outbound,
            model_id="",
            gguf_source=LocalPath(path=""),
            tokenizer=LocalPath(path=""),
        )
        fed = message.feedback_in
        self._gate = FeedbackGate(message.inbound.edge_id, fed.edge_id) if fed is not None else None
        controller.handle(ProvisionStage(provision=wire))
        controller.handle(MarkWorkerReady())
        if self._engine is not None:
            self.loaded(self._engine)

    def loaded(self, engine: Engine) -> None:
        """The weights are here: the step table begins with the first object of its edges."""
        from worker.engine.stage_steps import StageShape, StageSteps

        self._engine = engine
        edges = self._edges
        if edges is None or self._controller is None:
            return
        shape = StageShape(
            is_first=edges.stage_index == 0,
            is_last=edges.stage_index == edges.stage_count - 1,
            width=engine.header.embedding_length,
            chunk=engine.chunk,
            vocab_size=engine.header.vocab_size,
            dtype_in=edges.inbound.object_spec.dtype,
            dtype_out=edges.outbound.object_spec.dtype,
            end_ids=frozenset(engine.tokenizer.vocabulary.end_ids),
        )
        self._steps = StageSteps(engine.model, shape)
        mine = {"run_id": edges.run_id, "node_id": edges.node_id, "stage_index": edges.stage_index}
        self._controller.handle(MarkWeightsReady(**mine))

    def threads(self, asked: int) -> int:
        """Threads of this engine's kernels: what was asked for, else OMP_NUM_THREADS; else, where all stages share this
        machine's cores (taking edges at an ipc address means being beside the run), its share of them; else 0, all."""
        edges, limit = self._edges, os.environ.get("OMP_NUM_THREADS", "")
        if asked or limit.isdecimal():
            return asked or int(limit)
        if edges is None:
            return 0
        is_local = any(address.startswith("ipc://") for address in self._port.candidates)
        return max(1, len(os.sched_getaffinity(0)) // edges.stage_count) if is_local else 0

    def dropped(self) -> None:
        """The weights are gone."""
        self._engine = self._steps = None

    @property
    def _generation(self) -> int:
        return self._edges.generation if self._edges else 0

    def _opened(self, event: EdgeOpened) -> None:
        if self._controller is None or self._edges is None:
            return
        inbound = event.edge_id == self._edges.inbound.edge_id
        kind = MarkInboundEdgeReady if inbound else MarkOutboundEdgeReady
        self._controller.handle(kind(edge_id=event.edge_id))

    # --- sequences --------------------------------------------------------------------------------------------
    def _begin(self, message: EngineBegin) -> None:
        from worker.engine.sampler import Sampling

        if self._steps is None:
            self._send(EngineFault(request_id=message.request_id, error=NOT_LOADED))
            return
        try:
            sampling = self._sampling(message.sampling) or Sampling()
            self._steps.begin(message.request_id, message.first_object_id, sampling, message.recent)
        except EngineError as error:
            self._send(EngineFault(request_id=message.request_id, error=str(error)))
            return
        self._send(EngineBegun(request_id=message.request_id))

    def _cancel(self, message: Cancel) -> None:
        known = self._steps is not None and self._steps.cancel(message.request_id)
        self._mailbox.forget(message.request_id)
        self._send(Cancelled(request_id=message.request_id, known=known))

    # --- steps ------------------------------------------------------------------------------------------------
    def _object(self, event: EdgeObject) -> None:
        gate = self._gate
        if gate is None:
            self._load(event.edge_id, event.record)
            return
        take = gate.on_feedback if event.edge_id == gate.feedback else gate.on_token_in
        try:
            steps = take(event.record)
        except FeedbackMismatch as error:
            self._fault(StageFailed(reason="ObjectFailed", detail=str(error)))
            return
        for step in steps:
            if isinstance(step, Compute):
                self._load(step.edge_id, step.record)
            else:
                self._port.consumed(self._generation, step.edge_id, step.record.end_offset)

    def _forecast(self) -> tuple[FastPath, Forecast] | None:
        """The next decode step, where the fast path can do it."""
        steps, edges, path = self._steps, self._edges, self._engine.model.fast_path if self._engine else None
        controller = self._controller
        if steps is None or edges is None or path is None or steps.request_id is None or controller is None:
            return None
        if controller.state is not stage.StageState.READY_IDLE:
            return None
        if self._mailbox.is_cancelled(steps.request_id) or (self._gate is not None and not self._gate.fed_next):
            return None
        inbound = self._gate.feedback if self._gate is not None else edges.inbound.edge_id
        feedback = edges.feedback_out.edge_id if edges.feedback_out is not None else None
        forecast = steps.forecast(inbound, edges.outbound.edge_id, feedback)
        return (path, forecast) if forecast is not None else None

    def _fast_record(self, event: EdgeObject) -> None:
        """Everything that belongs to the step, now that it is done. A cancel that came meanwhile came too late."""
        self._is_done = True
        try:
            self._object(event)
        finally:
            self._is_done = False

    def _fault(self, failed: StageFailed) -> None:
        for output in self._controller.handle(failed) if self._controller else []:
            if isinstance(output, stage.StageFault):
                self._send_fault(output)

    def _send_fault(self, fault: stage.StageFault) -> None:
        self._send(StageFaulted(reason=fault.reason, detail=fault.detail, generation=self._generation))

    def _load(self, edge_id: int, record: Record) -> None:
        """edge_id: over which it came; to the step table it is an object of the one inbound edge."""
        controller, edges = self._controller, self._edges
        if controller is None or self._steps is None or edges is None:
            return
        loaded = ObjectLoaded(
            edge_id=edges.inbound.edge_id,
            object_id=record.object_id,
            sequence=record.sequence,
            handle_generation=1,
            handle_id=record.sequence,
        )
        for output in controller.handle(loaded):
            if isinstance(output, stage.ExecuteStep):
                self._execute(output, edge_id, record, controller)
            elif isinstance(output, stage.StageFault):
                self._send_fault(output)
        controller.check()

    def _execute(
        self, step: stage.ExecuteStep, edge_id: int, record: Record, controller: stage.StageController
    ) -> None:
        from worker.engine.stage_steps import StepError

        assert self._steps is not None
        generation = self._generation
        self._page.enter(Phase.PREFILL_OR_DECODE)
        if self._steps.rows(record) > 1:
            self._port.leave_to_port()
        fact: Message = StepCompleted(step_id=step.step_id)
        try:
            is_cancelled = (lambda _request: False) if self._is_done else self._mailbox.is_cancelled
            for out in self._steps.run(record, is_cancelled, self._page.bump):
                self._feed_back(out)
                self._port.write(generation, step.output_edge_ids[0], out)
        except StepError as error:
            detail = f"{error} (object {record.object_id}, sequence {record.sequence})"
            fact = StageFailed(reason=error.reason, detail=detail)
        for output in controller.handle(fact):
            if isinstance(output, stage.ReleaseInputHandle):
                self._port.consumed(generation, edge_id, record.end_offset)
            elif isinstance(output, stage.StageFault):
                self._send_fault(output)
        self._page.enter(Phase.IDLE)

    def _feed_back(self, out: Record) -> None:
        """Before anything else: the first stage waits for it."""
        edge = self._edges.feedback_out if self._edges else None
        if edge is not None and (token := fed_back(out)) is not None:
            self._port.write(self._generation, edge.edge_id, token)

    # --- the end ----------------------------------------------------------------------------------------------
    def _close(self, _message: CloseEdges) -> None:
        """The port thread has closed the edges; no step runs while this does."""
        self._controller = None
        self._send(EdgesClosed())
