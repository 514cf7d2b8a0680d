"""The agent from its start to a ready stage: engine, readiness, acknowledgement, provision, weights (S1 4.6 to 4.9)."""

from __future__ import annotations

from typing import Any

import pytest

from common.actors import Inbox
from common.codec import Message
from common.effects import SendFailed
from common.messages.engine import ConfigureRole, Initialize, LoadWeights, Progress
from common.messages.node_agent import (
    LocalPath,
    MarkWeightsReady,
    RuntimeLoaded,
    RuntimeReadyAck,
    WorkerCrashed,
)
from common.messages.orchestrator import (
    EndpointWire,
    ObserveNodeRuntimeReady,
    ObserveNodeRuntimeReadyAck,
    ObserveStageFault,
    ObserveStageProgress,
    ObserveStageReady,
    ObserveWeightsReady,
)
from tests.support.harness import NODE
from tests.unit.agent.playbook import (
    ACK,
    ENGINE_READY,
    NODE_ID,
    ORCHESTRATOR,
    PUBLISHER,
    RUN,
    STAGE,
    WEIGHTS,
    Agent,
    provision,
    ready_agent,
)
from worker.agent.events import PageRead, ReadPage, StageReport, StartEngine
from worker.stage_controller import StageReady, StageState

READY = ObserveNodeRuntimeReady(
    run_id=RUN,
    node_id=NODE_ID,
    stage_index=STAGE,
    endpoint=EndpointWire(node_key=NODE),
    node_actor=b"actor" + (1).to_bytes(27, "big"),
    datastream_publisher=PUBLISHER,
    readiness_id=1,
)
WEIGHTS_READY = ObserveWeightsReady(run_id=RUN, node_id=NODE_ID, stage_index=STAGE)
STAGE_READY = ObserveStageReady(run_id=RUN, stage_index=STAGE)


@pytest.mark.spec("S1 6.5")
def test_the_engine_is_started_first_and_nothing_is_reported_before_it_answers() -> None:
    agent = Agent()
    assert agent.told() == [Initialize(device="CPU", threads=2)]
    assert Agent(measure=True).told() == [Initialize(device="CPU", threads=2, measure=True)]
    assert agent.effects() == [StartEngine()]
    agent.advance(1500)
    assert agent.sent() == []
    assert agent.events() == [("bootstrap", "engine", "started")]


@pytest.mark.spec("S1 5.5", "S1 9.5", "S1 6.5")
def test_readiness_is_reported_100_ms_doubling_to_2_s_until_acknowledged() -> None:
    agent = Agent()
    agent.engine(ENGINE_READY)
    times = []
    start = agent.now_ms
    for _ in range(12_000):
        times += [agent.now_ms - start] * len([1 for item in agent.sent() if item == (ORCHESTRATOR, READY)])
        agent.advance(1)
    assert times == [0, 100, 300, 700, 1500, 3100, 5100, 7100, 9100, 11_100]
    agent.tell(ACK)
    agent.sent()
    agent.advance(10_000)
    assert READY not in agent.sent_to(ORCHESTRATOR)
    assert ("bootstrap", "runtime_ready", "ready") in agent.events()


@pytest.mark.spec("S1 9.6", "S1 6.5")
def test_each_acknowledgement_is_answered() -> None:
    agent = Agent()
    agent.engine(ENGINE_READY)
    agent.sent()
    answer = ObserveNodeRuntimeReadyAck(run_id=RUN, node_id=NODE_ID, stage_index=STAGE, readiness_id=1)
    for _ in range(3):
        agent.tell(ACK)
        assert agent.sent() == [(ORCHESTRATOR, answer)]


@pytest.mark.spec("S1 6.12", "S1 9.19", "S1 9.6")
@pytest.mark.parametrize("wrong", [{"run_id": 2}, {"node_id": 9}, {"stage_index": 0}, {"readiness_id": 2}])
def test_an_acknowledgement_of_another_context_is_dropped_with_a_record(wrong: dict[str, int]) -> None:
    agent = Agent()
    agent.engine(ENGINE_READY)
    agent.quiet()
    fields: dict[str, Any] = {"run_id": RUN, "node_id": NODE_ID, "stage_index": STAGE, "readiness_id": 1, **wrong}
    agent.tell(RuntimeReadyAck(**fields))
    assert agent.sent() == []
    assert agent.events() == [("stage", "message", "dropped")]
    agent.advance(100)
    assert agent.sent_to(ORCHESTRATOR) == [READY], "still reporting"


@pytest.mark.spec("S1 5.6", "S1 6.6", "S1 9.7")
def test_a_provision_configures_and_loads_and_direct_mode_is_ready_with_the_weights() -> None:
    agent = Agent()
    agent.engine(ENGINE_READY)
    agent.tell(ACK)
    agent.quiet()
    agent.tell(provision(layer_end_exclusive=30, max_context=256))
    assert agent.told() == [
        ConfigureRole(run_id=RUN, stage_index=STAGE, stage_count=1, layer_start=0, layer_end_exclusive=30),
        LoadWeights(
            model_id="smol",
            gguf_source=LocalPath(path="/m.gguf"),
            tokenizer=provision().provision.tokenizer,
            max_context=256,
        ),
    ]
    assert agent.sent() == []
    agent.engine(WEIGHTS)
    assert agent.sent() == [(ORCHESTRATOR, WEIGHTS_READY), (ORCHESTRATOR, STAGE_READY)]
    assert agent.actor.core.state is StageState.READY_IDLE
    assert agent.events() == [
        ("stage", "provision", "started"),
        ("stage", "weights", "ready"),
        ("stage", "stage", "ready"),
    ]


