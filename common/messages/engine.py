"""Engine: what agent and engine say over their socketpair, u32 LE length then the message alone (design.md 4).

Not on the bus: FROM is the agent for both directions, because the link is private to one worker.
"""

from __future__ import annotations

from typing import Any, ClassVar

import msgspec

from common.addresses import U32, U64, ActorAddress, Role, RunNonce
from common.codec import Message
from common.messages.node_agent import (
    ChatMessage,
    GgufSource,
    Sampling,
    StageInboundEdgeWire,
    StageOutboundEdgeWire,
    TokenizerSource,
)

_AGENT = frozenset({Role.AGENT})


class EdgeBind(msgspec.Struct, frozen=True, kw_only=True):
    """Where the engine takes edges, and as whom: the worker's own CURVE key pair (this link is private to the worker).

    addresses: ZeroMQ endpoints to bind; a tcp one may have port "*". advertise: the host that stands for a wildcard.
    """

    run: RunNonce
    public_key: bytes
    secret_key: bytes
    addresses: list[str] = []
    advertise: str = "127.0.0.1"

    def __repr__(self) -> str:
        return f"EdgeBind(addresses={self.addresses!r})"

    def __rich_repr__(self) -> list[tuple[str, Any]]:
        """Without the secret (S1 9.20)."""
        return [("addresses", self.addresses)]


class Initialize(Message, frozen=True, kw_only=True, tag=240):
    """Agent → engine, first: answered by EngineReady or Fatal. device: tinygrad's DEV, "" for its default.

    edge: bind the edge endpoint before EngineReady; absent: this engine has no edges. measure: say bytes_per_s.
    """

    FROM: ClassVar[frozenset[Role]] = _AGENT
    device: str = ""
    threads: U32 = 0
    edge: EdgeBind | None = None
    measure: bool = False


class EngineReady(Message, frozen=True, kw_only=True, tag=241):
    """Engine → agent: tinygrad is imported, the device opened. edge_candidates: where the edge endpoint is bound."""

    FROM: ClassVar[frozenset[Role]] = _AGENT
    pid: U32
    backend: str
    elapsed_ms: U64
    edge_candidates: list[str] = []
    memory_bytes: U64 = 0
    """Free; bytes_per_s: of memory that a thread reads. 0 where it was not measured."""
    bytes_per_s: U64 = 0


class ConfigureRole(Message, frozen=True, kw_only=True, tag=242):
    """Agent → engine: the stage. Answered by RoleConfigured or Fatal."""

    FROM: ClassVar[frozenset[Role]] = _AGENT
    run_id: U64
    stage_index: U32
    stage_count: U32
    layer_start: U32
    layer_end_exclusive: U32 | None = None


class RoleConfigured(Message, frozen=True, kw_only=True, tag=243):
    """Engine → agent."""

    FROM: ClassVar[frozenset[Role]] = _AGENT


class LoadWeights(Message, frozen=True, kw_only=True, tag=244):
    """Agent → engine: load and warm up. Answered by Progress*, then WeightsLoaded or Fatal."""

    FROM: ClassVar[frozenset[Role]] = _AGENT
    model_id: str
    gguf_source: GgufSource
    tokenizer: TokenizerSource
    max_context: U32 | None = None


class Progress(Message, frozen=True, kw_only=True, tag=245):
    """Engine → agent. phase: "tensors" (bytes) | "download" (bytes) | "warm_up" (steps) | "kernels"."""

    FROM: ClassVar[frozenset[Role]] = _AGENT
    phase: str
    done: U64
    total: U64


class WeightsLoaded(Message, frozen=True, kw_only=True, tag=246):
    """Engine → agent: ready to serve. weights_bytes, kv_bytes: memory held."""

    FROM: ClassVar[frozenset[Role]] = _AGENT
    weights_bytes: U64
    kv_bytes: U64
    layers: U32
    max_context: U32
    elapsed_ms: U64
    eos_tokens: list[U32] = []


class EngineInfer(Message, frozen=True, kw_only=True, tag=247):
    """Agent → engine: generate. Answered by TokenDelta*, then one EngineDone or EngineFault."""

    FROM: ClassVar[frozenset[Role]] = _AGENT
    request_id: U64
    prompt: str
    max_tokens: U32 = 0
    messages: list[ChatMessage] = []
    raw: bool = False
    sampling: Sampling | None = None
    stop: list[str] = []


class TokenDelta(Message, frozen=True, kw_only=True, tag=248):
    """Engine → agent: whole characters only."""

    FROM: ClassVar[frozenset[Role]] = _AGENT
    request_id: U64
    text: str
    tokens: U32


class EngineDone(Message, frozen=True, kw_only=True, tag=249):
    """Engine → agent. finish_reason: "stop" | "length" | "context"."""

    FROM: ClassVar[frozenset[Role]] = _AGENT
    request_id: U64
    final_text: str
    tokens_generated: U32
    elapsed_ms: U64
    prompt_tokens: U32
    finish_reason: str


class EngineFault(Message, frozen=True, kw_only=True, tag=250):
    """Engine → agent: this request failed; the engine goes on."""

    FROM: ClassVar[frozenset[Role]] = _AGENT
    request_id: U64
    error: str


class EngineEncode(Message, frozen=True, kw_only=True, tag=251):
    """Agent → engine: answered by EngineEncoded or EngineFault."""

    FROM: ClassVar[frozenset[Role]] = _AGENT
    request_id: U64
    prompt: str
    messages: list[ChatMessage] = []
    raw: bool = False


class EngineEncoded(Message, frozen=True, kw_only=True, tag=252):
    """Engine → agent."""

    FROM: ClassVar[frozenset[Role]] = _AGENT
    request_id: U64
    tokens: list[U32]


