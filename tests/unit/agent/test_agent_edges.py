"""The agent of a pipeline stage: edges opened and closed by the engine, sequences, faults, edges over the bus."""

from __future__ import annotations

import pytest

from common.codec import encode_body
from common.edges.carrier import Carried, EdgeCarrierActor, carrier_address
from common.messages.edge import BeginSequence, EdgeCredit, EdgeNotYet, SequenceBegun
from common.messages.engine import (
    Cancel,
    Cancelled,
    CloseEdges,
    ConfigureRole,
    EdgeBind,
    EdgeCarry,
    EdgeReady,
    EdgesClosed,
    EngineBegin,
    EngineBegun,
    EngineFault,
    EngineReady,
    Initialize,
    LoadWeights,
    OpenEdges,
    Released,
    ReleaseRun,
    ResetRole,
    RoleReset,
    StageFaulted,
)
from common.messages.node_agent import (
    CancelRequest,
    ObjectSpec,
    ProvisionStage,
    RingSpec,
    StageInboundEdgeWire,
    StageOutboundEdgeWire,
    StopRun,
)
from common.messages.orchestrator import (
    EndpointWire,
    ObserveNodeRuntimeReady,
    ObserveStageFault,
    ObserveStageReady,
    ObserveStageStopped,
    ObserveWeightsReady,
)
from common.messages.prompt import RequestCancelled, TokenizerFault
from tests.support.harness import Harness
from tests.unit.agent.playbook import (
    ACK,
    GATEWAY_INBOX,
    NODE_ID,
    ORCHESTRATOR,
    PUBLISHER,
    RUN,
    STAGE,
    SWIM,
    WEIGHTS,
    Agent,
    provision,
)
from worker.agent.core import NodeAgentActor
from worker.agent.events import WorkerIdentity

SPEC, RING = ObjectSpec(max_extent=400, alignment=4), RingSpec(data_capacity=440, alignment=64)
INBOUND = StageInboundEdgeWire(edge_id=4, kind="Activation", object_spec=SPEC, ring_spec=RING, edge_token=b"i" * 16)
OUTBOUND = StageOutboundEdgeWire(
    edge_id=5,
    kind="TokenOut",
    object_spec=SPEC,
    ring_spec=RING,
    consumer_node_id=1,
    consumer_endpoint=EndpointWire(node_key=b"g" * 32, candidates=["ipc:///gw"]),
    edge_token=b"o" * 16,
)
BIND = EdgeBind(run=b"r" * 16, public_key=b"p" * 32, secret_key=b"s" * 32, addresses=["ipc:///e4"])
READY = EngineReady(pid=7, backend="x", elapsed_ms=1, edge_candidates=["ipc:///e4"])
GATEWAY = b"G" * 32


def staged() -> ProvisionStage:
    return provision(stage_count=5, inbound_edge_id=4, outbound_edge_id=5, inbound_edge=INBOUND, outbound_edge=OUTBOUND)


def stage_agent() -> Agent:
    agent = Agent()
    agent.engine(READY)
    agent.tell(ACK)
    agent.tell(staged())
    return agent


def ready_stage() -> Agent:
    agent = stage_agent()
    agent.engine(WEIGHTS, EdgeReady(edge_id=4), EdgeReady(edge_id=5, path="ipc:///gw"))
    return agent.quiet()


def test_the_engine_binds_before_the_worker_says_that_it_is_ready() -> None:
    identity = WorkerIdentity(RUN, NODE_ID, STAGE, ORCHESTRATOR, edge=BIND)
    harness = Harness(NodeAgentActor(identity, PUBLISHER, SWIM))
    (initialize,) = [e.message for e in harness.effects() if hasattr(e, "message")]
    assert isinstance(initialize, Initialize) and initialize.edge == BIND
    assert "ssss" not in repr(initialize), "a key pair in a log"
    agent = Agent()
    agent.engine(READY)
    (report,) = [m for m in agent.sent_to(ORCHESTRATOR) if isinstance(m, ObserveNodeRuntimeReady)]
    assert report.endpoint.candidates == ["ipc:///e4"] and report.endpoint.relay


