"""New edges for a stage that keeps its weights: a neighbour was replaced ([runtime] on_worker_loss = "restart")."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from common.messages.node_agent import (
    MarkInboundEdgeReady,
    MarkOutboundEdgeReady,
    MarkWeightsReady,
    MarkWorkerReady,
    ObjectLoaded,
    ObjectSpec,
    ProvisionStage,
    RingSpec,
    StageFailed,
    StageInboundEdgeWire,
    StageOutboundEdgeWire,
    StageProvisionWire,
    StepCompleted,
    StopRun,
)
from common.messages.orchestrator import EndpointWire
from tests.unit.worker.test_stage_controller import INBOUND, NODE, ORCHESTRATOR, OUTBOUND, RUN, STAGE, WIRE
from worker.stage_controller import (
    ExecuteStep,
    FaultReason,
    RenewEdges,
    StageController,
    StageFault,
    StageReady,
    StageState,
    StepAccepted,
    WeightsReady,
)

SPEC, RING = ObjectSpec(max_extent=64, alignment=4), RingSpec(data_capacity=128, alignment=8)


def wire(generation: int, **changes: Any) -> StageProvisionWire:
    token = bytes([generation]) * 16
    common: dict[str, Any] = {"kind": "Activation", "object_spec": SPEC, "ring_spec": RING, "edge_token": token}
    endpoint = EndpointWire(node_key=bytes([generation]) * 32)
    return msgspec.structs.replace(
        WIRE,
        generation=generation,
        inbound_edge=StageInboundEdgeWire(edge_id=INBOUND, **common),
        outbound_edge=StageOutboundEdgeWire(edge_id=OUTBOUND, consumer_node_id=9, consumer_endpoint=endpoint, **common),
        **changes,
    )


def edges_ready(core: StageController) -> list[Any]:
    return [
        *core.handle(MarkInboundEdgeReady(edge_id=INBOUND)),
        *core.handle(MarkOutboundEdgeReady(edge_id=OUTBOUND)),
    ]


def ready() -> StageController:
    core = StageController(ORCHESTRATOR, NODE)
    core.handle(ProvisionStage(provision=wire(0)))
    core.handle(MarkWorkerReady())
    core.handle(MarkWeightsReady(run_id=RUN, node_id=NODE, stage_index=STAGE))
    assert edges_ready(core) == [StageReady()]
    return core


def loaded(sequence: int) -> ObjectLoaded:
    return ObjectLoaded(edge_id=INBOUND, object_id=sequence, sequence=sequence, handle_generation=1, handle_id=sequence)


@pytest.mark.parametrize("busy", [False, True])
def test_weights_stay_edges_and_sequence_begin_anew(busy: bool) -> None:
    core = ready()
    core.handle(loaded(0))
    if not busy:
        core.handle(StepCompleted(step_id=0))
    renewed = core.handle(ProvisionStage(provision=wire(1)))
    assert renewed == [RenewEdges(wire(1)), WeightsReady()] and core.state is StageState.WAITING
    core.check()
    assert core.handle(ProvisionStage(provision=wire(1))) == [WeightsReady()], "a repeat is not executed again"
    assert edges_ready(core) == [StageReady()]
    assert core.handle(loaded(0)) == [ExecuteStep(0, INBOUND, 0, 0, (OUTBOUND,)), StepAccepted(0)]
    core.check()


def test_a_broken_edge_is_mended_and_no_other_fault() -> None:
    core = ready()
    core.handle(StageFailed(reason="EdgeFault", detail="edge 5: gone"))
    assert core.handle(ProvisionStage(provision=wire(1)))[0] == RenewEdges(wire(1))
    assert core.fault is None
    core.handle(StageFailed(reason="StepFailed", detail="no memory"))
    assert core.handle(ProvisionStage(provision=wire(2))) == [StageFault(FaultReason.STEP_FAILED, "no memory")]


def test_what_differs_in_more_than_edges_is_another_provision() -> None:
    core = ready()
    (fault,) = core.handle(ProvisionStage(provision=wire(1, layer_start=5)))
    assert fault == StageFault(FaultReason.UNAUTHORIZED_PROVISION, "the stage already has another provision")


def test_a_stage_that_is_stopping_takes_no_new_edges() -> None:
    core = ready()
    core.handle(StopRun(run_id=RUN))
    assert core.handle(ProvisionStage(provision=wire(1))) == []
