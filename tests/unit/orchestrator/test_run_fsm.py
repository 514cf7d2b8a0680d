"""The run's state machine by its rules (S1 6.4; rust-swactor.md 4.2), and under any order of observations."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from common.messages.orchestrator import StageAssignment
from services.orchestrator.run_fsm import OrchestratorRun

PLAN = [StageAssignment(stage_index=index, node_id=2 + index) for index in range(2)]


def kinds(run: OrchestratorRun) -> list[str]:
    return [command.kind for command in run.commands]


def provisioned(stages: int = 2, *, max_tokens: int = 0, prompt: list[int] | None = None) -> OrchestratorRun:
    run = OrchestratorRun(1, max_tokens=max_tokens, prompt=[5, 6] if prompt is None else prompt)
    run.plan_available(PLAN[:stages])
    run.pool_is_ready([2, 3])
    return run


def generating(*, max_tokens: int = 0) -> OrchestratorRun:
    run = provisioned(max_tokens=max_tokens)
    run.stage_ready(0)
    run.stage_ready(1)
    run.token_endpoint_ready(inbound=True)
    run.token_endpoint_ready(inbound=False)
    return run


@pytest.mark.spec("S1 6.4")
def test_provisions_once_when_plan_and_pool_are_both_known() -> None:
    run = OrchestratorRun(1)
    assert run.state == "waiting for plan and pool"
    run.pool_is_ready([2])
    run.plan_available(PLAN)
    assert run.commands == []
    run.pool_is_ready([3])
    assert kinds(run) == ["ProvisionStage", "ProvisionStage", "CreateTokenInEndpoint", "CreateTokenOutEndpoint"]
    assert [(command.stage_index, command.node_id) for command in run.commands[:2]] == [(0, 2), (1, 3)]
    run.pool_is_ready([2, 3])
    run.plan_available(PLAN[:1])
    assert len(run.commands) == 4 and run.plan == PLAN


def test_one_stage_has_no_token_endpoints() -> None:
    run = provisioned(1, prompt=[])
    assert kinds(run) == ["ProvisionStage"]
    assert run.state == "waiting for stage readiness"
    run.stage_ready(0)
    assert run.state == "provisioned"
    run.operator_stop()
    assert kinds(run)[1:] == ["StopRun"]
    run.stage_stopped(0)
    assert run.state == "torn down"


@pytest.mark.spec("S1 6.4")
def test_prompt_is_injected_once_and_only_when_endpoints_and_every_stage_are_ready() -> None:
    run = provisioned()
    assert run.state == "waiting for stage readiness"
    run.token_endpoint_ready(inbound=True)
    run.stage_ready(0)
    run.stage_ready(1)
    assert run.state == "waiting for token endpoints" and not run.injected_sequences
    run.token_endpoint_ready(inbound=False)
    assert run.injected_sequences == [0] and run.commands[-1].tokens == [5, 6]
    run.stage_ready(1)
    run.token_endpoint_ready(inbound=True)
    assert run.injected_sequences == [0] and run.state == "generating tokens"


@pytest.mark.spec("S1 6.4")
def test_next_token_is_injected_only_after_the_one_before_came_back() -> None:
    run = generating()
    run.token_received(1, 8, eos=False)
    assert run.injected_sequences == [0]
    run.token_received(0, 7, eos=False)
    assert run.injected_sequences == [0, 1] and run.commands[-1].tokens == [7]
    run.token_received(0, 7, eos=False)
    assert run.injected_sequences == [0, 1]
    run.token_received(1, 2, eos=True)
    assert run.events == [("RunCompleted", "")]
    run.token_received(2, 9, eos=False)
    assert run.injected_sequences == [0, 1] and run.state == "tearing down"


@pytest.mark.parametrize("max_tokens", [1, 2, 5])
def test_completes_when_as_many_as_allowed_were_injected(max_tokens: int) -> None:
    run = generating(max_tokens=max_tokens)
    for sequence in range(max_tokens):
        assert not run.terminal
        run.token_received(sequence, 7, eos=False)
    assert run.terminal == "RunCompleted" and len(run.injected_sequences) == max_tokens


def test_nothing_is_injected_into_a_run_that_is_not_provisioned() -> None:
    run = OrchestratorRun(1, prompt=[5])
    run.plan_available(PLAN[:1])
    run.token_endpoint_ready(inbound=True)
    run.token_endpoint_ready(inbound=False)
    run.stage_ready(0)
    assert run.injected_sequences == []
    run.pool_is_ready([2])
    assert run.injected_sequences == [0]


def test_token_before_the_prompt_is_ignored() -> None:
    run = provisioned()
    run.token_received(0, 7, eos=True)
    assert not run.terminal


@pytest.mark.spec("S1 6.4")
def test_unknown_stage_faults_the_run() -> None:
    run = provisioned()
    run.stage_ready(9)
    assert run.events == [("RunFaulted", "UnknownStageReady")]


@pytest.mark.spec("S1 6.4", "S1 4.12")
def test_teardown_starts_once_and_ends_once_after_every_stage_and_the_endpoints() -> None:
    run = provisioned()
    run.fault("StageFault: x")
    run.fault("second")
    run.operator_stop()
    assert kinds(run)[4:] == ["StopRun", "StopRun", "TearDownTokenEndpoints"]
    run.stage_stopped(0)
    run.stage_stopped(1)
    assert run.state == "tearing down"
    run.endpoints_stopped()
    run.endpoints_stopped()
    run.stage_stopped(1)
    assert run.events == [("RunFaulted", "StageFault: x"), ("RunTornDown", "")]
    assert run.state == "torn down"


def test_stop_before_any_plan_is_torn_down_at_once_and_never_provisions() -> None:
    run = OrchestratorRun(1)
    run.operator_stop()
    assert run.events == [("RunOperatorStopped", ""), ("RunTornDown", "")]
    run.plan_available(PLAN)
    run.pool_is_ready([2, 3])
    assert run.commands == []


class RunMachine(RuleBasedStateMachine):
    """Any observation at any time: each end once, sequences without a hole, no injection after the end."""

    def __init__(self) -> None:
        super().__init__()
        self.run = OrchestratorRun(1, max_tokens=3, prompt=[1])
        self.injected_at_end: int | None = None

    @rule(stages=st.integers(1, 2))
    def plan(self, stages: int) -> None:
        self.run.plan_available(PLAN[:stages])

    @rule(nodes=st.lists(st.sampled_from([2, 3, 9])))
    def pool(self, nodes: list[int]) -> None:
        self.run.pool_is_ready(nodes)

    @rule(stage=st.integers(0, 1))
    def ready(self, stage: int) -> None:
        self.run.stage_ready(stage)

    @rule(inbound=st.booleans())
    def endpoint(self, inbound: bool) -> None:
        self.run.token_endpoint_ready(inbound=inbound)

    @rule(sequence=st.integers(0, 4), eos=st.booleans())
    def token(self, sequence: int, eos: bool) -> None:
        self.run.token_received(sequence, 7, eos)

    @rule(reason=st.sampled_from(["", "StageFault", "EndpointFault"]))
    def end(self, reason: str) -> None:
        if reason:
            self.run.fault(reason)
        else:
            self.run.operator_stop()

    @rule(stage=st.integers(0, 1))
    def stopped(self, stage: int) -> None:
        self.run.stage_stopped(stage)

    @rule()
    def endpoints_stopped(self) -> None:
        self.run.endpoints_stopped()

    @invariant()
    def holds(self) -> None:
        run = self.run
        run.check()
        assert run.state
        assert kinds(run).count("TearDownTokenEndpoints") <= 1
        assert kinds(run).count("ProvisionStage") in (0, len(run.plan or []))
        if run.injected_sequences:
            assert run.provisioned and {stage.stage_index for stage in run.plan or []} <= run.ready_stages
        if run.terminal:
            if self.injected_at_end is None:
                self.injected_at_end = len(run.injected_sequences)
            assert len(run.injected_sequences) == self.injected_at_end
        if run.torn_down:
            assert {stage.stage_index for stage in run.plan or []} <= run.stopped_stages


@pytest.mark.spec("S1 6.4")
def test_any_observation_at_any_time_keeps_the_rules() -> None:
    run_state_machine_as_test(RunMachine, settings=settings(max_examples=150, stateful_step_count=30))
