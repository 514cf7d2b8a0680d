"""The real model cut into 1 to 30 stages in one process: the same tokens, whatever the cut (issue 4, figures)."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from common.edge_records import Record, decode_tokens, encode_tokens
from services.orchestrator.planner import layer_range
from tools.fetch_model import default_model_path
from worker.engine.engine import Engine
from worker.engine.parts import Part
from worker.engine.sampler import Sampling
from worker.engine.stage_steps import StageShape, StageSteps

pytestmark = pytest.mark.engine
CONTEXT, TOKENS, LAYERS = 512, 12, 30
PROMPTS = ("a", "What is the capital of France?", "The keeper climbed the stairs and counted the ships. " * 25)


@pytest.fixture(scope="module")
def whole() -> Iterator[Engine]:
    engine = Engine.load(default_model_path(), max_context=CONTEXT)
    engine.warm_up()
    yield engine
    engine.close()


def generated(engine: Engine, ids: list[int]) -> list[int]:
    tokens: list[int] = []
    for event in engine.generate(ids, max_tokens=TOKENS).events():
        tokens += getattr(event, "token_ids", ())
    return tokens


@pytest.mark.parametrize("stages", [2, 3, 7, 30])
def test_the_cut_does_not_change_a_token(whole: Engine, stages: int) -> None:
    engines, steps = [], []
    for index in range(stages):
        part = Part(*layer_range(LAYERS, stages, index), index == 0, index == stages - 1)
        engine = Engine.load(default_model_path(), max_context=CONTEXT, part_of=lambda _, part=part: part, threads=1)
        engine.warm_up()
        engines.append(engine)
        shape = StageShape(
            is_first=index == 0,
            is_last=index == stages - 1,
            width=engine.header.embedding_length,
            chunk=engine.chunk,
            vocab_size=engine.header.vocab_size,
            end_ids=frozenset(engine.tokenizer.vocabulary.end_ids),
        )
        steps.append(StageSteps(engine.model, shape))
    sequence = 0
    for prompt in PROMPTS:
        ids = whole.encode(prompt)
        for stage in steps:
            stage.begin(1, sequence, Sampling(), ids[-64:])
        found: list[int] = []
        feed, begin = ids, True
        while len(found) < TOKENS:
            records = [Record(sequence, sequence, encode_tokens(feed), begin=begin, end=True)]
            for stage in steps:
                records = [out for r in records for out in stage.run(r, lambda _: False, lambda: None)]
            (last,) = records
            sequence += 1
            if last.end:
                break
            feed, begin = decode_tokens(last.payload), False
            found += feed
        assert found == generated(whole, ids), prompt[:20]
    for engine in engines:
        engine.close()