class EngineDecode(Message, frozen=True, kw_only=True, tag=253):
    """Agent → engine: stateful per request_id; last flushes and forgets. Answered by EngineDecoded or EngineFault."""

    FROM: ClassVar[frozenset[Role]] = _AGENT
    request_id: U64
    tokens: list[U32]
    last: bool = False


class EngineDecoded(Message, frozen=True, kw_only=True, tag=254):
    """Engine → agent: as TokensDecoded."""

    FROM: ClassVar[frozenset[Role]] = _AGENT
    request_id: U64
    text: str
    lengths: list[U32] = []


class Cancel(Message, frozen=True, kw_only=True, tag=255):
    """Agent → engine: end the request within one step. Answered by Cancelled, after which nothing of it comes."""

    FROM: ClassVar[frozenset[Role]] = _AGENT
    request_id: U64


class Cancelled(Message, frozen=True, kw_only=True, tag=256):
    """Engine → agent. known: the request was running or queued."""

    FROM: ClassVar[frozenset[Role]] = _AGENT
    request_id: U64
    known: bool = True


class ReleaseRun(Message, frozen=True, kw_only=True, tag=257):
    """Agent → engine: free weights and caches. Answered by Released."""

    FROM: ClassVar[frozenset[Role]] = _AGENT


class Released(Message, frozen=True, kw_only=True, tag=258):
    """Engine → agent."""

    FROM: ClassVar[frozenset[Role]] = _AGENT


class ResetRole(Message, frozen=True, kw_only=True, tag=259):
    """Agent → engine: forget the stage. Answered by RoleReset."""

    FROM: ClassVar[frozenset[Role]] = _AGENT


class RoleReset(Message, frozen=True, kw_only=True, tag=260):
    """Engine → agent."""

    FROM: ClassVar[frozenset[Role]] = _AGENT


class Shutdown(Message, frozen=True, kw_only=True, tag=261):
    """Agent → engine: exit 0. EOF on the link means the same."""

    FROM: ClassVar[frozenset[Role]] = _AGENT


class Fatal(Message, frozen=True, kw_only=True, tag=262):
    """Engine → agent: the engine cannot go on and exits 1; one sentence."""

    FROM: ClassVar[frozenset[Role]] = _AGENT
    error: str


class OpenEdges(Message, frozen=True, kw_only=True, tag=263):
    """Agent → engine in planned mode: take the inbound edge, dial the outbound one. Answered by EdgeReady for each, or
    StageFaulted. The other fields are those of the provision that the stage's step table needs. Again with a later
    generation: the edges before are closed and their sequence is forgotten, role and weights stay."""

    FROM: ClassVar[frozenset[Role]] = _AGENT
    orchestrator: ActorAddress
    run_id: U64
    node_id: U64
    stage_index: U32
    stage_count: U32
    inbound: StageInboundEdgeWire
    outbound: StageOutboundEdgeWire
    generation: U32 = 0
    feedback_in: StageInboundEdgeWire | None = None
    feedback_out: StageOutboundEdgeWire | None = None


class EdgeReady(Message, frozen=True, kw_only=True, tag=264):
    """Engine → agent: EdgeHello accepted (inbound) or EdgeWelcome received (outbound). path: candidate or "relay"."""

    FROM: ClassVar[frozenset[Role]] = _AGENT
    edge_id: U64
    path: str = ""
    generation: U32 = 0


class StageFaulted(Message, frozen=True, kw_only=True, tag=265):
    """Engine → agent: the stage cannot go on. reason: a StageController reason; detail: one sentence with numbers."""

    FROM: ClassVar[frozenset[Role]] = _AGENT
    reason: str
    detail: str = ""
    generation: U32 = 0


class EngineBegin(Message, frozen=True, kw_only=True, tag=266):
    """Agent → engine: BeginSequence. Answered by EngineBegun or EngineFault; a Cancel of it by Cancelled."""

    FROM: ClassVar[frozenset[Role]] = _AGENT
    request_id: U64
    first_object_id: U64
    sampling: Sampling | None = None
    recent: list[U32] = []


class EngineBegun(Message, frozen=True, kw_only=True, tag=267):
    """Engine → agent: the stage waits for the sequence's BEGIN."""

    FROM: ClassVar[frozenset[Role]] = _AGENT
    request_id: U64


class CloseEdges(Message, frozen=True, kw_only=True, tag=268):
    """Agent → engine: stop both edges. Answered by EdgesClosed once no byte moves and no step runs."""

    FROM: ClassVar[frozenset[Role]] = _AGENT


class EdgesClosed(Message, frozen=True, kw_only=True, tag=269):
    """Engine → agent: no edge moves bytes and no buffer of one is in use."""

    FROM: ClassVar[frozenset[Role]] = _AGENT


class EdgeMoved(Message, frozen=True, kw_only=True, tag=292):
    """Engine → agent, at most once a second for an edge that moved: becomes a record `mvp.node.edge`.

    records, bytes: since the edge was opened. latency_ms (outbound): the way there and back, the least; held_ms
    (inbound): mean of how long records were held; of those since the last report.
    """

    FROM: ClassVar[frozenset[Role]] = _AGENT
    edge_id: U64
    records: U64
    bytes: U64
    latency_ms: float | None = None
    held_ms: float | None = None


class EdgeCarry(Message, frozen=True, kw_only=True, tag=290):
    """Agent ↔ engine: a stream message of common/messages/edge.py for an edge that goes over the bus.

    peer: the node at the other end (to the agent: where to; to the engine: where from). frame: the encoded message.
    """

    FROM: ClassVar[frozenset[Role]] = _AGENT
    peer: bytes
    frame: bytes
