"""A file of which some byte ranges are there: what a fetch by ranges has brought so far.

The file has the whole's size; what nobody needed is a hole. A list beside it says which ranges are there, so that a
fetch which was cut goes on where it stopped. Processes of one machine share both: none waits while another fetches.
Ranges are [begin, end) in bytes, ordered, apart.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import weakref
from collections.abc import Iterable, Iterator
from pathlib import Path

from common.cache_files import write_whole

Ranges = list[tuple[int, int]]
SOURCE = ".source"
"""Suffix of the note that says what a file is of; its time is that of the last use."""
_RANGES, _LOCK = ".ranges", ".lock"


def parts(path: Path) -> tuple[Path, ...]:
    """What goes with the file, itself first; its lock stays for whoever waits for it."""
    return path, path.with_suffix(SOURCE), path.with_suffix(_RANGES)


def remove(path: Path) -> None:
    """Raises BlockingIOError while somebody has a SparseFile of it, OSError."""
    with path.with_suffix(_LOCK).open("wb") as lock, path.open("rb") as file:
        fcntl.flock(lock, fcntl.LOCK_EX)
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        for part in parts(path):
            part.unlink(missing_ok=True)


def merged(ranges: Iterable[tuple[int, int]], gap: int = 0) -> Ranges:
    """The same bytes as ordered ranges; those at most `gap` apart become one."""
    out: Ranges = []
    for begin, end in sorted(ranges):
        if out and begin <= out[-1][1] + gap:
            out[-1] = (out[-1][0], max(out[-1][1], end))
        elif end > begin:
            out.append((begin, end))
    return out


def missing(wanted: Ranges, have: Ranges) -> Ranges:
    """The parts of `wanted` that `have` lacks."""
    out: Ranges = []
    for begin, end in wanted:
        for from_, to in have:
            if from_ < end and to > begin:
                if from_ > begin:
                    out.append((begin, from_))
                begin = to
        if begin < end:
            out.append((begin, end))
    return out


class SparseFile:
    """The file at `path`, whole it would have `size` bytes. name: what it is of. While this lives, `mvp-orchestrator
    cache` leaves the file alone. Raises OSError where the folder cannot be written."""

    def __init__(self, path: Path, size: int, name: str = "") -> None:
        self.path, self.size = path, size
        self._list, self._lock = path.with_suffix(_RANGES), path.with_suffix(_LOCK)
        path.parent.mkdir(parents=True, exist_ok=True)
        with self._locked():
            if not path.exists() or path.stat().st_size != size:
                self._list.unlink(missing_ok=True)
                with path.open("wb") as file:
                    file.truncate(size)
            used = os.open(path, os.O_RDONLY)
            weakref.finalize(self, os.close, used)
            fcntl.flock(used, fcntl.LOCK_SH)
            write_whole(path.with_suffix(SOURCE), name.encode())
            # A list that outlived its file says nothing: where the file is a hole it was made anew, or damaged.
            listed = self.have()
            if lost := missing(listed, self._written()):
                self._write_list(missing(listed, lost))

    def have(self) -> Ranges:
        """What is there now."""
        try:
            return merged((int(begin), int(end)) for begin, end in json.loads(self._list.read_text()))
        except (OSError, ValueError, TypeError):
            return []

    def _write_list(self, have: Ranges) -> None:
        write_whole(self._list, json.dumps(have).encode())

    def _written(self) -> Ranges:
        """Where the file is no hole; all of it on a file system that knows none."""
        out: Ranges = []
        with contextlib.suppress(OSError), self.path.open("rb") as file:  # ENXIO: only a hole follows
            at = 0
            while at < self.size:
                begin = os.lseek(file.fileno(), at, os.SEEK_DATA)
                at = os.lseek(file.fileno(), begin, os.SEEK_HOLE)
                out.append((begin, at))
        return merged(out)

    def put(self, begin: int, data: bytes) -> None:
        """Store bytes; they count as there once they are on the disk."""
        with self.path.open("r+b") as file:
            os.pwrite(file.fileno(), data, begin)
            os.fdatasync(file.fileno())
        with self._locked():
            self._write_list(merged([*self.have(), (begin, begin + len(data))]))

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """Held for moments only."""
        with self._lock.open("wb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield
