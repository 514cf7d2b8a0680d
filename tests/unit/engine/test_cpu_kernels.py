"""Each C kernel against numpy, for each instruction set of this machine and each tensor type, over odd shapes."""

from __future__ import annotations

import os
from pathlib import Path

import gguf
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.gguf_quants import dequantise_bytes
from worker.engine.cpu_native import Kernels
from worker.engine.cpu_objects import (
    _SETS,
    CompileError,
    compile_object,
    find_object,
    instruction_sets,
    machine,
    present_object,
    shipped_object,
    source_stamp,
    zig,
)
from worker.engine.cpu_plan import KINDS, rotary_order, tiled_bytes

F32 = npt.NDArray[np.float32]
SETS = instruction_sets()
_loaded: dict[str, Kernels] = {}


@pytest.fixture(params=SETS)
def kernels(request: pytest.FixtureRequest) -> Kernels:
    if request.param not in _loaded:
        _loaded[request.param] = Kernels(request.param, *find_object(request.param))
    return _loaded[request.param]


def random_blocks(kind: str, rows: int, columns: int, seed: int) -> npt.NDArray[np.uint8]:
    """Bytes of a matrix whose codes are arbitrary and whose scales are of a usual size."""
    random = np.random.default_rng(seed)
    block, nbytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    if kind in ("F32", "F16", "BF16"):
        values = random.standard_normal((rows, columns)).astype(np.float32)
        packed = gguf.quants.quantize(values, gguf.GGMLQuantizationType[kind])
        return np.ascontiguousarray(packed).view(np.uint8).reshape(rows, -1)
    raw = random.integers(0, 256, (rows * columns // block, nbytes), dtype=np.uint8)
    halves = {
        "Q4_1": (0, 2), "Q5_1": (0, 2), "Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2),
        "Q6_K": (208,),
    }.get(kind, (0,))  # fmt: skip
    for at in halves:
        scales = (random.standard_normal(len(raw)) * 0.01).astype(np.float16)
        raw[:, at : at + 2] = scales[:, None].view(np.uint8)
    return raw.reshape(rows, -1)


def block_columns(kind: str) -> int:
    return max(32, gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]][0])


def tiles(kernels: Kernels, kind: str, raw: npt.NDArray[np.uint8], columns: int) -> npt.NDArray[np.uint8]:
    out = np.empty(tiled_bytes(kind, len(raw), columns), np.uint8)
    kernels.repack(KINDS.index(kind), raw.ctypes.data, out.ctypes.data, len(raw), columns, 0, 0)
    return out


def expected(kernels: Kernels, kind: str, raw: npt.NDArray[np.uint8], x: F32) -> tuple[F32, float]:
    """The product in float64, with the activations as the kernel sees them, and the size of its terms."""
    weights = dequantise_bytes(raw.tobytes(), kind, x.shape[1]).astype(np.float64)
    seen = (x if kind in ("F32", "F16", "BF16") else kernels.quantise(x)).astype(np.float64)
    return (seen @ weights.T).astype(np.float32), float((np.abs(seen) @ np.abs(weights).T).max())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows, units, count", [(16, 1, 1), (33, 2, 3), (48, 3, 8), (1, 1, 13), (160, 5, 21)])
def test_product(kernels: Kernels, kind: str, rows: int, units: int, count: int) -> None:
    columns = units * block_columns(kind)
    raw = random_blocks(kind, rows, columns, rows + count)
    x = np.random.default_rng(count).standard_normal((count, columns)).astype(np.float32)
    result = kernels.product(KINDS.index(kind), tiles(kernels, kind, raw, columns), rows, x)
    wanted, size = expected(kernels, kind, raw, x)
    assert np.abs(result - wanted).max() <= 2e-6 * size
    one_by_one = [kernels.product(KINDS.index(kind), tiles(kernels, kind, raw, columns), rows, row[None]) for row in x]
    assert np.array_equal(np.concatenate(one_by_one), result), "the rows of a batch do not know of each other"


