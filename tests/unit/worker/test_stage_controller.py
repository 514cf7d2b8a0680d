"""StageController as playbooks: each rule of S1 6.5 and rust-swactor.md 4.5, facts in, outputs out."""

from __future__ import annotations

import msgspec
import pytest

from common.codec import Message
from common.messages.node_agent import (
    DeviceObjectsReleased,
    EmbeddedGguf,
    LocalEdgesStopped,
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
    StopRun,
    WorkerCrashed,
    WorkerRingsQuiesced,
    WorkerRoleReset,
)
from worker.stage_controller import (
    ConfigureWorkerRole,
    EstablishInboundEdge,
    EstablishOutboundEdge,
    ExecuteStep,
    FaultReason,
    LoadWeights,
    Output,
    ReleaseInputHandle,
    ReleaseRunDeviceObjects,
    ResetRole,
    StageController,
    StageFault,
    StageReady,
    StageState,
    StageStopped,
    StepAccepted,
    StopLocalEdges,
    WeightsReady,
)

ORCHESTRATOR = b"o" * 32
NODE, RUN, STAGE, INBOUND, OUTBOUND = 4, 1, 3, 4, 5
WIRE = StageProvisionWire(
    run_id=RUN,
    authorized_orchestrator=ORCHESTRATOR,
    node_id=NODE,
    stage_index=STAGE,
    stage_count=5,
    layer_start=6,
    layer_end_exclusive=12,
    inbound_edge_id=INBOUND,
    outbound_edge_id=OUTBOUND,
    model_id="m",
    gguf_source=LocalPath(path="/m.gguf"),
    tokenizer=EmbeddedGguf(),
    max_context=512,
)
READINESS: list[Message] = [
    MarkWorkerReady(),
    MarkWeightsReady(run_id=RUN, node_id=NODE, stage_index=STAGE),
    MarkInboundEdgeReady(edge_id=INBOUND),
    MarkOutboundEdgeReady(edge_id=OUTBOUND),
]
TEARDOWN: list[Message] = [
    LocalEdgesStopped(run_id=RUN),
    WorkerRingsQuiesced(run_id=RUN),
    DeviceObjectsReleased(run_id=RUN),
    WorkerRoleReset(run_id=RUN),
]


def provision(**changes: object) -> ProvisionStage:
    return ProvisionStage(provision=msgspec.structs.replace(WIRE, **changes))


def loaded(sequence: int, edge_id: int = INBOUND) -> ObjectLoaded:
    return ObjectLoaded(edge_id=edge_id, object_id=70 + sequence, sequence=sequence, handle_generation=1, handle_id=9)


def tell(controller: StageController, *facts: Message) -> list[Output]:
    outputs: list[Output] = []
    for fact in facts:
        outputs += controller.handle(fact)
        controller.check()
    return outputs


def fresh(*facts: Message) -> StageController:
    controller = StageController(ORCHESTRATOR, NODE)
    tell(controller, *facts)
    return controller


def ready() -> StageController:
    return fresh(provision(), *READINESS)


@pytest.mark.spec("S1 6.5", "S1 6.6")
def test_an_accepted_provision_commands_edges_role_and_weights_in_this_order() -> None:
    controller = fresh()
    assert controller.state is StageState.UNPROVISIONED
    assert tell(controller, provision()) == [
        EstablishInboundEdge(INBOUND, None),
        EstablishOutboundEdge(OUTBOUND, None),
        ConfigureWorkerRole(RUN, STAGE, 5, 6, 12),
        LoadWeights("m", LocalPath(path="/m.gguf"), EmbeddedGguf(), 6, 12, 512),
    ]
    assert controller.state is StageState.PROVISIONING


@pytest.mark.spec("S1 6.6")
@pytest.mark.parametrize("changes", [{"authorized_orchestrator": b"x" * 32}, {"node_id": 9}])
@pytest.mark.parametrize("prepared", [(), (provision(),), (provision(), *READINESS)])
def test_a_provision_of_somebody_else_faults_the_stage(changes: dict[str, object], prepared: tuple[Message]) -> None:
    controller = fresh(*prepared)
    (fault,) = tell(controller, provision(**changes))
    assert isinstance(fault, StageFault) and fault.reason is FaultReason.UNAUTHORIZED_PROVISION and fault.detail
    assert controller.state is StageState.FAULTED
    assert tell(controller, loaded(0)) == []


