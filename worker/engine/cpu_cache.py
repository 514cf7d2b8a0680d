"""The weights of a stage in the C kernels' tiles: repacked once, then read or mapped from the cache.

Where memory allows, the tiles lie in anonymous memory with huge pages, which streams a fifth faster than a mapped file
(30 against 25 GB/s measured): a start reads the cache file into it at memory speed. Where they would take most of the
free memory, or the system has no huge pages, the file is mapped and the system keeps what fits.

A cache file is named by the hash of the tensors' content and of the layout; the tiles are the same for every
instruction set, which the name says too. A small note remembers which file (path, size, time) has which content, so
that a second start reads neither the model's tensors nor hashes anything. Without a writable cache, or without
space, the tiles live in anonymous memory.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import mmap
import os
import struct
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from io import BufferedRandom
from pathlib import Path

import numpy as np

from common.cache_files import cache_folder, write_whole
from common.free_memory import free_memory
from worker.engine.cpu_native import Kernels
from worker.engine.cpu_plan import LAYOUT, Item, StagePlan
from worker.engine.parts import Progress

HUGE_PAGE = 2 << 20
READ_BYTES = 16 << 20  # of the cache file at once, by each thread
HEAD_BYTES = 4096  # magic, layout, size; then the arena, page-aligned
KEPT_BYTES = 16 << 30  # of all cache files together; the ones that were used longest ago go first
_MAGIC = b"SMQTILES"
_HEAD = struct.Struct("<8sQQ")
_PREFIX = "weights-"


class Arena:
    """Memory and its address; `origin` says what is in it: the weights from the "cache", or "packed", or "empty"."""

    def __init__(self, memory: mmap.mmap, offset: int, nbytes: int, origin: str) -> None:
        self._memory = memory  # keeps the mapping
        self.nbytes, self.origin = nbytes, origin
        self.address = _address(memory) + offset

    @classmethod
    def anonymous(cls, nbytes: int, origin: str) -> Arena:
        """Zeroed memory of our own, in huge pages where the system has them."""
        memory = mmap.mmap(-1, nbytes + HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with contextlib.suppress(OSError, AttributeError, ValueError):
            memory.madvise(mmap.MADV_HUGEPAGE)
        return cls(memory, -_address(memory) % HUGE_PAGE, nbytes, origin)

    def bytes(self) -> memoryview:
        start = self.address - _address(self._memory)
        return memoryview(self._memory)[start : start + self.nbytes]


def load_arena(plan: StagePlan, kernels: Kernels, threads: int, progress: Progress) -> Arena:
    """Map the cached arena or make it; `progress("tensors", bytes of the file done, in all)`."""
    folder = cache_folder()
    note = folder / f"note-{_identity(plan)}"
    with contextlib.suppress(OSError, ValueError):
        if arena := _cached(folder / _file_name(note.read_text()), plan, threads, progress):
            return arena
    key = _content_key(plan)
    target = folder / _file_name(key)
    arena = _cached(target, plan, threads, progress) or _make(plan, kernels, threads, progress, target)
    with contextlib.suppress(OSError):
        write_whole(note, key.encode())
    return arena


def _file_name(key: str) -> str:
    if not key.isalnum():
        raise ValueError("not a key")
    return f"{_PREFIX}{LAYOUT}-all-{key}"  # "all": these tiles serve every instruction set


def _structure(plan: StagePlan) -> bytes:
    rotary = (plan.header.head_dim, plan.header.rope_dim)
    return repr((LAYOUT, rotary, [(item.name, item.kind, item.rows, item.columns) for item in plan.items])).encode()


def _identity(plan: StagePlan) -> str:
    """Which file it is, without reading it."""
    facts = []
    for path in plan.file.paths:
        status = os.stat(path)
        facts.append((os.path.realpath(path), status.st_size, status.st_mtime_ns, status.st_ino))
    return hashlib.sha256(repr(facts).encode() + _structure(plan)).hexdigest()[:32]


def _content_key(plan: StagePlan) -> str:
    digest = hashlib.sha256(_structure(plan))
    for item in plan.items:
        digest.update(plan.file.tensor_bytes(item.name))
    return digest.hexdigest()[:32]


def _address(memory: mmap.mmap) -> int:
    return int(np.frombuffer(memory, np.uint8).ctypes.data)


def huge_pages_pay(nbytes: int) -> bool:
    """Whether there are huge pages, and memory for `nbytes` in them with as much again left over."""
    try:
        if "[never]" in Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text():
            return False
    except OSError:
        return False
    return free_memory() > 2 * nbytes


def _cached(path: Path, plan: StagePlan, threads: int, progress: Progress) -> Arena | None:
    """The arena of a complete cache file, or None."""
    try:
        with path.open("rb") as file:
            if os.fstat(file.fileno()).st_size != HEAD_BYTES + plan.nbytes:
                return None
            if _HEAD.unpack(file.read(_HEAD.size)) != (_MAGIC, LAYOUT, plan.nbytes):
                return None
            if huge_pages_pay(plan.nbytes):
                arena = Arena.anonymous(plan.nbytes, "cache")
                _read(file.fileno(), arena, plan.source_bytes, threads, progress)
            else:
                flags = mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0)
                memory = mmap.mmap(file.fileno(), HEAD_BYTES + plan.nbytes, flags, mmap.PROT_READ)
                arena = Arena(memory, HEAD_BYTES, plan.nbytes, "cache")
                progress("tensors", plan.source_bytes, plan.source_bytes)
    except OSError:
        return None
    with contextlib.suppress(OSError):
        os.utime(path)
    return arena


def _read(file: int, arena: Arena, total: int, threads: int, progress: Progress) -> None:
    """Fill the arena from a cache file. Raises OSError, also where the file is too short."""
    target = arena.bytes()

    def one(start: int) -> int:
        at, end = start, min(start + READ_BYTES, arena.nbytes)
        while at < end:
            count = os.preadv(file, [target[at:end]], HEAD_BYTES + at)
            if not count:
                raise OSError("the cache file ends too early")
            at += count
        return end

    with ThreadPoolExecutor(threads) as pool:
        for end in pool.map(one, range(0, arena.nbytes, READ_BYTES)):
            progress("tensors", total * end // arena.nbytes, total)


def _make(plan: StagePlan, kernels: Kernels, threads: int, progress: Progress, target: Path) -> Arena:
    """Pack in memory and save it, or pack into the cache file and keep that mapped."""
    in_memory = huge_pages_pay(plan.nbytes)
    if not in_memory:
        with contextlib.suppress(OSError):
            return _make_mapped(plan, kernels, threads, progress, target)
    arena = Arena.anonymous(plan.nbytes, "packed")
    pack(plan, kernels, threads, progress, arena.address)
    if in_memory:
        with contextlib.suppress(OSError), _new_file(target, plan.nbytes) as file:
            file.write(_HEAD.pack(_MAGIC, LAYOUT, plan.nbytes).ljust(HEAD_BYTES, b"\0"))
            file.write(arena.bytes())
    return arena


def _make_mapped(plan: StagePlan, kernels: Kernels, threads: int, progress: Progress, target: Path) -> Arena:
    with _new_file(target, plan.nbytes) as file:
        os.posix_fallocate(file.fileno(), 0, HEAD_BYTES + plan.nbytes)
        memory = mmap.mmap(file.fileno(), HEAD_BYTES + plan.nbytes)
        memory[: _HEAD.size] = _HEAD.pack(_MAGIC, LAYOUT, plan.nbytes)
        arena = Arena(memory, HEAD_BYTES, plan.nbytes, "packed")
        pack(plan, kernels, threads, progress, arena.address)
    return arena


@contextlib.contextmanager
def _new_file(target: Path, nbytes: int) -> Iterator[BufferedRandom]:
    """A file that gets its name when all has gone well. Raises OSError where the disk has no room."""
    target.parent.mkdir(parents=True, exist_ok=True)
    _make_room(target.parent, nbytes)
    handle, temporary = tempfile.mkstemp(prefix=f".{_PREFIX}", dir=target.parent)
    try:
        with os.fdopen(handle, "w+b") as file:
            yield file
        os.replace(temporary, target)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise


def _make_room(folder: Path, nbytes: int) -> None:
    """Drop what was used longest ago. Raises OSError where the disk has no room for `nbytes` and as much again."""
    found = []
    for path in folder.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):
            found.append((path.stat().st_mtime, path.stat().st_size, path))
    used = nbytes
    for _, size, path in sorted(found, reverse=True):
        used += size
        if used > KEPT_BYTES:
            with contextlib.suppress(OSError):
                path.unlink()
    space = os.statvfs(folder)
    if space.f_bavail * space.f_frsize < 2 * nbytes:
        raise OSError("no room for the weights' cache")


def pack(plan: StagePlan, kernels: Kernels, threads: int, progress: Progress, address: int) -> None:
    """Write every tensor of the plan to its place in the arena at `address`."""
    h, total, done = plan.header, plan.source_bytes, 0

    def one(item: Item) -> int:
        at = address + item.offset
        if item.kind is None:
            values = plan.vector(item)
            ctypes.memmove(at, values.ctypes.data, values.nbytes)
        else:
            source = np.frombuffer(plan.file.tensor_bytes(item.name), np.uint8)
            heads = (h.head_dim, h.rope_dim) if item.rotary else (0, 0)
            kernels.repack(item.number, source.ctypes.data, at, item.rows, item.columns, *heads)
        return plan.file.tensors[item.name].nbytes

    with ThreadPoolExecutor(threads) as pool:
        for nbytes in pool.map(one, plan.items):
            done += nbytes
            progress("tensors", done, total)
