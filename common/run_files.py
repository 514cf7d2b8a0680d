"""What lies in a run directory, and who removes it when the launcher cannot (design.md 2).

The launcher removes its directory at its end. When it was killed, its services end by themselves, and the last of them
does: each holds a shared lock on ALIVE, and who gets it alone is the last. A new launcher that took the directory over
in the meantime holds LOCK; then it is not theirs any more.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import stat
from pathlib import Path

LOCK = "lock"
ALIVE = "alive"
RPC_ADDR_FILE = "prompt_rpc.addr"
"""Where the prompt RPC listens, for the HTTP front."""
OWN_NAMES = frozenset({LOCK, ALIVE, "bus", "keys", "secrets", "nodes", RPC_ADDR_FILE})
"""What a run leaves in its directory, beside its sockets. Whatever else lies there is somebody's and stays."""


def is_own(entry: Path) -> bool:
    """Whether a run put it there."""
    return entry.name in OWN_NAMES or stat.S_ISSOCK(entry.lstat().st_mode)


def clear(directory: Path) -> None:
    """Remove everything of a run but the lock. Raises OSError."""
    for entry in directory.iterdir():
        if is_own(entry) and entry.name != LOCK:
            shutil.rmtree(entry) if entry.is_dir() and not entry.is_symlink() else entry.unlink()


def remove(directory: Path) -> None:
    """Remove it as far as it is a run's. The caller holds LOCK."""
    with contextlib.suppress(OSError):
        clear(directory)
        (directory / LOCK).unlink()
        directory.rmdir()


class Presence:
    """One service of an embedded run. Without a directory that can be written it does nothing."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._fd = -1
        with contextlib.suppress(OSError):
            self._fd = os.open(directory / ALIVE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            fcntl.flock(self._fd, fcntl.LOCK_SH | fcntl.LOCK_NB)

    def leave(self) -> None:
        """The process ends. If nobody else of the run is there, launcher included, the directory goes."""
        if self._fd < 0:
            return
        # Turning a shared lock into an exclusive one gives the shared one up first: of two that try at the same time
        # at least one succeeds.
        with contextlib.suppress(OSError):
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            lock = os.open(self._directory / LOCK, os.O_RDWR | os.O_CLOEXEC)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                remove(self._directory)
            finally:
                os.close(lock)
        os.close(self._fd)
        self._fd = -1
