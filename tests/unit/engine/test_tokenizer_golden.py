"""Ids of llama.cpp's own tokenizer (llama-tokenize of build 11434) for SmolLM2's vocabulary, text for text."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from common.gguf import GgufFile
from worker.engine.tokenizer import EngineTokenizer

GOLDEN: list[tuple[str, list[int]]] = json.loads(Path(__file__).with_name("golden_smollm2.json").read_text())


@pytest.mark.engine
def test_ids_are_those_of_llama_cpp(model_path: Path) -> None:
    assert len(GOLDEN) >= 500
    with GgufFile.open(model_path) as file:
        tokenizer = EngineTokenizer.from_gguf(file)
    different = [text for text, ids in GOLDEN if tokenizer.encode(text) != ids]
    assert different == []
    assert [text for text, ids in GOLDEN if tokenizer.decode(ids) != text] == []