@pytest.mark.spec("S1 6.5", "S1 6.6")
def test_a_repeated_provision_is_answered_again_but_not_executed_again() -> None:
    controller = fresh(provision())
    assert tell(controller, provision()) == []
    tell(controller, READINESS[0], READINESS[1])
    assert tell(controller, provision()) == [WeightsReady()]
    tell(controller, READINESS[2], READINESS[3])
    assert tell(controller, provision()) == [WeightsReady(), StageReady()]
    (fault,) = tell(controller, WorkerCrashed(reason="gone"))
    assert tell(controller, provision()) == [fault]
    tell(controller, StopRun(run_id=RUN))
    assert tell(controller, provision()) == []
    tell(controller, *TEARDOWN)
    assert tell(controller, provision()) == [StageStopped()]


def test_another_provision_than_the_accepted_one_faults_the_stage() -> None:
    controller = ready()
    (fault,) = tell(controller, provision(layer_start=0))
    assert isinstance(fault, StageFault) and "already has another" in fault.detail


@pytest.mark.spec("S1 6.5")
@pytest.mark.parametrize("last", range(4))
def test_the_stage_is_ready_once_with_the_last_of_four_facts(last: int) -> None:
    controller = fresh(provision())
    for index, fact in enumerate(READINESS):
        if index != last:
            assert StageReady() not in tell(controller, fact, fact)
    assert controller.state is StageState.WAITING
    assert tell(controller, READINESS[last])[-1] == StageReady()
    assert controller.state is StageState.READY_IDLE
    assert tell(controller, *READINESS) == []


def test_the_engine_may_be_ready_before_the_provision_comes() -> None:
    controller = fresh(MarkWorkerReady(), provision(), *READINESS[1:3])
    assert tell(controller, READINESS[3]) == [StageReady()]


@pytest.mark.spec("S1 6.12", "S1 9.19")
@pytest.mark.parametrize(
    "fact",
    [
        MarkWeightsReady(run_id=2, node_id=NODE, stage_index=STAGE),
        MarkWeightsReady(run_id=RUN, node_id=9, stage_index=STAGE),
        MarkWeightsReady(run_id=RUN, node_id=NODE, stage_index=0),
        MarkInboundEdgeReady(edge_id=OUTBOUND),
        MarkOutboundEdgeReady(edge_id=INBOUND),
    ],
)
def test_a_readiness_fact_of_another_context_counts_for_nothing(fact: Message) -> None:
    same = {type(fact): fact}
    controller = fresh(provision(), *(same.get(type(usual), usual) for usual in READINESS))
    assert controller.state is StageState.WAITING


@pytest.mark.spec("S1 6.5")
def test_an_object_in_sequence_is_one_step_and_its_end_releases_the_input() -> None:
    controller = ready()
    for sequence in range(3):
        outputs = tell(controller, loaded(sequence))
        step = ExecuteStep(sequence, INBOUND, 70 + sequence, sequence, (OUTBOUND,))
        assert outputs == [step, StepAccepted(sequence)]
        assert controller.state is StageState.BUSY
        assert tell(controller, loaded(sequence + 1), StepCompleted(step_id=sequence + 7)) == []
        assert tell(controller, StepCompleted(step_id=sequence)) == [ReleaseInputHandle(70 + sequence, 1, 9)]
        assert controller.state is StageState.READY_IDLE


@pytest.mark.spec("S1 6.5")
def test_objects_are_dropped_before_readiness_while_busy_and_from_a_foreign_edge() -> None:
    assert tell(fresh(provision()), loaded(5)) == []
    assert tell(fresh(), loaded(0)) == []
    controller = ready()
    assert tell(controller, loaded(5, edge_id=99)) == []
    tell(controller, loaded(0))
    assert tell(controller, loaded(17)) == []
    assert controller.state is StageState.BUSY


