"""What the provisioner knows of a run and its workers, and the events that reach it from its jobs. Pure data."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from enum import StrEnum

from common.limits import STDERR_TAIL_LINES
from common.messages.provision import NodeProvisionSpec, ProviderPrepared, ProviderPrepareFailed
from services.provisioner.guard import ProvisionedClusterGuard
from services.provisioner.plugin import Exited, Failed, PluginNodeHandle, PluginObservation


class NodeState(StrEnum):
    """The life of a worker: MINTING → ADMITTING → STARTING → LIVE → STOPPED; FAILED from each of the first three."""

    MINTING = "minting"
    ADMITTING = "admitting"
    STARTING = "starting"
    LIVE = "live"
    STOPPED = "stopped"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Minted:
    """Result of the job `mint`: the worker's identity; its launch file is on disk. No secret in here."""

    public_key: bytes
    handle_id: str
    launch: str


@dataclass(frozen=True, slots=True)
class Prepared:
    """Result of the job `prepare`."""

    reconciled: int
    problems: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Rechecked:
    """Result of the job `recheck`. owed: workers that may still be left; problems: sentences on those of them that
    could not be looked for or stopped."""

    owed: int = 0
    problems: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class NodeObserved:
    """Event: what a plugin saw of one worker, in order, a batch at a time."""

    handle_id: str
    observations: tuple[PluginObservation, ...]


@dataclass(slots=True)
class WorkerNode:
    """One worker of the run."""

    spec: NodeProvisionSpec
    orchestrator: bytes
    orchestrator_node: bytes
    state: NodeState = NodeState.MINTING
    minted: Minted | None = None
    handle: PluginNodeHandle | None = None
    ended: Exited | Failed | None = None
    error: str = ""
    live_said: bool = False
    came: bool = False
    successor: WorkerNode | None = None
    """The next attempt at this node, which begins when this worker is stopped."""
    stop_said: bool = False
    exit_said: bool = False
    tail: deque[str] = field(default_factory=lambda: deque(maxlen=STDERR_TAIL_LINES))

    def cause(self, what: str) -> str:
        """`what`, and the last words of the worker: usually the reason in its own terms."""
        last = next((line.strip() for line in reversed(self.tail) if line.strip()), "")
        return f"{what}; its last words: {last}" if last else what


@dataclass(slots=True)
class Run:
    """One run. owner: the orchestrator's actor that prepared it; nonce: b"" until the first StartNode."""

    epoch: int
    owner: bytes = b""
    nonce: bytes = b""
    preparing: bool = False
    answer: ProviderPrepared | ProviderPrepareFailed | None = None
    completing: bool = False
    nodes: dict[int, WorkerNode] = field(default_factory=dict)
    guard: ProvisionedClusterGuard = field(default_factory=ProvisionedClusterGuard)

    @property
    def prepared(self) -> bool:
        """Workers may be started."""
        return isinstance(self.answer, ProviderPrepared)

    @property
    def starting(self) -> bool:
        """A start runs that can only be waited for."""
        return any(node.state in (NodeState.MINTING, NodeState.STARTING) for node in self.nodes.values())

    @property
    def idle(self) -> bool:
        """Nothing was begun, or everything has ended."""
        return not self.preparing and not self.starting and self.guard.empty


@dataclass(slots=True)
class Stopping:
    """A stop of all workers under way. reply_to: the orchestrator that asked; reason: why, if none did."""

    fast: bool = False
    reply_to: bytes = b""
    reason: str = ""
    clear_after: bool = False
    exit_after: bool = False
