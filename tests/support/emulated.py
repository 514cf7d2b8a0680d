"""The C kernels on a processor that this machine is not: under qemu-user, with a small program around them."""

from __future__ import annotations

import ctypes
import os
import shutil
import struct
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from worker.engine.cpu_native import (
    _ARGS,
    _MATMUL,
    _QUANTISE,
    _REPACK,
    _ROWS,
    CONTROL_BYTES,
    Control,
    Kernels,
    act_bytes,
)
from worker.engine.cpu_objects import SOURCES, compile_object, zig
from worker.engine.cpu_plan import KINDS, tiled_bytes
from worker.engine.fast_path import _Departure, _FastPath

_DRIVER = Path(__file__).with_name("emulated_call.c")
_LINK_LIMIT_S = 120
_FLAGS = [
    "-O1",
    "-ffreestanding",
    "-fno-builtin",
    "-fno-stack-protector",
    "-fno-sanitize=undefined",
    "-nostdlib",
    "-static",
]


@dataclass(frozen=True, slots=True)
class Processor:
    """A CPU model of qemu and the best kernels that it can run."""

    arch: str
    model: str
    kernels: str

    def __str__(self) -> str:
        return f"{self.arch}-{self.model}-{self.kernels}"


PROCESSORS = (
    Processor("x86_64", "Nehalem", "base"),  # SSE 4.2, no AVX
    Processor("x86_64", "Haswell", "avx2"),  # no AVX-512
    Processor("aarch64", "cortex-a53", "base"),  # NEON without dot products
    Processor("aarch64", "neoverse-n1", "dotprod"),
)


def emulator(arch: str) -> str:
    """The path of qemu for programs of `arch`; the test is skipped where there is none."""
    found = shutil.which(f"qemu-{arch}")
    if found is None:
        pytest.skip(f"qemu-{arch} is missing: apt-get install qemu-user")
    return found


def build(processor: Processor, folder: Path, source: Path = SOURCES / "step.c") -> Path:
    """A static program of the kernels for `processor`."""
    compiler = zig()
    assert compiler is not None, "the package ziglang belongs to the environment"
    kernels, program = folder / f"{processor}-{source.stem}.o", folder / f"{processor}-{source.stem}"
    compile_object(processor.kernels, kernels, of=processor.arch, source=source)
    env = {**os.environ, "ZIG_GLOBAL_CACHE_DIR": str(folder / "zig"), "ZIG_LOCAL_CACHE_DIR": str(folder / "zig")}
    mcpu = ["-mcpu=x86_64"] if processor.arch == "x86_64" else ["-mcpu=generic"]
    command = [compiler, "cc", "-target", f"{processor.arch}-linux-musl", *mcpu, *_FLAGS]
    subprocess.run(
        [*command, str(_DRIVER), str(kernels), "-o", str(program)],
        check=True, env=env, timeout=_LINK_LIMIT_S, capture_output=True,
    )  # fmt: skip
    return program


