"""A planned run: plan before workers, token endpoints before stages, stages in order (S1 4.4, 4.8, 9.3, 9.8)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from common.effects import JobDone, RunJob
from common.messages.node_agent import ProvisionStage, StopRun
from common.messages.orchestrator import EndpointWire
from common.messages.provision import PrepareProvider, StartNode
from common.messages.serve import (
    CloseRpc,
    OpenPromptRpc,
    OpenTokenIn,
    OpenTokenOut,
    TokenEndpointFailed,
    TokenEndpointReady,
    TokenOutListening,
)
from services.orchestrator.base import Phase
from services.orchestrator.planner import ModelFacts, plan_run
from services.orchestrator.planner_facts import PLAN_JOB
from tests.unit.orchestrator.playbook import NODE_ID, NONCE, RUN_ID, Play
from tests.unit.planner.test_planner import FACTS

SIZED = replace(FACTS, layer_bytes=(10 * 2**20,) * 30, head_bytes=0, kv_bytes_per_layer=2 * 2**20)
GATEWAY_ENDPOINT = EndpointWire(node_key=b"g" * 32, candidates=["ipc:///gw"], relay=True)


class PlannedPlay(Play):
    """Two stages on nodes NODE_ID and NODE_ID + 1."""

    def begin(self, facts: ModelFacts = FACTS, **changes: Any) -> PlannedPlay:
        self.configure(pipeline_stages=2, node_id=NODE_ID - 1, **changes)
        self.services_ready()
        (job,) = [effect for effect in self.harness.effects() if isinstance(effect, RunJob)]
        assert job.kind == PLAN_JOB and self.at(Phase.PLAN)
        self.facts = facts
        return self

    def planned(self, error: str = "") -> PlannedPlay:
        plan = None if error else plan_run(self.facts, 2, run_id=RUN_ID, node_id=NODE_ID - 1)
        self.tell(JobDone(PLAN_JOB, "plan", plan, error))
        return self

    def acknowledged(self) -> PlannedPlay:
        self.prepared()
        for stage in (0, 1):
            self.started(stage)
        for stage in (0, 1):
            endpoint = EndpointWire(node_key=self.key(stage), candidates=[f"ipc:///edge{stage}"])
            self.reported(stage, endpoint=endpoint)
            self.routed(stage)
            self.member(stage)
        for stage in (0, 1):
            self.acked(stage)
        self.completed()
        return self

    def weights(self) -> PlannedPlay:
        self.gateway(TokenOutListening(endpoint=GATEWAY_ENDPOINT))
        return self


@pytest.mark.spec("S1 4.4", "S1 9.3", "S1 5.3")
def test_workers_are_started_from_the_plan_and_never_before_it() -> None:
    play = PlannedPlay().begin()
    assert not play.said(PrepareProvider)
    play.planned()
    assert play.said(PrepareProvider)
    play.prepared()
    starts = play.said(StartNode)
    assert [(s.spec.node_id, s.spec.stage_index) for s in starts] == [(NODE_ID, 0), (NODE_ID + 1, 1)]
    assert not any(s.spec.measure for s in starts)


@pytest.mark.spec("S1 10.4", "S1 4.4")
def test_a_planning_error_ends_the_run_before_any_worker() -> None:
    play = PlannedPlay().begin()
    error = "pipeline_stages = 31 exceeds GGUF layer count 30; choose pipeline_stages <= 30"
    play.planned(error)
    failure = play.failure()
    assert failure["phase"] == "run_plan" and failure["detail"]["error"] == error
    assert not play.said(PrepareProvider, StartNode)
    play.flushed()
    assert (play.over().status, play.run.result.error) == (1, error)


@pytest.mark.spec("S1 4.8", "S1 4.9", "S1 9.7", "S1 9.8", "S1 6.6")
def test_stages_are_loaded_one_after_the_other_with_wires_of_the_plan() -> None:
    play = PlannedPlay().begin().planned()
    play.said()
    play.acknowledged()
    sent = play.said(OpenTokenOut, ProvisionStage)
    assert [type(msg) for msg in sent] == [OpenTokenOut] and sent[0].run == NONCE
    play.weights()
    token_in, first = play.said(OpenTokenIn, ProvisionStage)
    assert token_in.token_in.consumer_endpoint.candidates == ["ipc:///edge0"]
    wire = first.provision
    assert (wire.stage_index, wire.layer_start, wire.layer_end_exclusive, wire.stage_count) == (0, 0, 15, 2)
    assert wire.inbound_edge.edge_token == token_in.token_in.edge_token
    assert wire.outbound_edge.consumer_endpoint.candidates == ["ipc:///edge1"]
    play.harness.advance(5000)
    assert {m.provision.stage_index for m in play.said(ProvisionStage)} == {0}, "only the active stage is asked again"
    play.loaded(0)
    (second,) = play.said(ProvisionStage)
    wire = second.provision
    assert (wire.stage_index, wire.layer_start, wire.layer_end_exclusive) == (1, 15, 30)
    assert wire.inbound_edge.edge_token == first.provision.outbound_edge.edge_token
    assert wire.outbound_edge.edge_token == sent[0].token_out.edge_token
    assert wire.outbound_edge.consumer_endpoint == GATEWAY_ENDPOINT
    tokens = {sent[0].token_out.edge_token, token_in.token_in.edge_token, wire.inbound_edge.edge_token}
    assert len(tokens) == 3 and all(len(token) == 16 for token in tokens)


@pytest.mark.spec("S1 9.4", "S1 4.10")
def test_the_rpc_opens_after_every_stage_and_both_token_endpoints() -> None:
    play = PlannedPlay().begin().planned().acknowledged().weights()
    play.gateway(TokenEndpointReady(endpoint="TokenIn", path="ipc:///edge0"))
    for stage in (0, 1):
        play.loaded(stage)
        play.stage_ready(stage)
    assert not play.said(OpenPromptRpc) and play.at(Phase.WEIGHTS)
    play.gateway(TokenEndpointReady(endpoint="TokenOut"))
    (opened,) = play.said(OpenPromptRpc)
    assert opened.mode == "pipeline" and opened.max_context == 2048
    assert opened.stage_actors == [play.node_actor(0), play.node_actor(1)]
    assert (opened.encode_actor, opened.decode_actor) == (play.node_actor(0), play.node_actor(1))
    play.opened()
    assert play.at(Phase.SERVING)
    states = [(record["phase"], record["status"]) for record in play.records()]
    assert states.count(("token_endpoints", "ready")) == 2


@pytest.mark.spec("S1 10.3", "S1 10.8")
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_token_endpoint_that_fails_ends_the_run(when: str) -> None:
    play = PlannedPlay().begin().planned().acknowledged()
    if when == "after":
        play.weights()
    play.said()
    play.gateway(TokenEndpointFailed(endpoint="TokenOut", error="the edge endpoint ipc:///x cannot be bound: no space"))
    error = play.failure()["detail"]["error"]
    assert error == "pipeline token-out edge from node 4 stage 1: the edge endpoint ipc:///x cannot be bound: no space"
    assert play.said(CloseRpc), "the gateway closes what it has opened"


def test_a_consumer_without_an_endpoint_is_named() -> None:
    play = PlannedPlay().begin().planned().acknowledged()
    play.run._endpoints.pop(NODE_ID + 1)
    play.weights()
    assert play.failure()["detail"]["error"] == f"missing runtime-ready endpoint for consumer node {NODE_ID + 1}"


# --- placement by measure -----------------------------------------------------------------------------------------
def measured(*facts: tuple[int, float]) -> PlannedPlay:
    """Workers that have said (MiB free, GB/s), up to the hand-over."""
    play = PlannedPlay().begin(SIZED, pipeline_placement="measured").planned()
    play.prepared()
    for stage in (0, 1):
        play.started(stage)
    for stage, (mib, gb_s) in enumerate(facts):
        endpoint = EndpointWire(node_key=play.key(stage), candidates=[f"tcp://10.0.0.{stage}:1"])
        play.reported(stage, endpoint=endpoint, memory_bytes=mib * 2**20, bytes_per_s=int(gb_s * 1e9))
        play.routed(stage)
        play.member(stage)
    for stage in (0, 1):
        play.acked(stage)
    play.said()
    play.completed()
    return play


def test_workers_are_asked_to_measure() -> None:
    play = PlannedPlay().begin(SIZED, pipeline_placement="measured").planned()
    play.prepared()
    assert [s.spec.measure for s in play.said(StartNode)] == [True, True]


def test_layers_follow_what_the_workers_measured() -> None:
    play = measured((9000, 12.0), (9000, 6.0)).weights()
    (first,) = play.said(ProvisionStage)
    assert (first.provision.layer_start, first.provision.layer_end_exclusive) == (0, 20)
    play.loaded(0)
    (second,) = play.said(ProvisionStage)
    assert (second.provision.layer_start, second.provision.layer_end_exclusive) == (20, 30)
    plan = [r["detail"] for r in play.records() if (r["phase"], r["status"]) == ("run_plan", "ready")][-1]
    assert plan["placement"] == "measured" and plan["left_out"] == []
    assert [m["bytes_per_s"] for m in plan["measured"]] == [12_000_000_000, 6_000_000_000]


def test_a_worker_that_would_only_slow_the_run_is_stopped_and_those_behind_it_move_up() -> None:
    play = measured((9000, 0.1), (9000, 12.0)).weights()
    sent = play.said(StopRun, ProvisionStage)
    assert [type(msg) for msg in sent] == [StopRun, ProvisionStage]
    wire = sent[1].provision
    assert (wire.node_id, wire.stage_index, wire.stage_count) == (NODE_ID + 1, 0, 1)
    assert (wire.layer_start, wire.layer_end_exclusive) == (0, 30)
    plan = [r["detail"] for r in play.records() if (r["phase"], r["status"]) == ("run_plan", "ready")][-1]
    assert plan["left_out"][0].startswith(f"node {NODE_ID} is left out: ")
    play.exited(0)
    assert not play.said(CloseRpc), "its end is wanted"
    play.loaded(1)
    for name in ("TokenIn", "TokenOut"):
        play.gateway(TokenEndpointReady(endpoint=name))
    play.stage_ready(1)
    (opened,) = play.said(OpenPromptRpc)
    assert opened.stage_actors == [play.node_actor(1)] and opened.nodes == [play.key(1)]


@pytest.mark.parametrize(
    ("facts", "says"),
    [
        ([(9000, 6.0), (0, 0.0)], "node 4 stage 1 did not measure memory and speed"),
        ([(10, 6.0), (10, 6.0)], "the model does not fit the workers: weights and cache need 360.0 MiB"),
    ],
)
def test_a_placement_that_cannot_be_ends_the_start(facts: list[tuple[int, float]], says: str) -> None:
    play = measured(*facts)
    failure = play.failure()
    assert failure["phase"] == "run_plan" and says in failure["detail"]["error"]


@pytest.mark.spec("S1 9.8", "S1 4.9")
def test_a_stage_fault_while_loading_names_stage_and_node() -> None:
    play = PlannedPlay().begin().planned().acknowledged().weights()
    play.loaded(0)
    play.faulted("EdgeFault: edge 2: no candidate answered within 20 s: ipc:///edge1", stage=1)
    error = play.failure()["detail"]["error"]
    assert error.startswith(
        f"node {NODE_ID + 1} stage 1 faulted while loading weights: EdgeFault: edge 2: no candidate"
    )
