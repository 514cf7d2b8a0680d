"""The one module that touches tinygrad (pinned to 0.13.0; reference/engine.md 8 says why; 0.14.0 runs too).

It prepares the environment before tinygrad is imported, chooses the C compiler, and offers the engine a small
vocabulary: tensors, symbolic integers, kernels with explicit vector lanes, a captured step, and byte copies.

The compiler is clang where it is on the PATH, else the clang inside the `ziglang` wheel. tinygrad's compile cache
keys on the source text and says "native", not which CPU that is; so the cache file is our own, one per CPU model
and compiler, and a home directory shared between machines cannot hand out illegal instructions.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import hashlib
import importlib.util
import os
import platform
import shutil
import subprocess
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from common.cache_files import cache_folder
from worker.engine.errors import EngineError

LANES = 16  # rows of a weight tile: one AVX-512 register of float32, two of AVX2; tinygrad's upcast limit
TOKEN_UPCAST = 4  # rows of the batch that share one pass over a weight tile

Array: TypeAlias = npt.NDArray[Any]


def compiler_command() -> list[str]:
    """The clang to call: from the PATH, else out of the ziglang wheel. Raises EngineError if there is neither."""
    clang = shutil.which(os.environ.get("CC") or "clang")
    if clang is not None and "clang" in Path(clang).name:
        return [clang]
    spec = importlib.util.find_spec("ziglang")
    for folder in spec.submodule_search_locations or () if spec is not None else ():
        zig = Path(folder) / "zig"
        if os.access(zig, os.X_OK):
            return [str(zig), "clang"]
    raise EngineError("no C compiler: neither clang is on the PATH nor is the Python package ziglang installed")


def _any_compiler() -> list[str]:
    with contextlib.suppress(EngineError):
        return compiler_command()
    return []


def _cpu_identity() -> str:
    """What decides which instructions `-march=native` emits: the CPU's model and flags."""
    lines = {platform.machine()}
    with contextlib.suppress(OSError), open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
        for line in file:
            if line.startswith(("model name", "flags", "Features", "CPU part")):
                lines.add(line.strip())
    return "\n".join(sorted(lines))


def _cache_file(command: list[str]) -> Path:
    stamp = _cpu_identity()
    for compiler in command[:1]:
        stamp += f"\n{os.path.realpath(compiler)}\n{os.stat(compiler).st_size}"
    return cache_folder() / f"kernels-{hashlib.sha256(stamp.encode()).hexdigest()[:16]}.db"


def _usable(cache: Path) -> bool:
    """Whether the cache can be written; what is left of a broken one is removed, since it can be made again."""
    try:
        cache.parent.mkdir(parents=True, exist_ok=True)
        if cache.exists() and cache.stat().st_size:
            with cache.open("rb") as file:
                if file.read(16) != b"SQLite format 3\0":
                    cache.unlink()
    except OSError:
        return False
    return os.access(cache if cache.exists() else cache.parent, os.W_OK)


def _prepare_environment() -> list[str]:
    """Set what tinygrad reads at import; gives the compiler, empty where there is none or none is needed.

    DEV, THREADS, CACHEDB and CACHELEVEL of the user are respected.
    """
    wanted = os.environ.setdefault("DEV", "CPU")
    # Without one: the C kernels may come compiled, and who needs it is told when it is called.
    command = _any_compiler() if wanted in ("CPU", "CPU:CLANG") else []
    # Measured on two cores: handing a kernel to a second thread costs what it gains (50 us of 80).
    os.environ.setdefault("THREADS", "0")
    # 0.14 compiles in worker processes, which do not know our compiler.
    os.environ.setdefault("PARALLEL", "0")
    if "CACHEDB" not in os.environ:
        cache = _cache_file(command)
        if _usable(cache):
            os.environ["CACHEDB"] = str(cache)
        else:
            os.environ["CACHELEVEL"] = "0"  # a read-only home: compile on every start
    return command


_command = _prepare_environment()

from tinygrad import Device, Tensor, TinyJit, Variable, device, dtypes  # noqa: E402
from tinygrad.runtime.support.c import DLL  # noqa: E402

_find_library = DLL.findlib


def _find_library_but_llvm(name: str, *places: Any) -> Any:
    """tinygrad loads libLLVM wherever it lies, 41 MB of resident memory for a renderer that is not in use."""
    return None if name == "llvm" and "LLVM" not in os.environ["DEV"] else _find_library(name, *places)


DLL.findlib = staticmethod(_find_library_but_llvm)

from tinygrad.runtime import ops_cpu  # noqa: E402
from tinygrad.runtime.support import compiler_cpu  # noqa: E402
from tinygrad.runtime.support.elf import jit_loader  # noqa: E402
from tinygrad.uop.ops import AxisType, KernelInfo, Ops, UOp  # noqa: E402

# What 0.14 changed: programs stay ELF objects until they are loaded, and copies go from buffer to buffer.
_OBJECTS = not hasattr(compiler_cpu, "ClangJITCompiler")

