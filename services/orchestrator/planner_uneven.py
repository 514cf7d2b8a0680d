"""Placement by measured memory and speed, for workers that are not alike ([pipeline] placement = "measured"). Pure.

A stage's time for a token is the bytes that it reads over its worker's bytes a second. The split makes the slowest
stage as fast as it can be, which is in proportion to the speeds as far as whole layers, at least one a worker, and
memory allow; among equals the shortest way of a token. A worker is left out where the others hold the model and are no
slower without it: its one layer takes longer than all that it could take off them, so that it would only slow the run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from services.orchestrator.planner import ModelFacts, PlanError


@dataclass(frozen=True, slots=True)
class WorkerMeasure:
    """memory_bytes: free for weights and cache; bytes_per_s: of weights that it reads while it decodes."""

    node_id: int
    memory_bytes: int
    bytes_per_s: int


@dataclass(frozen=True, slots=True)
class Share:
    """What a worker gets: layers [start, end)."""

    node_id: int
    layer_start: int
    layer_end_exclusive: int
    token_s: float


@dataclass(frozen=True, slots=True)
class Placement:
    """shares: in the order of the layers; left_out: node id → one sentence."""

    shares: tuple[Share, ...]
    left_out: dict[int, str]

    @property
    def slowest_s(self) -> float:
        """Of its stages: what a prompt's prefill, which overlaps, is bound by."""
        return max(share.token_s for share in self.shares)

    @property
    def token_s(self) -> float:
        """Of all stages, one after the other: what a token takes, without the hops."""
        return sum(share.token_s for share in self.shares)


def place(facts: ModelFacts, workers: Sequence[WorkerMeasure]) -> Placement:
    """The best split over `workers`, in their order. Raises PlanError where the model does not fit them."""
    best = _split(facts, workers)
    if best is None:
        need = sum(facts.layer_bytes) + facts.head_bytes + facts.num_layers * facts.kv_bytes_per_layer
        have = ", ".join(f"node {worker.node_id} {_mib(worker.memory_bytes)}" for worker in workers)
        raise PlanError(
            f"the model does not fit the workers: weights and cache need {_mib(need)}, free are {have}; "
            "use more or larger workers, or a smaller [model] max_context"
        )
    left_out: dict[int, str] = {}
    staying = list(workers)
    for worker in sorted(workers, key=lambda worker: worker.bytes_per_s):
        without = [other for other in staying if other is not worker]
        other = _split(facts, without)
        if other is None or other.slowest_s > best.slowest_s or other.token_s >= best.token_s:
            continue
        mine = next(share for share in best.shares if share.node_id == worker.node_id)
        left_out[worker.node_id] = (
            f"node {worker.node_id} is left out: {mine.token_s * 1000:.2f} ms a token for "
            f"{mine.layer_end_exclusive - mine.layer_start} layer(s), without it the slowest stage needs "
            f"{other.slowest_s * 1000:.2f} ms instead of {best.slowest_s * 1000:.2f} ms and a token "
            f"{other.token_s * 1000:.2f} ms instead of {best.token_s * 1000:.2f} ms"
        )
        best, staying = other, without
    return Placement(best.shares, left_out)


def _split(facts: ModelFacts, workers: Sequence[WorkerMeasure]) -> Placement | None:
    """By dynamic programming over (worker, layer); None where it does not fit."""
    layers, count = facts.num_layers, len(workers)
    if not 1 <= count <= layers:
        return None
    read = [0, *accumulate(facts.layer_bytes)]

    def cost(index: int, start: int, end: int) -> float | None:
        weights = read[end] - read[start] + (facts.head_bytes if index == count - 1 else 0)
        if weights + (end - start) * facts.kv_bytes_per_layer > workers[index].memory_bytes:
            return None
        return weights / workers[index].bytes_per_s

    # best[end]: (slowest stage, whole way, start of the last share and so on) of the workers so far on layers [0, end).
    best: dict[int, tuple[float, float, tuple[int, ...]]] = {0: (0.0, 0.0, ())}
    for index in range(count):
        following: dict[int, tuple[float, float, tuple[int, ...]]] = {}
        for start, (slowest, whole, starts) in best.items():
            for end in range(start + 1, layers - (count - index - 1) + 1):
                if (time_s := cost(index, start, end)) is None:
                    break
                option = (max(slowest, time_s), whole + time_s, (*starts, start))
                if end not in following or option < following[end]:
                    following[end] = option
        best = following
    if layers not in best:
        return None
    starts = best[layers][2]
    ends = (*starts[1:], layers)
    shares = tuple(
        Share(worker.node_id, start, end, cost(index, start, end) or 0.0)
        for index, (worker, start, end) in enumerate(zip(workers, starts, ends, strict=True))
    )
    return Placement(shares, {})


def _mib(size: int) -> str:
    return f"{size / 2**20:.1f} MiB"
