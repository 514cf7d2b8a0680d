"""The pure planner: placement, edges, sizes, wires, and every rejection with its numbers (S1 4.4, 5.3, 7.4, 10.4)."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.config_slices import CachedModelSlice, OrchestratorSlice
from common.messages.node_agent import EmbeddedGguf, LocalPath, ObjectSpec, RingSpec
from common.messages.orchestrator import EndpointWire
from services.orchestrator.planner import (
    Endpoint,
    ModelFacts,
    PlanError,
    PlanRejection,
    PlanRejectionKind,
    RunPlan,
    check_plan,
    layer_range,
    node_specs,
    outbound_wire,
    plan_run,
    stage_wire,
)
from services.orchestrator.planner_facts import make_plan, planning_path, read_facts, worker_source
from tests.unit.engine.tiny_model import TinySpec, write_model

FACTS = ModelFacts(
    model_id="smol",
    gguf_source=LocalPath(path="/m.gguf"),
    tokenizer=EmbeddedGguf(),
    num_layers=30,
    hidden_dim=576,
    max_seq_len=2048,
    vocab_size=49152,
)
ORCHESTRATOR = b"o" * 32


def plan(stages: int = 3, facts: ModelFacts = FACTS, **more: Any) -> RunPlan:
    return plan_run(facts, stages, **{"run_id": 1, "node_id": 1, **more})


def endpoints(of: RunPlan) -> dict[int, EndpointWire]:
    nodes = [of.node_id, *(stage.node_id for stage in of.stages)]
    return {node: EndpointWire(node_key=bytes([node % 256]) * 32, candidates=[f"ipc:///e{node}"]) for node in nodes}


@pytest.mark.spec("S1 4.4", "S1 7.4", "S1 5.3")
@given(st.integers(1, 300), st.integers(1, 300), st.integers(0, 1000))
def test_stages_cover_every_layer_once_in_order(layers: int, stages: int, node_id: int) -> None:
    facts = dataclasses.replace(FACTS, num_layers=layers)
    if stages > layers:
        with pytest.raises(PlanError, match=rf"pipeline_stages = {stages} exceeds GGUF layer count {layers}; choose"):
            plan(stages, facts)
        return
    made = plan(stages, facts, node_id=node_id)
    covered = [layer for stage in made.stages for layer in range(stage.layer_start, stage.layer_end_exclusive)]
    assert covered == list(range(layers))
    sizes = [stage.layers for stage in made.stages]
    assert max(sizes) - min(sizes) <= 1 and min(sizes) >= 1
    assert [stage.node_id for stage in made.stages] == [node_id + 1 + index for index in range(stages)]
    assert [edge.edge_id for edge in made.edges] == list(range(1, stages + 2))
    kinds = [edge.kind for edge in made.edges]
    assert kinds == ["TokenIn", *["Activation"] * (stages - 1), "TokenOut"]
    assert made.token_in.producer == made.token_out.consumer == Endpoint(node_id)
    for left, right in zip(made.stages, made.stages[1:], strict=False):
        assert left.outbound_edge_id == right.inbound_edge_id
    specs = node_specs(made, "img")
    assert [(spec.stage_index, spec.node_id) for spec in specs] == [(s.stage_index, s.node_id) for s in made.stages]


def test_known_splits() -> None:
    assert [layer_range(30, 7, index) for index in range(7)] == [
        (0, 4), (4, 8), (8, 12), (12, 17), (17, 21), (21, 25), (25, 30),
    ]  # fmt: skip
    assert layer_range(12, 1, 0) == (0, 12)


def test_sizes_are_those_of_the_record_and_the_dtype() -> None:
    made = plan(2)
    token, activation = made.token_in, made.edges[1]
    assert token.object_spec == ObjectSpec(max_extent=2048 * 4, alignment=4, dtype="u32")
    assert token.ring_spec == RingSpec(data_capacity=40 + 2048 * 4, alignment=8)
    assert activation.object_spec == ObjectSpec(max_extent=2048 * 576 * 4, alignment=4, dtype="f32")
    assert activation.ring_spec == RingSpec(data_capacity=40 + 2048 * 576 * 4, alignment=64)
    half = plan(2, dataclasses.replace(FACTS, dtype="f16")).edges[1]
    assert half.object_spec == ObjectSpec(max_extent=2048 * 576 * 2, alignment=2, dtype="f16")


@pytest.mark.spec("S1 6.6", "S1 5.6")
@given(st.integers(1, 8))
def test_wires_name_both_edges_and_the_consumers_endpoint(stages: int) -> None:
    made = plan(stages)
    tokens = {edge.edge_id: bytes([edge.edge_id]) * 16 for edge in made.edges}
    known = endpoints(made)
    for stage in made.stages:
        wire = stage_wire(made, stage.stage_index, orchestrator=ORCHESTRATOR, tokens=tokens, endpoints=known)
        assert wire.inbound_edge is not None and wire.outbound_edge is not None
        assert (wire.stage_count, wire.layer_start) == (stages, stage.layer_start)
        assert wire.layer_end_exclusive == stage.layer_end_exclusive
        assert wire.inbound_edge.edge_token == tokens[wire.inbound_edge_id]
        consumer = made.edge(wire.outbound_edge_id).consumer.node_id
        assert wire.outbound_edge.consumer_endpoint == known[consumer]
        assert wire.outbound_edge.consumer_node_id == consumer
        assert wire.max_context == 2048 and wire.model_id == "smol"
    last = made.stages[-1]
    assert made.edge(last.outbound_edge_id).consumer == Endpoint(1)


def test_a_missing_endpoint_is_named() -> None:
    made = plan(2)
    with pytest.raises(PlanError, match="missing runtime-ready endpoint for consumer node 3"):
        outbound_wire(made.edges[1], b"t" * 16, {})
    with pytest.raises(PlanRejection, match=r"UnknownStage: stage 9 is none of the plan's 2 stages"):
        stage_wire(made, 9, orchestrator=ORCHESTRATOR, tokens={}, endpoints={})
    with pytest.raises(PlanRejection, match="MissingEdge: the plan has no edge 17"):
        made.edge(17)


@pytest.mark.spec("S1 10.4")
@pytest.mark.parametrize(
    ("facts", "stages", "says"),
    [
        ({}, 0, "plan pipeline run: InvalidStageCount: 0 stages were asked for; choose pipeline_stages >= 1"),
        ({}, 31, "pipeline_stages = 31 exceeds GGUF layer count 30; choose pipeline_stages <= 30"),
        ({"hidden_dim": 0}, 2, "UnsupportedShapeOrLayout: hidden_dim is 0"),
        ({"max_seq_len": 2**40}, 2, "UnsupportedShapeOrLayout: max_seq_len is 1099511627776"),
        ({"dtype": "q4"}, 2, "activation rows of dtype 'q4'; set .pipeline. activation_dtype to one of float16"),
        ({"hidden_dim": 2**32 - 1, "max_seq_len": 2**32 - 1}, 2, "activation ring size overflow while planning"),
        (
            {"hidden_dim": 2**32 - 2, "max_seq_len": 2**30 + 1},
            2,
            "activation ring size overflow|activation ring data capacity overflow",
        ),
    ],
)
def test_rejections_name_numbers_and_the_way_out(facts: dict[str, Any], stages: int, says: str) -> None:
    with pytest.raises(PlanError, match=says):
        plan(stages, dataclasses.replace(FACTS, **facts))


def broken(kind: PlanRejectionKind) -> RunPlan:
    made = plan(3)
    first, second, third = made.stages
    edges = list(made.edges)
    match kind:
        case PlanRejectionKind.INVALID_STAGE_COUNT:
            return dataclasses.replace(made, stages=())
        case PlanRejectionKind.DUPLICATE_STAGE_ASSIGNMENT:
            return dataclasses.replace(made, stages=(first, second, dataclasses.replace(third, stage_index=1)))
        case PlanRejectionKind.MISSING_STAGE:
            return dataclasses.replace(made, stages=(first, second, dataclasses.replace(third, stage_index=3)))
        case PlanRejectionKind.MODEL_STAGE_LAYOUT_MISMATCH:
            return dataclasses.replace(made, stages=(first, dataclasses.replace(second, layer_start=11), third))
        case PlanRejectionKind.UNKNOWN_NODE:
            edges[1] = dataclasses.replace(edges[1], consumer=Endpoint(77, 1))
        case PlanRejectionKind.EDGE_ENDPOINT_MISMATCH:
            edges[1] = dataclasses.replace(edges[1], consumer=edges[2].consumer)
        case PlanRejectionKind.INVALID_OBJECT_SPEC:
            edges[1] = dataclasses.replace(edges[1], object_spec=ObjectSpec(max_extent=7, alignment=4))
        case PlanRejectionKind.INVALID_RING_SPEC:
            edges[1] = dataclasses.replace(edges[1], ring_spec=RingSpec(data_capacity=2**40, alignment=3))
        case PlanRejectionKind.MISSING_EDGE:
            edges.pop()
    return dataclasses.replace(made, edges=tuple(edges))


@pytest.mark.parametrize(
    "kind",
    [
        kind
        for kind in PlanRejectionKind
        if kind not in (PlanRejectionKind.UNKNOWN_STAGE, PlanRejectionKind.UNSUPPORTED_SHAPE_OR_LAYOUT)
    ],
)
def test_a_plan_is_checked_for_every_kind(kind: PlanRejectionKind) -> None:
    with pytest.raises(PlanRejection) as caught:
        check_plan(broken(kind))
    assert caught.value.kind is kind
    assert str(caught.value).startswith(f"plan pipeline run: {kind}: ")


# --- facts of a file ----------------------------------------------------------------------------------------------
CONFIG = OrchestratorSlice(
    provider="process", image="i", model_id="tiny", gguf_source=LocalPath(path="/m"), tokenizer=EmbeddedGguf()
)


def config(**more: Any) -> OrchestratorSlice:
    return msgspec.structs.replace(CONFIG, **more)


@pytest.mark.spec("S1 9.3")
def test_facts_come_from_the_file(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    spec = TinySpec()
    write_model(path, spec)
    made = make_plan(config(gguf_source=LocalPath(path=str(path)), pipeline_stages=2, run_id=7, node_id=4))
    assert made.facts.num_layers == spec.layers == len(made.facts.layer_bytes)
    assert all(made.facts.layer_bytes) and made.facts.head_bytes and made.facts.kv_bytes_per_layer
    assert (made.facts.hidden_dim, made.run_id, made.stages[0].node_id) == (spec.width, 7, 5)
    assert made.facts.max_seq_len == min(4096, spec.context)
    with pytest.raises(PlanError, match=rf"max_context is {spec.context + 1}, but the model's context is 1 to"):
        read_facts(config(gguf_source=LocalPath(path=str(path)), max_context=spec.context + 1))


@pytest.mark.spec("S1 9.3", "S1 10.4")
def test_what_cannot_be_inspected_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="does not exist or is not a file; set"):
        read_facts(config(gguf_source=LocalPath(path=str(tmp_path))))
    junk = tmp_path / "junk.gguf"
    junk.write_bytes(b"no model at all, but long enough to have a header of some kind")
    with pytest.raises(PlanError, match="GGUF metadata cannot be used for planning"):
        read_facts(config(gguf_source=LocalPath(path=str(junk))))


def test_workers_get_the_path_that_they_can_see() -> None:
    cached = CachedModelSlice(host_path="/host/m.gguf", container_path="/models/cached/m.gguf")
    assert worker_source(config(cached_model=cached)) == LocalPath(path="/host/m.gguf")
    assert worker_source(config(cached_model=cached, provider="docker")) == LocalPath(path="/models/cached/m.gguf")
    assert planning_path(config(cached_model=cached)) == Path("/host/m.gguf")