__all__ = ["LANES", "Array", "Expr", "NativeStep", "Step", "Symbol", "Tensor", "dtypes"]

Symbol: TypeAlias = Any  # a tinygrad UOp: an integer known only when a step runs
Expr: TypeAlias = Any  # a tinygrad UOp inside a kernel


def _compile_to_object(self: Any, source: str) -> bytes:
    """tinygrad's own flags with the chosen compiler; -g0 because debug sections have unknown relocations."""
    if not _command:
        compiler_command()
    command = [
        *_command, "-c", "-x", "c", "-O2", "-g0", "-fPIC", "-ffreestanding", "-fno-math-errno", "-nostdlib",
        "-fno-ident", f"--target={self.arch}-none-unknown-elf", *self.args, "-", "-o", "-",
    ]  # fmt: skip
    result = subprocess.run(command, input=source.encode(), capture_output=True, check=False)
    if result.returncode:
        last = result.stderr.decode(errors="replace").strip().splitlines()[-1:] or [f"exit {result.returncode}"]
        raise EngineError(f"the C compiler {_command[0]} failed: {last[0]}")
    return result.stdout


if _OBJECTS:  # its CPU device compiles programs of its own, whatever renderer is chosen
    _command = _command or _any_compiler()
    compiler_cpu.ClangCompiler.compile = _compile_to_object
elif os.environ["DEV"] in ("CPU", "CPU:CLANG"):
    compiler_cpu.ClangJITCompiler.compile_to_obj = _compile_to_object


def _wait_unless_own_thread(self: Any, timeout: int | None = None) -> None:
    """The garbage collector may run on the device's own thread; a buffer freed there waited for that very thread."""
    if not isinstance(threading.current_thread(), ops_cpu.CPUWorker):
        _wait(self, timeout)


if not _OBJECTS:  # later its threads run no Python
    _wait = ops_cpu.CPUDevice.synchronize
    ops_cpu.CPUDevice.synchronize = _wait_unless_own_thread


def device_name() -> str:
    """The tinygrad device in use, such as CPU or CUDA."""
    return str(Device.DEFAULT)


def is_cpu() -> bool:
    return device_name().split(":")[0] == "CPU"


def symbol(name: str, lowest: int, highest: int) -> Symbol:
    """A symbolic integer; a step binds it to a value with `symbol.bind(value)`."""
    return Variable(name, lowest, max(highest, lowest + 1))  # of one value it would be a constant


def allocate(shape: tuple[int, ...], dtype: Any) -> Tensor:
    """A device buffer with undefined content; memory becomes resident only where it is written."""
    tensor = Tensor.empty(*shape, dtype=dtype).realize()
    tensor.uop.buffer.ensure_allocated()
    return tensor


def upload(array: Array) -> Tensor:
    """A device copy of a host array."""
    return Tensor(np.ascontiguousarray(array)).realize()


def write(tensor: Tensor, array: Array, element_offset: int = 0) -> None:
    """Copy a contiguous host array of the tensor's dtype into its buffer, from `element_offset` on."""
    buffer = tensor.uop.buffer
    part = buffer.view(array.size, tensor.dtype, element_offset * tensor.dtype.itemsize).ensure_allocated()
    data = array.reshape(-1).view(np.uint8).data
    if _OBJECTS:
        part.copy_from(device.Buffer("PYTHON", array.size, tensor.dtype, opaque=data))
        synchronize()  # the array is the caller's, and the copy may still read it
    else:
        part.copyin(data)


def read(tensor: Tensor, count: int) -> npt.NDArray[np.float32]:
    """The first `count` float32 values of a realised tensor, as an own copy. Waits for the device."""
    buffer = tensor.uop.buffer.view(count, dtypes.float32, 0).ensure_allocated()
    return np.frombuffer(buffer.as_memoryview(), np.float32, count).copy()


def release_memory() -> None:
    """Hand freed buffers back to the system: tinygrad keeps them for reuse otherwise."""
    gc.collect()
    Device[device_name()].allocator.free_cache()


# -- kernels -------------------------------------------------------------------------------------------------


def loop(count: Expr, number: int) -> Expr:
    """A loop of a kernel; loops nest in the order of their numbers."""
    return UOp.range(count, number, AxisType.LOOP)


def reduction(count: Expr, number: int) -> Expr:
    """The loop that `total` or `largest` runs over."""
    return UOp.range(count, number, AxisType.REDUCE)


def total(value: Expr, over: Expr) -> Expr:
    return value.reduce(over, arg=Ops.ADD)


def largest(value: Expr, over: Expr) -> Expr:
    return value.reduce(over, arg=Ops.MAX)


def as_float(value: Expr) -> Expr:
    return value.cast(dtypes.float32)


def as_half(value: Expr) -> Expr:
    return value.cast(dtypes.float16)


def choose(condition: Expr, value: Expr, other: float) -> Expr:
    return condition.where(value, value.const_like(other))


def lanes(count: int, number: int) -> Expr:
    """A loop whose turns are computed side by side: a vector, or neighbours that share what they load."""
    return UOp.range(count, number, AxisType.UPCAST)


