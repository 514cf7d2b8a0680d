"""The launch file: everything a worker needs to join, and the only way by which secrets reach it (design.md 2).

Written by the provisioner before start_node, read once by `mvp-worker-node --launch FILE`. Never argv, env or labels.
"""

from __future__ import annotations

import contextlib
import os
import stat
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from common.addresses import U32, U64
from common.limits import LAUNCH_FILE_BYTES_MAX

LAUNCH_FILE_VERSION = 1
LAUNCH_FILE_NAME = "launch.json"

# \Z, because $ would let a newline through.
Hex32 = Annotated[str, Meta(pattern=r"\A[0-9a-f]{64}\Z")]
Hex16 = Annotated[str, Meta(pattern=r"\A[0-9a-f]{32}\Z")]
_SECRETS = ("secret_key", "hf_token")


class LaunchFileError(ValueError):
    """One sentence: which file, what is wrong, what to do. Holds nothing of the file's content."""


class LaunchFile(msgspec.Struct, frozen=True, kw_only=True):
    """Keys, nonce and addresses are lower-case hex.

    run: the run's nonce. endpoints: plane name ("control", "prompt", "edge", "stream") → ZeroMQ endpoint of the door.
    orchestrator: the ActorAddress whose orders count (authorized_orchestrator). orchestrator_node: its node key, "" if
    not known. hf_token: "" if not needed. device: tinygrad's DEV, "" for the worker's own choice. profile: SWIM's.
    measure: the engine measures its speed before it is ready.
    """

    v: int = LAUNCH_FILE_VERSION
    run_id: U64
    run: Hex16
    node_id: U64
    stage_index: U32 = 0
    endpoints: dict[str, str]
    broker_public_key: Hex32
    public_key: Hex32
    secret_key: Hex32
    orchestrator: Hex32
    orchestrator_node: Annotated[str, Meta(pattern=r"\A([0-9a-f]{64})?\Z")] = ""
    hf_token: str = ""
    device: str = ""
    profile: str = "lan"
    measure: bool = False

    def __repr__(self) -> str:
        shown = ", ".join(f"{name}={value!r}" for name, value in self.__rich_repr__())
        return f"LaunchFile({shown})"

    def __rich_repr__(self) -> list[tuple[str, Any]]:
        """All fields, the secret ones only as "<set>" or "<unset>" (S1 9.20): for repr, rich and tracebacks."""
        shown = [(name, getattr(self, name)) for name in self.__struct_fields__]
        return [(name, ("<set>" if value else "<unset>") if name in _SECRETS else value) for name, value in shown]

    def write(self, path: Path) -> None:
        """Create `path` with mode 0600, whole or not at all, on disk when this returns.

        Raises LaunchFileError if it exists already, cannot be written, is too large or a field is malformed.
        """
        data = msgspec.json.format(msgspec.json.encode(self), indent=2) + b"\n"
        if len(data) > LAUNCH_FILE_BYTES_MAX:
            raise LaunchFileError(f"launch file {path} would have {len(data)} bytes, more than {LAUNCH_FILE_BYTES_MAX}")
        _decode(data, path)
        staged = path.with_name(f".{path.name}.{os.getpid()}.{id(self):x}")
        try:
            handle = os.open(staged, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            try:
                with os.fdopen(handle, "wb") as file:
                    file.write(data)
                    file.flush()
                    os.fsync(file.fileno())
                # link, not rename: a rename would replace another worker's file without a word.
                os.link(staged, path)
            finally:
                with contextlib.suppress(OSError):
                    os.unlink(staged)
            _sync_folder(path.parent)
        except FileExistsError:
            raise LaunchFileError(
                f"launch file {path} exists already; remove it or use another run directory"
            ) from None
        except OSError as error:
            raise LaunchFileError(f"cannot write launch file {path}: {error.strerror}") from None

    @classmethod
    def read(cls, path: Path) -> LaunchFile:
        """The checked content. Raises LaunchFileError: missing, readable by others, too large, malformed."""
        try:
            # O_NONBLOCK: a FIFO under this name must not hang the worker's start.
            handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError as error:
            raise LaunchFileError(f"cannot read launch file {path}: {error.strerror}") from None
        with os.fdopen(handle, "rb") as file:
            found = os.fstat(file.fileno())
            if not stat.S_ISREG(found.st_mode):
                raise LaunchFileError(f"launch file {path} is not a regular file")
            if found.st_mode & 0o077:
                mode = stat.S_IMODE(found.st_mode)
                raise LaunchFileError(
                    f"launch file {path} holds a secret key and has mode {mode:04o}; "
                    f"make it yours alone with: chmod 600 {path}"
                )
            data = file.read(LAUNCH_FILE_BYTES_MAX + 1)
        if len(data) > LAUNCH_FILE_BYTES_MAX:
            raise LaunchFileError(f"launch file {path} is larger than {LAUNCH_FILE_BYTES_MAX} bytes")
        return _decode(data, path)


def _decode(data: bytes, path: Path) -> LaunchFile:
    try:
        launch = msgspec.json.decode(data, type=LaunchFile)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        # msgspec names the field and the rule, never the value.
        raise LaunchFileError(f"launch file {path} is malformed: {error}") from None
    if launch.v != LAUNCH_FILE_VERSION:
        raise LaunchFileError(
            f"launch file {path} has version {launch.v}, this worker reads {LAUNCH_FILE_VERSION}; "
            "run the same version on both sides"
        )
    if "control" not in launch.endpoints:
        raise LaunchFileError(f"launch file {path} names no endpoint for the control plane")
    return launch


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
