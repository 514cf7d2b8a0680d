"""Serve: the orchestrator opens and closes the prompt RPC, the gateway reports (S1 4.10, 4.11; design.md 4)."""

from __future__ import annotations

from typing import ClassVar

from common.addresses import SERVICES, U32, U64, ActorAddress, NodeKey, Role, RunNonce
from common.codec import Message
from common.messages.node_agent import StageInboundEdgeWire, StageOutboundEdgeWire
from common.messages.orchestrator import EndpointWire

_ORCHESTRATOR = frozenset({Role.ORCHESTRATOR})
_GATEWAY = frozenset({Role.GATEWAY})


class OpenPromptRpc(Message, frozen=True, kw_only=True, tag=180):
    """Orchestrator → gateway, only after weights are ready (S1 9.4). Answered by PromptRpcReady or PromptRpcFailed.

    mode: "direct" | "pipeline"; encode_actor and decode_actor are the same node agent in direct mode. nodes: the
    node keys that serve, so that the gateway sees their loss in the member view.
    """

    FROM: ClassVar[frozenset[Role]] = _ORCHESTRATOR
    run_id: U64
    node_id: U64
    mode: str
    encode_actor: ActorAddress
    decode_actor: ActorAddress
    nodes: list[NodeKey]
    eos_tokens: list[U32] = []
    stage_actors: list[ActorAddress] = []
    """Pipeline mode: the node agents of all stages in order."""
    max_context: U32 = 0
    """Pipeline mode: tokens of the context, prompt and answer together."""
    orchestrator: bytes = b""
    """Pipeline mode: the orchestrator actor, which follows the tokens."""
    feedback: bool = False
    """Pipeline mode: the last stage feeds tokens back by itself, so that the end of a sequence has to be said."""
    restart: bool = False
    """A lost worker is replaced ([runtime] on_worker_loss): its active prompt is held instead of faulted."""


class PromptRpcReady(Message, frozen=True, kw_only=True, tag=181):
    """Gateway → orchestrator: the listener is bound at `addr` (host:port)."""

    FROM: ClassVar[frozenset[Role]] = _GATEWAY
    addr: str


class PromptRpcFailed(Message, frozen=True, kw_only=True, tag=182):
    """Gateway → orchestrator: bind failed or the slice is unusable; a start-up failure (S1 10.9)."""

    FROM: ClassVar[frozenset[Role]] = _GATEWAY
    error: str


class CloseRpc(Message, frozen=True, kw_only=True, tag=183):
    """Orchestrator → gateway: no new work; active and queued prompts get their one fault. Answered by RpcClosed.

    reason: the sentence of those faults.
    """

    FROM: ClassVar[frozenset[Role]] = _ORCHESTRATOR
    reason: str


class RpcClosed(Message, frozen=True, kw_only=True, tag=184):
    """Gateway → orchestrator: the listener and every connection are closed; settled: how many prompts were ended."""

    FROM: ClassVar[frozenset[Role]] = _GATEWAY
    settled: U32 = 0


class ShutdownRequested(Message, frozen=True, kw_only=True, tag=185):
    """Gateway → orchestrator: a client sent {"type":"shutdown"}. source: "rpc"."""

    FROM: ClassVar[frozenset[Role]] = SERVICES
    source: str


class ServingFailed(Message, frozen=True, kw_only=True, tag=186):
    """Gateway → orchestrator: the orchestration path of prompts broke (S1 10.10); the run ends with status 1."""

    FROM: ClassVar[frozenset[Role]] = _GATEWAY
    error: str


class SuspendServing(Message, frozen=True, kw_only=True, tag=187):
    """Orchestrator → gateway: a worker is Dead (row 22); fault the active request, dispatch nothing until Resume.

    error: the fault's sentence.
    """

    FROM: ClassVar[frozenset[Role]] = _ORCHESTRATOR
    error: str


class ResumeServing(Message, frozen=True, kw_only=True, tag=188):
    """Orchestrator → gateway: the worker is Alive again."""

    FROM: ClassVar[frozenset[Role]] = _ORCHESTRATOR


class OpenTokenOut(Message, frozen=True, kw_only=True, tag=189):
    """Orchestrator → gateway, planned mode, before the stages are provisioned: bind the token-out endpoint. Answered by
    TokenOutListening or TokenEndpointFailed; TokenEndpointReady follows when the last stage has connected."""

    FROM: ClassVar[frozenset[Role]] = _ORCHESTRATOR
    run_id: U64
    run: RunNonce
    token_out: StageInboundEdgeWire


class TokenOutListening(Message, frozen=True, kw_only=True, tag=190):
    """Gateway → orchestrator: where the last stage finds the token-out endpoint."""

    FROM: ClassVar[frozenset[Role]] = _GATEWAY
    endpoint: EndpointWire


class OpenTokenIn(Message, frozen=True, kw_only=True, tag=191):
    """Orchestrator → gateway, planned mode: dial the first stage. TokenEndpointReady follows when it has welcomed."""

    FROM: ClassVar[frozenset[Role]] = _ORCHESTRATOR
    run_id: U64
    token_in: StageOutboundEdgeWire


class TokenEndpointReady(Message, frozen=True, kw_only=True, tag=192):
    """Gateway → orchestrator. endpoint: "TokenIn" | "TokenOut"; path: the candidate that answered, or "relay"."""

    FROM: ClassVar[frozenset[Role]] = _GATEWAY
    endpoint: str
    path: str = ""


class TokenEndpointFailed(Message, frozen=True, kw_only=True, tag=193):
    """Gateway → orchestrator: a start-up failure before serving, a serving failure after (S1 10.3, 10.10)."""

    FROM: ClassVar[frozenset[Role]] = _GATEWAY
    endpoint: str
    error: str


class PromptActive(Message, frozen=True, kw_only=True, tag=194):
    """Gateway → orchestrator when a prompt gets the slot, and again with ended when it has its terminal event: should
    the gateway die in between, the orchestrator records that request's one terminal fault (design.md 2).

    request_id: the client's; prompt_id: the internal one (row 24).
    """

    FROM: ClassVar[frozenset[Role]] = _GATEWAY
    request_id: U64
    prompt_id: U64
    ended: bool = False


class HoldServing(Message, frozen=True, kw_only=True, tag=195):
    """Orchestrator → gateway: a worker is being replaced. Nothing is dispatched, the active prompt waits, the token
    edges are closed. Ended by RestoreServing, or by CloseRpc with the prompt's fault."""

    FROM: ClassVar[frozenset[Role]] = _ORCHESTRATOR
    error: str


class RestoreServing(Message, frozen=True, kw_only=True, tag=196):
    """Orchestrator → gateway: the run serves again, with these actors and nodes; the active prompt's history is
    replayed. Answered by ServingRestored."""

    FROM: ClassVar[frozenset[Role]] = _ORCHESTRATOR
    run: OpenPromptRpc


class ServingRestored(Message, frozen=True, kw_only=True, tag=197):
    """Gateway → orchestrator: prompts go on. replayed: tokens of the active prompt's answer that were there before."""

    FROM: ClassVar[frozenset[Role]] = _GATEWAY
    replayed: U32 = 0


class ServingDisturbed(Message, frozen=True, kw_only=True, tag=198):
    """Gateway → orchestrator, where lost workers are replaced: a worker or a token edge failed under the active prompt,
    which is held until RestoreServing."""

    FROM: ClassVar[frozenset[Role]] = _GATEWAY
    error: str
