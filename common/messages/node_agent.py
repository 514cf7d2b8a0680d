"""NodeAgentMsg: the orchestrator's control of a worker, and the worker's own observations (S1 6.5, 6.6)."""

from __future__ import annotations

from typing import ClassVar

import msgspec

from common.addresses import U32, U64, ActorAddress, Plane, Role, Token
from common.codec import Message
from common.messages.orchestrator import EndpointWire

_ORCHESTRATOR = frozenset({Role.ORCHESTRATOR})
_CLIENTS = frozenset({Role.GATEWAY, Role.ORCHESTRATOR})
_WORKER = frozenset({Role.AGENT})


class LocalPath(msgspec.Struct, frozen=True, kw_only=True, tag="LocalPath", tag_field="source"):
    """A GGUF or tokenizer.json file as the worker sees it."""

    path: str


class HuggingFaceGguf(msgspec.Struct, frozen=True, kw_only=True, tag="HuggingFaceGguf", tag_field="source"):
    """A GGUF file of a Hugging Face repository, fetched by the worker itself."""

    repo: str
    file: str
    revision: str | None = None


class EmbeddedGguf(msgspec.Struct, frozen=True, kw_only=True, tag="EmbeddedGguf", tag_field="source"):
    """The tokenizer that stands in the GGUF."""


GgufSource = LocalPath | HuggingFaceGguf
TokenizerSource = EmbeddedGguf | LocalPath


class ObjectSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Largest payload of an edge record, its alignment and element type (rust-swactor.md 5)."""

    max_extent: U64
    alignment: U32
    dtype: str = "f32"


class RingSpec(msgspec.Struct, frozen=True, kw_only=True):
    """The window of an edge: at most data_capacity bytes may be uncredited."""

    data_capacity: U64
    alignment: U32


class StageInboundEdgeWire(msgspec.Struct, frozen=True, kw_only=True):
    """kind: TokenIn | Activation | TokenOut | TokenFeedback."""

    edge_id: U64
    kind: str
    object_spec: ObjectSpec
    ring_spec: RingSpec
    edge_token: Token = b""


class StageOutboundEdgeWire(msgspec.Struct, frozen=True, kw_only=True):
    """As the inbound edge, and who consumes it."""

    edge_id: U64
    kind: str
    object_spec: ObjectSpec
    ring_spec: RingSpec
    consumer_node_id: U64
    consumer_endpoint: EndpointWire | None = None
    edge_token: Token = b""


class StageProvisionWire(msgspec.Struct, frozen=True, kw_only=True):
    """S1 6.6. layer_end_exclusive absent: all layers (design.md 6 row 28). max_context: tokens, absent: row 29.

    generation: counts the worker restarts of the run. A stage that has its weights takes a provision of a later
    generation, which differs in nothing but its edges, for new edges and a new token stream (on_worker_loss).
    feedback_in, feedback_out: of the first and of the last stage, where tokens are also fed back directly.
    """

    run_id: U64
    authorized_orchestrator: ActorAddress
    node_id: U64
    stage_index: U32
    stage_count: U32
    layer_start: U32
    layer_end_exclusive: U32 | None = None
    inbound_edge_id: U64
    outbound_edge_id: U64
    inbound_edge: StageInboundEdgeWire | None = None
    outbound_edge: StageOutboundEdgeWire | None = None
    model_id: str
    gguf_source: GgufSource
    tokenizer: TokenizerSource
    max_context: U32 | None = None
    generation: U32 = 0
    feedback_in: StageInboundEdgeWire | None = None
    feedback_out: StageOutboundEdgeWire | None = None


class Sampling(msgspec.Struct, frozen=True, kw_only=True):
    """Optional sampling (design.md 6 row 21); all defaults together are greedy."""

    temperature: float = 0.0
    top_k: U32 = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: U64 | None = None


class ChatMessage(msgspec.Struct, frozen=True, kw_only=True):
    """One turn for the model's chat template."""

    role: str
    content: str


class RuntimeReadyAck(Message, frozen=True, kw_only=True, tag=130):
    """Orchestrator → node agent, each 250 ms until ObserveNodeRuntimeReadyAck, at most 60 s (S1 9.6)."""

    FROM: ClassVar[frozenset[Role]] = _ORCHESTRATOR
    run_id: U64
    node_id: U64
    stage_index: U32
    readiness_id: U64


class ProvisionStage(Message, frozen=True, kw_only=True, tag=131):
    """Orchestrator → node agent, each second until weights or fault. A repeat is not executed again: the current
    answer (WeightsReady, StageReady or StageFault) is sent again."""

    FROM: ClassVar[frozenset[Role]] = _ORCHESTRATOR
    provision: StageProvisionWire


class InferPrompt(Message, frozen=True, kw_only=True, tag=132):
    """Gateway → node agent: direct inference (S1 6.9, 9.11). Answered at reply_to by TextDelta* and one Done or Fault.

    messages: chat turns for the template; else prompt is one user turn, or, with raw, the text as it stands (row 25).
    max_tokens 0: no cap but EOS, context, cancel (row 1).
    """

    PLANE: ClassVar[Plane] = Plane.PROMPT
    FROM: ClassVar[frozenset[Role]] = _CLIENTS
    request_id: U64
    prompt: str
    max_tokens: U32 = 0
    reply_to: ActorAddress
    messages: list[ChatMessage] = []
    raw: bool = False
    sampling: Sampling | None = None
    stop: list[str] = []


