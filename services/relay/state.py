"""The state file of a relay that runs by itself: its own key, and whom it has admitted for which operator.

Whole or not at all on disk when `save` returns: what a relay has acknowledged outlives its restart.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from pathlib import Path

import msgspec

from common.addresses import Role
from common.broker import Admission
from common.bus import KeyPair, mint_keypair, public_of
from common.security import SecurityError, read_secret_file

VERSION = 1


class _Worker(msgspec.Struct, frozen=True, kw_only=True):
    key: str
    operator: str
    run: str
    node_id: int
    logical_id: str = ""


class _State(msgspec.Struct, frozen=True, kw_only=True):
    v: int = VERSION
    secret_key: str
    workers: list[_Worker] = []


class RelayState:
    """One file; `save` runs on job threads, one at a time."""

    def __init__(self, path: Path) -> None:
        """Read it, or make it with a new key. Raises SecurityError with one sentence."""
        self.path = path
        self._lock = threading.Lock()
        if not path.exists():
            self.keys = mint_keypair()
            self.workers: dict[bytes, Admission] = {}
            try:
                path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                self._write({})
            except OSError as error:
                raise SecurityError(f"cannot keep the relay's state in {path}: {error.strerror}") from None
            return
        try:
            found = msgspec.json.decode(read_secret_file(path), type=_State)
            if found.v != VERSION:
                raise ValueError(f"version {found.v}")
            secret = bytes.fromhex(found.secret_key)
            self.keys = KeyPair(public_of(secret), secret)
            self.workers = {
                bytes.fromhex(worker.key): Admission(
                    Role.AGENT,
                    bytes.fromhex(worker.run),
                    worker.node_id,
                    worker.logical_id,
                    bytes.fromhex(worker.operator),
                )
                for worker in found.workers
            }
        except SecurityError:
            raise
        except (msgspec.DecodeError, ValueError) as error:
            raise SecurityError(
                f"the relay's state in {path} is damaged ({error}); restore it, or remove it: the relay then has a new "
                "key, and every operator needs its new URL"
            ) from None

    def save(self, workers: Mapping[bytes, Admission]) -> None:
        """Replace what is on disk. Raises SecurityError. One at a time: a save that a hanging disk made late would
        else put its older state over the newer one."""
        try:
            with self._lock:
                self._write(workers)
        except OSError as error:
            raise SecurityError(f"cannot write the relay's state {self.path}: {error.strerror}") from None

    def _write(self, workers: Mapping[bytes, Admission]) -> None:
        state = _State(
            secret_key=self.keys.secret.hex(),
            workers=[
                _Worker(
                    key=key.hex(),
                    operator=known.operator.hex(),
                    run=known.run.hex(),
                    node_id=known.node_id,
                    logical_id=known.logical_id,
                )
                for key, known in sorted(workers.items())
            ],
        )
        staged = self.path.with_name(f".{self.path.name}.{os.getpid()}")
        handle = os.open(staged, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        with os.fdopen(handle, "wb") as file:
            file.write(msgspec.json.format(msgspec.json.encode(state), indent=1) + b"\n")
            file.flush()
            os.fsync(file.fileno())
        staged.rename(self.path)
        folder = os.open(self.path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
