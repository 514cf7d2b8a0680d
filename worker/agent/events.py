"""What the agent's core tells its shell (effects) and what the shell tells the core (events).

Events are no Messages, so that nothing of the bus can pretend to be the engine or the launcher.
"""

from __future__ import annotations

from dataclasses import dataclass

from common.codec import Message
from common.effects import Effect
from common.limits import LEASE_TTL_MS
from common.messages.engine import EdgeBind
from worker.stage_controller import Output


@dataclass(frozen=True, slots=True)
class WorkerIdentity:
    """Who this worker is, from its launch file; device is tinygrad's DEV, "" for its own choice; threads 0: all.
    measure: the engine measures its speed."""

    run_id: int
    node_id: int
    stage_index: int
    orchestrator: bytes
    """The ActorAddress whose orders count (authorized_orchestrator)."""
    device: str = ""
    threads: int = 0
    measure: bool = False
    edge: EdgeBind | None = None
    """Where the engine takes edges; None: nowhere."""
    lease_ms: int = LEASE_TTL_MS
    """How long it waits for its first lease; each lease says how long the next may take."""


# --- effects ------------------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class StartEngine(Effect):
    """Start the engine child; EngineExited says that it failed or, later, that it ended."""


@dataclass(frozen=True, slots=True)
class EngineSend(Effect):
    """Hand a message of common/messages/engine.py to the engine."""

    message: Message


@dataclass(frozen=True, slots=True)
class ReadPage(Effect):
    """Read the engine's progress page; answered by PageRead."""


@dataclass(frozen=True, slots=True)
class KillEngine(Effect):
    """SIGKILL the engine; EngineExited follows."""


# --- events -------------------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class EngineEvent:
    """The engine said something."""

    message: Message


@dataclass(frozen=True, slots=True)
class EngineHungUp:
    """The engine closed its link: EngineExited follows by itself, or must be brought about."""


@dataclass(frozen=True, slots=True)
class EngineExited:
    """The engine is gone: one sentence, and the exit status (negative: killed by that signal; None: never started)."""

    reason: str
    status: int | None


@dataclass(frozen=True, slots=True)
class PageRead:
    """What the progress page shows: the phase's name, a count of steps, and when it was last written (ns)."""

    phase: str
    progress: int
    stamp_ns: int


@dataclass(frozen=True, slots=True)
class StopAsked:
    """Whoever started this worker wants it gone. source: what people read, as "stdin said shutdown"."""

    source: str


@dataclass(frozen=True, slots=True)
class StageReport:
    """To `report_to`, a local actor that follows the stage: a command or lifecycle event of the controller."""

    output: Output
