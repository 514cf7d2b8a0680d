"""What the actors of gpu-node say to each other and to the shell (S2 3). All of it stays in the process: the only
messages that travel are those of common/messages/inference.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from common.effects import Effect
from common.messages.inference import InferenceRequest


@dataclass(frozen=True, slots=True)
class ProcessSpec:
    """A child process. environ: added to this process's own."""

    command: tuple[str, ...]
    environ: Mapping[str, str] = field(default_factory=dict)


# --- ProcessCommand: to a ProcessActor ----------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Subscribe:
    """Send every notification to this actor; the first subscriber also gets what came before it."""

    address: bytes


@dataclass(frozen=True, slots=True)
class WriteStdin:
    """Write these bytes to the child, whole and in order."""

    data: bytes


@dataclass(frozen=True, slots=True)
class Close:
    """Close the child's standard input once everything is written: it may finish what it has."""


@dataclass(frozen=True, slots=True)
class Stop:
    """End the child: close its input, SIGTERM, and SIGKILL after KILL_TIMEOUT_MS."""


ProcessCommand: TypeAlias = Subscribe | WriteStdin | Close | Stop


# --- ProcessNotification: from a ProcessActor to its subscribers; the shell tells the actor the same --------------
@dataclass(frozen=True, slots=True)
class Started:
    """The child runs."""

    pid: int


@dataclass(frozen=True, slots=True)
class Output:
    """Bytes of the child, as they were read: cut anywhere."""

    stream: Literal["stdout", "stderr"]
    data: bytes


@dataclass(frozen=True, slots=True)
class Exited:
    """The child is gone, after its last output. status: the exit status, or minus the signal."""

    status: int


@dataclass(frozen=True, slots=True)
class Error:
    """The child could not be started, or its pipes failed (then Exited follows). One sentence."""

    reason: str


ProcessNotification: TypeAlias = Started | Output | Exited | Error


# --- InferenceActorMsg: to the InferenceActor ---------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Request:
    """A prompt to run. owner: the broker-verified node that sent it; the reply goes there (design.md 6 row 37)."""

    request: InferenceRequest
    owner: bytes


@dataclass(frozen=True, slots=True)
class Process:
    """What the worker process did."""

    notification: ProcessNotification


InferenceActorMsg: TypeAlias = Request | Process


# --- InferenceActorStatus: from the InferenceActor to its observer ------------------------------------------------
@dataclass(frozen=True, slots=True)
class ProcessStarted:
    """The worker process runs; it loads."""

    pid: int


@dataclass(frozen=True, slots=True)
class WorkerReady:
    """The worker has said that it is ready."""

    pid: int


@dataclass(frozen=True, slots=True)
class ProcessExited:
    """The worker process is gone. status: None if it never ran; reason: one sentence."""

    status: int | None
    reason: str


InferenceActorStatus: TypeAlias = ProcessStarted | WorkerReady | ProcessExited


# --- effects: to the shell ----------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class SpawnChild(Effect):
    """Start the asking actor's child; Started or Error is told, later Output and Exited."""

    spec: ProcessSpec


@dataclass(frozen=True, slots=True)
class WriteChild(Effect):
    """Write to the asking actor's child."""

    data: bytes


@dataclass(frozen=True, slots=True)
class CloseChild(Effect):
    """Close its standard input after what is still unwritten."""


@dataclass(frozen=True, slots=True)
class SignalChild(Effect):
    """Send it SIGTERM or SIGKILL."""

    kill: bool
