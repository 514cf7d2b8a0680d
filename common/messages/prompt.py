"""Prompt: PromptEvent and TokenizerEvent (S1 6.3, 6.9, 6.10), the replies of node agents to the gateway's inboxes."""

from __future__ import annotations

from typing import ClassVar

from common.addresses import U32, U64, Plane, Role
from common.codec import Message

_AGENT = frozenset({Role.AGENT})


class TextDelta(Message, frozen=True, kw_only=True, tag=160):
    """Node agent → reply_to: new text, never a part of a character; may hold several tokens."""

    PLANE: ClassVar[Plane] = Plane.PROMPT
    FROM: ClassVar[frozenset[Role]] = _AGENT
    request_id: U64
    text: str
    tokens: U32 = 1


class Done(Message, frozen=True, kw_only=True, tag=161):
    """Node agent → reply_to: the request ended well. finish_reason: "stop" | "length" | "context" (row 11)."""

    PLANE: ClassVar[Plane] = Plane.PROMPT
    FROM: ClassVar[frozenset[Role]] = _AGENT
    request_id: U64
    final_text: str
    tokens_generated: U32
    elapsed_ms: U64
    prompt_tokens: U32
    finish_reason: str


class Fault(Message, frozen=True, kw_only=True, tag=162):
    """Node agent → reply_to: the request failed; the sentence reaches the client (S1 10.10). lost: not
    the request is to blame but this worker, which serves no more."""

    PLANE: ClassVar[Plane] = Plane.PROMPT
    FROM: ClassVar[frozenset[Role]] = _AGENT
    request_id: U64
    error: str
    lost: bool = False


class RequestCancelled(Message, frozen=True, kw_only=True, tag=163):
    """Node agent → the sender of CancelRequest: nothing more will come for this request. known: it was running."""

    PLANE: ClassVar[Plane] = Plane.PROMPT
    FROM: ClassVar[frozenset[Role]] = _AGENT
    request_id: U64
    known: bool = True


class PromptEncoded(Message, frozen=True, kw_only=True, tag=164):
    """Node agent → reply_to: the token ids of the prompt."""

    PLANE: ClassVar[Plane] = Plane.PROMPT
    FROM: ClassVar[frozenset[Role]] = _AGENT
    request_id: U64
    tokens: list[U32]


class TokensDecoded(Message, frozen=True, kw_only=True, tag=165):
    """Node agent → reply_to: the text that became whole with these tokens.

    lengths: how many characters of it with each token."""

    PLANE: ClassVar[Plane] = Plane.PROMPT
    FROM: ClassVar[frozenset[Role]] = _AGENT
    request_id: U64
    text: str
    lengths: list[U32] = []


class TokenizerFault(Message, frozen=True, kw_only=True, tag=166):
    """Node agent → reply_to: encode or decode failed; becomes the Fault of the active prompt. lost: as in Fault."""

    PLANE: ClassVar[Plane] = Plane.PROMPT
    FROM: ClassVar[frozenset[Role]] = _AGENT
    request_id: U64
    error: str
    lost: bool = False


PromptEvent = TextDelta | Done | Fault
TokenizerEvent = PromptEncoded | TokensDecoded | TokenizerFault
