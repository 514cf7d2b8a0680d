"""Layers by measured memory and speed: tables of workers and what they get (issue 4, uneven workers)."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.orchestrator.planner import ModelFacts, PlanError
from services.orchestrator.planner_uneven import WorkerMeasure, place
from tests.unit.planner.test_planner import FACTS

MIB = 2**20
GB_S = 1e9


def facts(layers: int = 30, head_mib: float = 0) -> ModelFacts:
    """Each layer 10 MiB of weights and 2 MiB of cache."""
    return replace(
        FACTS,
        num_layers=layers,
        layer_bytes=(10 * MIB,) * layers,
        head_bytes=int(head_mib * MIB),
        kv_bytes_per_layer=2 * MIB,
    )


def workers(*measures: tuple[float, float]) -> list[WorkerMeasure]:
    """(GB/s, MiB) each."""
    return [WorkerMeasure(2 + at, int(mib * MIB), int(gb_s * GB_S)) for at, (gb_s, mib) in enumerate(measures)]


@pytest.mark.parametrize(
    ("asked", "counts", "left_out"),
    [
        # Alike: evenly.
        ([(6, 9000), (6, 9000)], [15, 15], []),
        ([(6, 9000)] * 3, [10, 10, 10], []),
        # Twice as fast: twice the layers, wherever it stands.
        ([(12, 9000), (6, 9000)], [20, 10], []),
        ([(6, 9000), (12, 9000)], [10, 20], []),
        ([(3, 9000), (6, 9000), (6, 9000)], [6, 12, 12], []),
        # Memory bounds what speed would give: 12 MiB a layer.
        ([(12, 120), (6, 9000)], [10, 20], []),
        ([(12, 120), (6, 240), (1, 9000)], [10, 18, 2], []),
        # One layer on it takes longer than the others take for everything: left out.
        ([(12, 9000), (12, 9000), (0.1, 9000)], [15, 15], [4]),
        ([(0.1, 9000), (12, 9000), (12, 9000)], [15, 15], [2]),
        ([(12, 9000), (0.2, 9000)], [30], [3]),
        # As slow, but needed: the others do not hold the model.
        ([(12, 180), (12, 168), (0.1, 9000)], [15, 14, 1], []),
    ],
)
def test_layers_follow_speed_and_memory(
    asked: list[tuple[float, float]], counts: list[int], left_out: list[int]
) -> None:
    found = place(facts(), workers(*asked))
    assert [share.layer_end_exclusive - share.layer_start for share in found.shares] == counts
    assert sorted(found.left_out) == left_out
    for node_id, why in found.left_out.items():
        assert why.startswith(f"node {node_id} is left out: ") and "without it the slowest stage" in why


def test_the_head_counts_on_the_last_worker() -> None:
    found = place(facts(head_mib=100), workers((6, 9000), (6, 9000)))
    assert [share.layer_end_exclusive - share.layer_start for share in found.shares] == [20, 10]


def test_a_model_that_does_not_fit_names_numbers_and_the_way_out() -> None:
    with pytest.raises(PlanError, match=r"need 360\.0 MiB, free are node 2 100\.0 MiB, node 3 200\.0 MiB; use more or"):
        place(facts(), workers((6, 100), (6, 200)))


@given(
    st.lists(st.tuples(st.floats(0.1, 100), st.floats(20, 2000)), min_size=1, max_size=6),
    st.integers(6, 40),
)
def test_whatever_the_workers_are_the_layers_are_placed_once_and_fit(
    measures: list[tuple[float, float]], layers: int
) -> None:
    asked = workers(*measures)
    try:
        found = place(facts(layers), asked)
    except PlanError:
        assert sum(int(mib // 12) for _, mib in measures) < layers or len(measures) > layers
        return
    at = 0
    by_node = {worker.node_id: worker for worker in asked}
    for share in found.shares:
        assert share.layer_start == at < share.layer_end_exclusive
        at = share.layer_end_exclusive
        assert (at - share.layer_start) * 12 * MIB <= by_node[share.node_id].memory_bytes
    assert at == layers
    assert {share.node_id for share in found.shares} | set(found.left_out) == set(by_node)