class EncodePrompt(Message, frozen=True, kw_only=True, tag=133):
    """Gateway → the first stage's node agent (S1 6.10). Answered at reply_to by PromptEncoded or TokenizerFault."""

    PLANE: ClassVar[Plane] = Plane.PROMPT
    FROM: ClassVar[frozenset[Role]] = _CLIENTS
    request_id: U64
    prompt: str
    reply_to: ActorAddress
    messages: list[ChatMessage] = []
    raw: bool = False


class DecodeTokens(Message, frozen=True, kw_only=True, tag=134):
    """Gateway → the last stage's node agent (S1 6.10). Answered at reply_to by TokensDecoded or TokenizerFault.

    The decoder is stateful per request_id (row 13): an incomplete character is held back; last flushes it.
    """

    PLANE: ClassVar[Plane] = Plane.PROMPT
    FROM: ClassVar[frozenset[Role]] = _CLIENTS
    request_id: U64
    tokens: list[U32]
    reply_to: ActorAddress
    last: bool = False


class CancelRequest(Message, frozen=True, kw_only=True, tag=135):
    """Gateway → node agent(s): end it within one step. Answered at the sender by RequestCancelled (row 21)."""

    PLANE: ClassVar[Plane] = Plane.PROMPT
    FROM: ClassVar[frozenset[Role]] = _CLIENTS
    request_id: U64


class StopRun(Message, frozen=True, kw_only=True, tag=136):
    """Orchestrator → node agent at shutdown: stop edges, quiesce, release, reset; answered by ObserveStageStopped."""

    FROM: ClassVar[frozenset[Role]] = _ORCHESTRATOR
    run_id: U64


class RuntimeLoaded(Message, frozen=True, kw_only=True, tag=137):
    """Worker runtime → its own node agent: report readiness to the orchestrator (rust-swactor.md 4.3)."""

    FROM: ClassVar[frozenset[Role]] = _WORKER
    run_id: U64
    node_id: U64
    stage_index: U32
    endpoint: EndpointWire
    readiness_id: U64


class MarkWorkerReady(Message, frozen=True, kw_only=True, tag=138):
    """Worker → its node agent: the engine process answers."""

    FROM: ClassVar[frozenset[Role]] = _WORKER


class MarkWeightsReady(Message, frozen=True, kw_only=True, tag=139):
    """Worker → its node agent: the weights are loaded and warm."""

    FROM: ClassVar[frozenset[Role]] = _WORKER
    run_id: U64
    node_id: U64
    stage_index: U32


class MarkInboundEdgeReady(Message, frozen=True, kw_only=True, tag=140):
    """Worker → its node agent: the inbound edge is accepted."""

    FROM: ClassVar[frozenset[Role]] = _WORKER
    edge_id: U64


class MarkOutboundEdgeReady(Message, frozen=True, kw_only=True, tag=141):
    """Worker → its node agent: the consumer welcomed the outbound edge."""

    FROM: ClassVar[frozenset[Role]] = _WORKER
    edge_id: U64


class ObjectLoaded(Message, frozen=True, kw_only=True, tag=142):
    """Worker → its stage controller: an inbound object is in memory."""

    FROM: ClassVar[frozenset[Role]] = _WORKER
    edge_id: U64
    object_id: U64
    sequence: U64
    handle_generation: U64
    handle_id: U64


class StepCompleted(Message, frozen=True, kw_only=True, tag=143):
    """Worker → its stage controller: the step ended; step_id equals the sequence."""

    FROM: ClassVar[frozenset[Role]] = _WORKER
    step_id: U64


class WorkerCrashed(Message, frozen=True, kw_only=True, tag=144):
    """Worker → its node agent: the engine process ended."""

    FROM: ClassVar[frozenset[Role]] = _WORKER
    reason: str = ""


class LocalEdgesStopped(Message, frozen=True, kw_only=True, tag=145):
    """Worker → its node agent while stopping: no edge moves bytes."""

    FROM: ClassVar[frozenset[Role]] = _WORKER
    run_id: U64


class WorkerRingsQuiesced(Message, frozen=True, kw_only=True, tag=146):
    """Worker → its node agent while stopping: no buffer of an edge is in use."""

    FROM: ClassVar[frozenset[Role]] = _WORKER
    run_id: U64


class DeviceObjectsReleased(Message, frozen=True, kw_only=True, tag=147):
    """Worker → its node agent while stopping: weights and KV cache are freed."""

    FROM: ClassVar[frozenset[Role]] = _WORKER
    run_id: U64


class WorkerRoleReset(Message, frozen=True, kw_only=True, tag=148):
    """Worker → its node agent while stopping: the engine has no role."""

    FROM: ClassVar[frozenset[Role]] = _WORKER
    run_id: U64


class StageFailed(Message, frozen=True, kw_only=True, tag=149):
    """Worker → its stage controller. reason: StepFailed | ObjectFailed | OutputFault | EdgeFault; detail: the cause."""

    FROM: ClassVar[frozenset[Role]] = _WORKER
    reason: str
    detail: str = ""


NodeAgentMsg = (
    RuntimeReadyAck
    | ProvisionStage
    | InferPrompt
    | EncodePrompt
    | DecodeTokens
    | CancelRequest
    | StopRun
    | RuntimeLoaded
    | MarkWorkerReady
    | MarkWeightsReady
    | MarkInboundEdgeReady
    | MarkOutboundEdgeReady
    | ObjectLoaded
    | StepCompleted
    | WorkerCrashed
    | LocalEdgesStopped
    | WorkerRingsQuiesced
    | DeviceObjectsReleased
    | WorkerRoleReset
    | StageFailed
)
