"""The C kernels as Python calls: the control block of cpu/model.h, the small operations, and the helper threads."""

from __future__ import annotations

import ctypes
import os
import threading
import weakref
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from common.gguf import GgufFile
from worker.engine import tinygrad_shim as tg
from worker.engine.cpu_objects import CompileError, chosen, cpu_vendor, find_object
from worker.engine.cpu_plan import KINDS, ROWS_MAX
from worker.engine.tinygrad_shim import Tensor, dtypes

_STEP, _HELPER, _REPACK, _STREAM, _SCRATCH, _MATMUL, _QUANTISE, _ROWS, _STOP, _UNPACK, FAST_PATH = range(1, 12)
_ACT_GROUP = 8
CONTROL_BYTES = 1280
PHASE_BYTES = 12 * 64  # of a block, at the start of the scratch memory
_AHEAD, _ARGS, _POSITIONS = 24, 32, 176  # byte offsets within the control block

F32 = npt.NDArray[np.float32]


class Control:
    """One control block; each thread that calls the kernels by itself needs its own."""

    def __init__(self, address: int, memory: npt.NDArray[np.uint8]) -> None:
        self.address, self._memory = address, memory
        words = memory.view(np.int32)
        self.head = words[:6]  # op, threads, rows, head_rows, exit, skip_blocks
        self.ahead = memory[_AHEAD:_ARGS].view(np.int64)
        self.args = memory[_ARGS : _ARGS + 80].view(np.int64)
        self.positions = memory[_POSITIONS : _POSITIONS + 4 * ROWS_MAX].view(np.int32)
        self.slots = memory[_POSITIONS + 4 * ROWS_MAX : _POSITIONS + 8 * ROWS_MAX].view(np.int32)
        self.tokens = memory[_POSITIONS + 8 * ROWS_MAX : _POSITIONS + 16 * ROWS_MAX].view(np.int64)

    @classmethod
    def private(cls) -> Control:
        raw = np.zeros(CONTROL_BYTES + 64, np.uint8)
        start = -raw.ctypes.data % 64
        return cls(raw.ctypes.data + start, raw[start : start + CONTROL_BYTES])

    @classmethod
    def in_tensor(cls, tensor: Tensor) -> Control:
        memory = tg.view(tensor)
        memory[:] = 0
        return cls(tg.address(tensor), memory)


