"""What cores hand to the shell (effects) and what the shell and the node tell cores (events).

An effect is data; `common/loop.py` and each service's `service.py` turn it into I/O. Services add their own subclasses
of `Effect` in their `core.py` and handle them in their `service.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from common.codec import Message


class Effect:
    """Base of all effects."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class RunJob(Effect):
    """Run blocking work on a thread that owns no socket; the asking actor receives JobDone{key, ...}.

    kind names a function of the service's job table; pool: "start", "stop", "follow" or "misc", so that a stop never
    queues behind a start; "alone" for what may hang: at the process's end nobody waits for it. After limit_ms the
    actor gets JobDone with error "timed out"; a later result is dropped.
    """

    kind: str
    key: str
    args: Mapping[str, Any] = field(default_factory=dict)
    limit_ms: int = 60_000
    pool: str = "misc"


@dataclass(frozen=True, slots=True)
class Observed(Effect):
    """A record for the orchestrator's datastream (S1 3.9). payload: JSON text or raw bytes; source: for the archive."""

    channel: str
    payload: bytes
    source: str = ""


@dataclass(frozen=True, slots=True)
class Log(Effect):
    """A line for the service's own log (stderr). level: "debug" | "info" | "warning" | "error"."""

    level: str
    text: str


@dataclass(frozen=True, slots=True)
class Exit(Effect):
    """End this process with status 0 or 1 after what was sent has had its linger."""

    status: int
    error: str = ""


@dataclass(frozen=True, slots=True)
class JobDone:
    """Event: the job `key` of this actor ended. error is one sentence, empty on success."""

    kind: str
    key: str
    result: Any = None
    error: str = ""


@dataclass(frozen=True, slots=True)
class SendFailed:
    """Event: `message` to `dst` will not be delivered by the bus (S1 6.11, 10.12).

    reason: "unroutable" | "peer_lost" | "queue_full" | "link_down" | "refused" | "unsupported".
    """

    dst: bytes
    message: Message
    reason: str


@dataclass(frozen=True, slots=True)
class ViewChanged:
    """Event: a watched view ("routes", "members", "paths", "names") has new content; read it through ctx.views."""

    view: str


@dataclass(frozen=True, slots=True)
class OwnerGone:
    """Event: the launcher's pipe is at EOF; this process stops what it owns and exits (design.md 2)."""


@dataclass(frozen=True, slots=True)
class StopSignal:
    """Event: SIGTERM, SIGINT or SIGHUP; count is 1 for the first, 2 for the second (faster)."""

    name: str
    count: int
