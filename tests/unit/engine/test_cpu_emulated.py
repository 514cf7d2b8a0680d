"""The C kernels on processors with fewer or other instructions than this machine's: none is illegal, all are right."""

from __future__ import annotations

import dataclasses
import math
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from common.edge_records import Record, encode_record, encode_tokens
from common.edges.port import Way
from common.gguf import GgufFile
from common.gguf_quants import dequantise_rows
from common.local_edges import frame_bytes
from tests.support.emulated import PROCESSORS, EmulatedKernels, Processor, build, emulator
from tests.unit.engine.test_cpu_kernels import (  # noqa: F401 - run again, with this file's `kernels`
    block_columns,
    expected,
    random_blocks,
    test_elementary_functions,
    test_rotary_pairs_move_into_halves,
    tiles,
)
from tests.unit.engine.test_cpu_model import IDS, distance
from tests.unit.engine.test_cpu_model import load as load_part
from tests.unit.engine.tiny_model import TinySpec, reference_logits, write_model
from worker.engine import tinygrad_shim as tg
from worker.engine.cpu_native import load_kernels
from worker.engine.cpu_objects import machine
from worker.engine.cpu_plan import KINDS
from worker.engine.fast_path import Departing, FastPath, Forecast

NOISE = 0.2
# What Linux says of such a processor: the choice of kernels reads no more of it.
NEHALEM = "processor\t: 0\nmodel name\t: Intel Core i7 9xx\nflags\t\t: fpu sse sse2 ssse3 sse4_1 sse4_2 popcnt\n"
ENGINE = """
import sys
from worker.engine.cpu_native import load_kernels
from worker.engine.engine import Engine
from pathlib import Path
engine = Engine.load(Path(sys.argv[1]), threads=1)
print(engine.model.backend)
print(*(float(value) for value in engine.model.logits([5, 6, 7], 0)))
engine.close()
"""


