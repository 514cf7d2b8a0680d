"""Whether a model cut into stages says what the whole says: StageSteps chained in one process, without transport.

What transport adds to this (nothing, a byte stream) is proven end to end; here every cut and length is cheap.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

from common.edge_records import Record, decode_tokens, encode_tokens
from services.orchestrator.planner import layer_range
from worker.engine.engine import Engine
from worker.engine.parts import Part
from worker.engine.sampler import Sampling
from worker.engine.stage_steps import StageShape, StageSteps

LENGTHS = (1, 2, 3, 5, 8, 13, 21, 34, 55, 63, 64, 65, 89, 128, 129, 233, 377, 610, 987, 2000)
"""Tokens of the 20 prompts; 64 rows are one activation record."""
ANSWER_TOKENS = 8
CONTEXT = 2048
TEXT = (
    "The keeper of lighthouse number {0} climbed {1} stairs each evening, counted the ships on the horizon, trimmed "
    "the wick and wrote the sum, {2}, into the book that nobody had ever asked to read. "
)


def prompts(engine: Engine) -> list[list[int]]:
    """Token ids, each prompt with a beginning of its own."""
    found = []
    for number, length in enumerate(LENGTHS):
        text = "".join(TEXT.format(number, number * 7 + at, at * at) for at in range(length // 20 + 1))
        found.append(engine.encode(text)[:length])
    return found


def whole(model: Path) -> tuple[list[list[int]], list[tuple[list[int], str]]]:
    """The prompts, and ids and text that the uncut model answers to each."""
    engine = Engine.load(model, max_context=CONTEXT)
    engine.warm_up()
    asked, answers = prompts(engine), []
    for ids in asked:
        tokens: list[int] = []
        text = ""
        for event in engine.generate(ids, max_tokens=ANSWER_TOKENS).events():
            tokens += getattr(event, "token_ids", ())
            text = getattr(event, "final_text", text)
        answers.append((tokens, text))
    engine.close()
    return asked, answers


def cut(model: Path, stages: int, asked: list[list[int]]) -> list[tuple[list[int], str]]:
    """Ids and text of the same prompts from a chain of stages."""
    engines = []
    for index in range(stages):
        part_of = partial(_part, stages, index)
        engines.append(Engine.load(model, max_context=CONTEXT, part_of=part_of, threads=1))
        engines[-1].warm_up()
    chain = [StageSteps(engine.model, _shape(engine, index, stages)) for index, engine in enumerate(engines)]
    answers, sequence = [], 0
    for ids in asked:
        tokens, sequence = _answer(chain, ids, sequence)
        stream = engines[-1].tokenizer.stream()
        answers.append((tokens, "".join(stream.feed(token) for token in tokens)))
    for engine in engines:
        engine.close()
    return answers


def _answer(chain: list[StageSteps], ids: list[int], sequence: int) -> tuple[list[int], int]:
    for stage in chain:
        stage.begin(1, sequence, Sampling(), ids[-64:])
    tokens: list[int] = []
    feed, begin = ids, True
    while len(tokens) < ANSWER_TOKENS:
        records = [Record(sequence, sequence, encode_tokens(feed), begin=begin, end=True)]
        for stage in chain:
            records = [out for record in records for out in stage.run(record, lambda _: False, lambda: None)]
        sequence += 1
        if records[0].end:
            break
        feed, begin = decode_tokens(records[0].payload), False
        tokens += feed
    return tokens, sequence


def _shape(engine: Engine, index: int, stages: int) -> StageShape:
    return StageShape(
        is_first=index == 0,
        is_last=index == stages - 1,
        width=engine.header.embedding_length,
        chunk=engine.chunk,
        vocab_size=engine.header.vocab_size,
        end_ids=frozenset(engine.tokenizer.vocabulary.end_ids),
    )


def _part(stages: int, index: int, layers: int) -> Part:
    return Part(*layer_range(layers, stages, index), index == 0, index == stages - 1)
