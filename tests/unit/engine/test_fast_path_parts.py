"""The fast path's own sum and choice, on every instruction set: zlib's CRC-32, numpy's argmax."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest

from tests.support.emulated import PROCESSORS, EmulatedKernels, Processor, build, emulator
from worker.engine.cpu_objects import instruction_sets, machine
from worker.engine.fast_path import _sum_tables

SOURCE = Path(__file__).resolve().parents[2] / "support" / "fast_path_parts.c"
CRC, ARGMAX = 0, 1
F32 = np.float32
Run = Callable[[int, bytes, Sequence[tuple[int, int]]], list[int]]
HERE = tuple(Processor(machine(), "", name) for name in instruction_sets())


class Native(EmulatedKernels):
    """The same program on this processor."""

    def __init__(self, program: Path) -> None:
        self._command = [str(program)]


@pytest.fixture(scope="module", params=(*HERE, *PROCESSORS), ids=str)
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Run:
    processor: Processor = request.param
    if processor.model:
        emulator(processor.arch)
    program = build(processor, tmp_path_factory.mktemp("parts"), SOURCE)
    kernels = EmulatedKernels(processor, program) if processor.model else Native(program)

    def call(what: int, data: bytes, cases: Sequence[tuple[int, int]]) -> list[int]:
        request = struct.pack("<2q", what, len(cases)) + b"".join(struct.pack("<2q", *case) for case in cases)
        out = kernels.remote([request, data, _sum_tables().tobytes(), bytes(8 * len(cases))], (), range(4))
        return list(struct.unpack(f"<{len(cases)}q", out[3]))

    return call


def test_sums_are_those_of_zlib(run: Run) -> None:
    random = np.random.default_rng(1)
    data = random.bytes(40_000)
    cases = [(at, n) for n in (*range(18), 255, 33_000) for at in (0, 1, 7)]
    cases += [(int(at), int(n)) for at, n in random.integers(0, 20_000, (40, 2))]
    assert run(CRC, data, cases) == [zlib.crc32(data[at : at + n]) for at, n in cases]


def test_the_likeliest_token_is_that_of_numpy(run: Run) -> None:
    """Ties: the first of them; minus zero and zero are one; all infinite; any length."""
    random = np.random.default_rng(2)
    rows = [random.standard_normal(n).astype(F32) for n in (*range(1, 70), 263, 5000)]
    rows += [random.integers(0, 3, n).astype(F32) for n in (*range(1, 70), 1001)]
    rows += [np.zeros(40, F32), np.array([-0.0, 0.0] * 9, F32), np.array([-1, -0.0, 0.0, -0.0], F32)]
    rows += [np.full(33, -np.inf, F32), np.array([0, np.inf] * 20, F32), np.full(17, np.finfo(F32).min)]
    last = np.full(263, -1, F32)
    last[-1] = 1
    rows.append(last)
    starts = np.cumsum([0, *(len(row) for row in rows)])
    cases = [(int(start), len(row)) for start, row in zip(starts, rows, strict=False)]
    assert run(ARGMAX, np.concatenate(rows).tobytes(), cases) == [int(row.argmax()) for row in rows]


def test_a_logit_that_is_no_number_is_noticed_wherever_it_is(run: Run) -> None:
    rows = []
    for n in (1, 5, 16, 35, 263):
        for at in {0, n // 2, n - 1}:
            row = np.arange(n, dtype=F32)
            row[at] = np.nan if at % 2 else -np.nan
            rows.append(row)
    starts = np.cumsum([0, *(len(row) for row in rows)])
    cases = [(int(start), len(row)) for start, row in zip(starts, rows, strict=False)]
    assert run(ARGMAX, np.concatenate(rows).tobytes(), cases) == [-1] * len(rows)
