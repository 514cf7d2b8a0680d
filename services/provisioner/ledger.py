"""The handle ledger: what was started, written down before it is started, so that nothing outlives us unnoticed.

One JSON-lines file per provisioner instance in `$XDG_STATE_HOME/swactor-mq/ledger/`, flock-ed while the instance lives
(design.md 2, 6 row 32). Records are only appended, each on disk before the next step: intent → (attempt → a paid call,
several times) → worker starts → handle → worker is stopped → stopped. Whoever gets the lock of a file that is not its
own knows that its writer is dead.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import msgspec

from common.launch_file import LaunchFile, LaunchFileError
from services.provisioner.plugin import LeftBehind, PluginNodeHandle

LEDGER_BYTES_MAX = 64 * 1024 * 1024  # no honest instance comes near; a broken file must not fill our memory
SUFFIX = ".jsonl"
FLEET_FILE = "fleet"
SINGLE_GPU_FOLDER = "ledger-single-gpu"
"""Beside the provisioners' folder: what single-gpu-inference rents."""


class LedgerError(Exception):
    """The ledger cannot be kept; str() is one sentence. Without a ledger no worker is started."""


class LedgerRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One line. id: the handle id, the key of all. launch, public_key: the launch file, to remove it later.

    at_unix_ms: when the line was written; 0 in ledgers of older versions.
    """

    op: Literal["intent", "attempt", "handle", "stopped"]
    id: str
    provider: str = ""
    run: str = ""
    run_id: int = 0
    node_id: int = 0
    stage_index: int = 0
    boot_id: str = ""
    launch: str = ""
    public_key: str = ""
    process_id: int | None = None
    facts: dict[str, str | int] = {}
    error: str = ""
    at_unix_ms: int = 0


@dataclass(frozen=True, slots=True)
class Settled:
    """One entry that `reconcile` closed. stopped: it was still alive; else it had ended by itself."""

    entry: LedgerRecord
    stopped: bool


@dataclass(slots=True)
class Reconciled:
    """What `reconcile` did. problems: sentences about what stays open."""

    settled: list[Settled] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    @property
    def stopped(self) -> int:
        """How many workers were still alive."""
        return sum(item.stopped for item in self.settled)


@dataclass(frozen=True, slots=True)
class OpenEntry:
    """A worker that some ledger still answers for. alive: the instance that wrote it runs; handle: None while the
    worker starts; error: why the last stop was not confirmed; asked_unix_ms: the latest attempt to start it, which a
    start that takes several may make a quarter of an hour after its intent."""

    intent: LedgerRecord
    handle: LedgerRecord | None
    alive: bool
    error: str = ""
    asked_unix_ms: int = 0


def ledger_folder(environment: Mapping[str, str]) -> Path:
    """Where ledgers lie. Raises LedgerError if neither XDG_STATE_HOME nor HOME says so."""
    if state := environment.get("XDG_STATE_HOME"):
        return Path(state) / "swactor-mq" / "ledger"
    if home := environment.get("HOME"):
        return Path(home) / ".local" / "state" / "swactor-mq" / "ledger"
    raise LedgerError("there is no place for the ledger: set HOME or XDG_STATE_HOME")


def fleet_id(environment: Mapping[str, str]) -> str:
    """16 hex digits, the same for this user on this machine for ever: what paid and remote things are marked with.

    Raises LedgerError.
    """
    folder = ledger_folder(environment).parent
    path = folder / FLEET_FILE
    try:
        _make_folder(folder)
        if not path.exists():
            fresh = os.urandom(8).hex()
            staged = path.with_name(f".fleet.{fresh}")
            staged.write_text(fresh)
            # link, not rename: of two that start at once the first one's counts for both.
            with contextlib.suppress(FileExistsError):
                os.link(staged, path)
            staged.unlink()
        found = path.read_text(errors="replace").strip()
    except OSError as error:
        raise LedgerError(f"cannot keep the fleet id in {path}: {error.strerror}") from None
    if not re.fullmatch(r"[0-9a-f]{16}", found):
        raise LedgerError(f"the fleet id in {path} is damaged; remove the file when no worker of yours is left")
    return found


class Ledger:
    """This instance's own file. Thread-safe: job threads write it."""

    def __init__(self, folder: Path, instance: str) -> None:
        """Create and lock `<instance>.jsonl`. Raises LedgerError if it exists or the folder cannot be written."""
        self.path = folder / f"{instance}{SUFFIX}"
        self._lock = threading.Lock()
        self._open: set[str] = set()
        try:
            _make_folder(folder)
            self._fd = _create_locked(self.path)
            _sync_folder(folder)
        except OSError as error:
            raise LedgerError(f"cannot keep the ledger in {folder}: {error.strerror}; no worker is started") from None
        self._size = 0

    @property
    def unsettled(self) -> int:
        """How many intents have no `stopped` yet."""
        return len(self._open)

    def append(self, record: LedgerRecord) -> None:
        """Write and fsync. Raises LedgerError; then the file holds whole records only, as before."""
        at_ms = record.at_unix_ms or time.time_ns() // 1_000_000
        line = msgspec.json.encode(msgspec.structs.replace(record, at_unix_ms=at_ms)) + b"\n"
        with self._lock:
            try:
                _write_all(self._fd, line)
                os.fsync(self._fd)
            except OSError as error:
                with contextlib.suppress(OSError):
                    os.ftruncate(self._fd, self._size)
                raise LedgerError(f"cannot write the ledger {self.path}: {error.strerror}") from None
            self._size += len(line)
            if record.op == "intent":
                self._open.add(record.id)
            elif record.op == "stopped" and not record.error:
                self._open.discard(record.id)

    def close(self) -> None:
        """Release it: removed when everything is settled, else left for the next start. Closing twice is fine."""
        with self._lock:
            if self._fd < 0:
                return
            if not self._open:
                with contextlib.suppress(OSError):
                    os.unlink(self.path)
            os.close(self._fd)
            self._fd = -1


