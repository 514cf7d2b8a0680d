"""A model's file on a hub, read by byte ranges: by the planner its header, by a stage its own tensors (S1 4.4, 7.1).

The ranges go to a sparse file in the cache, named by the content hash that the hub gives. A range cannot be checked
against the hash of the whole file: its length and the file's size are, and a file that changes meanwhile has another
hash and begins anew.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import math
import os
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from common.cache_files import cache_folder
from common.gguf import GgufError, GgufFile, MalformedError, NotGgufError, UnsupportedVersionError, part_names
from common.messages.node_agent import HuggingFaceGguf
from common.sparse_file import Ranges, SparseFile, missing

PIECE_BYTES = 16 << 20  # of one request: lost again at most when the connection breaks
HEADER_BYTES = 4 << 20  # the first guess, doubled while it is too little; a vocabulary of 50,000 tokens fits
HEADER_BYTES_MAX = 128 << 20  # a vocabulary of 262,144 tokens and its merges take 8 MB
ATTEMPTS = 4  # of one piece
BACKOFF_S = 0.5  # before the second attempt, doubled after each
REQUEST_TIMEOUT_S = 60.0  # without a byte

NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT})
DISK_ERRORS = NO_ROOM | {errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EFBIG}

Progress = Callable[[str, int, int], None]
"""("download", bytes there, bytes wanted)."""


class HubError(Exception):
    """The hub does not give what was asked for; one sentence without the name of the file."""


class RangesRefused(HubError):
    """The hub sends whole files only, or HF_HUB_OFFLINE leaves only those that were fetched before."""


def full_name(source: HuggingFaceGguf) -> str:
    """For messages."""
    return f"{source.repo}/{source.file}@{source.revision or 'main'}"


def not_there(error: Exception, source: HuggingFaceGguf) -> str:
    """What the configuration names and the hub does not have, with the way out; "" for other errors."""
    from huggingface_hub.errors import (
        EntryNotFoundError,
        GatedRepoError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    match error:
        case RevisionNotFoundError():
            return f"the repository has no revision {source.revision}: set [model] gguf_revision to one that it has"
        case GatedRepoError():
            return "the repository is gated: accept its terms on its page and set HF_TOKEN"
        case RepositoryNotFoundError():
            return "there is no such repository that you may read: mind [model] gguf_repo and HF_TOKEN"
        case EntryNotFoundError() if not isinstance(error, LocalEntryNotFoundError):
            return "the repository has no such file: set [model] gguf_file to one that it has"
    return ""


def reason(error: Exception, source: HuggingFaceGguf, token: str | None = None) -> str:
    """One sentence for what huggingface_hub, or its HTTP client, raised. Never with the token or a signed address."""
    from huggingface_hub import constants

    if isinstance(error, HubError):
        return str(error)
    if isinstance(error, GgufError):
        return str(error).partition(": ")[2]  # without the file's name in the cache
    if text := not_there(error, source):
        return text
    hub = f"the hub {constants.ENDPOINT}"
    if status := getattr(getattr(error, "response", None), "status_code", 0):
        return f"{hub} answers with status {status}{'; mind HF_TOKEN' if status in (401, 403) else ''}"
    if isinstance(error, OSError) and error.errno in DISK_ERRORS:
        rid = "`mvp-orchestrator cache --remove` makes room there, or " if error.errno in NO_ROOM else ""
        return f"{cache_folder()} cannot be written: {error.strerror}; {rid}set XDG_CACHE_HOME to another folder"
    text = " ".join(str(error).split())[:400] or type(error).__name__
    for secret in filter(None, (token, os.environ.get("HF_TOKEN"))):
        text = text.replace(secret, "***")
    return f"{hub} cannot be reached, or breaks off: {text}"


class HubFile:
    """One file, of which `commit` is the revision, None where the hub does not say. token: None for HF_TOKEN, or what
    the user has logged in with; the library's session sends it to the hub and to nobody else.

    until: on time.monotonic(), when to give up; None to go on. Raises HubError, or the library's errors.
    """

    def __init__(self, source: HuggingFaceGguf, token: str | None = None, until: float | None = None) -> None:
        os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
        from huggingface_hub import get_hf_file_metadata, hf_hub_url, is_offline_mode  # 0.4 s that few runs need
        from huggingface_hub.utils import build_hf_headers, get_session

        if is_offline_mode():
            raise RangesRefused("HF_HUB_OFFLINE is set")
        self._url = hf_hub_url(source.repo, source.file, revision=source.revision)
        found = get_hf_file_metadata(self._url, token=token)
        if found.etag is None or found.size is None:
            raise RangesRefused("the hub does not say the file's size and hash")
        self.etag, self.size, self.commit = found.etag, found.size, found.commit_hash
        self._name = full_name(source)
        self._until = until
        self._headers = {**build_hf_headers(token=token), "Accept-Encoding": "identity"}
        self._session: Any = get_session()

    def read(self, begin: int, end: int, told: Callable[[int], None] = lambda _: None) -> bytes:
        """Bytes [begin, end); told: how many have come. Raises HubError, or the library's after the last attempt."""
        for attempt in range(1, ATTEMPTS + 1):
            try:
                return self._read_once(begin, end, told)
            except HubError:
                raise
            except Exception:  # the session's errors depend on the library's version
                if attempt == ATTEMPTS:
                    raise
                time.sleep(BACKOFF_S * 2 ** (attempt - 1))
        raise AssertionError

    def _read_once(self, begin: int, end: int, told: Callable[[int], None]) -> bytes:
        headers = {**self._headers, "Range": f"bytes={begin}-{end - 1}"}
        data = bytearray()
        limit_s = min(REQUEST_TIMEOUT_S, self._left_s())
        with self._session.stream("GET", self._url, headers=headers, follow_redirects=True, timeout=limit_s) as answer:
            if answer.status_code == 200:
                raise RangesRefused("the hub sends no byte ranges of it")
            answer.raise_for_status()
            for chunk in answer.iter_raw():
                data += chunk
                if len(data) > end - begin:
                    break
                told(len(data))
                self._left_s()
            sent = answer.headers.get("Content-Range", "")
        if len(data) != end - begin or sent not in (f"bytes {begin}-{end - 1}/{size}" for size in (self.size, "*")):
            raise OSError(f"it sent {len(data)} bytes ({sent!r}) instead of [{begin}, {end}) of {self.size}")
        return bytes(data)

    def _left_s(self) -> float:
        """Raises HubError when the time is over."""
        left = math.inf if self._until is None else self._until - time.monotonic()
        if left <= 0:
            raise HubError("the hub is too slow; what has come is kept: start again to go on")
        return left

    def kept(self) -> SparseFile:
        """Where its ranges are kept. Raises OSError."""
        name = hashlib.sha256(f"{self.etag} {self.size}".encode()).hexdigest()[:32]
        return SparseFile(cache_folder() / "models" / f"{name}.gguf", self.size, self._name)


