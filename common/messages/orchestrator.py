"""OrchestratorMsg: what the orchestrator actor is told (S1 6.4; rust-swactor.md 4.1)."""

from __future__ import annotations

from typing import ClassVar

import msgspec

from common.addresses import U32, U64, ActorAddress, NodeKey, Role
from common.codec import Message

_AGENT = frozenset({Role.AGENT, Role.ORCHESTRATOR})
_LOCAL = frozenset({Role.ORCHESTRATOR, Role.GATEWAY})


class EndpointWire(msgspec.Struct, frozen=True, kw_only=True):
    """Where a worker's engine takes edges: node key, candidate endpoints in order, whether the relay carries it."""

    node_key: NodeKey
    candidates: list[str] = []
    relay: bool = False


class StageAssignment(msgspec.Struct, frozen=True, kw_only=True):
    """One stage of the plan and the node that serves it."""

    stage_index: U32
    node_id: U64


class ObservePoolReady(Message, frozen=True, kw_only=True, tag=80):
    """Run actor → orchestrator actor: these nodes are provisioned."""

    FROM: ClassVar[frozenset[Role]] = _LOCAL
    nodes: list[U64]


class ObservePlanAvailable(Message, frozen=True, kw_only=True, tag=81):
    """Run actor → orchestrator actor: the stages of the run (one in direct mode)."""

    FROM: ClassVar[frozenset[Role]] = _LOCAL
    run_id: U64
    stages: list[StageAssignment]


class ObserveNodeRuntimeReady(Message, frozen=True, kw_only=True, tag=82):
    """Agent → orchestrator, repeated 100 ms doubling to 2 s until its RuntimeReadyAck came (S1 5.5)."""

    FROM: ClassVar[frozenset[Role]] = _AGENT
    run_id: U64
    node_id: U64
    stage_index: U32
    endpoint: EndpointWire
    node_actor: ActorAddress
    datastream_publisher: ActorAddress
    readiness_id: U64
    memory_bytes: U64 = 0
    """As the engine measured: free memory, and what a thread reads of it in a second; 0: not measured."""
    bytes_per_s: U64 = 0


class ObserveNodeRuntimeReadyAck(Message, frozen=True, kw_only=True, tag=83):
    """Agent → orchestrator: it has taken the RuntimeReadyAck of this readiness_id; sent for each one received."""

    FROM: ClassVar[frozenset[Role]] = _AGENT
    run_id: U64
    node_id: U64
    stage_index: U32
    readiness_id: U64


class ObserveWeightsReady(Message, frozen=True, kw_only=True, tag=84):
    """Agent → orchestrator: the stage's weights are loaded and warm; repeated for a repeated ProvisionStage."""

    FROM: ClassVar[frozenset[Role]] = _AGENT
    run_id: U64
    node_id: U64
    stage_index: U32


class ObserveStageReady(Message, frozen=True, kw_only=True, tag=85):
    """Agent → orchestrator: worker, weights and both edges are ready; repeated for a repeated ProvisionStage.
    generation: the provision's."""

    FROM: ClassVar[frozenset[Role]] = _AGENT
    run_id: U64
    stage_index: U32
    generation: U32 = 0


class ObserveStageFault(Message, frozen=True, kw_only=True, tag=86):
    """Agent → orchestrator: the stage is faulted and takes no more work. reason: StageController's, and a cause.
    generation: the provision's, 0 before there is one."""

    FROM: ClassVar[frozenset[Role]] = _AGENT
    run_id: U64
    stage_index: U32
    reason: str = ""
    generation: U32 = 0


class ObserveStageStopped(Message, frozen=True, kw_only=True, tag=87):
    """Agent → orchestrator: the answer to StopRun after edges, rings, device objects and role are released."""

    FROM: ClassVar[frozenset[Role]] = _AGENT
    run_id: U64
    stage_index: U32


class ObserveStageProgress(Message, frozen=True, kw_only=True, tag=88):
    """Agent → orchestrator, a coalesced fact (at most 10 Hz): extends the silence limit of the phase (row 14)."""

    FROM: ClassVar[frozenset[Role]] = _AGENT
    run_id: U64
    node_id: U64
    stage_index: U32
    phase: str
    done: U64 = 0
    total: U64 = 0


class ObserveTokenInEndpointReady(Message, frozen=True, kw_only=True, tag=89):
    """Run actor → orchestrator actor: the token-in producer is connected (planned mode)."""

    FROM: ClassVar[frozenset[Role]] = _LOCAL


class ObserveTokenOutEndpointReady(Message, frozen=True, kw_only=True, tag=90):
    """Run actor → orchestrator actor: the token-out consumer is connected (planned mode)."""

    FROM: ClassVar[frozenset[Role]] = _LOCAL


class ObserveTokenReceived(Message, frozen=True, kw_only=True, tag=91):
    """Gateway → orchestrator actor: a token came back in sequence (planned mode). A coalesced fact (at most 10 Hz, and
    at the end of each prompt): the last one of `count` tokens in a row."""

    FROM: ClassVar[frozenset[Role]] = _LOCAL
    sequence: U64
    token_id: U32
    eos: bool
    count: U32 = 1


class ObserveEndpointFault(Message, frozen=True, kw_only=True, tag=92):
    """Run actor → orchestrator actor: endpoint "TokenIn" or "TokenOut" failed, as the gateway has told."""

    FROM: ClassVar[frozenset[Role]] = _LOCAL
    run_id: U64
    endpoint: str


class ObserveTokenEndpointsStopped(Message, frozen=True, kw_only=True, tag=93):
    """Run actor → orchestrator actor: both token endpoints are closed."""

    FROM: ClassVar[frozenset[Role]] = _LOCAL


OrchestratorMsg = (
    ObservePoolReady
    | ObservePlanAvailable
    | ObserveNodeRuntimeReady
    | ObserveNodeRuntimeReadyAck
    | ObserveWeightsReady
    | ObserveStageReady
    | ObserveStageFault
    | ObserveStageStopped
    | ObserveStageProgress
    | ObserveTokenInEndpointReady
    | ObserveTokenOutEndpointReady
    | ObserveTokenReceived
    | ObserveEndpointFault
    | ObserveTokenEndpointsStopped
)