def reconcile(folder: Path, stop: Callable[[LeftBehind], bool]) -> Reconciled:
    """Settle the files of dead instances; those of living ones are locked and left alone.

    stop: `plugin.stop_left_behind` of the entry's provider. A file goes when all its entries are settled; one with an
    entry that could not be stopped stays for the next start, and is named in `problems`.
    """
    result = Reconciled()
    try:
        files = sorted(folder.glob(f"*{SUFFIX}"))
    except OSError:
        return result
    for path in files:
        try:
            handle = _lock_existing(path)
        except OSError as error:
            result.problems.append(f"cannot read the ledger {path}: {error.strerror}")
            continue
        if handle is not None:
            try:
                _settle(path, handle, stop, result)
            finally:
                os.close(handle)
    return result


def open_entries(folder: Path) -> list[OpenEntry]:
    """What all ledgers of the folder answer for, those of living instances too; changes nothing.

    A file that cannot be read raises LedgerError: what it names is unknown, and unknown is never "none".
    """
    found: list[OpenEntry] = []
    for path in sorted(folder.glob(f"*{SUFFIX}")):
        try:
            handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except FileNotFoundError:
            continue
        except OSError as error:
            raise LedgerError(f"cannot read the ledger {path}: {error.strerror}") from None
        try:
            alive = _is_locked(handle)
            found += _open_of(read_records(handle)[0], alive)
        finally:
            os.close(handle)
    return found


def _open_of(records: list[LedgerRecord], alive: bool) -> list[OpenEntry]:
    """Every entry that is not settled, in the order of their start."""
    intents: dict[str, LedgerRecord] = {}
    asked: dict[str, int] = {}
    handles: dict[str, LedgerRecord] = {}
    errors: dict[str, str] = {}
    for record in records:
        if record.op in ("intent", "attempt"):
            asked[record.id] = max(asked.get(record.id, 0), record.at_unix_ms)
        if record.op == "attempt":
            continue
        if record.op == "intent":
            intents[record.id] = record
        elif record.op == "handle":
            handles[record.id] = record
        elif record.error:
            errors[record.id] = record.error
        else:
            intents.pop(record.id, None)
    return [
        OpenEntry(intent, handles.get(id), alive, errors.get(id, ""), asked.get(id, 0))
        for id, intent in intents.items()
    ]


