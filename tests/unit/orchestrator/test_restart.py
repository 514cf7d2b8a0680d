"""[runtime] on_worker_loss = "restart": what a run does when it loses a worker while serving, and when it gives up."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from common.limits import (
    WORKER_LOSS_NAMED_MS,
    WORKER_RESTART_BACKOFF_MS,
    WORKER_RESTARTS_MAX,
    WORKER_RESTARTS_WINDOW_MS,
)
from common.messages.node_agent import ProvisionStage
from common.messages.orchestrator import EndpointWire, ObserveStageFault, ObserveStageReady
from common.messages.provision import NodeExited, NodeFailed, NodeStarted, StartNode
from common.messages.serve import (
    CloseRpc,
    HoldServing,
    OpenPromptRpc,
    OpenTokenIn,
    OpenTokenOut,
    RestoreServing,
    ServingDisturbed,
    ServingRestored,
    ShutdownRequested,
    SuspendServing,
    TokenEndpointReady,
)
from services.orchestrator.base import Phase, RunOver
from tests.unit.orchestrator.playbook import NODE_ID, RUN_ID, Play
from tests.unit.orchestrator.test_planned import PlannedPlay


class RestartPlay(PlannedPlay):
    """Workers of a later attempt have other keys and actors."""

    attempts: tuple[int, ...] = (0, 0)

    def key(self, stage: int = 0) -> bytes:  # type: ignore[override]
        return bytes([0x10 + stage + 4 * self.attempts[stage]]) * 32

    def node_actor(self, stage: int = 0) -> bytes:  # type: ignore[override]
        return bytes([0x20 + stage + 4 * self.attempts[stage]]) * 32

    def started(self, stage: int = 0) -> None:
        started = NodeStarted(
            node_id=NODE_ID + stage,
            stage_index=stage,
            handle="h",
            node_key=self.key(stage),
            attempt=self.attempts[stage],
        )
        self.provisioner(started)

    def next_attempt(self, *stages: int) -> None:
        self.attempts = tuple(count + (stage in stages) for stage, count in enumerate(self.attempts))

    def exited(
        self, stage: int = 0, status: int = 1, tail: list[str] | None = None, attempt: int | None = None
    ) -> None:
        exited = NodeExited(
            node_id=NODE_ID + stage,
            stage_index=stage,
            status=status,
            attempt=self.attempts[stage] if attempt is None else attempt,
        )
        self.provisioner(exited)

    def stages_ready(self, generation: int) -> None:
        """Both stages, and the gateway's ends."""
        for stage in (0, 1):
            self.loaded(stage)
        for name in ("TokenIn", "TokenOut"):
            self.gateway(TokenEndpointReady(endpoint=name))
        for stage in (0, 1):
            self.worker(ObserveStageReady(run_id=RUN_ID, stage_index=stage, generation=generation), stage)

    def serving(self) -> RestartPlay:
        self.begin(on_worker_loss="restart").planned().acknowledged().weights()
        self.stages_ready(0)
        self.opened()
        assert self.at(Phase.SERVING)
        self.said()
        self.records()
        return self

    def waited(self, attempt: int = 0) -> RestartPlay:
        self.harness.advance(WORKER_RESTART_BACKOFF_MS[attempt])
        return self

    def comes_back(self, *stages: int) -> None:
        """The replaced workers, up to the hand-over."""
        for stage in stages:
            self.started(stage)
        for stage in stages:
            self.reported(stage, endpoint=EndpointWire(node_key=self.key(stage), candidates=[f"ipc:///new{stage}"]))
            self.routed(stage)
            self.member(stage)
        for stage in stages:
            self.acked(stage)
        self.completed()
        self.weights()

    def restored(self) -> None:
        self.gateway(ServingRestored(replayed=12))
        assert self.at(Phase.SERVING)


def steps(play: Play) -> list[tuple[str, str]]:
    return [(r["phase"], r["status"]) for r in play.records() if r["phase"] == "worker_restart"]