def _told(progress: Progress, done: int, total: int, count: int) -> None:
    progress("download", done + count, total)


def fetch_ranges(hub: HubFile, file: SparseFile, wanted: Ranges, progress: Progress) -> None:
    """Bring what is not there yet."""
    total = sum(end - begin for begin, end in wanted)
    todo = missing(wanted, file.have())
    done = total - sum(end - begin for begin, end in todo)
    for begin, end in todo:
        for at in range(begin, end, PIECE_BYTES):
            to = min(at + PIECE_BYTES, end)
            if missing([(at, to)], file.have()):  # else another process has brought it meanwhile
                file.put(at, hub.read(at, to, partial(_told, progress, done, total)))
            done += to - at
            progress("download", done, total)


def fetch_header(hub: HubFile, file: SparseFile, progress: Progress) -> None:
    """Bring metadata and tensor index, after which GgufFile can open the file. Raises GgufError, too."""
    end, limit = min(HEADER_BYTES, hub.size), min(HEADER_BYTES_MAX, hub.size)
    while True:
        fetch_ranges(hub, file, [(0, end)], progress)
        try:
            with GgufFile.open_one(str(file.path)) as gguf:
                if end >= min((info.offset for info in gguf.tensors.values()), default=0):
                    return
        except (NotGgufError, UnsupportedVersionError):
            raise
        except GgufError:  # it reads on in the hole, or the header is broken
            if end >= limit:
                raise
        if end >= limit:
            raise MalformedError(f"{file.path}: its header has more than {limit} bytes")
        end = min(2 * end, limit)


class HubModel:
    """A model on a hub, in one file or several, as far as it was fetched: `path` is for GgufFile.open once the header
    is there; `source` names the commit that was found. Arguments, errors: as of HubFile; OSError, too.
    """

    def __init__(self, source: HuggingFaceGguf, token: str | None = None, until: float | None = None) -> None:
        names = part_names(source.file)
        first = HubFile(replace(source, file=names[0]), token, until)
        self.source = replace(source, revision=first.commit or source.revision)
        rest = [HubFile(replace(self.source, file=name), token, until) for name in names[1:]]
        self._files = [(file, file.kept()) for file in (first, *rest)]
        kept = [file.path for _, file in self._files]
        self.path = kept[0] if len(kept) == 1 else _named(kept, names) / Path(source.file).name

    def fetch_header(self, progress: Progress) -> None:
        """Metadata and tensor index of all files. Raises GgufError, too."""
        for hub, file in self._files:
            fetch_header(hub, file, progress)

    def fetch(self, wanted: Sequence[Ranges], progress: Progress) -> None:
        """wanted: of each file."""
        for (hub, file), ranges in zip(self._files, wanted, strict=True):
            fetch_ranges(hub, file, ranges, progress)


def _named(paths: Sequence[Path], names: Sequence[str]) -> Path:
    """A folder in which the files have the names that tell GgufFile which belong together."""
    folder = paths[0].parent / hashlib.sha256("\n".join(map(str, paths)).encode()).hexdigest()[:32]
    folder.mkdir(exist_ok=True)
    for path, name in zip(paths, names, strict=True):
        with contextlib.suppress(FileExistsError):
            (folder / Path(name).name).symlink_to(path)
    return folder


def cached_whole(source: HuggingFaceGguf) -> Path | None:
    """Where huggingface_hub has the whole file of this revision already, or all files of a model in several."""
    from huggingface_hub import try_to_load_from_cache

    names = part_names(source.file)
    found = [try_to_load_from_cache(source.repo, name, revision=source.revision) for name in names]
    paths = [Path(path) for path in found if isinstance(path, str)]
    return paths[names.index(source.file)] if len(paths) == len(names) else None
