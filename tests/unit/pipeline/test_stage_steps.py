"""What a stage does with records: any cut of the layers gives the same tokens, cancelled sequences stay gapless."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.edge_records import Record, decode_tokens, encode_tokens
from worker.engine.errors import EngineError
from worker.engine.parts import Inputs
from worker.engine.sampler import Sampling
from worker.engine.stage_steps import ROWS_PER_RECORD_MAX, StageShape, StageSteps, StepError

F32 = npt.NDArray[np.float32]
WIDTH, VOCAB, CONTEXT, LAYERS, EOS = 8, 50, 400, 6, 3


class ToyModel:
    """Layers that mix each row with the sum of all rows before it, like attention does; exact in any chunking."""

    def __init__(self, first: int, last: int) -> None:
        self.max_context = CONTEXT
        self.layers = range(first, last)
        self.memory = {layer: np.zeros((CONTEXT, WIDTH), np.float32) for layer in self.layers}
        self.calls: list[tuple[int, int]] = []

    def _embed(self, ids: list[int]) -> F32:
        return np.asarray([[(token * 7 + k * 3) % 11 for k in range(WIDTH)] for token in ids], np.float32)

    def run_blocks(self, inputs: Inputs, start: int, tick: Callable[[], None] | None = None) -> F32:
        rows = self._embed(inputs) if isinstance(inputs, list) else inputs
        self.calls.append((start, len(rows)))
        for layer in self.layers:
            self.memory[layer][start : start + len(rows)] = rows
            mixed = []
            for at in range(len(rows)):
                past = self.memory[layer][: start + at + 1].sum(0)
                mixed.append((rows[at] * (layer + 2) + np.roll(past, layer)) % 13)
            rows = np.asarray(mixed, np.float32)
        return rows

    def run_to_logits(self, inputs: Inputs, start: int, tick: Callable[[], None] | None = None) -> F32:
        row = self.run_blocks(inputs, start, tick)[-1]
        weights = np.asarray([[(v * 5 + k * k) % 17 for k in range(WIDTH)] for v in range(VOCAB)], np.float32)
        return weights @ row


class Pipe:
    """N stages joined by lists; `feed` is the gateway."""

    def __init__(self, stages: int, chunk: int = 32, dtype: str = "f32") -> None:
        self.stages = []
        for index in range(stages):
            first, last = LAYERS * index // stages, LAYERS * (index + 1) // stages
            shape = StageShape(
                is_first=index == 0,
                is_last=index == stages - 1,
                width=WIDTH,
                chunk=chunk,
                vocab_size=VOCAB,
                dtype_in=dtype,
                dtype_out=dtype,
                end_ids=frozenset({EOS}),
            )
            self.stages.append(StageSteps(ToyModel(first, last), shape))
        self.sequence = 0
        self.in_sequence = [0] * (stages + 1)
        self.cancelled: set[int] = set()
        self.out: list[Record] = []

    def begin(self, request_id: int, sampling: Sampling | None = None, recent: Iterable[int] = ()) -> None:
        for stage in self.stages:
            stage.begin(request_id, self.sequence, sampling or Sampling(), list(recent))

    def feed(self, ids: list[int], begin: bool, upto: int | None = None) -> list[Record]:
        """A token-in record through the first `upto` stages; returns what came out of the last of them."""
        record = Record(self.sequence, self.sequence, encode_tokens(ids), begin=begin, end=True)
        self.sequence += 1
        return self.push([record], 0, len(self.stages) if upto is None else upto)

    def push(self, records: list[Record], first: int, last: int) -> list[Record]:
        for index in range(first, last):
            records = [
                out
                for record in records
                for out in self.stages[index].run(record, self.cancelled.__contains__, lambda: None)
            ]
            for record in records:
                assert record.sequence == self.in_sequence[index + 1], "a gap on an edge"
                self.in_sequence[index + 1] += 1
        if last == len(self.stages):
            for record in records:
                assert record.object_id == record.sequence, "token-out sequence is the token-in sequence"
        return records

    def generate(self, request_id: int, prompt: list[int], count: int) -> list[int]:
        self.begin(request_id, recent=prompt[-64:])
        tokens: list[int] = []
        (record,) = self.feed(prompt, begin=True)
        for _ in range(count):
            (token,) = decode_tokens(record.payload)
            tokens.append(token)
            assert record.end == (token == EOS)
            (record,) = self.feed([token], begin=False)
        return tokens


PROMPT = st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=150)


@settings(max_examples=40)
@given(PROMPT, st.integers(2, LAYERS), st.integers(1, 80))
def test_any_number_of_stages_gives_the_same_tokens(prompt: list[int], stages: int, chunk: int) -> None:
    assert Pipe(stages, chunk).generate(1, prompt, 6) == Pipe(1, chunk).generate(1, prompt, 6)


def test_a_prompt_is_cut_into_records_that_overlap() -> None:
    pipe = Pipe(2, chunk=32)
    pipe.begin(1)
    records = pipe.feed(list(range(40)) * 2, begin=True, upto=1)
    assert [(r.begin, r.end, len(r.payload) // (4 * WIDTH)) for r in records] == [
        (True, False, 32), (False, False, 32), (False, True, 16),
    ]  # fmt: skip
    assert {r.object_id for r in records} == {0}
    pipe.push(records, 1, 2)
    model = pipe.stages[1]._model
    assert isinstance(model, ToyModel) and model.calls == [(0, 32), (32, 32), (64, 16)]
    big = Pipe(2, chunk=512)
    big.begin(1)
    sizes = [len(r.payload) // (4 * WIDTH) for r in big.feed([1] * 150, begin=True, upto=1)]
    assert sizes == [ROWS_PER_RECORD_MAX, ROWS_PER_RECORD_MAX, 22]


@settings(max_examples=60)
@given(PROMPT, PROMPT, st.integers(1, 4), st.integers(0, 4), st.integers(0, 3))
def test_a_cancelled_prompt_leaves_the_next_one_as_if_it_had_not_been(
    old: list[int], new: list[int], stages: int, reached: int, decoded: int
) -> None:
    """Cut anywhere: the records of the old prompt are still between the stages when the next one begins."""
    pipe = Pipe(stages)
    pipe.generate(1, old, decoded)
    pipe.begin(2)
    reached = min(reached, stages)
    between = pipe.feed(old, begin=True, upto=reached)
    for stage in pipe.stages:
        stage.cancel(2)
    pipe.begin(3, recent=new[-64:])
    late = pipe.push(between, reached, stages)
    assert len(late) == 1 and (not late[0].payload or reached == stages)
    (record,) = pipe.feed(new, begin=True)
    fresh = Pipe(stages)
    fresh.begin(3, recent=new[-64:])
    assert record.payload == fresh.feed(new, begin=True)[0].payload


def test_a_cancel_in_the_middle_of_a_prefill_ends_it_within_a_chunk() -> None:
    pipe = Pipe(2, chunk=32)
    pipe.begin(5)
    record = Record(0, 0, encode_tokens([1] * 100), begin=True, end=True)
    pipe.sequence = 1
    got = []
    for out in pipe.stages[0].run(record, pipe.cancelled.__contains__, lambda: None):
        got.append(out)
        pipe.cancelled.add(5)
    assert [(len(r.payload) > 0, r.end) for r in got] == [(True, False), (False, True)]
    (last,) = pipe.push(got, 1, 2)
    assert last.payload == b"" and not last.end
    assert not pipe.stages[0].cancel(4) and pipe.stages[0].cancel(5)


def stage(**changes: object) -> StageSteps:
    shape = StageShape(is_first=False, is_last=True, width=WIDTH, chunk=32, vocab_size=VOCAB)
    steps = StageSteps(ToyModel(0, 1), replace(shape, **changes))  # type: ignore[arg-type]
    steps.begin(1, 0, Sampling(), [])
    return steps


def rows(count: int) -> bytes:
    return np.ones((count, WIDTH), np.float32).tobytes()


@pytest.mark.parametrize(
    ("changes", "record", "says"),
    [
        ({}, Record(0, 0, b"abcd", begin=True, end=True), "4 bytes are no rows of 32 bytes"),
        ({}, Record(0, 0, rows(1), begin=False, end=True), "object 0 came before the BEGIN of its sequence"),
        ({}, Record(0, 0, rows(65), begin=True, end=True), "65 rows in one record, allowed are 64"),
        ({"is_first": True}, Record(0, 0, encode_tokens([VOCAB]), begin=True, end=True), "token 50 is outside the voc"),
        (
            {"is_first": True},
            Record(0, 0, encode_tokens([1] * (CONTEXT + 1)), begin=True, end=True),
            "401 rows at position 0 do not fit the context of 400",
        ),
    ],
)
def test_objects_that_cannot_be_computed(changes: dict[str, object], record: Record, says: str) -> None:
    with pytest.raises(StepError, match=says) as caught:
        list(stage(**changes).run(record, lambda _: False, lambda: None))
    assert caught.value.reason == "ObjectFailed"


def test_a_failing_kernel_is_a_failed_step_and_impossible_sampling_a_refusal() -> None:
    steps = stage()

    def broken(_rows: F32, _start: int, _tick: Callable[[], None] | None = None) -> F32:
        raise RuntimeError("no memory on the device\nmore lines")

    steps._model.run_blocks = broken  # type: ignore[method-assign]
    with pytest.raises(StepError, match=r"^no memory on the device$") as caught:
        list(steps.run(Record(0, 0, rows(1), begin=True, end=True), lambda _: False, lambda: None))
    assert caught.value.reason == "StepFailed"
    with pytest.raises(EngineError):
        steps.begin(2, 1, Sampling(temperature=-1), [])


def test_float16_edges_halve_the_bytes() -> None:
    pipe = Pipe(2, dtype="f16")
    pipe.begin(1)
    (record,) = pipe.feed([1, 2, 3], begin=True, upto=1)
    assert len(record.payload) == 3 * WIDTH * 2
    assert len(decode_tokens(pipe.push([record], 1, 2)[0].payload)) == 1
