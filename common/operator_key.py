"""The operator's lasting key: by it a relay that runs elsewhere knows whose router dials it (design.md 3, Relay).

`$XDG_STATE_HOME/swactor-mq/operator.key`, made on first use. One router at a time may use it: two would take each
other's place at the relay.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Mapping
from pathlib import Path

from common.bus import KeyPair, mint_keypair, public_of

FILE = "operator.key"
KEY_HEX_CHARS = 64


class OperatorKeyError(ValueError):
    """The key cannot be kept, read or had alone; one sentence."""


def operator_key_path(environment: Mapping[str, str]) -> Path:
    """Where it lies. Raises OperatorKeyError if neither XDG_STATE_HOME nor HOME says so."""
    if state := environment.get("XDG_STATE_HOME"):
        return Path(state) / "swactor-mq" / FILE
    if home := environment.get("HOME"):
        return Path(home) / ".local" / "state" / "swactor-mq" / FILE
    raise OperatorKeyError("there is no place for the operator key: set HOME or XDG_STATE_HOME")


def operator_key(path: Path) -> KeyPair:
    """The key pair in this file, made if it is not there. Raises OperatorKeyError."""
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not path.exists():
            staged = path.with_name(f".{path.name}.{os.getpid()}")
            handle = os.open(staged, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
            with os.fdopen(handle, "w") as file:
                file.write(mint_keypair().secret.hex() + "\n")
                file.flush()
                os.fsync(file.fileno())
            # link, not rename: of two that start at once the first one's counts for both.
            with contextlib.suppress(FileExistsError):
                os.link(staged, path)
            staged.unlink()
        if path.stat().st_mode & 0o077:
            raise OperatorKeyError(f"{path}: others can read this key file; run chmod 600 on it")
        text = path.read_text(errors="replace").strip()
    except OSError as error:
        raise OperatorKeyError(f"cannot keep the operator key in {path}: {error.strerror}") from None
    try:
        secret = bytes.fromhex(text)
        if len(text) != KEY_HEX_CHARS:
            raise ValueError
    except ValueError:
        raise OperatorKeyError(
            f"the operator key in {path} is damaged; restore it, or remove it for a new one"
        ) from None
    return KeyPair(public_of(secret), secret)


def hold(path: Path) -> int:
    """The descriptor that keeps other routers away from this key while this process lives. Raises OperatorKeyError."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise OperatorKeyError(f"cannot use the operator key {path}: {error.strerror}") from None
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(handle)
        raise OperatorKeyError(
            "another run uses this operator key, and a relay knows one router a key; stop that run, or set another "
            f"XDG_STATE_HOME and have that key allowed, too ({path})"
        ) from None
    return handle