@pytest.mark.spec("S1 6.5", "S1 6.6", "S1 5.6")
def test_edges_role_and_weights_are_ordered_and_all_of_them_make_the_stage_ready() -> None:
    agent = stage_agent()
    opened, role, load = agent.told()[1:]
    assert isinstance(opened, OpenEdges) and (opened.inbound, opened.outbound) == (INBOUND, OUTBOUND)
    assert (opened.stage_index, opened.stage_count, opened.node_id) == (STAGE, 5, NODE_ID)
    assert isinstance(role, ConfigureRole) and isinstance(load, LoadWeights)
    agent.quiet()
    agent.engine(WEIGHTS, EdgeReady(edge_id=4))
    assert [type(m) for m in agent.sent_to(ORCHESTRATOR)] == [ObserveWeightsReady]
    agent.engine(EdgeReady(edge_id=5, path="ipc:///gw"))
    assert [type(m) for m in agent.sent_to(ORCHESTRATOR)] == [ObserveStageReady]
    agent.tell(staged())
    assert [type(m) for m in agent.sent_to(ORCHESTRATOR)] == [ObserveWeightsReady, ObserveStageReady]
    assert not [m for m in agent.told() if isinstance(m, OpenEdges | LoadWeights)], "a repeat is not executed again"


def test_sequences_begin_and_are_cancelled() -> None:
    agent = ready_stage()
    begin = BeginSequence(request_id=9, first_object_id=40, reply_to=GATEWAY_INBOX, recent=[1, 2])
    agent.tell(begin)
    assert agent.told() == [EngineBegin(request_id=9, first_object_id=40, recent=[1, 2])]
    agent.engine(EngineBegun(request_id=9))
    assert agent.sent_to(GATEWAY_INBOX) == [SequenceBegun(request_id=9, stage_index=STAGE)]
    agent.tell(CancelRequest(request_id=9), src=GATEWAY)
    assert agent.told() == [Cancel(request_id=9)]
    agent.engine(Cancelled(request_id=9))
    assert agent.sent_to(GATEWAY) == [RequestCancelled(request_id=9)]
    agent.tell(begin)
    agent.engine(EngineFault(request_id=9, error="temperature is -1"))
    assert agent.sent_to(GATEWAY_INBOX) == [TokenizerFault(request_id=9, error="temperature is -1")]


def test_a_stage_that_is_not_ready_begins_nothing() -> None:
    agent = stage_agent().quiet()
    agent.tell(BeginSequence(request_id=9, first_object_id=0, reply_to=GATEWAY_INBOX))
    (fault,) = agent.sent_to(GATEWAY_INBOX)
    assert isinstance(fault, TokenizerFault) and "the worker is not ready" in fault.error
    assert agent.told() == []


@pytest.mark.parametrize(
    ("reason", "reported"),
    [
        ("EdgeFault", "EdgeFault: edge 4: gone"),
        ("ObjectFailed", "ObjectFailed: edge 4: gone"),
        ("StepFailed", "StepFailed: edge 4: gone"),
        ("SequenceViolation", "StepFailed: SequenceViolation edge 4: gone"),
    ],
)
def test_a_fault_of_the_engines_half_is_the_stages_fault(reason: str, reported: str) -> None:
    agent = ready_stage()
    agent.engine(StageFaulted(reason=reason, detail="edge 4: gone"))
    agent.engine(StageFaulted(reason="EdgeFault", detail="and another"))
    assert agent.sent_to(ORCHESTRATOR) == [ObserveStageFault(run_id=RUN, stage_index=STAGE, reason=reported)]


@pytest.mark.spec("S1 6.5", "S1 9.16")
def test_the_teardown_goes_step_by_step() -> None:
    agent = ready_stage()
    agent.tell(StopRun(run_id=RUN))
    assert agent.told() == [CloseEdges()], "nothing is released while an edge moves"
    agent.engine(EdgesClosed())
    assert agent.told() == [ReleaseRun(), ResetRole()]
    agent.engine(Released())
    assert not [m for m in agent.sent_to(ORCHESTRATOR) if isinstance(m, ObserveStageStopped)]
    agent.engine(RoleReset())
    assert [type(m) for m in agent.sent_to(ORCHESTRATOR)] == [ObserveStageStopped]


def test_stream_messages_over_the_bus() -> None:
    agent = ready_stage()
    credit = EdgeCredit(edge_id=4, consumed_offset=80)
    agent.engine(EdgeCarry(peer=b"q" * 32, frame=encode_body(credit)))
    assert agent.sent_to(carrier_address(b"q" * 32)) == [credit]
    agent.engine(EdgeCarry(peer=b"q" * 32, frame=b"junk"))
    assert agent.sent() == []
    agent.tell(Carried(b"q" * 32, encode_body(EdgeNotYet(edge_id=5))))
    assert agent.told() == [EdgeCarry(peer=b"q" * 32, frame=encode_body(EdgeNotYet(edge_id=5)))]


def test_the_carrier_says_which_node_the_broker_verified() -> None:
    carrier = Harness(EdgeCarrierActor(b"owner".ljust(32)))
    carrier.tell(EdgeNotYet(edge_id=5), src=b"x" * 32, src_node=b"q" * 32)
    assert carrier.system.outbound == []  # a local event; its owner is not of this harness
    assert carrier_address(b"a" * 32) != carrier_address(b"b" * 32)
