"""The agent's side of the link to its engine as pure framing: bytes in, typed messages out (design.md 4).

A frame is a u32 little-endian length and one message of common/messages/engine.py. A stream socket splits and merges
frames as it likes; whatever is wrong with the bytes becomes one LinkError and the link is over, because after a bad
length nothing behind it can be trusted.
"""

from __future__ import annotations

import struct

import msgspec

from common.codec import BadEnvelope, Message, decode_body, encode_body
from common.limits import ENVELOPE_BYTES_MAX
from common.messages.engine import (
    Cancelled,
    EdgeCarry,
    EdgeMoved,
    EdgeReady,
    EdgesClosed,
    EngineBegun,
    EngineDecoded,
    EngineDone,
    EngineEncoded,
    EngineFault,
    EngineReady,
    Fatal,
    Progress,
    Released,
    RoleConfigured,
    RoleReset,
    StageFaulted,
    TokenDelta,
    WeightsLoaded,
)

FRAME_BYTES_MAX = ENVELOPE_BYTES_MAX  # what an engine says goes into one envelope, so a frame need not be larger
FROM_ENGINE: tuple[type[Message], ...] = (
    EngineReady,
    RoleConfigured,
    Progress,
    WeightsLoaded,
    TokenDelta,
    EngineDone,
    EngineFault,
    EngineEncoded,
    EngineDecoded,
    Cancelled,
    Released,
    RoleReset,
    Fatal,
    EdgeReady,
    EdgeMoved,
    EdgesClosed,
    EdgeCarry,
    EngineBegun,
    StageFaulted,
)
"""All that an engine may say."""

_LENGTH = struct.Struct("<I")


class LinkError(ValueError):
    """The other side of the link broke the protocol; one sentence."""


class _Tagged(msgspec.Struct):
    """The tag alone; every other field is skipped undecoded."""

    t: int


def frame(message: Message) -> bytes:
    """A message as it goes over the link. Raises LinkError when it is larger than FRAME_BYTES_MAX."""
    body = encode_body(message)
    if len(body) > FRAME_BYTES_MAX:
        raise LinkError(f"{type(message).__name__} of {len(body)} bytes is larger than the {FRAME_BYTES_MAX} allowed")
    return _LENGTH.pack(len(body)) + body


class FrameBuffer:
    """Collects bytes until they are whole messages. accepts: the types that this side takes."""

    def __init__(self, accepts: tuple[type[Message], ...] = FROM_ENGINE) -> None:
        self._accepts = accepts
        self._held = bytearray()
        self._broken = ""

    @property
    def held(self) -> int:
        """Bytes of a message that is not whole yet; not 0 at EOF means that it was cut off."""
        return len(self._held)

    def feed(self, data: bytes) -> list[Message]:
        """The messages that became whole with `data`, in order.

        Raises LinkError for a bad length, bytes that are no message, and a type that this side does not take; the
        messages before it are lost with it, and every later call raises the same.
        """
        if self._broken:
            raise LinkError(self._broken)
        self._held += data
        messages: list[Message] = []
        at = 0
        try:
            while len(self._held) - at >= _LENGTH.size:
                (size,) = _LENGTH.unpack_from(self._held, at)
                if size > FRAME_BYTES_MAX:
                    raise LinkError(f"a frame of {size} bytes is larger than the {FRAME_BYTES_MAX} allowed")
                end = at + _LENGTH.size + size
                if len(self._held) < end:
                    break
                messages.append(self._decode(bytes(self._held[at + _LENGTH.size : end])))
                at = end
        except LinkError as error:
            self._broken = str(error)
            self._held.clear()
            raise
        del self._held[:at]
        return messages

    def _decode(self, body: bytes) -> Message:
        try:
            tag = msgspec.msgpack.decode(body, type=_Tagged).t
        except (msgspec.DecodeError, RecursionError):
            raise LinkError(f"a frame of {len(body)} bytes holds no message") from None
        try:
            message = decode_body(tag, body)
        except BadEnvelope as error:
            raise LinkError(f"a frame holds a bad message: {error.reason}") from None
        if not isinstance(message, self._accepts):
            raise LinkError(f"{type(message).__name__} does not belong on this side of the link")
        return message
