"""Only what a stage needs of a model on a hub: the header, and the byte ranges of its own tensors (S1 7.1, 7.4).

The ranges go to their places in a sparse file of the model's size; what other stages need stays a hole. A list beside
it says which ranges are there, so that a fetch which was cut goes on where it stopped. Both are named by the content
hash that the hub gives. A range cannot be checked against the hash of the whole file: its length and the file's size
are, and a file that changes meanwhile has another hash and begins anew.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from common.gguf import GgufError, GgufFile
from common.messages.node_agent import HuggingFaceGguf
from worker.engine.cpu_objects import cache_folder, write_whole
from worker.engine.errors import EngineError
from worker.engine.parts import Part, Progress

PIECE_BYTES = 16 << 20  # of one request: lost again at most when the connection breaks
HEADER_BYTES = 4 << 20  # the first guess, doubled while it is too little; a vocabulary of 50,000 tokens fits
JOIN_BYTES = 1 << 20  # a smaller gap between two ranges is cheaper to fetch than another request
ATTEMPTS = 4  # of one piece
BACKOFF_S = 0.5  # before the second attempt, doubled after each
REQUEST_TIMEOUT_S = 60.0

PartOf = Callable[[int], Part]
Ranges = list[tuple[int, int]]  # [begin, end) in bytes, ordered, apart


class RangesRefused(Exception):
    """The server sends whole files only."""


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


def tensor_ranges(file: GgufFile, part: Part) -> Ranges:
    """Where the tensors lie that a stage with this part reads."""
    own = tuple(f"blk.{layer}." for layer in range(part.layer_start, part.layer_end_exclusive))
    tied = "output.weight" not in file.tensors
    found = []
    for name, info in file.tensors.items():
        if name.startswith("blk."):
            needed = name.startswith(own)
        elif name == "token_embd.weight":
            needed = part.with_embedding or (part.with_head and tied)
        else:
            needed = part.with_head or not name.startswith("output")
        if needed:
            found.append((info.offset, info.offset + info.nbytes))
    return merged(found, JOIN_BYTES)


def header_end(path: Path, fetched: int) -> int | None:
    """Where the tensors begin, if the first `fetched` bytes of the sparse file hold the whole header."""
    try:
        with GgufFile.open(path) as file:
            begin = min((info.offset for info in file.tensors.values()), default=fetched + 1)
    except GgufError:  # it reads on in the hole
        return None
    return begin if begin <= fetched else None


class SparseModel:
    """A model's file of which some ranges are there. Use it while holding the lock."""

    def __init__(self, path: Path, size: int) -> None:
        self.path, self.size = path, size
        self._list = path.with_suffix(".ranges")
        # A list that outlived its file, or a file of another size, says nothing: all of it is a hole.
        is_new = not path.exists() or path.stat().st_size != size
        if is_new:
            self._list.unlink(missing_ok=True)
            with path.open("wb") as file:
                file.truncate(size)
        self.have = [] if is_new else self._known()

    def _known(self) -> Ranges:
        try:
            return merged((int(begin), int(end)) for begin, end in json.loads(self._list.read_text()))
        except (OSError, ValueError, TypeError):
            return []

    def put(self, begin: int, data: bytes) -> None:
        """Store bytes; they count as there once they are on the disk."""
        with self.path.open("r+b") as file:
            os.pwrite(file.fileno(), data, begin)
            os.fdatasync(file.fileno())
        self.have = merged([*self.have, (begin, begin + len(data))])
        write_whole(self._list, json.dumps(self.have).encode())


class HubFile:
    """A file on the hub, read by ranges; the library's session sends the token to the hub and to nobody else."""

    def __init__(self, source: HuggingFaceGguf) -> None:
        from huggingface_hub import get_hf_file_metadata, hf_hub_url  # 0.4 s that only this source needs
        from huggingface_hub.utils import build_hf_headers, get_session

        self._url = hf_hub_url(source.repo, source.file, revision=source.revision)
        found = get_hf_file_metadata(self._url)
        if found.etag is None or found.size is None:
            raise RangesRefused
        self.etag, self.size = found.etag, found.size
        self._headers = {**build_hf_headers(), "Accept-Encoding": "identity"}
        self._session: Any = get_session()

    def read(self, begin: int, end: int) -> bytes:
        """Bytes [begin, end). Raises RangesRefused, or the library's error after the last attempt."""
        for attempt in range(1, ATTEMPTS + 1):
            try:
                return self._read_once(begin, end)
            except RangesRefused:
                raise
            except Exception:  # the session's errors depend on the library's version
                if attempt == ATTEMPTS:
                    raise
                time.sleep(BACKOFF_S * 2 ** (attempt - 1))
        raise AssertionError

    def _read_once(self, begin: int, end: int) -> bytes:
        headers = {**self._headers, "Range": f"bytes={begin}-{end - 1}"}
        with self._session.stream(
            "GET", self._url, headers=headers, follow_redirects=True, timeout=REQUEST_TIMEOUT_S
        ) as answer:
            if answer.status_code == 200:
                raise RangesRefused
            answer.raise_for_status()
            data = bytes(answer.read())
            whole = answer.headers.get("Content-Range", "").rpartition("/")[2]
        if len(data) != end - begin or whole not in ("", "*", str(self.size)):
            raise EngineError(f"the hub sent {len(data)} of {end - begin} bytes of a file of {whole or '?'} bytes")
        return data


def fetch_part(source: HuggingFaceGguf, part_of: PartOf, progress: Progress) -> Path:
    """The path of a sparse file with the tensors of one part. Raises RangesRefused, or the library's errors."""
    hub = HubFile(source)
    folder = cache_folder() / "models"
    folder.mkdir(parents=True, exist_ok=True)
    name = hashlib.sha256(f"{hub.etag} {hub.size}".encode()).hexdigest()[:32]
    with (folder / f"{name}.lock").open("wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # stages of one machine share the file
        model = SparseModel(folder / f"{name}.gguf", hub.size)
        _fetch(hub, model, [(0, min(HEADER_BYTES, hub.size))], progress)
        while header_end(model.path, model.have[0][1]) is None and model.have[0] != (0, hub.size):
            _fetch(hub, model, [(0, min(2 * model.have[0][1], hub.size))], progress)
        with GgufFile.open(model.path) as file:
            wanted = tensor_ranges(file, part_of(file.header().block_count))
        _fetch(hub, model, wanted, progress)
    return model.path


def _fetch(hub: HubFile, model: SparseModel, wanted: Ranges, progress: Progress) -> None:
    todo = missing(wanted, model.have)
    total = sum(end - begin for begin, end in wanted)
    done = total - sum(end - begin for begin, end in todo)
    for begin, end in todo:
        for at in range(begin, end, PIECE_BYTES):
            data = hub.read(at, min(at + PIECE_BYTES, end))
            model.put(at, data)
            done += len(data)
            progress("download", done, total)
