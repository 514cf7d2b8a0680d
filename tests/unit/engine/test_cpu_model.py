"""The C backend against a float32 numpy reference: every tensor type, every architecture, any cut, any thread count."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import gguf
import numpy as np
import pytest

from common.gguf import GgufError, GgufFile
from tests.unit.engine.test_cpu_kernels import random_blocks
from tests.unit.engine.tiny_model import TinySpec, log_softmax, reference_logits, write_model
from worker.engine import cpu_cache
from worker.engine.cpu_model import CpuPart
from worker.engine.cpu_native import Kernels, load_kernels
from worker.engine.cpu_objects import find_object, instruction_sets
from worker.engine.cpu_plan import StagePlan
from worker.engine.engine import Engine
from worker.engine.errors import EngineError
from worker.engine.parts import Part, whole

IDS = [int(value) for value in np.random.default_rng(5).integers(3, 250, 75)]
# Activations have 8 bits and random weights no structure; a wrong rotation, mask or scale differs by more than 1.
NOISE = 0.2


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture(scope="session")
def kernels() -> Kernels:
    found = load_kernels()
    assert found is not None, "this machine has no C kernels"
    return found


def load(path: Path, kernels: Kernels, part: Part | None = None, threads: int = 2, slots: int = 1) -> CpuPart:
    file = GgufFile.open(path)
    header = file.header()
    plan = StagePlan(file, header, part or whole(header))
    assert plan.reason is None
    return CpuPart(plan, kernels, 96, threads, lambda *_: None, slots)


def run(model: CpuPart, sizes: list[int]) -> np.ndarray:
    at = 0
    for size in sizes:
        logits = model.logits(IDS[at : at + size], at)
        at += size
    return logits


def distance(a: np.ndarray, b: np.ndarray) -> float:
    top = np.argsort(-b)[:5]
    return float(np.sqrt(np.mean((log_softmax(a)[top] - log_softmax(b)[top]) ** 2)))


@pytest.mark.parametrize(
    "spec",
    [
        TinySpec(rope_freqs=True, tied=True, kind="Q8_0"),
        TinySpec(architecture="qwen2", kind="Q8_0"),
        TinySpec(architecture="qwen3", head_size=32, kind="Q8_0"),
        TinySpec(architecture="gemma3", layers=7, head_size=48, kv_heads=1, tied=True, theta=1e6, kind="Q8_0"),
        TinySpec(heads=2, kv_heads=2, kind="Q5_1"),
        TinySpec(kind="F16"),
        TinySpec(kind="BF16"),
        TinySpec(kind="F32"),
    ],
    ids=lambda spec: f"{spec.architecture}-{spec.kind}",
)
def test_architectures_match_the_reference_and_any_cut_gives_the_same_bits(
    tmp_path: Path, kernels: Kernels, spec: TinySpec
) -> None:
    weights = write_model(tmp_path / "m.gguf", spec)
    model = load(tmp_path / "m.gguf", kernels)
    logits = run(model, [64, 11])
    expected = reference_logits(spec, weights, IDS)[-1]
    assert logits.shape == expected.shape
    assert distance(logits, expected) <= (0.01 if spec.kind in ("F16", "F32", "BF16") else NOISE)
    assert int(logits.argmax()) in np.argsort(-expected)[:3]
    model.use_threads(1)
    for sizes in ([1] * 75, [7, 13, 50, 5], [64, 11]):
        assert np.array_equal(run(model, sizes), logits), sizes
    model.close()
    cut = max(1, spec.layers // 2)
    first = load(tmp_path / "m.gguf", kernels, Part(0, cut, True, False), threads=1)
    second = load(tmp_path / "m.gguf", kernels, Part(cut, spec.layers, False, True), threads=2)
    at = 0
    for size in (20, 1, 54):
        rows = second.run_blocks(first.run_blocks(IDS[at : at + size], at), at)
        at += size
    assert np.array_equal(second.run_head(rows[-1]), logits)
    last = first.run_blocks(IDS[21:75], 21)
    assert np.array_equal(second.run_to_logits(last, 21), logits)
    with pytest.raises(EngineError, match="no head"):
        first.run_head(rows[-1])


def test_the_head_of_given_rows_after_a_step_of_tokens(tmp_path: Path, kernels: Kernels) -> None:
    write_model(tmp_path / "m.gguf", TinySpec(kind="Q8_0"))
    model = load(tmp_path / "m.gguf", kernels)
    expected = model.run_to_logits(IDS[:5], 0)
    rows = model.run_blocks(IDS[:5], 0)
    assert np.array_equal(model.run_head(rows[-1]), expected)
    model.close()


def test_a_stage_whose_embedding_is_smaller_than_the_vocabulary_is_refused(tmp_path: Path) -> None:
    """The kernels read its rows from the file without looking."""
    write_model(tmp_path / "m.gguf", TinySpec(kind="Q8_0"))
    file = GgufFile.open(tmp_path / "m.gguf")
    header = dataclasses.replace(file.header(), vocab_size=file.header().vocab_size + 1)
    with pytest.raises(GgufError, match=r"tensor token_embd.weight has shape"):
        StagePlan(file, header, Part(0, 1, True, False))
    assert StagePlan(file, header, Part(1, 2, False, False)).reason is None
    file.close()


@pytest.mark.parametrize("kind", ["Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS", "Q4_0", "Q4_1", "Q5_0"])
@pytest.mark.parametrize("name", instruction_sets())
def test_every_type_matches_the_reference(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, name: str
) -> None:
    """gguf.quants cannot write all of these: matrices of arbitrary blocks stand in for quantised ones."""
    seeds = iter(range(1000))

    def quantize(values: np.ndarray, wanted: gguf.GGMLQuantizationType) -> np.ndarray:
        raw = random_blocks(wanted.name, *values.shape, next(seeds))
        size = float(np.std(gguf.quants.dequantize(raw, wanted)))
        factor = float(np.std(values)) / size  # scales are float16: their product with a power of two is exact
        return scaled(raw, wanted.name, 2.0 ** np.floor(np.log2(factor) - 0.5))

    monkeypatch.setattr(gguf.quants, "quantize", quantize)
    spec = TinySpec(layers=2, width=256, ffn=512, kind=kind, tied=True)
    weights = write_model(tmp_path / "m.gguf", spec)
    model = load(tmp_path / "m.gguf", Kernels(name, *find_object(name)))
    expected = reference_logits(spec, weights, IDS)
    ours = [model.logits([token], at) for at, token in enumerate(IDS)]
    assert np.array_equal(run(model, [64, 11]), ours[-1])
    agreed = sum(int(a.argmax()) == int(b.argmax()) for a, b in zip(ours, expected, strict=True))
    assert agreed >= 68, "issue 3 asks for 58 of 64"
    assert np.sqrt(np.mean([distance(a, b) ** 2 for a, b in zip(ours, expected, strict=True)])) <= NOISE
    model.close()


def scaled(raw: np.ndarray, kind: str, factor: float) -> np.ndarray:
    """The same blocks with their float16 scales multiplied."""
    _, nbytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    blocks = raw.reshape(-1, nbytes).copy()
    halves = {"Q4_1": (0, 2), "Q5_1": (0, 2), "Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2)}
    for at in {**halves, "Q6_K": (208,)}.get(kind, (0,)):
        values = blocks[:, at : at + 2].copy().view(np.float16) * np.float16(factor)
        blocks[:, at : at + 2] = values.astype(np.float16).view(np.uint8)
    return blocks.reshape(raw.shape)


def test_several_sequences_in_one_step(tmp_path: Path, kernels: Kernels) -> None:
    write_model(tmp_path / "m.gguf", TinySpec(kind="Q8_0"))
    alone = load(tmp_path / "m.gguf", kernels)
    batched = load(tmp_path / "m.gguf", kernels, slots=3)
    sequences = [IDS[:9], IDS[20:25], IDS[40:52]]
    for at in range(12):
        live = [slot for slot, ids in enumerate(sequences) if at < len(ids)]
        logits = batched.batch_logits([sequences[slot][at] for slot in live], [at] * len(live), live)
        for row, slot in zip(logits.copy(), live, strict=True):
            for position, token in enumerate(sequences[slot][: at + 1]):
                expected = alone.logits([token], position)
            assert np.array_equal(row, expected)
    with pytest.raises(EngineError, match="the cache has 3"):
        batched.batch_logits([1, 1], [0, 0], [2, 2])


@pytest.mark.parametrize("huge_pages", [True, False])
def test_the_cache_serves_the_second_start_and_a_copy(
    tmp_path: Path, kernels: Kernels, monkeypatch: pytest.MonkeyPatch, huge_pages: bool
) -> None:
    """Read into memory of huge pages, or mapped where memory is short."""
    monkeypatch.setattr(cpu_cache, "huge_pages_pay", lambda nbytes: huge_pages)
    write_model(tmp_path / "m.gguf", TinySpec(kind="Q4_1"))
    first = load(tmp_path / "m.gguf", kernels)
    assert first._arena.origin == "packed"
    expected = run(first, [64, 11])
    second = load(tmp_path / "m.gguf", kernels)
    assert second._arena.origin == "cache" and np.array_equal(run(second, [64, 11]), expected)
    (tmp_path / "copy.gguf").write_bytes((tmp_path / "m.gguf").read_bytes())
    assert load(tmp_path / "copy.gguf", kernels)._arena.origin == "cache"
    for file in (tmp_path / "cache" / "swactor-mq").glob("weights-*"):
        file.write_bytes(file.read_bytes()[:-64])  # a half-written one
    third = load(tmp_path / "m.gguf", kernels)
    assert third._arena.origin == "packed" and np.array_equal(run(third, [64, 11]), expected)


def test_another_model_under_the_same_name_is_noticed(tmp_path: Path, kernels: Kernels) -> None:
    write_model(tmp_path / "m.gguf", TinySpec(kind="Q4_1", seed=1))
    load(tmp_path / "m.gguf", kernels)
    weights = write_model(tmp_path / "m.gguf", spec := TinySpec(kind="Q4_1", seed=2))
    os.utime(tmp_path / "m.gguf", ns=(1, 1))
    logits = run(load(tmp_path / "m.gguf", kernels), [64, 11])
    assert distance(logits, reference_logits(spec, weights, IDS)[-1]) <= NOISE


def test_without_a_cache_folder_the_tiles_live_in_memory(
    tmp_path: Path, kernels: Kernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_model(tmp_path / "m.gguf", TinySpec(kind="Q4_1"))
    expected = run(load(tmp_path / "m.gguf", kernels), [64, 11])
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    model = load(tmp_path / "m.gguf", kernels)
    assert model._arena.origin == "packed" and np.array_equal(run(model, [64, 11]), expected)


@pytest.mark.parametrize("choice, backend", [("portable", "tinygrad CPU"), ("base", "c base"), ("", "c ")])
def test_the_backend_can_be_chosen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, choice: str, backend: str) -> None:
    write_model(tmp_path / "m.gguf", TinySpec(layers=1))
    monkeypatch.setenv("SMQ_ENGINE_KERNELS", choice)
    engine = Engine.load(tmp_path / "m.gguf", max_context=32, threads=1)
    assert engine.model.backend.startswith(backend)
    engine.close()


OPEN_AND_CLOSE = """
import sys
from pathlib import Path
from tests.unit.engine.test_cpu_model import load
from worker.engine.cpu_native import load_kernels
kernels = load_kernels()
for _ in range(100):
    model = load(Path(sys.argv[1]), kernels, threads=4)
    model.logits([5], 0)
    model.close()
"""


def test_helpers_go_home_whenever_they_are_sent(tmp_path: Path) -> None:
    """Right after a step, while one is late; and a buffer may be collected on the device's own thread meanwhile."""
    write_model(tmp_path / "m.gguf", TinySpec(layers=1, kind="Q8_0"))
    command = [sys.executable, "-c", OPEN_AND_CLOSE, str(tmp_path / "m.gguf")]
    subprocess.run(command, check=True, timeout=300, cwd=Path(__file__).parents[3])
