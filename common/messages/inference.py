"""Inference: the request and the replies of single-gpu-inference (S2 4.2, 6.1); tags 300 and on.

The replies are typed, and each has the field `text`: whoever reads that alone sees what the original sent, the empty
string for "not ready" and for what failed (design.md 6 row 20).
"""

from __future__ import annotations

from typing import Annotated, ClassVar

from msgspec import Meta

from common.addresses import U32, U64, ActorAddress, Plane, Role
from common.codec import Message

PROMPT_CHARS_MAX = 1_000_000  # far above any context window here; the whole request stays within one envelope
PROMPT_BYTES_MAX = 3 * 1024 * 1024  # an envelope holds 4 MiB
DEFAULT_MAX_TOKENS = 64
DEFAULT_TEMPERATURE = 0.7

_ENDS = frozenset({Role.AGENT, Role.ROUTER})
"""Either end may be the broker of the two: gpu-node on the same machine, the client when the node is rented."""


class InferenceRequest(Message, frozen=True, kw_only=True, tag=300):
    """Client → the actor named "inference". Answered by exactly one of the three replies, to reply_to on the node that
    sent this; after InferenceNotReady the client sends it again.

    request_id: the client's own, comes back in the reply. max_tokens 0: no cap but the context. temperature 0: greedy.
    """

    PLANE: ClassVar[Plane] = Plane.PROMPT
    FROM: ClassVar[frozenset[Role]] = _ENDS
    request_id: U64
    prompt: Annotated[str, Meta(max_length=PROMPT_CHARS_MAX)]
    max_tokens: U32 = DEFAULT_MAX_TOKENS
    temperature: float = DEFAULT_TEMPERATURE
    reply_to: ActorAddress


class InferenceResponse(Message, frozen=True, kw_only=True, tag=301):
    """gpu-node → reply_to: the answer."""

    PLANE: ClassVar[Plane] = Plane.PROMPT
    FROM: ClassVar[frozenset[Role]] = _ENDS
    request_id: U64
    text: str


class InferenceNotReady(Message, frozen=True, kw_only=True, tag=302):
    """gpu-node → reply_to: the worker is still loading; nothing was queued, ask again (S2 4.5). text is empty."""

    PLANE: ClassVar[Plane] = Plane.PROMPT
    FROM: ClassVar[frozenset[Role]] = _ENDS
    request_id: U64
    text: str = ""


class InferenceFault(Message, frozen=True, kw_only=True, tag=303):
    """gpu-node → reply_to: this request failed, for the reason in one sentence (S2 4.3, 4.4). text is empty."""

    PLANE: ClassVar[Plane] = Plane.PROMPT
    FROM: ClassVar[frozenset[Role]] = _ENDS
    request_id: U64
    text: str = ""
    error: str


InferenceReply = InferenceResponse | InferenceNotReady | InferenceFault