@settings(max_examples=30)
@given(st.data())
@pytest.mark.parametrize("name", SETS)
def test_product_of_extreme_codes_and_activations(name: str, data: st.DataObject) -> None:
    """Codes at their limits, where a 16-bit sum would overflow first; activations of any size."""
    kernels = _loaded.setdefault(name, Kernels(name, *find_object(name)))
    kind = data.draw(st.sampled_from(KINDS[3:]))
    columns = block_columns(kind) * data.draw(st.integers(1, 3))
    raw = random_blocks(kind, 16, columns, data.draw(st.integers(0, 99)))
    keep = dequantise_bytes(raw.tobytes(), kind, columns)
    filler = data.draw(st.sampled_from((0x00, 0x7F, 0x80, 0xFF, 0x0F)))
    _, nbytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    start, end = (4, 68) if nbytes > 34 else (nbytes - 16, nbytes)
    raw.reshape(-1, nbytes)[:, start:end] = filler
    if not np.isfinite(dequantise_bytes(raw.tobytes(), kind, columns)).all() or not np.isfinite(keep).all():
        return
    size = data.draw(st.sampled_from((0.0, 1e-42, 1e-20, 1.0, 1e30)))
    sign = data.draw(st.sampled_from((1.0, -1.0)))
    x = np.full((2, columns), sign * size, np.float32)
    x[1, ::3] *= -0.5
    result = kernels.product(KINDS.index(kind), tiles(kernels, kind, raw, columns), 16, x)
    wanted, magnitude = expected(kernels, kind, raw, x)
    assert np.isfinite(result).all()
    assert np.abs(result - wanted).max() <= 2e-6 * magnitude


@settings(max_examples=60)
@given(values=st.lists(st.floats(-(2.0**127), 2.0**127, width=32), min_size=64, max_size=64))
@pytest.mark.parametrize("name", SETS)
def test_activations_are_at_most_half_a_step_off(name: str, values: list[float]) -> None:
    kernels = _loaded.setdefault(name, Kernels(name, *find_object(name)))
    x = np.array(values, np.float32).reshape(1, 64)
    seen = kernels.quantise(x).astype(np.float64)
    step = np.abs(x.astype(np.float64)).reshape(-1, 16).max(1) / 127
    assert np.isfinite(seen).all()
    assert (np.abs(seen - x).reshape(-1, 16).max(1) <= step * 0.5001 + 1e-30).all()


