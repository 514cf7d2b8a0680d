"""OrchestratorReport: what the orchestrator actor tells the report inbox (S1 6.4; rust-swactor.md 4.2).

All are local to the orchestrator process; they are messages so that they are recorded and replayed like the rest.
"""

from __future__ import annotations

from typing import ClassVar

import msgspec

from common.addresses import U32, U64, ActorAddress, Role
from common.codec import Message
from common.messages.orchestrator import EndpointWire

_ORCHESTRATOR = frozenset({Role.ORCHESTRATOR})


class NodeRuntimeReady(Message, frozen=True, kw_only=True, tag=110):
    """A runtime-ready report of the active run and an expected node: one fact of the barrier (S1 9.5)."""

    FROM: ClassVar[frozenset[Role]] = _ORCHESTRATOR
    run_id: U64
    node_id: U64
    stage_index: U32
    endpoint: EndpointWire
    node_actor: ActorAddress
    datastream_publisher: ActorAddress
    readiness_id: U64
    memory_bytes: U64 = 0
    bytes_per_s: U64 = 0


class NodeRuntimeReadyAck(Message, frozen=True, kw_only=True, tag=111):
    """The worker has taken the acknowledgement of this readiness_id (S1 9.6)."""

    FROM: ClassVar[frozenset[Role]] = _ORCHESTRATOR
    run_id: U64
    node_id: U64
    stage_index: U32
    readiness_id: U64


class WeightsReady(Message, frozen=True, kw_only=True, tag=112):
    """The stage's weights are loaded (S1 4.9)."""

    FROM: ClassVar[frozenset[Role]] = _ORCHESTRATOR
    run_id: U64
    node_id: U64
    stage_index: U32


class StageReady(Message, frozen=True, kw_only=True, tag=113):
    """Every readiness fact of the stage holds."""

    FROM: ClassVar[frozenset[Role]] = _ORCHESTRATOR
    run_id: U64
    stage_index: U32
    generation: U32 = 0


class StageFault(Message, frozen=True, kw_only=True, tag=114):
    """The stage faulted: a start-up failure before serving, a runtime failure after (S1 4.9)."""

    FROM: ClassVar[frozenset[Role]] = _ORCHESTRATOR
    run_id: U64
    stage_index: U32
    reason: str = ""
    generation: U32 = 0


class StageStopped(Message, frozen=True, kw_only=True, tag=115):
    """The stage has released everything."""

    FROM: ClassVar[frozenset[Role]] = _ORCHESTRATOR
    run_id: U64
    stage_index: U32


class StageProgress(Message, frozen=True, kw_only=True, tag=116):
    """The stage is busy in `phase`: the silence limit starts anew."""

    FROM: ClassVar[frozenset[Role]] = _ORCHESTRATOR
    run_id: U64
    node_id: U64
    stage_index: U32
    phase: str
    done: U64 = 0
    total: U64 = 0


class RunCommandWire(msgspec.Struct, frozen=True, kw_only=True):
    """A command of the run FSM. kind: ProvisionStage | CreateTokenInEndpoint | CreateTokenOutEndpoint |
    InjectTokenObject | StopRun | TearDownTokenEndpoints; the other fields as the kind needs them."""

    kind: str
    run_id: U64
    stage_index: U32 = 0
    node_id: U64 = 0
    sequence: U64 = 0
    tokens: list[U32] = []


class Command(Message, frozen=True, kw_only=True, tag=117):
    """The run FSM asks for something (observational in this program: S1 6.4)."""

    FROM: ClassVar[frozenset[Role]] = _ORCHESTRATOR
    command: RunCommandWire


class Lifecycle(Message, frozen=True, kw_only=True, tag=118):
    """The run FSM reached RunRejected | RunFaulted | RunCompleted | RunOperatorStopped | RunTornDown."""

    FROM: ClassVar[frozenset[Role]] = _ORCHESTRATOR
    run_id: U64
    event: str
    reason: str = ""


OrchestratorReport = (
    NodeRuntimeReady
    | NodeRuntimeReadyAck
    | WeightsReady
    | StageReady
    | StageFault
    | StageStopped
    | StageProgress
    | Command
    | Lifecycle
)
