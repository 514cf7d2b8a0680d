"""The state file of a gpu-node on this machine: where it listens and the keys of its clients (design.md 6 row 38).

`$XDG_STATE_HOME/swactor-mq/gpu-nodes/<64 hex>.json`, 0600, so that `--seed <hex>` is all that a person types. The node
holds it flock-ed while it lives; each client locks one byte of it, and so has one of the keys for itself.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from common.bus import KeyPair, mint_keypair, public_of
from common.security import SecurityError, read_secret_file, write_private

CLIENTS_MAX = 16  # clients at the same time: two with one key would take each other's connection
_STATE_BYTES_MAX = 64 * 1024

Hex32 = Annotated[str, Meta(pattern=r"\A[0-9a-f]{64}\Z")]


class StateError(Exception):
    """One sentence: what is wrong with which file, and the way out."""


class State(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The content. clients: secret keys of client key pairs, all admitted."""

    v: int = 1
    node: Hex32
    host: str
    port: Annotated[int, Meta(ge=1, le=65532)]
    clients: list[Hex32]


@dataclass(frozen=True, slots=True)
class Door:
    """How a client gets in. `lock`: holds its key for this process; -1 if the key is its own."""

    node: bytes
    host: str
    port: int
    keys: KeyPair
    lock: int = -1


def state_folder(environment: Mapping[str, str]) -> Path:
    """Where state files lie. Raises StateError."""
    if state := environment.get("XDG_STATE_HOME"):
        return Path(state) / "swactor-mq" / "gpu-nodes"
    if home := environment.get("HOME"):
        return Path(home) / ".local" / "state" / "swactor-mq" / "gpu-nodes"
    raise StateError("there is no place for the state file: set HOME or XDG_STATE_HOME")


class Published:
    """A node's own state file, there as long as the node."""

    def __init__(self, folder: Path, node: bytes, host: str, port: int, clients: list[KeyPair]) -> None:
        """Raises StateError."""
        self.path = folder / f"{node.hex()}.json"
        state = State(node=node.hex(), host=host, port=port, clients=[keys.secret.hex() for keys in clients])
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            remove_stale(folder)
            write_private(self.path, msgspec.json.encode(state) + b"\n")
            self._fd = os.open(self.path, os.O_RDWR | os.O_CLOEXEC)
            fcntl.flock(self._fd, fcntl.LOCK_EX)
        except OSError as error:
            raise StateError(f"cannot write the state file {self.path}: {error.strerror}") from None

    def remove(self) -> None:
        """The node is gone. Twice is fine."""
        if self._fd >= 0:
            with contextlib.suppress(FileNotFoundError):
                self.path.unlink()
            os.close(self._fd)
            self._fd = -1


def mint_clients() -> list[KeyPair]:
    """The key pairs of a node's clients."""
    return [mint_keypair() for _ in range(CLIENTS_MAX)]


def remove_stale(folder: Path) -> None:
    """Files of nodes that died without a word: nobody holds their lock."""
    for path in folder.glob("*.json"):
        with contextlib.suppress(OSError):
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                if not _is_held(fd):
                    path.unlink()
            finally:
                os.close(fd)


def _is_held(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    fcntl.flock(fd, fcntl.LOCK_UN)
    return False


def find(folder: Path, node: str) -> Door:
    """The way to a node of this machine, with a client key that nobody else uses now. Raises StateError."""
    path = folder / f"{node}.json"
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError as error:
        raise StateError(
            f"no gpu-node {node[:16]}… is known on this machine ({path}: {error.strerror}); start gpu-node and take "
            "the hex of its GPU_NODE_ADDR line, or say --seed HEX@HOST:PORT --key FILE"
        ) from None
    try:
        state = _read(fd, path)
        if not _is_held(fd):
            raise StateError(f"the gpu-node {node[:16]}… is not running any more; start it again and take its new hex")
        for slot, secret in enumerate(state.clients):
            try:
                fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, slot)
            except OSError:
                continue
            return Door(bytes.fromhex(state.node), state.host, state.port, _pair(secret), fd)
    except BaseException:
        os.close(fd)
        raise
    os.close(fd)
    raise StateError(f"{len(state.clients)} clients use this gpu-node already; wait until one of them is done")


def _read(fd: int, path: Path) -> State:
    if os.fstat(fd).st_mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise StateError(f"{path}: others can read this key file; run chmod 600 on it")
    try:
        return msgspec.json.decode(os.read(fd, _STATE_BYTES_MAX), type=State)
    except msgspec.DecodeError as error:
        raise StateError(f"{path} is damaged ({error}); start gpu-node again") from None


def read_key(path: Path) -> KeyPair:
    """`--key FILE`: a secret key's 64 hex digits, or the first client key of a copied state file. Raises StateError."""
    try:
        text = read_secret_file(path).decode().strip()
        if text.startswith("{"):
            return _pair(str(json.loads(text)["clients"][0]))
        return _pair(text)
    except SecurityError as error:
        raise StateError(str(error)) from None
    except (ValueError, LookupError, TypeError):
        raise StateError(f"{path} holds no secret key: 64 hex digits, or a gpu-node's state file") from None


def _pair(secret: str) -> KeyPair:
    raw = bytes.fromhex(secret)
    if len(raw) != 32:
        raise ValueError("not a key")
    return KeyPair(public_of(raw), raw)
