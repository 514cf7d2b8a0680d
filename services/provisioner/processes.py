"""Which process is it really: identities that survive the reuse of pids, and signals that hit nobody else.

A worker is known by (pid, start time, boot id), and by the mark that it and all its children carry in their
environment. Signals go through a pidfd that was opened before the identity was checked.
"""

from __future__ import annotations

import contextlib
import errno
import os
import select
import signal
import time
from collections.abc import Iterator
from pathlib import Path

MARK_VARIABLE = "SMQ_WORKER"
"""Environment variable with the handle id of the worker: no secret, but unguessable, so that it proves kinship."""

FLEET_VARIABLE = "SMQ_FLEET"
"""Whose worker it is (design.md 6 row 32): by this one that no ledger names any more is still found."""

_PROC = Path("/proc")


def boot_id() -> str:
    """The id of this machine's current boot; pids of another boot mean nothing. "" where it cannot be read."""
    try:
        return (_PROC / "sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def start_time(pid: int) -> int | None:
    """When the process started, in clock ticks since boot; None if there is no such process (or only its zombie)."""
    try:
        stat = (_PROC / str(pid) / "stat").read_bytes()
    except OSError:
        return None
    # The name in parentheses may hold spaces and parentheses itself; the state is the first field after it.
    fields = stat.rpartition(b")")[2].split()
    return None if fields[0] in (b"Z", b"X") else int(fields[19])


def marks_of(pid: int) -> str | None:
    """The mark of a process, "" if it has none, None if that cannot be read (not ours, or gone)."""
    return variable_of(pid, MARK_VARIABLE)


def variable_of(pid: int, wanted: str) -> str | None:
    """An environment variable of a process, "" if it has none, None if that cannot be read."""
    try:
        environment = (_PROC / str(pid) / "environ").read_bytes()
    except OSError:
        return None
    for item in environment.split(b"\0"):
        name, _, value = item.partition(b"=")
        if name == wanted.encode():
            return value.decode("ascii", "replace")
    return ""


def marked_with(variable: str, value: str) -> dict[str, list[int]]:
    """Living processes of this user with that variable: mark → pids, the first started first."""
    found: dict[str, list[tuple[int, int]]] = {}
    for pid in _own_pids():
        if variable_of(pid, variable) == value and (mark := marks_of(pid)) and (started := start_time(pid)) is not None:
            found.setdefault(mark, []).append((started, pid))
    return {mark: [pid for _, pid in sorted(pids)] for mark, pids in found.items()}


def started_unix_ms(pid: int) -> int:
    """When a process started, 0 if that cannot be read."""
    ticks = start_time(pid)
    try:
        up_s = float((_PROC / "uptime").read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return 0
    return 0 if ticks is None else int((time.time() - up_s + ticks / os.sysconf("SC_CLK_TCK")) * 1000)


def kill_identified(pid: int, started: int, mark: str) -> bool:
    """SIGKILL the process only if it is the one that started then and bears no other mark. True if it was killed."""
    with _pidfd(pid) as handle:
        if handle is None or start_time(pid) != started or marks_of(pid) not in (mark, None):
            return False
        return _kill(handle)


def kill_marked(mark: str) -> list[int]:
    """SIGKILL everything of this user that carries the mark, also what left the worker's group. The pids killed."""
    killed = []
    for pid in _own_pids():
        if marks_of(pid) == mark:
            with _pidfd(pid) as handle:
                # Again, now that the pidfd holds the identity.
                if handle is not None and marks_of(pid) == mark and start_time(pid) is not None and _kill(handle):
                    killed.append(pid)
    return killed


def wait_gone(pids: list[int], limit_ms: int) -> list[int]:
    """Wait until these are dead (a zombie is dead); those that are still alive after limit_ms."""
    deadline = time.monotonic() + limit_ms / 1000
    for pid in pids:
        with _pidfd(pid) as handle:
            if handle is not None:
                poller = select.poll()
                poller.register(handle, select.POLLIN)
                poller.poll(max(0, int((deadline - time.monotonic()) * 1000)))
    return [pid for pid in pids if start_time(pid) is not None]


def oom_kills() -> int:
    """How often the kernel's out-of-memory killer struck since boot; 0 where it does not say."""
    try:
        for line in (_PROC / "vmstat").read_text().splitlines():
            if line.startswith("oom_kill "):
                return int(line.split()[1])
    except (OSError, ValueError):
        pass
    return 0


def exit_status(code: int) -> int:
    """Shells and engines report a death by signal n as 128 + n, here -n; a worker itself exits only with 0 or 1."""
    return 128 - code if 128 < code < 128 + 65 else code


def describe_status(status: int, oom_seen: bool = False) -> str:
    """An exit status in words: "exited with status 3", "killed by signal 9 (SIGKILL)"."""
    if status >= 0:
        return f"exited with status {status}"
    try:
        name = f" ({signal.Signals(-status).name})"
    except ValueError:
        name = ""
    text = f"killed by signal {-status}{name}"
    if oom_seen and status == -signal.SIGKILL:
        text += ": the kernel ran out of memory; use a smaller model, more stages or a machine with more memory"
    return text


@contextlib.contextmanager
def _pidfd(pid: int) -> Iterator[int | None]:
    try:
        handle = os.pidfd_open(pid)
    except OSError:
        yield None
        return
    try:
        yield handle
    finally:
        os.close(handle)


def _kill(handle: int) -> bool:
    try:
        signal.pidfd_send_signal(handle, signal.SIGKILL)
    except OSError as error:
        if error.errno not in (errno.ESRCH, errno.EPERM):
            raise
        return False
    return True


def _own_pids() -> Iterator[int]:
    own, me = os.geteuid(), os.getpid()
    with os.scandir(_PROC) as entries:
        for entry in entries:
            if entry.name.isdecimal() and int(entry.name) != me:
                with contextlib.suppress(OSError):
                    if entry.stat().st_uid == own:
                        yield int(entry.name)