def _is_locked(handle: int) -> bool:
    try:
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    fcntl.flock(handle, fcntl.LOCK_UN)
    return False


def _settle(path: Path, handle: int, stop: Callable[[LeftBehind], bool], result: Reconciled) -> None:
    records, damaged = read_records(handle)
    failed = False
    # Last started first, as the guard would.
    for left in reversed(_open_of(records, alive=False)):
        entry = left.intent
        try:
            stopped = stop(left_behind(left))
        except Exception as error:  # a plugin's bug or failure with one entry must not keep us from the others
            failed = True
            named = f"worker {entry.id} of an earlier run (node {entry.node_id})"
            result.problems.append(f"{named} is not stopped: {error}")
            continue
        result.settled.append(Settled(entry, stopped))
        remove_launch_file(entry.launch, entry.public_key)
    if failed:
        return
    if damaged:
        # Never again tried, never thrown away: somebody may want to look by hand.
        os.replace(path, path.with_suffix(".damaged"))
        result.problems.append(f"the ledger {path} has {damaged} unreadable lines; it is kept as {path.stem}.damaged")
    else:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)


def read_records(handle: int) -> tuple[list[LedgerRecord], int]:
    """The records of an open ledger, and how many lines are unreadable. A torn last line is no damage: its writer
    died in the middle of it, so the step it announces was never taken."""
    data = bytearray()
    os.lseek(handle, 0, os.SEEK_SET)
    while len(data) <= LEDGER_BYTES_MAX and (chunk := os.read(handle, 1 << 20)):
        data += chunk
    whole, _, _ = bytes(data[:LEDGER_BYTES_MAX]).rpartition(b"\n")
    records, damaged = [], 0
    for line in whole.split(b"\n") if whole else []:
        try:
            records.append(msgspec.json.decode(line, type=LedgerRecord))
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            damaged += 1
    return records, damaged


def left_behind(entry: OpenEntry) -> LeftBehind:
    """What a provider needs to stop the worker of this entry."""
    intent, handle = entry.intent, entry.handle
    known = None if handle is None else PluginNodeHandle(intent.id, handle.process_id, handle.facts)
    return LeftBehind(
        intent.id, intent.provider, intent.run, intent.node_id, intent.boot_id, known, entry.asked_unix_ms
    )


def remove_launch_file(launch: str, public_key: str) -> None:
    """It holds a secret key. Another run, or the next attempt at the node, may have put its own file at the same path
    by now: that one stays, and its folder."""
    path = Path(launch)
    with contextlib.suppress(LaunchFileError, OSError):
        if launch and LaunchFile.read(path).public_key == public_key:
            path.unlink()


def _create_locked(path: Path) -> int:
    while True:
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC, 0o600)
        try:
            # Blocking: a reconcile that opened the new, still empty file holds it for a moment only.
            fcntl.flock(handle, fcntl.LOCK_EX)
            if os.fstat(handle).st_nlink > 0:
                return handle
        except OSError:
            os.close(handle)
            raise
        # That reconcile found it settled and removed it: once more.
        os.close(handle)


def _lock_existing(path: Path) -> int | None:
    """The locked file, None if a living instance has it or it is gone."""
    try:
        handle = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        alive = os.fstat(handle).st_nlink > 0
    except BlockingIOError:
        alive = False
    except OSError:
        os.close(handle)
        raise
    if not alive:
        os.close(handle)
        return None
    return handle


def _make_folder(folder: Path) -> None:
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)


def _write_all(handle: int, data: bytes) -> None:
    while data:
        data = data[os.write(handle, data) :]


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
