"""The prompt RPC's lines: newline-delimited JSON over TCP, one object per line each way (S1 2.5, 7.8; design.md 6).

Requests:
  {"request_id": u64, "prompt_text": str}                       the prompt of S1 2.5; optional beside it:
      "max_tokens": u32 (0, null or absent: no cap but the configured one),
      "messages": [{"role", "content"}, …] in place of prompt_text, "raw": true (prompt_text without chat template),
      "sampling": {…}, "stop": [str, …], "events": ["queued"]
  {"type": "shutdown"}                                          ask for the end of the run
Responses, `type` first:
  text_delta, done, fault (row 11)     the prompt's events; done and fault end it, exactly one of them comes
  queued                               only if asked for: how many prompts are before this one
  shutdown_accepted                    the shutdown request was passed on; what is active gets its fault
  error                                the connection broke the protocol; it is closed after this line (rows 7, 8)

A response line may begin with spaces: after a client has shut its sending side down, the gateway probes with a space,
which JSON ignores and a vanished peer answers with a reset. Of two equal keys in one object the last one counts. Pure.
"""

from __future__ import annotations

import math
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from common.addresses import U32
from common.messages.node_agent import ChatMessage, Sampling

U64_MAX = 2**64 - 1
STOP_STRINGS_MAX = 16  # each is searched for in every new text
MESSAGES_MAX = 4096  # turns of a chat; the line's length bounds it as well
ERROR_CHARS_MAX = 300  # an unknown field's name may be a megabyte long


class ProtocolError(ValueError):
    """A line that is no request. The text is one sentence for the client's error line."""


class _Strict(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of everything in a request: an unknown field is an error, never ignored."""


class Turn(_Strict, frozen=True, kw_only=True):
    """One chat message of a request."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str


class SamplingOptions(_Strict, frozen=True, kw_only=True):
    """How the next token is chosen; all defaults together are greedy (design.md 6 row 21)."""

    temperature: Annotated[float, Meta(ge=0)] = 0.0
    top_k: U32 = 0
    top_p: Annotated[float, Meta(gt=0, le=1)] = 1.0
    min_p: Annotated[float, Meta(ge=0, le=1)] = 0.0
    repetition_penalty: Annotated[float, Meta(gt=0)] = 1.0
    seed: Annotated[int, Meta(ge=0)] | None = None


class SubmitPrompt(_Strict, frozen=True, kw_only=True):
    """S1 2.5 with the additions of design.md 6 rows 11, 21 and 25. null means absent in every optional field."""

    request_id: Annotated[int, Meta(ge=0)]
    prompt_text: str | None = None
    max_tokens: U32 | None = None
    messages: Annotated[list[Turn], Meta(max_length=MESSAGES_MAX)] | None = None
    raw: bool | None = None
    sampling: SamplingOptions | None = None
    stop: Annotated[list[Annotated[str, Meta(min_length=1)]], Meta(max_length=STOP_STRINGS_MAX)] | None = None
    events: list[Literal["queued"]] | None = None

    @property
    def prompt_bytes(self) -> int:
        """The length of what is asked, UTF-8: the only thing that records say about a prompt's text."""
        texts = [turn.content for turn in self.messages or ()] or [self.prompt_text or ""]
        return sum(len(text.encode()) for text in texts)

    def chat(self) -> list[ChatMessage]:
        """The turns as a node agent takes them."""
        return [ChatMessage(role=turn.role, content=turn.content) for turn in self.messages or ()]

    def sampler(self) -> Sampling | None:
        """The sampling as a node agent takes it; None where nothing was asked."""
        asked = self.sampling
        return None if asked is None else Sampling(**msgspec.structs.asdict(asked))


class Shutdown(_Strict, frozen=True, kw_only=True, tag_field="type", tag="shutdown"):
    """{"type":"shutdown"} (design.md 6 row 2)."""


Request = SubmitPrompt | Shutdown


class _Kind(msgspec.Struct):
    type: object = None


_kind_decoder = msgspec.json.Decoder(_Kind)
_submit_decoder = msgspec.json.Decoder(SubmitPrompt)
_shutdown_decoder = msgspec.json.Decoder(Shutdown)


def parse_request(line: bytes) -> Request:
    """One line without its newline. Raises ProtocolError, whose text names the field and what is wrong with it."""
    if not line.strip():
        raise ProtocolError("malformed request: the line is empty; a request is one JSON object per line")
    try:
        kind = _kind_decoder.decode(line).type
        if kind is not None and kind != "shutdown":
            raise ProtocolError(
                f"unknown request type {_clip(repr(kind), 60)}; a prompt has no type, the other request is shutdown"
            )
        request = _submit_decoder.decode(line) if kind is None else _shutdown_decoder.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, OverflowError) as error:
        raise ProtocolError(f"malformed request: {_clip(str(error) or 'nested too deep')}") from None
    if isinstance(request, SubmitPrompt):
        _check_prompt(request)
    return request


def _check_prompt(request: SubmitPrompt) -> None:
    """What types alone cannot say."""
    if request.request_id > U64_MAX:
        raise ProtocolError(f"malformed request: request_id is larger than {U64_MAX}")
    if request.prompt_text is None and not request.messages:
        raise ProtocolError("malformed request: it needs prompt_text (or messages)")
    if request.messages and request.prompt_text:
        raise ProtocolError("malformed request: prompt_text and messages exclude each other")
    if request.messages and request.raw:
        raise ProtocolError("malformed request: raw goes with prompt_text, not with messages")
    if (sampling := request.sampling) is not None:
        if sampling.seed is not None and sampling.seed > U64_MAX:
            raise ProtocolError(f"malformed request: sampling.seed is larger than {U64_MAX}")
        numbers = (sampling.temperature, sampling.top_p, sampling.min_p, sampling.repetition_penalty)
        if not all(map(math.isfinite, numbers)):
            raise ProtocolError("malformed request: a number in sampling is not finite")


def _clip(text: str, chars: int = ERROR_CHARS_MAX) -> str:
    return text if len(text) <= chars else text[:chars] + "…"


# --- responses --------------------------------------------------------------------------------------------------
class TextDeltaLine(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="text_delta"):
    """New text of the answer; may hold several tokens, never a part of a character."""

    request_id: int
    text: str


class DoneLine(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="done"):
    """The prompt ended well. finish_reason: "stop" | "length" | "context"."""

    request_id: int
    final_text: str
    tokens_generated: int
    elapsed_ms: int
    prompt_tokens: int
    finish_reason: str


class FaultLine(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="fault"):
    """The prompt failed; error is one sentence."""

    request_id: int
    error: str


class QueuedLine(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="queued"):
    """position: how many prompts end before this one starts; 1 = only the active one is before it."""

    request_id: int
    position: int


class ErrorLine(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="error"):
    """The connection broke the protocol and is closed."""

    error: str


class ShutdownAcceptedLine(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="shutdown_accepted"):
    """The orchestrator has been asked to end the run."""


Response = TextDeltaLine | DoneLine | FaultLine | QueuedLine | ErrorLine | ShutdownAcceptedLine

_encoder = msgspec.json.Encoder()
_response_decoder = msgspec.json.Decoder(Response)


def encode_response(response: Response) -> bytes:
    """One line with its newline."""
    return _encoder.encode(response) + b"\n"


def decode_response(line: bytes) -> Response:
    """The client's side. Raises ProtocolError."""
    try:
        return _response_decoder.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolError(f"no prompt RPC response: {_clip(str(error))}") from None
