"""Whether a model cut into stages says what the whole says: StageSteps chained in one process, without transport.

What transport adds to this (nothing, a byte stream) is proven end to end; here every cut and length is cheap.
"""

from __future__ import annotations

from pathlib import Path

from tests.support.chain import Chain, whole_answer
from worker.engine.engine import Engine

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
    asked = prompts(engine)
    answers = [whole_answer(engine, ids, ANSWER_TOKENS) for ids in asked]
    engine.close()
    return asked, answers


def cut(model: Path, stages: int, asked: list[list[int]]) -> list[tuple[list[int], str]]:
    """Ids and text of the same prompts from a chain of stages."""
    answers = []
    with Chain(model, stages, max_context=CONTEXT) as chain:
        for ids in asked:
            tokens = chain.answer(ids, ANSWER_TOKENS)
            stream = chain.engines[-1].tokenizer.stream()
            answers.append((tokens, "".join(stream.feed(token) for token in tokens)))
    return answers
