"""The weights of a stage in the C kernels' tiles: repacked once, then mapped from the cache.

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
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from worker.engine.cpu_native import Kernels
from worker.engine.cpu_objects import cache_folder, write_whole
from worker.engine.cpu_plan import LAYOUT, Item, StagePlan
from worker.engine.parts import Progress

HEAD_BYTES = 4096  # magic, layout, size; then the arena, page-aligned
KEPT_BYTES = 16 << 30  # of all cache files together; the ones that were used longest ago go first
_MAGIC = b"SMQTILES"
_HEAD = struct.Struct("<8sQQ")
_PREFIX = "weights-"


class Arena:
    """The weights' memory and its address; `origin` says where they came from: "cache", "packed"."""

    def __init__(self, memory: mmap.mmap, offset: int, nbytes: int, origin: str) -> None:
        self._memory = memory  # keeps the mapping
        self.nbytes, self.origin = nbytes, origin
        self.address = _address(memory) + offset


def load_arena(plan: StagePlan, kernels: Kernels, threads: int, progress: Progress) -> Arena:
    """Map the cached arena or make it; `progress("tensors", bytes of the file done, in all)`."""
    folder, total = cache_folder(), plan.source_bytes
    note = folder / f"note-{_identity(plan)}"
    with contextlib.suppress(OSError, ValueError):
        if arena := _mapped(folder / _file_name(note.read_text()), plan.nbytes):
            progress("tensors", total, total)
            return arena
    key = _content_key(plan)
    target = folder / _file_name(key)
    arena = _mapped(target, plan.nbytes)
    if arena is None:
        arena = _make(plan, kernels, threads, progress, target)
    else:
        progress("tensors", total, total)
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


def _mapped(path: Path, nbytes: int) -> Arena | None:
    """The arena of a complete cache file, or None."""
    try:
        with path.open("rb") as file:
            if os.fstat(file.fileno()).st_size != HEAD_BYTES + nbytes:
                return None
            if _HEAD.unpack(file.read(_HEAD.size)) != (_MAGIC, LAYOUT, nbytes):
                return None
            memory = mmap.mmap(
                file.fileno(), HEAD_BYTES + nbytes, mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0), mmap.PROT_READ
            )
    except OSError:
        return None
    with contextlib.suppress(OSError):
        os.utime(path)
    return Arena(memory, HEAD_BYTES, nbytes, "cache")


def _make(plan: StagePlan, kernels: Kernels, threads: int, progress: Progress, target: Path) -> Arena:
    """Pack into the cache, or into memory of our own where that is not possible."""
    handle, temporary = -1, ""
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        _make_room(target.parent, plan.nbytes)
        handle, temporary = tempfile.mkstemp(prefix=f".{_PREFIX}", dir=target.parent)
        os.posix_fallocate(handle, 0, HEAD_BYTES + plan.nbytes)
        memory = mmap.mmap(handle, HEAD_BYTES + plan.nbytes)
        memory[: _HEAD.size] = _HEAD.pack(_MAGIC, LAYOUT, plan.nbytes)
        arena = Arena(memory, HEAD_BYTES, plan.nbytes, "packed")
        pack(plan, kernels, threads, progress, arena.address)
        os.replace(temporary, target)
        temporary = ""
        return arena
    except OSError:
        memory = mmap.mmap(-1, max(plan.nbytes, 1))
        with contextlib.suppress(OSError, AttributeError, ValueError):
            memory.madvise(mmap.MADV_HUGEPAGE)
        arena = Arena(memory, 0, plan.nbytes, "packed")
        pack(plan, kernels, threads, progress, arena.address)
        return arena
    finally:
        if handle >= 0:
            os.close(handle)
        if temporary:
            with contextlib.suppress(OSError):
                os.unlink(temporary)


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
