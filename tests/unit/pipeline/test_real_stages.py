"""The real model cut into 1 to 30 stages in one process: the same tokens, whatever the cut (issue 4, figures)."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.chain import Chain, whole_answer
from tools.fetch_model import default_model_path
from worker.engine.engine import Engine

pytestmark = pytest.mark.engine
CONTEXT, TOKENS = 512, 12
PROMPTS = ("a", "What is the capital of France?", "The keeper climbed the stairs and counted the ships. " * 25)


@pytest.fixture(scope="module")
def whole() -> Iterator[Engine]:
    engine = Engine.load(default_model_path(), max_context=CONTEXT)
    engine.warm_up()
    yield engine
    engine.close()


@pytest.mark.parametrize("stages", [2, 3, 7, 30])
def test_the_cut_does_not_change_a_token(whole: Engine, stages: int) -> None:
    with Chain(default_model_path(), stages, max_context=CONTEXT) as chain:
        for prompt in PROMPTS:
            ids = whole.encode(prompt)
            found = chain.answer(ids, TOKENS)
            assert found == whole_answer(whole, ids, TOKENS)[0], prompt[:20]
