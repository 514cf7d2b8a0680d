"""The run directory: chosen, owned, locked before any bind, removed at exit (design.md 2)."""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import stat
from collections.abc import Callable, Mapping
from pathlib import Path

from common.run_files import ALIVE, LOCK, clear, is_own, remove
from common.security import SecurityError


class RunDirectory:
    """A 0700 directory whose flock is held for the life of this object.

    A second bind on an ipc path succeeds and steals silently, so the lock comes first. Raises SecurityError with one
    sentence when the directory cannot be used.
    """

    def __init__(self, configured: str, environ: Mapping[str, str]) -> None:
        self.path = Path(configured).absolute() if configured else default_path(environ)
        try:
            self.path.mkdir(mode=0o700, parents=bool(configured), exist_ok=True)
            info = self.path.lstat()
        except OSError as error:
            raise SecurityError(
                f"run directory {self.path} cannot be made: {error.strerror}; set [runtime] run_dir to a directory "
                "that you can write"
            ) from None
        if not stat.S_ISDIR(info.st_mode) or info.st_uid != os.geteuid() or info.st_mode & 0o077:
            raise SecurityError(
                f"run directory {self.path} is not a private directory of this user; remove it or set [runtime] run_dir"
            )
        try:
            self._fd = self._lock()
            if foreign := sorted(entry.name for entry in self.path.iterdir() if not is_own(entry)):
                (self.path / LOCK).unlink()
                os.close(self._fd)
                raise SecurityError(
                    f"run directory {self.path} holds other files ({foreign[0]}); set [runtime] run_dir to a directory "
                    "of its own, it is emptied and removed"
                )
            os.ftruncate(self._fd, 0)
            os.write(self._fd, str(os.getpid()).encode())
            clear(self.path)  # of a run that was killed: nobody holds the lock, so nobody uses it
        except OSError as error:
            raise SecurityError(
                f"run directory {self.path} is not writable: {error.strerror}; set [runtime] run_dir to a directory "
                "that you can write"
            ) from None

    def _lock(self) -> int:
        """The descriptor that holds the lock. Raises SecurityError while somebody else does, OSError."""
        while True:
            fd = os.open(self.path / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                owner = os.read(fd, 32).decode(errors="replace").strip()
                os.close(fd)
                raise SecurityError(
                    f"run directory {self.path} is in use by another orchestrator"
                    + (f" (process {owner})" if owner.isdigit() else "")
                    + "; stop it, or set [runtime] run_dir to another directory"
                ) from None
            # Between open and flock the owner may have ended and removed the file: a lock on that locks nothing.
            try:
                if os.path.samestat(os.fstat(fd), os.stat(self.path / LOCK)):
                    return fd
            except FileNotFoundError:
                self.path.mkdir(mode=0o700, exist_ok=True)
            os.close(fd)

    def remove(self) -> None:
        """Give the directory up; what somebody put there in the meantime stays."""
        remove(self.path)
        os.close(self._fd)


def stale(environ: Mapping[str, str]) -> list[Path]:
    """Run directories of the default kind that a killed run has left: keys lie in them, and nobody removes them."""
    return [path for path in _candidates(environ) if _if_nobodys(path, lambda _: None)]


def remove_stale(environ: Mapping[str, str]) -> list[Path]:
    """Remove these, with the launch files of workers that the ledger will find or has found gone."""
    return [path for path in _candidates(environ) if _if_nobodys(path, remove)]


def _candidates(environ: Mapping[str, str]) -> list[Path]:
    own = os.geteuid()
    found = list(Path("/tmp").glob(f"smq-{own}-????????"))
    if runtime := environ.get("XDG_RUNTIME_DIR", ""):
        found += Path(runtime).glob("smq-????????")
    return sorted(path for path in found if _is_directory_of(path, own))


def _is_directory_of(path: Path, owner: int) -> bool:
    """False also for one that another run removes at this moment."""
    try:
        found = path.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == owner


def _if_nobodys(path: Path, then: Callable[[Path], None]) -> bool:
    """Do that, if an orchestrator once locked the directory and neither it nor a service of its run lives."""
    locks: list[int] = []
    try:
        for name in (LOCK, ALIVE):
            with contextlib.suppress(FileNotFoundError):
                locks.append(os.open(path / name, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW))
                fcntl.flock(locks[-1], fcntl.LOCK_EX | fcntl.LOCK_NB)
        # An empty lock belongs to an orchestrator between the file's creation and its lock.
        if not locks or not os.read(locks[0], 1):
            return False
        then(path)
    except OSError:
        return False
    finally:
        for lock in locks:
            os.close(lock)
    return True


def default_path(environ: Mapping[str, str]) -> Path:
    """`$XDG_RUNTIME_DIR/smq-<8 hex>`, else `/tmp/smq-<uid>-<8 hex>`: short, because it holds sockets."""
    name = secrets.token_hex(4)
    runtime = environ.get("XDG_RUNTIME_DIR", "")
    if runtime and os.access(runtime, os.W_OK) and len(runtime) < 40:
        return Path(runtime) / f"smq-{name}"
    return Path("/tmp") / f"smq-{os.geteuid()}-{name}"