def test_a_lost_worker_is_replaced_and_the_living_one_gets_new_edges() -> None:
    play = RestartPlay().serving()
    play.exited(1, status=-9)
    (hold,) = play.said(HoldServing, StartNode, CloseRpc, SuspendServing)
    assert hold.error == f"node {NODE_ID + 1} stage 1 exited while serving prompts: exit status -9"
    play.waited().next_attempt(1)
    (start,) = play.said(StartNode)
    assert (start.spec.node_id, start.spec.stage_index, start.spec.attempt) == (NODE_ID + 1, 1, 1)
    play.exited(1, attempt=0)
    assert play.at(Phase.START), "the old worker's end is no news of the new one"
    play.comes_back(1)
    _, open_in, first = play.said(OpenTokenOut, OpenTokenIn, ProvisionStage)
    assert first.provision.stage_index == 0 and first.provision.generation == 1
    assert first.provision.outbound_edge.consumer_endpoint.candidates == ["ipc:///new1"]
    assert open_in.token_in.edge_token == first.provision.inbound_edge.edge_token
    play.worker(ObserveStageReady(run_id=RUN_ID, stage_index=0, generation=0), 0)
    assert not play.run.workers[0].stage_ready, "said before it had the new edges"
    play.stages_ready(1)
    restore = play.said(RestoreServing, OpenPromptRpc)[-1]
    assert restore.run.stage_actors == [play.node_actor(0), play.node_actor(1)] and restore.run.restart
    assert restore.run.nodes == [play.key(0), play.key(1)]
    play.restored()
    started, ready = [r for r in play.records() if r["phase"] == "worker_restart"]
    assert started["node_id"] == NODE_ID + 1 and started["detail"]["attempt"] == 1
    assert started["detail"]["cause"] == hold.error and started["detail"]["replaced_node_ids"] == [NODE_ID + 1]
    assert (ready["status"], ready["detail"]["replayed_tokens"]) == ("ready", 12)
    play.run.check()


def test_a_loss_during_start_up_ends_the_run_as_ever() -> None:
    play = RestartPlay()
    play.begin(on_worker_loss="restart").planned().acknowledged().weights()
    play.exited(1)
    assert play.failure()["detail"]["error"].startswith(f"node {NODE_ID + 1} stage 1 exited while loading weights")


def test_two_that_die_together_are_one_loss() -> None:
    play = RestartPlay().serving()
    play.exited(0)
    play.exited(1)
    play.waited().next_attempt(0, 1)
    assert [s.spec.stage_index for s in play.said(StartNode)] == [0, 1]
    play.comes_back(0, 1)
    play.stages_ready(1)
    play.restored()
    assert steps(play) == [("worker_restart", "started"), ("worker_restart", "ready")]


@pytest.mark.spec("S1 9.15")
def test_when_the_attempts_are_spent_the_run_fails_with_the_first_cause() -> None:
    play = RestartPlay().serving()
    play.exited(1, status=-9)
    for attempt in range(WORKER_RESTARTS_MAX):
        play.waited(attempt).next_attempt(1)
        (start,) = play.said(StartNode)
        assert start.spec.attempt == attempt + 1
        failed = NodeFailed(node_id=NODE_ID + 1, stage_index=1, error="no space", attempt=attempt + 1)
        play.provisioner(failed)
    failure = next(r for r in play.records() if r["status"] == "failed" and r["phase"] != "worker_restart")
    error = failure["detail"]["error"]
    assert (failure["phase"], failure["node_id"]) == ("serve_prompts", NODE_ID + 1)
    assert error.startswith(
        f"node {NODE_ID + 1} stage 1 exited while serving prompts: exit status -9; after 3 restarts"
    )
    assert error.endswith(f"the last failed: node {NODE_ID + 1} did not start: no space")
    assert [close.reason for close in play.said(CloseRpc)] == [error]


def test_a_crash_loop_ends_and_a_rare_loss_does_not() -> None:
    play = RestartPlay().serving()
    for generation in range(1, WORKER_RESTARTS_MAX + 1):
        play.exited(1)
        play.waited(generation - 1).next_attempt(1)
        play.comes_back(1)
        play.stages_ready(generation)
        play.restored()
    play.harness.advance(WORKER_RESTARTS_WINDOW_MS)
    play.exited(1)
    assert not play.said(CloseRpc)
    play.waited().next_attempt(1)
    play.comes_back(1)
    play.stages_ready(WORKER_RESTARTS_MAX + 1)
    play.restored()
    for generation in range(WORKER_RESTARTS_MAX + 2, 2 * WORKER_RESTARTS_MAX + 1):
        play.exited(1)
        play.waited(2).next_attempt(1)
        play.comes_back(1)
        play.stages_ready(generation)
        play.restored()
    play.exited(1)
    (close,) = play.said(CloseRpc)
    assert "after 3 restarts within 10 minutes the run ends" in close.reason


