"""The model against a float32 numpy reference, for each tensor type, whole and cut into stages."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from common.gguf import GgufFile, MalformedError
from tests.unit.engine.tiny_model import TinySpec, log_softmax, reference_logits, write_model
from worker.engine.engine import Engine, context_size
from worker.engine.errors import EngineError
from worker.engine.parts import Part, check_part, whole
from worker.engine.portable_model import CHUNK, PortablePart

# Weights and cache are float16, so logits differ a little; a wrong rotation or mask differs by more than 1.
NOISE = 0.04
IDS = [int(value) for value in np.random.default_rng(5).integers(3, 250, 45)]


def load(path: Path, part: Part | None = None, context: int = 96) -> PortablePart:
    file = GgufFile.open(path)
    header = file.check_supported()
    return PortablePart(file, header, part or whole(header), context, lambda *_: None)


def distance(a: np.ndarray, b: np.ndarray) -> float:
    return float(np.sqrt(np.mean((log_softmax(a) - log_softmax(b)) ** 2)))


def run(model: PortablePart, ids: list[int], sizes: list[int]) -> np.ndarray:
    """Logits of the last token when `ids` come in pieces of these sizes."""
    at = 0
    for size in sizes:
        rows = model.run_blocks(ids[at : at + size], at)
        at += size
    assert at == len(ids)
    return model.run_head(rows[-1])


@pytest.mark.parametrize(
    "spec",
    [
        *(TinySpec(kind=kind) for kind in ("F32", "F16", "Q4_0", "Q4_1", "Q8_0")),
        TinySpec(kind="Q8_0", tied=True, rope_freqs=True),
        TinySpec(heads=2, kv_heads=2, layers=1),  # one query head per key-value head
        TinySpec(heads=4, kv_heads=1, layers=1),  # all share one
        TinySpec(architecture="qwen2", layers=2),
        TinySpec(architecture="qwen3", layers=2, head_size=32, kind="Q8_0"),
        TinySpec(architecture="gemma3", layers=7, head_size=48, kv_heads=1, tied=True, theta=1e6),  # local and global
    ],
    ids=lambda spec: f"{spec.architecture}-{spec.kind}-{spec.heads}-{spec.kv_heads}-{'tied' if spec.tied else 'own'}",
)
def test_logits_match_the_reference(tmp_path: Path, spec: TinySpec) -> None:
    weights = write_model(tmp_path / "m.gguf", spec)
    expected = reference_logits(spec, weights, IDS)
    model = load(tmp_path / "m.gguf")
    for sizes in ([CHUNK, 13], [32, *[1] * 13], [1] * 5 + [31, 9]):
        logits = run(model, IDS, sizes)
        assert logits.shape == expected[-1].shape
        assert distance(logits, expected[-1]) < NOISE, sizes
        assert int(logits.argmax()) == int(expected[-1].argmax())


def test_two_stages_give_the_same_bits_as_one(tmp_path: Path) -> None:
    spec = TinySpec(layers=3)
    write_model(tmp_path / "m.gguf", spec)
    one = load(tmp_path / "m.gguf")
    first = load(tmp_path / "m.gguf", Part(0, 2, True, False))
    second = load(tmp_path / "m.gguf", Part(2, 3, False, True))
    at = 0
    for size in (32, 8, 1, 1):
        ids = IDS[at : at + size]
        expected = one.run_head(one.run_blocks(ids, at)[-1])
        rows = second.run_blocks(first.run_blocks(ids, at), at)
        assert np.array_equal(second.run_head(rows[-1]), expected)
        assert np.array_equal(second.run_to_logits(first.run_blocks(ids, at), at), expected)
        at += size
    with pytest.raises(EngineError, match="no head"):
        first.run_head(rows[-1])


def test_a_second_run_does_not_see_the_first(tmp_path: Path) -> None:
    write_model(tmp_path / "m.gguf", TinySpec(layers=1))
    model = load(tmp_path / "m.gguf")
    before = run(model, IDS[:20], [20])
    run(model, IDS[::-1], [32, 13])
    assert np.array_equal(run(model, IDS[:20], [20]), before)


def test_the_last_positions_of_the_context_work(tmp_path: Path) -> None:
    spec = TinySpec(layers=1)
    weights = write_model(tmp_path / "m.gguf", spec)
    model = load(tmp_path / "m.gguf", context=45)
    assert distance(run(model, IDS, [32, 12, 1]), reference_logits(spec, weights, IDS)[-1]) < NOISE
    with pytest.raises(EngineError, match="context of 45"):
        model.run_blocks(IDS[:2], 44)


@pytest.mark.spec("S1 10.8")
@pytest.mark.parametrize("start, end", [(2, 2), (3, 1), (0, 31), (31, 32)])
def test_invalid_layer_range(model_path: Path, start: int, end: int) -> None:
    with GgufFile.open(model_path) as file, pytest.raises(EngineError, match=rf"layer range {start}\.\.{end} .* 30"):
        check_part(file.header(), Part(start, end, True, True))


@pytest.mark.spec("S1 2.1")
def test_context_size(model_path: Path) -> None:
    with GgufFile.open(model_path) as file:
        header = file.header()
    assert context_size(header, None) == 4096
    assert context_size(header, 8192) == 8192
    for wrong in (0, 8193):
        with pytest.raises(EngineError, match="1 to 8192"):
            context_size(header, wrong)


def test_a_missing_or_misshapen_tensor_is_named(tmp_path: Path) -> None:
    write_model(tmp_path / "m.gguf", TinySpec(layers=1))
    data = (tmp_path / "m.gguf").read_bytes()
    (tmp_path / "m.gguf").write_bytes(data.replace(b"blk.0.ffn_up.weight", b"blk.0.ffn_xx.weight"))
    with pytest.raises(MalformedError, match=r"tensor blk\.0\.ffn_up\.weight is missing"):
        load(tmp_path / "m.gguf")


def test_progress_counts_the_bytes_of_the_part(tmp_path: Path) -> None:
    write_model(tmp_path / "m.gguf", TinySpec(layers=2))
    seen: list[tuple[str, int, int]] = []
    engine = Engine.load(tmp_path / "m.gguf", progress=lambda *report: seen.append(report))
    tensors = [report for report in seen if report[0] == "tensors"]
    assert [done for _, done, _ in tensors] == sorted({done for _, done, _ in tensors})
    assert tensors[-1][1] == tensors[-1][2] > 0
    assert engine.model.kv_bytes > 0 and engine.model.weights_bytes > 0
    engine.close()