class EmulatedKernels(Kernels):
    """Kernels whose calls run on the emulated processor; a process each, since qemu starts in a few milliseconds."""

    def __init__(self, processor: Processor, program: Path) -> None:
        self.instruction_set, self.origin = processor.kernels, "emulated"
        self._command = [emulator(processor.arch), "-cpu", processor.model, str(program)]
        self.step_bytes: Sequence[int] = ()
        """Sizes of the buffers of the step that a fast path takes."""

    def remote(
        self,
        buffers: Sequence[bytes],
        pointers: Sequence[tuple[int, int, int]],
        arguments: Sequence[int],
        descriptors: Sequence[int] = (),
    ) -> list[bytes]:
        """The buffers after a call with these arguments (numbers of buffers, -1 for null). descriptors: it has them,
        too."""
        request = struct.pack("<q", len(buffers))
        request += b"".join(struct.pack("<q", len(buffer)) + buffer for buffer in buffers)
        request += struct.pack("<q", len(pointers)) + b"".join(struct.pack("<3q", *pointer) for pointer in pointers)
        request += struct.pack("<8q", *arguments, *[-1] * (8 - len(arguments)))
        done = subprocess.run(self._command, input=request, capture_output=True, timeout=120, pass_fds=descriptors)
        assert done.returncode == 0, f"exit {done.returncode}: {done.stderr.decode()[-300:]}"
        out, at = [], 0
        for buffer in buffers:
            out.append(done.stdout[at : at + len(buffer)])
            at += len(buffer)
        return out

    def call(self, control: Control) -> None:
        """A fast path."""
        block = _FastPath.from_address(int(control.args[0]))
        raw, departures = bytes(block), block.departure[: block.departures]
        starts = {name: getattr(_FastPath, name).offset for name in ("into", "expected", "sums", "end_ids", "step")}
        first = _FastPath.departure.offset
        fields = [
            (starts["into"], block.in_room),
            (starts["expected"], block.expected_bytes),
            (starts["sums"], 4 * 8 * 256),
            (starts["end_ids"], 8 * block.end_count),
            *((starts["step"] + 8 * number, size) for number, size in enumerate(self.step_bytes)),
            *((first + number * ctypes.sizeof(_Departure), slot.bytes) for number, slot in enumerate(departures)),
        ]
        places = [int.from_bytes(raw[offset : offset + 8], "little") for offset, _ in fields]
        memory = [ctypes.string_at(place, size) for place, (_, size) in zip(places, fields, strict=True)]
        pointers = [(0, _ARGS, 1), *((1, offset, 2 + number) for number, (offset, _) in enumerate(fields))]
        descriptors = {block.wake_fd, block.watch_fd, block.in_fd, *(slot.fd for slot in departures)}
        buffers = [ctypes.string_at(control.address, CONTROL_BYTES), raw, *memory]
        _, after, *results = self.remote(buffers, pointers, [0], sorted(descriptors))
        patched = bytearray(after)
        for place, (offset, _), data in zip(places, fields, results, strict=True):
            ctypes.memmove(place, data, len(data))
            patched[offset : offset + 8] = place.to_bytes(8, "little")
        ctypes.memmove(ctypes.addressof(block), bytes(patched), len(patched))

    def run(self, op: int, args: Sequence[int], first: int = 0, second: int = 0, ahead: int = 0) -> Control:
        control = Control.private()
        control.head[0], control.head[1], control.ahead[0] = op, 1, ahead
        control.args[: len(args)] = args
        sizes = self._sizes(op, args)
        places = [first, second, *(args[at] for at in sizes.pointers)]
        lengths = [sizes.first, sizes.second, *sizes.pointed]
        buffers = [ctypes.string_at(control.address, 768)]
        buffers += [ctypes.string_at(place, n) if n else b"" for place, n in zip(places, lengths, strict=True)]
        patches = [(0, _ARGS + 8 * at, 3 + number) for number, at in enumerate(sizes.pointers)]
        results = self.remote(buffers, patches, [0, 1, 2])
        for place, data in zip(places, results[1:], strict=True):
            ctypes.memmove(place, data, len(data))
        return control

    def _sizes(self, op: int, args: Sequence[int]) -> _Sizes:
        if op == _REPACK:
            kind, rows, columns = KINDS[args[0]], args[1], args[2]
            return _Sizes(source_bytes(kind, rows, columns), tiled_bytes(kind, rows, columns))
        if op == _MATMUL:
            kind, rows, columns, count = KINDS[args[0]], *args[1:4]
            out = count * -(-rows // 16) * 16 * 4
            act = act_bytes(count, columns)
            return _Sizes(count * columns * 4, tiled_bytes(kind, rows, columns), (4, 5), (out, act))
        if op == _QUANTISE:
            columns, count = args[2], args[3]
            return _Sizes(count * columns * 4, 0, (5,), (act_bytes(count, columns),))
        assert op == _ROWS, op
        return _Sizes(args[1] * 4, 0, (2,), (args[1] * 4,))


@dataclass(frozen=True, slots=True)
class _Sizes:
    """Bytes behind the two pointers of a small operation, and behind those among its numbers."""

    first: int
    second: int
    pointers: tuple[int, ...] = ()
    pointed: tuple[int, ...] = ()


def source_bytes(kind: str, rows: int, columns: int) -> int:
    """Bytes of a matrix as the file holds it."""
    import gguf

    block, nbytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    return rows * columns // block * nbytes