@pytest.mark.spec("S1 6.5")
def test_a_wrong_sequence_faults_the_stage() -> None:
    controller = ready()
    (fault,) = tell(controller, loaded(1))
    assert isinstance(fault, StageFault) and fault.reason is FaultReason.SEQUENCE_VIOLATION
    assert "sequence 1, expected was 0" in fault.detail
    assert tell(controller, loaded(0)) == []


@pytest.mark.spec("S1 6.5")
@pytest.mark.parametrize("reason", ["StepFailed", "ObjectFailed", "OutputFault", "EdgeFault"])
def test_each_reported_failure_is_a_fault_with_its_reason(reason: str) -> None:
    controller = ready()
    tell(controller, loaded(0))
    outputs = tell(controller, StageFailed(reason=reason, detail="why"))
    assert outputs[-1] == StageFault(FaultReason(reason), "why")
    ended = reason in ("StepFailed", "OutputFault")
    assert (ReleaseInputHandle(70, 1, 9) in outputs) == ended
    # A step that still reads its input releases it when it ends, fault or not.
    released = tell(controller, StepCompleted(step_id=0))
    assert released == ([] if ended else [ReleaseInputHandle(70, 1, 9)])
    assert controller.state is StageState.FAULTED


def test_a_failure_of_an_unknown_kind_is_a_failed_step_that_names_it() -> None:
    assert tell(ready(), StageFailed(reason="Meteor")) == [StageFault(FaultReason.STEP_FAILED, "Meteor")]


@pytest.mark.spec("S1 6.5")
def test_a_crash_faults_in_every_state_before_the_stop_and_the_first_fault_stands() -> None:
    for facts in ((), (provision(),), (provision(), *READINESS), (provision(), *READINESS, loaded(0))):
        controller = fresh(*facts)
        assert tell(controller, WorkerCrashed(reason="a")) == [StageFault(FaultReason.WORKER_CRASHED, "a")]
        assert tell(controller, WorkerCrashed(reason="b"), StageFailed(reason="StepFailed")) == []
        assert controller.fault == StageFault(FaultReason.WORKER_CRASHED, "a")


@pytest.mark.spec("S1 6.5")
def test_the_teardown_goes_edges_then_release_then_stopped() -> None:
    for facts in ((), (provision(),), (provision(), *READINESS), (provision(), WorkerCrashed())):
        controller = fresh(*facts)
        assert tell(controller, StopRun(run_id=RUN)) == [StopLocalEdges(RUN)]
        assert controller.state is StageState.STOPPING
        assert tell(controller, TEARDOWN[2], TEARDOWN[3]) == [], "released before it was asked"
        assert tell(controller, TEARDOWN[0]) == []
        assert tell(controller, TEARDOWN[1]) == [ReleaseRunDeviceObjects(RUN), ResetRole(RUN)]
        assert tell(controller, TEARDOWN[0], TEARDOWN[1], TEARDOWN[3]) == []
        assert tell(controller, TEARDOWN[2]) == [StageStopped()]
        assert controller.state is StageState.STOPPED
        assert tell(controller, *TEARDOWN, loaded(0), WorkerCrashed()) == []
        assert tell(controller, StopRun(run_id=RUN)) == [StageStopped()]
        assert tell(controller, StopRun(run_id=2)) == []


@pytest.mark.spec("S1 6.5")
def test_faults_are_ignored_while_stopping_and_a_running_step_may_still_end() -> None:
    controller = ready()
    tell(controller, loaded(0), StopRun(run_id=RUN))
    assert tell(controller, WorkerCrashed(), StageFailed(reason="EdgeFault"), StopRun(run_id=RUN)) == []
    assert tell(controller, StepCompleted(step_id=0)) == [ReleaseInputHandle(70, 1, 9)]
    assert tell(controller, *TEARDOWN)[-1] == StageStopped()
    assert controller.fault is None


@pytest.mark.spec("S1 6.12")
def test_a_stop_or_teardown_fact_of_another_run_is_dropped() -> None:
    controller = ready()
    assert tell(controller, StopRun(run_id=2)) == []
    tell(controller, StopRun(run_id=RUN))
    for fact in TEARDOWN:
        assert tell(controller, type(fact)(run_id=2)) == []
    assert not controller.release_reset_requested
