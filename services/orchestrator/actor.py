"""OrchestratorActor: takes the workers' observations, filters them by context, reports (S1 6.3, 6.4, 6.12, 9.19)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from common.actors import Actor, Ctx, Inbox
from common.messages.orchestrator import (
    ObserveEndpointFault,
    ObserveNodeRuntimeReady,
    ObserveNodeRuntimeReadyAck,
    ObservePlanAvailable,
    ObservePoolReady,
    ObserveStageFault,
    ObserveStageProgress,
    ObserveStageReady,
    ObserveStageStopped,
    ObserveTokenEndpointsStopped,
    ObserveTokenInEndpointReady,
    ObserveTokenOutEndpointReady,
    ObserveTokenReceived,
    ObserveWeightsReady,
    OrchestratorMsg,
)
from common.messages.report import (
    Command,
    Lifecycle,
    NodeRuntimeReady,
    NodeRuntimeReadyAck,
    OrchestratorReport,
    StageFault,
    StageProgress,
    StageReady,
    StageStopped,
    WeightsReady,
)
from services.orchestrator.run_fsm import OrchestratorRun


@dataclass(frozen=True, slots=True)
class ReportsPending:
    """Event: the report inbox was empty and is not any more; the run drains it."""


@dataclass(frozen=True, slots=True)
class ExpectNode:
    """Event: worker `node_id` serves `stage_index` under this bus key; reports of anybody else do not count."""

    node_id: int
    stage_index: int
    node_key: bytes


@dataclass(frozen=True, slots=True)
class StageLost:
    """Event: the worker of this stage is being replaced; it does not count any more."""

    stage_index: int


@dataclass(frozen=True, slots=True)
class StageLeftOut:
    """Event: the run goes without this worker."""

    stage_index: int


@dataclass(frozen=True, slots=True)
class StagesRenewed:
    """Event: all stages get new edges, as one of them is another worker's."""


@dataclass(frozen=True, slots=True)
class EndRun:
    """Event: the run begins to end; error is empty for a controlled stop."""

    error: str


class ReportInbox(Inbox):
    """S1 6.3: holds OrchestratorReport values until the run drains them; tells it once when it becomes pending."""

    def __init__(self, owner: bytes) -> None:
        super().__init__(OrchestratorReport)
        self._owner = owner

    def receive(self, msg: Any, ctx: Ctx) -> None:
        """Buffer, and wake the owner if it has nothing to drain yet."""
        was_empty = self.state == "empty"
        super().receive(msg, ctx)
        if was_empty:
            ctx.send(self._owner, ReportsPending())


