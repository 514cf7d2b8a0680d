"""One real model for the whole session: loading it costs seconds."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from worker.engine.engine import Engine

MODEL = Path(__file__).resolve().parents[3] / ".model-cache" / "SmolLM2-135M-Instruct.Q4_1.gguf"


@pytest.fixture(scope="session")
def model_path() -> Path:
    if not MODEL.is_file():
        pytest.fail(f"the model {MODEL.name} is missing; run ./dev fetch-model", pytrace=False)
    return MODEL


@pytest.fixture(scope="session")
def smollm(model_path: Path) -> Iterator[Engine]:
    engine = Engine.load(model_path, max_context=512)
    engine.warm_up()
    yield engine
    engine.close()