def finish(name: str, store: Expr, loops: Sequence[Expr], explicit: bool = True) -> Expr:
    """Close a kernel. `explicit` kernels run as they are written; the others are left to tinygrad's heuristics.

    Its heuristics find no vectors in a matrix-vector product on a CPU (reference/engine.md 2).
    """
    hints = () if explicit else None
    return store.end(*loops).sink(arg=KernelInfo(name=name, opts_to_apply=hints))


def launch(kernel: Callable[..., Expr], target: Tensor, *inputs: Tensor, bound: Sequence[Symbol] = ()) -> Tensor:
    """Run `kernel(target, *inputs)` on buffers; returns the target as it is afterwards.

    The order of launches is that of data: pass the returned tensor on. `bound` are the bound symbols that the
    kernel uses unbound.
    """
    buffers = [target.uop, *(tensor.uop for tensor in inputs)]
    places = [UOp.placeholder_like(buffer, slot=index) for index, buffer in enumerate(buffers)]
    body = kernel(*places)
    if _OBJECTS:  # a symbol is a parameter inside of kernels
        symbols = {value.src[0] for value in bound}
        body = body.substitute({symbol: UOp(Ops.PARAM, src=symbol.src, arg=symbol.arg) for symbol in symbols})
    return Tensor(target.uop.after(body.call(*buffers, *bound)))


# -- native code ---------------------------------------------------------------------------------------------


class Native:
    """A compiled C object whose first function takes buffers, run by tinygrad as a program of its CPU device."""

    def __init__(self, name: str, elf: bytes) -> None:
        self._name, self._elf = name, elf
        self._code = elf if _OBJECTS else bytes(jit_loader(elf))
        cpu = Device["CPU"]
        arguments = (device.TinyELF(elf, name, cpu.renderer.target, ()),) if _OBJECTS else (name, self._code)
        self._program = cpu.runtime(*arguments)

    def call(self, *addresses: int) -> None:
        """Run it at once, on this thread, on memory addresses; the GIL is released meanwhile."""
        self._program.fxn(*(ctypes.c_uint64(address) for address in addresses))

    def launch(self, target: Tensor, tensors: Sequence[Tensor]) -> Tensor:
        """Run it in a step on all of `tensors`; gives `target`, one of them, as it is afterwards."""
        buffers = [tensor.uop for tensor in tensors]
        places = [UOp.placeholder_like(buffer, slot=index) for index, buffer in enumerate(buffers)]
        sink = UOp.sink(*places, arg=KernelInfo(name=self._name))
        source = UOp(Ops.SOURCE, arg=f"{self._name} {hashlib.sha256(self._elf).hexdigest()}")
        on = () if _OBJECTS else (UOp(Ops.DEVICE, arg="CPU"),)
        parts = (sink, *on, UOp(Ops.LINEAR, src=(*places, sink)), source)
        program = UOp(Ops.PROGRAM, src=(*parts, UOp(Ops.BINARY, arg=self._code)))
        return Tensor(target.uop.after(program.call(*buffers)))


def borrow(address: int, nbytes: int) -> Tensor:
    """A tensor of bytes over memory that someone else owns and keeps longer than the tensor lives."""
    return Tensor.from_blob(address, (nbytes,), dtype=dtypes.uint8, device="CPU")


def address(tensor: Tensor) -> int:
    """Where a CPU tensor's buffer lies."""
    return int(tensor.uop.buffer._buf.va_addr)


def view(tensor: Tensor) -> Array:
    """A CPU tensor's memory as a numpy array of its dtype: reading and writing it costs no copy."""
    nbytes = tensor.uop.buffer.nbytes
    memory = (ctypes.c_uint8 * nbytes).from_address(address(tensor))
    return np.frombuffer(memory, np.dtype(tensor.dtype.fmt))


def synchronize() -> None:
    """Wait for the device."""
    Device[device_name()].synchronize()


class NativeStep:
    """A program on persistent tensors as a step: captured once, then replayed on the calling thread. Handing it to the
    device's thread and back costs 85 us (measured, 2 % of a token of SmolLM2); nothing else is queued there by then."""

    def __init__(self, native: Native, tensors: Sequence[Tensor]) -> None:
        self._native, self._tensors = native, tensors
        self._jit = TinyJit(lambda: native.launch(tensors[-1], tensors).realize())
        self.addresses: tuple[int, ...] = ()
        """Of the tensors, once the step is captured: what the program is called with."""

    def __call__(self) -> None:
        """Returns when the program has run."""
        if self.addresses:
            self._native.call(*self.addresses)
            return
        self._jit()
        synchronize()
        if self._jit.captured is not None:
            self.addresses = tuple(address(tensor) for tensor in self._tensors)


class Step:
    """A function of symbolic integers that is captured once and replayed; it works on persistent tensors."""

    def __init__(self, function: Callable[..., Tensor]) -> None:
        self._jit = TinyJit(function)

    def __call__(self, *bound: Symbol) -> Tensor:
        result: Tensor = self._jit(*bound)
        return result