@pytest.mark.spec("S1 6.6", "S1 5.6")
def test_a_repeated_provision_is_answered_again_and_not_executed_again() -> None:
    agent = Agent()
    agent.engine(ENGINE_READY)
    agent.quiet()
    agent.tell(provision())
    assert len(agent.told()) == 2
    agent.tell(provision())
    assert (agent.told(), agent.sent_to(ORCHESTRATOR)) == ([], [])
    agent.engine(WEIGHTS)
    agent.sent()
    for _ in range(2):
        agent.tell(provision())
        assert agent.told() == []
        assert agent.sent() == [(ORCHESTRATOR, WEIGHTS_READY), (ORCHESTRATOR, STAGE_READY)]


@pytest.mark.spec("S1 6.6", "S1 10.8")
@pytest.mark.parametrize("wrong", [{"authorized_orchestrator": b"x" * 32}, {"node_id": 9}])
def test_a_provision_of_somebody_else_faults_the_stage(wrong: dict[str, Any]) -> None:
    agent = Agent()
    agent.engine(ENGINE_READY)
    agent.quiet()
    agent.tell(provision(**wrong))
    assert agent.told() == []
    ((dst, fault),) = agent.sent()
    assert dst == ORCHESTRATOR and isinstance(fault, ObserveStageFault)
    assert fault.reason.startswith("UnauthorizedProvision: the provision ")
    agent.tell(provision())
    assert agent.sent_to(ORCHESTRATOR) == [fault], "a faulted stage takes no provision and says why"


@pytest.mark.spec("S1 6.12", "S1 9.19")
@pytest.mark.parametrize("wrong", [{"run_id": 2}, {"stage_index": 0}])
def test_a_provision_of_another_run_or_stage_is_dropped_with_a_record(wrong: dict[str, Any]) -> None:
    agent = Agent()
    agent.quiet()
    agent.tell(provision(**wrong))
    assert (agent.told(), agent.sent()) == ([], [])
    assert agent.events() == [("stage", "message", "dropped")]
    assert agent.actor.core.state is StageState.UNPROVISIONED


@pytest.mark.spec("S1 6.12", "S1 9.19")
@pytest.mark.parametrize(
    "fact",
    [
        MarkWeightsReady(run_id=RUN, node_id=NODE_ID, stage_index=STAGE),
        WorkerCrashed(reason="a lie"),
        RuntimeLoaded(
            run_id=RUN, node_id=NODE_ID, stage_index=STAGE, endpoint=EndpointWire(node_key=NODE), readiness_id=1
        ),
    ],
)
def test_another_worker_cannot_speak_for_this_one(fact: Message) -> None:
    agent = Agent()
    agent.tell(provision())
    agent.quiet()
    agent.tell(fact, src=b"f" * 32, src_node=b"w" * 32)
    assert agent.sent() == []
    assert agent.events() == [("stage", "message", "dropped")]
    agent.tell(fact, src=b"f" * 32, src_node=NODE)
    assert agent.sent() != [], "the same from this node counts"


@pytest.mark.spec("S1 6.5")
def test_progress_is_coalesced_to_ten_a_second_and_ends_with_the_weights() -> None:
    agent = Agent()
    agent.engine(ENGINE_READY)
    agent.tell(ACK)
    agent.tell(provision())
    agent.quiet()
    for step in range(950):
        agent.engine(Progress(phase="tensors", done=step, total=1000))
        agent.advance(1)
    told = [item for item in agent.sent_to(ORCHESTRATOR) if isinstance(item, ObserveStageProgress)]
    assert [item.done for item in told] == [0, 99, 199, 299, 399, 499, 599, 699, 799, 899]
    assert (told[0].run_id, told[0].node_id, told[0].stage_index) == (RUN, NODE_ID, STAGE)
    agent.engine(Progress(phase="warm_up", done=1, total=2), WEIGHTS)
    agent.sent()
    agent.advance(1000)
    agent.engine(Progress(phase="warm_up", done=2, total=2))
    assert agent.sent_to(ORCHESTRATOR) == []


def test_a_moving_page_is_told_as_progress_once_a_second() -> None:
    agent = Agent()
    agent.engine(ENGINE_READY)
    agent.tell(provision())
    agent.tell(ACK)
    agent.engine(Progress(phase="kernels", done=3, total=9))
    agent.quiet()
    for step in range(10):
        agent.advance(500)
        assert agent.effects() == [ReadPage()]
        agent.tell(PageRead("warming_up", step, step))
    told = agent.sent_to(ORCHESTRATOR)
    assert 4 <= len(told) <= 6
    assert {(item.phase, item.done) for item in told if isinstance(item, ObserveStageProgress)} == {("kernels", 3)}


@pytest.mark.spec("S1 6.11")
def test_a_report_that_was_not_delivered_is_given_again() -> None:
    agent = ready_agent()
    agent.tell(SendFailed(ORCHESTRATOR, WEIGHTS_READY, "link_down"))
    agent.tell(SendFailed(ORCHESTRATOR, STAGE_READY, "link_down"))
    agent.tell(SendFailed(ORCHESTRATOR, READY, "link_down"))
    assert agent.sent() == []
    agent.advance(2000)
    assert agent.sent() == [(ORCHESTRATOR, WEIGHTS_READY), (ORCHESTRATOR, STAGE_READY)]
    agent.advance(10_000)
    assert agent.sent() == []


def test_a_local_actor_may_follow_the_stage() -> None:
    agent = Agent()
    inbox = Inbox(StageReport)
    agent.actor.report_to = agent.system.spawn(inbox)
    agent.engine(ENGINE_READY)
    agent.tell(provision())
    agent.engine(WEIGHTS)
    assert [report.output for _, report in inbox.drain()][-1] == StageReady()