def test_elementary_functions(kernels: Kernels) -> None:
    x = np.concatenate([np.linspace(-100, 88, 4096), [0.0, -0.0, 1e-40, -1e-40, 1e-8, -88.0, -86.9]]).astype(np.float32)
    x = np.resize(x, (len(x) + 15) // 16 * 16)
    wide = x.astype(np.float64)
    exact = np.where(wide < -87, 0, np.exp(wide))
    assert (np.abs(kernels.rows(2, x) - exact) <= 3e-7 * exact + 1e-45).all()
    middle = np.clip(wide, -40, 40)
    silu = kernels.rows(0, middle.astype(np.float32))
    assert np.allclose(silu, middle / (1 + np.exp(-middle)), rtol=1e-6, atol=1e-7)
    gelu = kernels.rows(1, middle.astype(np.float32))
    inner = np.sqrt(2 / np.pi) * (middle + 0.044715 * middle**3)
    assert np.allclose(gelu, 0.5 * middle * (1 + np.tanh(inner)), rtol=1e-5, atol=1e-6)


@settings(max_examples=60)
@given(values=st.lists(st.floats(-65000, 65000, width=32), min_size=16, max_size=16))
@pytest.mark.parametrize("name", SETS)
def test_half_precision_rounds_like_numpy(name: str, values: list[float]) -> None:
    kernels = _loaded.setdefault(name, Kernels(name, *find_object(name)))
    x = np.array(values, np.float32)
    assert np.array_equal(kernels.rows(3, x), x.astype(np.float16).astype(np.float32))


@pytest.mark.parametrize("kind", KINDS)
def test_rows_of_the_embedding_have_the_bits_of_the_reference(kernels: Kernels, kind: str) -> None:
    """Also of infinite and denormal scales: the raw bytes are arbitrary."""
    block, nbytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    raw = np.random.default_rng(3).integers(0, 256, (40, 512 // block * nbytes), dtype=np.uint8)
    chosen = [3, 39, 0, 3]
    with np.errstate(invalid="ignore", over="ignore"):
        expected = dequantise_bytes(raw.tobytes(), kind, 512)[chosen]
    assert np.array_equal(kernels.unpack(KINDS.index(kind), raw.reshape(-1), 512, chosen), expected, equal_nan=True)


def test_rotary_pairs_move_into_halves(kernels: Kernels) -> None:
    raw = random_blocks("Q8_0", 96, 32, 4)
    out = np.empty(tiled_bytes("Q8_0", 96, 32), np.uint8)
    kernels.repack(KINDS.index("Q8_0"), raw.ctypes.data, out.ctypes.data, 96, 32, 48, 32)
    moved = raw[rotary_order(96, 48, 32)]
    assert np.array_equal(out, tiles(kernels, "Q8_0", np.ascontiguousarray(moved), 32))
    assert list(rotary_order(6, 6, 4)) == [0, 2, 1, 3, 4, 5]


def test_the_choice_of_instruction_sets() -> None:
    best = ["avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512_vnni", "avx2", "fma", "f16c", "bmi2"]
    assert instruction_sets(best, "x86_64") == ["avx512vnni", "avx2", "base"]
    assert instruction_sets(["avx2", "fma", "f16c", "bmi2"], "x86_64") == ["avx2", "base"]
    assert instruction_sets(["avx2"], "x86_64") == ["base"]
    assert instruction_sets([], "aarch64") == ["base"]
    assert instruction_sets(["asimddp"], "aarch64") == ["dotprod", "base"]
    assert instruction_sets([], "riscv64") == []


def test_the_stamp_is_the_same_in_every_process() -> None:
    import subprocess
    import sys

    code = "from worker.engine.cpu_objects import source_stamp; print(source_stamp())"
    for seed in ("1", "2"):
        env = {**os.environ, "PYTHONHASHSEED": seed}
        result = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
        assert result.stdout.strip() == source_stamp()


def test_an_object_that_is_there_is_the_shipped_one_then_the_cached_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file that was cut off, shipped or cached, is none."""
    monkeypatch.setattr("worker.engine.cpu_objects.SHIPPED", tmp_path / "shipped")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert present_object("base") is None
    shipped, cached = shipped_object("base"), tmp_path / "swactor-mq" / shipped_object("base").name
    for path in (shipped, cached):
        path.parent.mkdir()
        path.write_bytes(b"\x7fEL")
    assert present_object("base") is None
    cached.write_bytes(b"\x7fELF cached")
    assert present_object("base") == find_object("base") == (b"\x7fELF cached", "cached")
    shipped.write_bytes(b"\x7fELF shipped")
    assert present_object("base") == find_object("base") == (b"\x7fELF shipped", "shipped")


def test_no_compiler_is_one_sentence(tmp_path: os.PathLike[str], monkeypatch: pytest.MonkeyPatch) -> None:
    from pathlib import Path

    from worker.engine import cpu_objects

    monkeypatch.setattr(cpu_objects, "compilers", list)
    with pytest.raises(CompileError, match="cannot be compiled: neither clang nor gcc"):
        compile_object("base", Path(tmp_path) / "x.o")
    monkeypatch.setattr(cpu_objects, "compilers", lambda: ["/bin/false"])
    with pytest.raises(CompileError, match="/bin/false: exit status 1"):
        compile_object("base", Path(tmp_path) / "x.o")


@pytest.mark.skipif(zig() is None, reason="the ziglang wheel is not installed")
def test_every_instruction_set_compiles_with_zig(tmp_path: os.PathLike[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of the other architecture too; the entry is the object's first function."""
    from pathlib import Path

    from tinygrad.runtime.support.elf import elf_loader

    from worker.engine import cpu_objects

    monkeypatch.setattr(cpu_objects, "compilers", lambda: [zig()])
    for arch, name in (("aarch64", "dotprod"), (machine(), _SETS[machine()][0][0])):
        target = Path(tmp_path) / f"{arch}-{name}.o"
        compile_object(name, target, arch)
        sections = elf_loader(target.read_bytes())[1]
        assert sections[[section.name for section in sections].index(".text")].header.sh_size > 10_000