class OrchestratorActor(Actor):
    """Wraps the run FSM. Its address is the authorized_orchestrator of every worker of the run.

    A report counts only if run_id, node_id, stage_index and the sender's verified bus key are those of an expected
    worker (S1 6.12, 9.19); everything else is counted in `dropped` and changes nothing.
    """

    Incoming: ClassVar[tuple[type, ...]] = (  # type: ignore[assignment]
        OrchestratorMsg,
        ExpectNode,
        StageLost,
        StageLeftOut,
        StagesRenewed,
        EndRun,
    )

    def __init__(self, run_id: int, report_to: bytes | None, *, restarts: bool = False) -> None:
        """restarts: whether a stage's fault ends the run is for the run to say, by EndRun."""
        self.core = OrchestratorRun(run_id)
        self._restarts = restarts
        self.report_to = report_to
        self.dropped = 0
        self._expected: dict[int, ExpectNode] = {}
        self._command_cursor = 0
        self._event_cursor = 0

    def receive(self, msg: Any, ctx: Ctx) -> None:
        """One observation."""
        match msg:
            case ExpectNode():
                self._expected[msg.stage_index] = msg
            case StageLost():
                self._expected.pop(msg.stage_index, None)
            case StageLeftOut():
                self._expected.pop(msg.stage_index, None)
                self.core.leave_out(msg.stage_index)
            case StagesRenewed():
                self.core.stages_renewed()
            case EndRun() if msg.error:
                self.core.fault(msg.error)
            case EndRun():
                self.core.operator_stop()
            case ObservePoolReady():
                self.core.pool_is_ready(msg.nodes)
            case ObservePlanAvailable() if msg.run_id == self.core.run_id:
                self.core.plan_available(msg.stages)
            case ObserveTokenInEndpointReady():
                self.core.token_endpoint_ready(inbound=True)
            case ObserveTokenOutEndpointReady():
                self.core.token_endpoint_ready(inbound=False)
            case ObserveTokenReceived():
                self.core.token_received(msg.sequence, msg.token_id, msg.eos, msg.count)
            case ObserveTokenEndpointsStopped():
                self.core.endpoints_stopped()
            case ObserveEndpointFault() if msg.run_id == self.core.run_id:
                self.core.fault(f"EndpointFault: {msg.endpoint}")
            case _:
                self._worker(msg, ctx)
        self._report_new(ctx)

    def _worker(self, msg: Any, ctx: Ctx) -> None:
        if not self._matches(msg, ctx):
            self.dropped += 1
            return
        match msg:
            case ObserveNodeRuntimeReady():
                self._report(
                    NodeRuntimeReady(
                        run_id=msg.run_id,
                        node_id=msg.node_id,
                        stage_index=msg.stage_index,
                        endpoint=msg.endpoint,
                        node_actor=msg.node_actor,
                        datastream_publisher=msg.datastream_publisher,
                        readiness_id=msg.readiness_id,
                        memory_bytes=msg.memory_bytes,
                        bytes_per_s=msg.bytes_per_s,
                    ),
                    ctx,
                )
            case ObserveNodeRuntimeReadyAck():
                self._report(
                    NodeRuntimeReadyAck(
                        run_id=msg.run_id,
                        node_id=msg.node_id,
                        stage_index=msg.stage_index,
                        readiness_id=msg.readiness_id,
                    ),
                    ctx,
                )
            case ObserveWeightsReady():
                self._report(WeightsReady(run_id=msg.run_id, node_id=msg.node_id, stage_index=msg.stage_index), ctx)
            case ObserveStageProgress():
                self._report(
                    StageProgress(
                        run_id=msg.run_id,
                        node_id=msg.node_id,
                        stage_index=msg.stage_index,
                        phase=msg.phase,
                        done=msg.done,
                        total=msg.total,
                    ),
                    ctx,
                )
            case ObserveStageReady():
                self.core.stage_ready(msg.stage_index)
                ready = StageReady(run_id=msg.run_id, stage_index=msg.stage_index, generation=msg.generation)
                self._report(ready, ctx)
            case ObserveStageFault():
                if not self._restarts:
                    self.core.fault(f"StageFault: {msg.reason}")
                fault = StageFault(
                    run_id=msg.run_id, stage_index=msg.stage_index, reason=msg.reason, generation=msg.generation
                )
                self._report(fault, ctx)
            case ObserveStageStopped():
                self.core.stage_stopped(msg.stage_index)
                self._report(StageStopped(run_id=msg.run_id, stage_index=msg.stage_index), ctx)
            case _:
                self.dropped += 1

    def _matches(self, msg: Any, ctx: Ctx) -> bool:
        expected = self._expected.get(getattr(msg, "stage_index", -1))
        return (
            expected is not None
            and getattr(msg, "run_id", -1) == self.core.run_id
            and getattr(msg, "node_id", expected.node_id) == expected.node_id
            and ctx.sender_node == expected.node_key
        )

    def _report_new(self, ctx: Ctx) -> None:
        for command in self.core.commands[self._command_cursor :]:
            self._report(Command(command=command), ctx)
        for event, reason in self.core.events[self._event_cursor :]:
            self._report(Lifecycle(run_id=self.core.run_id, event=event, reason=reason), ctx)
        self._command_cursor, self._event_cursor = len(self.core.commands), len(self.core.events)

    def _report(self, report: Any, ctx: Ctx) -> None:
        if self.report_to is not None:
            ctx.send(self.report_to, report)

    def check(self) -> None:
        """The machine's invariants."""
        self.core.check()
