"""StageController under random events, held against a second, independent model of S1 6.5."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

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
from worker import stage_controller as stage
from worker.stage_controller import StageState

ORCHESTRATOR = b"o" * 32
WIRE = StageProvisionWire(
    run_id=1,
    authorized_orchestrator=ORCHESTRATOR,
    node_id=1,
    stage_index=0,
    stage_count=1,
    layer_start=0,
    inbound_edge_id=1,
    outbound_edge_id=2,
    model_id="m",
    gguf_source=LocalPath(path="/m"),
    tokenizer=EmbeddedGguf(),
)
RUNS = st.sampled_from([1, 1, 1, 2])
EDGES = st.sampled_from([1, 2])
ALLOWED = {
    StageState.UNPROVISIONED: {StageState.PROVISIONING, StageState.FAULTED, StageState.STOPPING},
    StageState.PROVISIONING: {StageState.WAITING, StageState.FAULTED, StageState.STOPPING},
    StageState.WAITING: {StageState.READY_IDLE, StageState.FAULTED, StageState.STOPPING},
    StageState.READY_IDLE: {StageState.BUSY, StageState.FAULTED, StageState.STOPPING},
    StageState.BUSY: {StageState.READY_IDLE, StageState.FAULTED, StageState.STOPPING},
    StageState.FAULTED: {StageState.STOPPING},
    StageState.STOPPING: {StageState.STOPPED},
    StageState.STOPPED: set(),
}
"""The arrows of S1 6.5."""


class Stage(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.controller = stage.StageController(ORCHESTRATOR, 1)
        self.released: list[int] = []
        self.executed: list[int] = []
        self.once: list[type[stage.Output]] = []
        self.faulted = False

    def tell(self, fact: Message) -> None:
        before = self.controller.state
        was_provisioned = self.controller.provision is not None
        outputs = self.controller.handle(fact)
        after = self.controller.state
        assert after is before or after in ALLOWED[before], f"{before} to {after} by {fact}"
        for output in outputs:
            match output:
                case stage.ExecuteStep():
                    assert before is StageState.READY_IDLE
                    assert output.sequence == output.step_id == len(set(self.executed))
                    self.executed.append(output.sequence)
                case stage.ReleaseInputHandle():
                    self.released.append(output.handle_id)
                    assert output.handle_id == self.executed[-1], "a handle that is not the last step's"
                case stage.LoadWeights() | stage.StopLocalEdges() | stage.ReleaseRunDeviceObjects() | stage.ResetRole():
                    assert type(output) not in self.once, "executed twice"
                    self.once.append(type(output))
                case stage.StageFault():
                    assert not self.faulted or isinstance(fact, ProvisionStage)
                    self.faulted = True
                case stage.StageReady() if not isinstance(fact, ProvisionStage):
                    assert stage.StageReady not in self.once
                    self.once.append(stage.StageReady)
        assert len(set(self.released)) == len(self.released), "released twice"
        if isinstance(fact, ProvisionStage) and was_provisioned:
            assert not any(isinstance(output, stage.Command) for output in outputs)

    @rule(foreign=st.sampled_from([False] * 6 + [True]), other=st.sampled_from([False] * 6 + [True]))
    def provision(self, foreign: bool, other: bool) -> None:
        wire = msgspec.structs.replace(WIRE, node_id=2) if foreign else WIRE
        self.tell(ProvisionStage(provision=msgspec.structs.replace(wire, layer_start=1) if other else wire))

    @rule(run_id=RUNS, edge_id=EDGES, which=st.integers(0, 3))
    def readiness(self, run_id: int, edge_id: int, which: int) -> None:
        facts: list[Message] = [
            MarkWorkerReady(),
            MarkWeightsReady(run_id=run_id, node_id=1, stage_index=0),
            MarkInboundEdgeReady(edge_id=edge_id),
            MarkOutboundEdgeReady(edge_id=edge_id),
        ]
        self.tell(facts[which])

    @rule()
    def all_ready(self) -> None:
        for which in range(4):
            self.readiness(1, 1 if which == 2 else 2, which)

    @rule(edge_id=st.sampled_from([1, 1, 1, 2]), skew=st.sampled_from([0] * 8 + [1]))
    def object_loaded(self, edge_id: int, skew: int) -> None:
        sequence = self.controller.expected_sequence + skew
        self.tell(
            ObjectLoaded(
                edge_id=edge_id, object_id=sequence, sequence=sequence, handle_generation=1, handle_id=sequence
            )
        )

    @rule(skew=st.sampled_from([0, 0, 0, 1]))
    def step_completed(self, skew: int) -> None:
        self.tell(StepCompleted(step_id=self.controller.expected_sequence + skew))

    @rule(reason=st.sampled_from(["StepFailed", "ObjectFailed", "OutputFault", "EdgeFault", "?", "crash"]))
    def failed(self, reason: str) -> None:
        self.tell(WorkerCrashed() if reason == "crash" else StageFailed(reason=reason))

    @rule(run_id=RUNS)
    def stop(self, run_id: int) -> None:
        self.tell(StopRun(run_id=run_id))

    @rule(run_id=RUNS, which=st.integers(0, 3))
    def teardown_fact(self, run_id: int, which: int) -> None:
        kinds = (LocalEdgesStopped, WorkerRingsQuiesced, DeviceObjectsReleased, WorkerRoleReset)
        self.tell(kinds[which](run_id=run_id))

    @invariant()
    def consistent(self) -> None:
        self.controller.check()
        unreleased = len(self.executed) - len(self.released)
        assert unreleased in (0, 1), "at most the running step's input is in use"
        if self.controller.busy:
            assert unreleased == 1


@pytest.mark.spec("S1 6.5")
def test_random_events_keep_every_rule() -> None:
    run_state_machine_as_test(Stage, settings=settings(max_examples=300, stateful_step_count=40))
