"""One real model for the whole session, and the kernels compiled once: both cost seconds."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.unit.engine.stage_rig import cut
from tests.unit.engine.tiny_model import TinySpec
from worker.engine.cpu_objects import compile_object, instruction_sets, shipped_object
from worker.engine.engine import Engine

MODEL = Path(__file__).resolve().parents[3] / ".model-cache" / "SmolLM2-135M-Instruct.Q4_1.gguf"


@pytest.fixture(scope="session", autouse=True)
def compiled_kernels() -> None:
    """As in a wheel, so that a test with a cache of its own does not compile."""
    for name in instruction_sets():
        if not shipped_object(name).is_file():
            compile_object(name, shipped_object(name))


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


@pytest.fixture(scope="module")
def halves(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Engine]]:
    """A tiny model cut in two."""
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("halves")
        patch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
        yield from cut(folder / "m.gguf", TinySpec(kind="F32"))