class Kernels:
    """The compiled kernels of one instruction set."""

    def __init__(self, instruction_set: str, elf: bytes, origin: str) -> None:
        self.instruction_set, self.origin = instruction_set, origin
        self.native = tg.Native("swactor_step", elf)

    def run(self, op: int, args: Sequence[int], first: int = 0, second: int = 0, ahead: int = 0) -> Control:
        """A small operation with its own control block, on this thread."""
        control = Control.private()
        control.head[0], control.head[1], control.ahead[0] = op, 1, ahead
        control.args[: len(args)] = args
        self.native.call(control.address, first, second, 0, 0, 0, 0, 0)
        return control

    def call(self, control: Control) -> None:
        """The operation of this block, on this thread."""
        self.native.call(control.address, 0, 0, 0, 0, 0, 0, 0)

    def repack(self, kind: int, source: int, target: int, rows: int, columns: int, head_dim: int, rope: int) -> None:
        self.run(_REPACK, (kind, rows, columns, head_dim, rope), source, target)

    def read_through(self, address: int, nbytes: int, ahead: int = 0) -> None:
        """Read memory once as fast as one thread can: the yardstick of decoding speed. `ahead`: see prefetch_bytes."""
        self.run(_STREAM, (nbytes,), 0, address, ahead)

    def scratch_bytes(self, plan: int, threads: int) -> int:
        control = Control.private()
        control.head[0], control.head[1] = _SCRATCH, threads
        self.native.call(control.address, 0, 0, plan, 0, 0, 0, 0)
        return int(control.args[0])

    def product(self, kind: int, tiles: npt.NDArray[np.uint8], rows: int, x: F32) -> F32:
        """x (T, columns) times a tiled matrix (rows, columns), with quantised activations: (T, rows)."""
        count, columns = x.shape
        padded = -(-rows // 16) * 16
        out = np.empty((count, padded), np.float32)
        act = np.zeros(act_bytes(count, columns), np.uint8)
        args = (kind, rows, columns, count, out.ctypes.data, act.ctypes.data)
        self.run(_MATMUL, args, np.ascontiguousarray(x).ctypes.data, tiles.ctypes.data)
        return out[:, :rows]

    def quantise(self, x: F32) -> F32:
        """x as the kernels see it: int8 times a scale for each 16 columns."""
        count, columns = x.shape
        act = np.zeros(act_bytes(count, columns), np.uint8)
        data = np.ascontiguousarray(x)
        self.run(_QUANTISE, (0, 0, columns, count, 0, act.ctypes.data), data.ctypes.data)
        group, padded = _act_rows(count)
        codes = act[: padded * columns].view(np.int8).astype(np.float32)
        first = -(-padded * columns // 64) * 64
        scales = act[first : first + padded * columns // 4].view(np.float32)
        seen: F32 = codes.reshape(-1, 16) * scales[:, None]
        return seen.reshape(-1, columns // 32, group, 32).swapaxes(1, 2).reshape(padded, columns)[:count]

    def unpack(self, kind: int, matrix: npt.NDArray[np.uint8], columns: int, rows: Sequence[int]) -> F32:
        """Chosen rows of a matrix as it lies in the file, (len(rows), columns)."""
        wanted = np.array(rows, np.int64)
        out = np.empty((len(wanted), columns), np.float32)
        args = (kind, wanted.ctypes.data, len(wanted), columns, out.ctypes.data)
        self.run(_UNPACK, args, matrix.ctypes.data)
        return out

    def rows(self, what: int, x: F32) -> F32:
        """0: SiLU, 1: GELU, 2: exp, 3: to float16 and back."""
        out = np.zeros_like(x)
        self.run(_ROWS, (what, x.size, out.ctypes.data), np.ascontiguousarray(x).ctypes.data)
        return out


def _act_rows(count: int) -> tuple[int, int]:
    """Rows of quantised activations that lie together, and how many there are with the last group full (tiles.h)."""
    group = 1 if count == 1 else _ACT_GROUP
    return group, -(-count // group) * group


def act_bytes(count: int, columns: int) -> int:
    """Room for `count` rows of quantised activations with `columns` columns."""
    return _act_rows(count)[1] * columns * 3 + 1024


def load_kernels() -> Kernels | None:
    """The best kernels that this processor runs; None where only the portable backend can work."""
    if not tg.is_cpu():
        return None
    for name in chosen():
        try:
            elf, origin = find_object(name)
        except CompileError:
            return None
        return Kernels(name, elf, origin)
    return None


class Team:
    """A step's buffers and threads: `step()` runs the captured program, all helpers beside it."""

    def __init__(self, kernels: Kernels, tensors: Sequence[Tensor], threads: int, memory: object) -> None:
        """`memory` is what the tensors borrow; a late helper may look at it until it is sent home."""
        self._tensors = list(tensors)
        self.control = Control.in_tensor(self._tensors[0])
        self.control.head[0], self.control.head[1], self.control.ahead[0] = _STEP, threads, prefetch_bytes()
        self.threads = threads
        self._step = tg.NativeStep(kernels.native, self._tensors)
        helpers = []
        for number in range(1, threads):
            control = Control.private()
            control.head[0] = _HELPER
            control.args[:2] = self.control.address, number
            thread = threading.Thread(target=_help, args=(kernels, control), name=f"engine-{number}", daemon=True)
            thread.start()
            helpers.append(thread)
        self._close = weakref.finalize(self, _stop, kernels, self.control.address, helpers, (self._tensors, memory))

    def set_embedding(self, file: GgufFile, name: str, scale: float) -> None:
        """Where a step finds the rows of its tokens: the matrix as it lies in the file."""
        info = file.tensor(name)
        self._file = file  # stays mapped; but a view of it would keep it from being closed
        where = np.frombuffer(file.tensor_bytes(name), np.uint8).ctypes.data
        self.control.args[1:3] = KINDS.index(info.type_name), where
        self.control.args[3:4].view(np.float32)[0] = scale

    def step(self) -> None:
        self._step()

    @property
    def addresses(self) -> tuple[int, ...]:
        """Of the buffers, once the step is captured."""
        return self._step.addresses

    def close(self) -> None:
        """Send the helpers home; also done at the interpreter's end, while the memory is still there."""
        self._close()


def _help(kernels: Kernels, control: Control) -> None:
    kernels.call(control)


def _stop(kernels: Kernels, control: int, helpers: list[threading.Thread], _kept: object) -> None:
    ctypes.c_int32.from_address(control).value = _STOP
    kernels.native.call(control, 0, 0, 0, 0, 0, 0, 0)
    for thread in helpers:
        thread.join()


def prefetch_bytes() -> int:
    """How far before their use weights are asked for, 0: not at all.

    Measured: on AMD's Zen 4 the processor's own prefetching reaches the memory's limit and instructions for it only
    take places in its queue (0.87 against 1.0 of that limit); elsewhere the tiles' short streams want them.
    """
    return 0 if cpu_vendor() == "AuthenticAMD" else 2048


def default_threads() -> int:
    """The cores that this process may use."""
    return max(1, len(os.sched_getaffinity(0)))


def control_tensor() -> Tensor:
    return tg.allocate((CONTROL_BYTES,), dtypes.uint8)