@pytest.fixture(scope="module", params=PROCESSORS, ids=str)
def kernels(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> EmulatedKernels:
    processor: Processor = request.param
    emulator(processor.arch)
    return EmulatedKernels(processor, build(processor, tmp_path_factory.mktemp("emulated")))


@pytest.mark.parametrize("kind", KINDS)
def test_products(kernels: EmulatedKernels, kind: str) -> None:
    for rows, units, count in ((33, 2, 3), (1, 1, 13)):
        columns = units * block_columns(kind)
        raw = random_blocks(kind, rows, columns, rows)
        x = np.random.default_rng(count).standard_normal((count, columns)).astype(np.float32)
        result = kernels.product(KINDS.index(kind), tiles(kernels, kind, raw, columns), rows, x)
        wanted, size = expected(kernels, kind, raw, x)
        assert np.abs(result - wanted).max() <= 2e-6 * size


@pytest.mark.parametrize("architecture", ["llama", "gemma3"])
def test_a_whole_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kernels: EmulatedKernels, architecture: str
) -> None:
    """The memory of a loaded part, as it lies before a step, goes to the other processor."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    spec = TinySpec(kind="Q8_0", architecture=architecture, layers=2, head_size=32)
    weights = write_model(tmp_path / "m.gguf", spec)
    here = load_kernels()
    assert here is not None
    part = load_part(tmp_path / "m.gguf", here, threads=1)
    embedded = dequantise_rows(GgufFile.open(tmp_path / "m.gguf"), "token_embd.weight", np.asarray(IDS[:40], np.int64))
    scale = math.sqrt(part.header.embedding_length) if architecture == "gemma3" else 1.0
    part._enter(embedded * np.float32(scale), range(40), 0)
    head = part._team.control.head
    head[2], head[3], head[5] = 40, 1, 0
    memory = [bytes(tg.view(tensor).view(np.uint8)) for tensor in part._team._tensors]
    logits = np.frombuffer(kernels.remote(memory, (), range(8))[7], np.float32)[: part.header.vocab_size]
    wanted = reference_logits(spec, weights, IDS[:40])[-1]
    assert distance(logits, wanted) < NOISE
    assert int(logits.argmax()) == int(wanted.argmax())


def test_a_fast_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kernels: EmulatedKernels) -> None:
    """The kernels' own system calls: it waits for the row's frame, computes and sends the token."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    write_model(tmp_path / "m.gguf", TinySpec(kind="Q8_0", layers=2))
    here = load_kernels()
    assert here is not None
    part = load_part(tmp_path / "m.gguf", here, threads=1)
    part.warm_up(lambda *_: None)
    embedded = dequantise_rows(GgufFile.open(tmp_path / "m.gguf"), "token_embd.weight", np.asarray(IDS[:9], np.int64))
    part.run_blocks(embedded[:8], 0)
    wanted = int(part.run_to_logits(embedded[8:], 8).argmax())
    kernels.step_bytes = [tensor.uop.buffer.nbytes for tensor in part._team._tensors]
    path = FastPath(kernels, part._team.addresses, part.header.vocab_size, has_head=True)
    received, left = Record(8, 8, bytes(embedded[8:].nbytes), end=True), Record(8, 0, bytes(4))
    forecast = Forecast(1, received, (Departing(2, left, tells_end=True),), 8, False, True, frozenset([wanted]))
    ways = [
        Way(number, descriptor, frame_bytes(b"head" + encode_record(record)))
        for number, descriptor, record in ((1, -1, received), (2, -1, left))
    ]
    inner, outer = socket.socketpair()
    wake = os.eventfd(0)
    with inner, outer:
        way_in, way_out = (dataclasses.replace(way, descriptor=inner.fileno()) for way in ways)
        body = b"head" + encode_record(dataclasses.replace(received, payload=embedded[8:].tobytes()))
        for damage in (1, 0):
            frame = bytearray(frame_bytes(body))
            frame[-1] ^= damage
            outer.sendall(frame)
            since = time.monotonic_ns()
            outcome = path.wait(forecast, way_in, [way_out], wake, inner.fileno())
            assert outcome.data == frame and since < outcome.arrived_ns < time.monotonic_ns()
            assert outcome.computed == (not damage)
        assert outcome.arrived_ns < outcome.left_ns < time.monotonic_ns()
        token = dataclasses.replace(left, payload=encode_tokens([wanted]), end=True)
        assert outer.recv(1000) == frame_bytes(b"head" + encode_record(token)) == outcome.sent[0][1]
        assert outcome.sent[0][2] == len(outcome.sent[0][1])
        os.eventfd_write(wake, 1)
        outer.sendall(frame)
        outcome = path.wait(forecast, way_in, [way_out], wake, inner.fileno())
        assert not outcome.data and not outcome.computed and inner.recv(10_000) == frame, "who is called leaves it"
    os.close(wake)


@pytest.mark.skipif(machine() != "x86_64" or os.geteuid() != 0, reason="shows a fake /proc/cpuinfo: x86-64 and root")
def test_the_engine_on_a_processor_without_avx(tmp_path: Path) -> None:
    """The whole engine in an emulated Python: it chooses the base kernels and gives the reference's answer."""
    spec = TinySpec(kind="Q8_0")
    weights = write_model(tmp_path / "m.gguf", spec)
    (tmp_path / "cpuinfo").write_text(NEHALEM)
    code = 'mount --bind "$1" /proc/cpuinfo && shift && exec "$@"'
    python = os.path.realpath(sys.executable)
    command = [
        "unshare",
        "-m",
        "sh",
        "-c",
        code,
        "sh",
        str(tmp_path / "cpuinfo"),
        emulator("x86_64"),
        "-cpu",
        "Nehalem",
    ]
    env = {
        **os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
        "XDG_CACHE_HOME": str(tmp_path / "cache"), "OPENBLAS_NUM_THREADS": "1",
    }  # fmt: skip
    done = subprocess.run(
        [*command, python, "-c", ENGINE, str(tmp_path / "m.gguf")], env=env, capture_output=True, text=True, timeout=500
    )
    assert done.returncode == 0, done.stderr[-500:]
    backend, values = done.stdout.strip().splitlines()
    assert backend == "c base, 1 threads"
    logits = np.array([float(value) for value in values.split()], np.float32)
    assert distance(logits, reference_logits(spec, weights, [5, 6, 7])[-1]) < NOISE
