"""Provision: the orchestrator's direct call of ProvisionPlugin made remote (S1 4.5, 5.4, 7.5, 7.6; row 23)."""

from __future__ import annotations

from typing import ClassVar

import msgspec

from common.addresses import U32, U64, ActorAddress, Role, RunNonce
from common.codec import Message

_ORCHESTRATOR = frozenset({Role.ORCHESTRATOR})
_PROVISIONER = frozenset({Role.PROVISIONER})


class ProviderMount(msgspec.Struct, frozen=True, kw_only=True):
    """A file or folder of the host that the worker sees at container_path."""

    host_path: str
    container_path: str
    readonly: bool = True


class NodeProvisionSpec(msgspec.Struct, frozen=True, kw_only=True):
    """What a provider needs to start one worker (S1 5.4). env holds no secret. attempt: counts the restarts of this
    node; each is another worker, with a key of its own. measure: its engine reports speed (placement by measure)."""

    run_id: U64
    node_id: U64
    stage_index: U32
    image: str
    env: dict[str, str] = {}
    args: list[str] = []
    mounts: list[ProviderMount] = []
    attempt: U32 = 0
    measure: bool = False


class PrepareProvider(Message, frozen=True, kw_only=True, tag=60):
    """Orchestrator → provisioner, once a run: build the provider (S1 7.5). Answered by ProviderPrepared or Failed."""

    FROM: ClassVar[frozenset[Role]] = _ORCHESTRATOR
    run_id: U64
    provider: str


class ProviderPrepared(Message, frozen=True, kw_only=True, tag=61):
    """Provisioner → orchestrator: workers can be started; `reconciled` leftovers of earlier runs were stopped."""

    FROM: ClassVar[frozenset[Role]] = _PROVISIONER
    provider: str
    reconciled: U32 = 0


class ProviderPrepareFailed(Message, frozen=True, kw_only=True, tag=62):
    """Provisioner → orchestrator: one sentence; fatal before any worker is started."""

    FROM: ClassVar[frozenset[Role]] = _PROVISIONER
    error: str


class StartNode(Message, frozen=True, kw_only=True, tag=63):
    """Orchestrator → provisioner: start this worker. Answered by NodeStarted or NodeFailed; a repeat of a known
    (run, node_id, attempt) is answered again, not executed again. run: the nonce of the worker's envelopes. A later
    attempt first stops the worker of the one before; NodeFailed if that cannot be done."""

    FROM: ClassVar[frozenset[Role]] = _ORCHESTRATOR
    run: RunNonce
    spec: NodeProvisionSpec
    orchestrator: ActorAddress


class NodeStarted(Message, frozen=True, kw_only=True, tag=64):
    """Provisioner → orchestrator: the worker runs; the guard owns `handle` from now on. node_key: its bus identity.

    dph_total: US dollars an hour, as its contract says, 0 where nothing is charged.
    """

    FROM: ClassVar[frozenset[Role]] = _PROVISIONER
    node_id: U64
    stage_index: U32
    handle: str
    node_key: bytes
    attempt: U32 = 0
    dph_total: float = 0.0


class NodeFailed(Message, frozen=True, kw_only=True, tag=65):
    """Provisioner → orchestrator: start_node failed (S1 10.6); nothing of it is left running."""

    FROM: ClassVar[frozenset[Role]] = _PROVISIONER
    node_id: U64
    stage_index: U32
    error: str
    attempt: U32 = 0


class CompleteBootstrap(Message, frozen=True, kw_only=True, tag=66):
    """Orchestrator → provisioner after the acknowledgements, for all handles. Answered by BootstrapCompleted."""

    FROM: ClassVar[frozenset[Role]] = _ORCHESTRATOR


class BootstrapCompleted(Message, frozen=True, kw_only=True, tag=67):
    """Provisioner → orchestrator. error: the first that a plugin reported, or empty."""

    FROM: ClassVar[frozenset[Role]] = _PROVISIONER
    error: str = ""


class StopNodes(Message, frozen=True, kw_only=True, tag=68):
    """Orchestrator → provisioner: stop every handle, last started first (S1 4.12). Answered by NodesStopped.

    fast: a second signal came; the grace is skipped.
    """

    FROM: ClassVar[frozenset[Role]] = _ORCHESTRATOR
    fast: bool = False


class NodesStopped(Message, frozen=True, kw_only=True, tag=69):
    """Provisioner → orchestrator: all were attempted; the first error is kept (S1 10.13)."""

    FROM: ClassVar[frozenset[Role]] = _PROVISIONER
    stopped: list[U64] = []
    first_error: str = ""


class NodeExited(Message, frozen=True, kw_only=True, tag=70):
    """Provisioner → orchestrator: a worker ended without being asked to; fatal in the active phases (S1 9.15).

    status: exit code, negative for a signal; stderr_tail: the last 50 lines.
    """

    FROM: ClassVar[frozenset[Role]] = _PROVISIONER
    node_id: U64
    stage_index: U32
    status: int | None = None
    reason: str = ""
    stderr_tail: list[str] = []
    attempt: U32 = 0


class NodeStopped(Message, frozen=True, kw_only=True, tag=71):
    """Provisioner → orchestrator: one handle's stop ended, so that the run can record it. error is empty on success."""

    FROM: ClassVar[frozenset[Role]] = _PROVISIONER
    node_id: U64
    error: str = ""


class WorkerAwaited(Message, frozen=True, kw_only=True, tag=72):
    """Provisioner → orchestrator, provider external: the launch file is written and somebody has to start the worker
    with it. The user is told where the file is. Not repeated: NodeStarted follows when the worker comes."""

    FROM: ClassVar[frozenset[Role]] = _PROVISIONER
    node_id: U64
    stage_index: U32
    launch: str
