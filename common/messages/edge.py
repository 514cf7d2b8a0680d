"""Edge: the byte stream between two stages, and the begin of a sequence (S1 6.10, 7.11; design.md 3 "Edges").

The stream's messages go over a direct connection between the two engines (or the gateway and an engine), one message
a frame, or, where no candidate can be reached, over the bus on the edge plane between the same two nodes.
"""

from __future__ import annotations

from typing import ClassVar

from common.addresses import U32, U64, Plane, Role, RunNonce, Token
from common.codec import Message
from common.messages.node_agent import Sampling

_ENDS = frozenset({Role.AGENT, Role.GATEWAY})
_AGENT = frozenset({Role.AGENT})
_GATEWAY = frozenset({Role.GATEWAY})


class EdgeHello(Message, frozen=True, kw_only=True, tag=270):
    """Producer → consumer: the first frame of a connection, again whenever the producer doubts it. Answered by
    EdgeWelcome, EdgeNotYet (asked again after 250 ms) or EdgeRefused. token: the secret of this edge (design.md 3)."""

    PLANE: ClassVar[Plane] = Plane.EDGE
    FROM: ClassVar[frozenset[Role]] = _ENDS
    token: Token
    edge_id: U64
    run: RunNonce


class EdgeNotYet(Message, frozen=True, kw_only=True, tag=271):
    """Consumer → producer: this edge is not provisioned here yet."""

    PLANE: ClassVar[Plane] = Plane.EDGE
    FROM: ClassVar[frozenset[Role]] = _ENDS
    edge_id: U64


class EdgeWelcome(Message, frozen=True, kw_only=True, tag=272):
    """Consumer → producer: send from next_offset on; consumed: bytes that need not be kept any more."""

    PLANE: ClassVar[Plane] = Plane.EDGE
    FROM: ClassVar[frozenset[Role]] = _ENDS
    edge_id: U64
    next_offset: U64
    consumed: U64 = 0


class EdgeData(Message, frozen=True, kw_only=True, tag=273):
    """Producer → consumer: at most 64 KiB of the stream from `offset` on. Answered by EdgeCredit when consumed."""

    PLANE: ClassVar[Plane] = Plane.EDGE
    FROM: ClassVar[frozenset[Role]] = _ENDS
    edge_id: U64
    offset: U64
    data: bytes


class EdgeCredit(Message, frozen=True, kw_only=True, tag=274):
    """Consumer → producer: everything below consumed_offset is done with; the window moves on.

    held_us: from the arrival of the record that ends there until this left, computing and waiting for other credits
    included; 0: not known.
    """

    PLANE: ClassVar[Plane] = Plane.EDGE
    FROM: ClassVar[frozenset[Role]] = _ENDS
    edge_id: U64
    consumed_offset: U64
    held_us: U32 = 0


class EdgeRefused(Message, frozen=True, kw_only=True, tag=275):
    """Consumer → producer: the stream is over here; one sentence. Not retried."""

    PLANE: ClassVar[Plane] = Plane.EDGE
    FROM: ClassVar[frozenset[Role]] = _ENDS
    edge_id: U64
    error: str


class BeginSequence(Message, frozen=True, kw_only=True, tag=280):
    """Gateway → every stage's node agent before a prompt's token-in record. Answered by SequenceBegun, or by
    TokenizerFault at reply_to. From now on only objects from first_object_id on count; all before are dropped.

    recent: the prompt's last tokens, for the repetition penalty of the last stage.
    """

    PLANE: ClassVar[Plane] = Plane.PROMPT
    FROM: ClassVar[frozenset[Role]] = _GATEWAY
    request_id: U64
    first_object_id: U64
    reply_to: bytes
    sampling: Sampling | None = None
    recent: list[U32] = []


class SequenceBegun(Message, frozen=True, kw_only=True, tag=281):
    """Node agent → reply_to: the stage waits for the sequence's BEGIN."""

    PLANE: ClassVar[Plane] = Plane.PROMPT
    FROM: ClassVar[frozenset[Role]] = _AGENT
    request_id: U64
    stage_index: U32
