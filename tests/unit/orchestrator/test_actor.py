"""OrchestratorActor and its report inbox: what is reported, what is dropped (S1 6.3, 6.4, 6.12, 9.19)."""

from __future__ import annotations

from typing import Any

import pytest

from common.actors import Actor, Ctx
from common.messages.orchestrator import (
    EndpointWire,
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
    StageAssignment,
)
from services.orchestrator.actor import EndRun, ExpectNode, OrchestratorActor, ReportInbox, ReportsPending
from tests.support.harness import Harness

KEY, STRANGER = b"k" * 32, b"s" * 32
RUN, NODE, STAGE = 7, 3, 0


class Owner(Actor):
    """Stands for the run: counts how often it is woken."""

    Incoming = (ReportsPending,)

    def __init__(self) -> None:
        self.woken = 0
        self.inbox: ReportInbox | None = None
        self.actor = OrchestratorActor(RUN, None)
        self.actor_address = b""

    def on_start(self, ctx: Ctx) -> None:
        self.inbox = ReportInbox(ctx.address)
        self.actor.report_to = ctx.spawn(self.inbox)
        self.actor_address = ctx.spawn(self.actor)

    def receive(self, msg: Any, ctx: Ctx) -> None:
        self.woken += 1


class Stage:
    def __init__(self) -> None:
        self.owner = Owner()
        self.harness = Harness(self.owner)
        self.tell(ExpectNode(NODE, STAGE, KEY))

    def tell(self, msg: Any, node: bytes = KEY) -> None:
        self.harness.tell(msg, src=b"a" * 32, src_node=node, dst=self.owner.actor_address)

    def reports(self) -> list[str]:
        assert self.owner.inbox is not None
        return [type(report).__name__ for _, report in self.owner.inbox.drain()]


def observations(run_id: int = RUN, node_id: int = NODE, stage_index: int = STAGE) -> list[Any]:
    common: dict[str, Any] = {"run_id": run_id, "stage_index": stage_index}
    return [
        ObserveNodeRuntimeReady(
            **common,
            node_id=node_id,
            endpoint=EndpointWire(node_key=KEY),
            node_actor=b"a" * 32,
            datastream_publisher=b"p" * 32,
            readiness_id=1,
        ),
        ObserveNodeRuntimeReadyAck(**common, node_id=node_id, readiness_id=1),
        ObserveStageProgress(**common, node_id=node_id, phase="loading"),
        ObserveWeightsReady(**common, node_id=node_id),
        ObserveStageReady(**common),
        ObserveStageFault(**common, reason="x"),
        ObserveStageStopped(**common),
    ]


EXPECTED = [
    "NodeRuntimeReady",
    "NodeRuntimeReadyAck",
    "StageProgress",
    "WeightsReady",
    "StageReady",
    "StageFault",
    "StageStopped",
]


@pytest.mark.spec("S1 6.4")
def test_every_observation_of_the_expected_worker_is_reported() -> None:
    stage = Stage()
    stage.tell(ObservePlanAvailable(run_id=RUN, stages=[StageAssignment(stage_index=STAGE, node_id=NODE)]))
    for message, name in zip(observations(), EXPECTED, strict=True):
        stage.tell(message)
        assert name in stage.reports()
    assert stage.owner.actor.dropped == 0


@pytest.mark.spec("S1 6.12", "S1 9.19")
@pytest.mark.parametrize(
    ("changes", "node"),
    [({"run_id": 8}, KEY), ({"node_id": 4}, KEY), ({"stage_index": 1}, KEY), ({}, STRANGER), ({}, b"")],
)
def test_whatever_does_not_match_run_node_stage_and_sender_is_dropped(changes: dict[str, int], node: bytes) -> None:
    stage = Stage()
    has_no_node_id = (ObserveStageReady, ObserveStageFault, ObserveStageStopped)
    for message in observations(**changes):
        if "node_id" in changes and isinstance(message, has_no_node_id):
            continue
        before = stage.owner.actor.dropped
        stage.tell(message, node)
        assert stage.reports() == [] and stage.owner.actor.dropped == before + 1
    assert stage.owner.actor.core.state == "waiting for plan and pool"


def test_nobody_is_believed_before_somebody_is_expected() -> None:
    owner = Owner()
    harness = Harness(owner)
    for message in observations():
        harness.tell(message, src_node=KEY, dst=owner.actor_address)
    assert owner.actor.dropped == len(EXPECTED) and owner.woken == 0


@pytest.mark.spec("S1 6.3")
def test_inbox_is_empty_pending_drained_and_wakes_its_owner_once() -> None:
    stage = Stage()
    inbox = stage.owner.inbox
    assert inbox is not None and inbox.state == "empty"
    for message in observations()[:4]:
        stage.tell(message)
    assert inbox.state == "pending" and stage.owner.woken == 1
    assert stage.reports() == EXPECTED[:4]
    assert inbox.state == "empty" and inbox.drain() == []
    stage.tell(observations()[3])
    assert inbox.state == "pending" and stage.owner.woken == 2


@pytest.mark.spec("S1 6.4")
def test_commands_and_lifecycle_of_the_machine_are_reported_each_once() -> None:
    stage = Stage()
    stage.tell(ExpectNode(NODE + 1, 1, STRANGER))
    stages = [StageAssignment(stage_index=index, node_id=NODE + index) for index in range(2)]
    stage.tell(ObservePlanAvailable(run_id=RUN + 1, stages=stages))
    stage.tell(ObservePoolReady(nodes=[NODE, NODE + 1]))
    assert stage.reports() == []
    stage.tell(ObservePlanAvailable(run_id=RUN, stages=stages))
    assert stage.reports() == ["Command"] * 4
    stage.tell(ObserveTokenInEndpointReady())
    stage.tell(ObserveTokenOutEndpointReady())
    stage.tell(ObserveTokenReceived(sequence=0, token_id=1, eos=False))
    stage.tell(ObserveEndpointFault(run_id=RUN + 1, endpoint="TokenIn"))
    assert stage.reports() == []
    stage.tell(ObserveEndpointFault(run_id=RUN, endpoint="TokenOut"))
    assert stage.reports() == ["Command"] * 3 + ["Lifecycle"]
    stage.tell(ObserveStageStopped(run_id=RUN, stage_index=0))
    stage.tell(ObserveStageStopped(run_id=RUN, stage_index=1), STRANGER)
    stage.tell(ObserveTokenEndpointsStopped())
    assert stage.reports() == ["StageStopped", "StageStopped", "Lifecycle"]
    assert stage.owner.actor.core.state == "torn down"


@pytest.mark.parametrize(("error", "event"), [("", "RunOperatorStopped"), ("node 3 exited", "RunFaulted")])
def test_end_of_the_run_is_the_machines_end(error: str, event: str) -> None:
    stage = Stage()
    stage.tell(EndRun(error), b"")
    stage.tell(EndRun("later"), b"")
    assert stage.owner.actor.core.events == [(event, error), ("RunTornDown", "")]
    assert stage.reports() == ["Lifecycle", "Lifecycle"]


def test_without_an_inbox_it_decides_all_the_same() -> None:
    actor = OrchestratorActor(RUN, None)
    harness = Harness(actor)
    harness.tell(ObservePlanAvailable(run_id=RUN, stages=[StageAssignment(stage_index=0, node_id=NODE)]))
    harness.tell(ObservePoolReady(nodes=[NODE]))
    assert actor.core.provisioned