def test_a_broken_edge_waits_for_the_name_of_the_lost_and_else_renews_edges() -> None:
    play = RestartPlay().serving()
    fault = "EdgeFault: edge 2: the connection broke"
    play.worker(ObserveStageFault(run_id=RUN_ID, stage_index=0, reason=fault), 0)
    assert play.said(HoldServing) and play.at(Phase.RESTART)
    play.harness.advance(WORKER_LOSS_NAMED_MS)
    assert not play.said(StartNode) and play.at(Phase.BOOTSTRAP)
    play.weights()
    play.worker(ObserveStageFault(run_id=RUN_ID, stage_index=0, reason=fault), 0)
    assert play.at(Phase.WEIGHTS), "of the edges before"
    play.stages_ready(1)
    play.restored()
    # The gateway sees it first, then the provider says who it was.
    play.gateway(ServingDisturbed(error="pipeline token-out stream fault"))
    play.exited(1)
    play.waited(1).next_attempt(1)
    assert [s.spec.stage_index for s in play.said(StartNode)] == [1]


def test_a_fault_that_is_no_loss_ends_the_run() -> None:
    play = RestartPlay().serving()
    play.faulted("StepFailed: out of memory", stage=1)
    assert "StepFailed: out of memory" in play.failure()["detail"]["error"]


def test_a_stop_while_a_worker_is_replaced_is_a_controlled_shutdown() -> None:
    play = RestartPlay().serving()
    play.exited(1)
    play.waited()
    play.gateway(ShutdownRequested(source="rpc"))
    assert play.said(CloseRpc)
    assert play.run.result.error == ""


# --- any order ----------------------------------------------------------------------------------------------------
class AnyPlay(RestartPlay):
    """The workers' side follows the attempts that the run has begun."""

    def follow(self) -> None:
        self.attempts = tuple(self.run.workers[stage].attempt for stage in (0, 1))

    def act(self, name: str, stage: int) -> None:
        self.follow()
        match name:
            case "exited":
                self.exited(stage, status=-9)
            case "failed":
                failed = NodeFailed(
                    node_id=NODE_ID + stage, stage_index=stage, error="no", attempt=self.attempts[stage]
                )
                self.provisioner(failed)
            case "comes":
                self.started(stage)
                endpoint = EndpointWire(node_key=self.key(stage), candidates=["ipc:///x"])
                self.reported(stage, endpoint=endpoint)
                self.routed(stage)
                self.member(stage)
                self.acked(stage)
            case "completed":
                self.completed()
                self.weights()
            case "ready":
                self.stages_ready(self.run.generation)
            case "restored":
                self.gateway(ServingRestored())
            case "disturbed":
                self.gateway(ServingDisturbed(error="x"))
            case "edge":
                fault = ObserveStageFault(
                    run_id=RUN_ID, stage_index=stage, reason="EdgeFault: x", generation=self.run.generation
                )
                self.worker(fault, stage)
            case "dead":
                self.member(stage, "dead")
            case "wait":
                self.harness.advance(2500)
            case "stop":
                self.gateway(ShutdownRequested(source="rpc"))


ACTS = ["exited", "failed", "restored", "disturbed", "edge", "dead", "stop"]
ACTS += ["comes", "completed", "ready", "wait"] * 2


@settings(max_examples=120, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.tuples(st.sampled_from(ACTS), st.integers(0, 1)), max_size=40))
def test_whatever_happens_the_run_serves_again_or_ends_once(acts: list[tuple[str, int]]) -> None:
    play = AnyPlay().serving()
    overs: list[RunOver] = []
    attempts = 0
    for name, stage in acts:
        play.act(name, stage)
        overs += [effect for effect in play.harness.effects() if isinstance(effect, RunOver)]
        attempts += steps(play).count(("worker_restart", "started"))
    for _ in range(60):
        if play.at(Phase.SERVING) or play.at(Phase.OVER):
            break
        play.harness.advance(60_000)
        overs += [effect for effect in play.harness.effects() if isinstance(effect, RunOver)]
    assert play.at(Phase.SERVING) or len(overs) == 1
    assert attempts <= WORKER_RESTARTS_MAX, "within the window"
    if not play.at(Phase.OVER):
        play.run.check()
        assert not play.run.restarting
