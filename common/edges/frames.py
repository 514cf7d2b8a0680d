"""Frames of an edge: one stream message of common/messages/edge.py each, nothing else is accepted."""

from __future__ import annotations

import msgspec

from common.codec import BadEnvelope, Message, decode_body
from common.messages.edge import EdgeCredit, EdgeData, EdgeHello, EdgeNotYet, EdgeRefused, EdgeWelcome

STREAM_MESSAGES = (EdgeHello, EdgeNotYet, EdgeWelcome, EdgeData, EdgeCredit, EdgeRefused)


class _Tagged(msgspec.Struct):
    """The tag alone; every other field is skipped undecoded."""

    t: int


_tagged = msgspec.msgpack.Decoder(_Tagged)


def decode_stream_message(frame: bytes) -> Message:
    """Raises BadEnvelope."""
    try:
        tag = _tagged.decode(frame).t
    except (msgspec.DecodeError, RecursionError) as error:
        raise BadEnvelope(f"no edge message: {error}", None, len(frame)) from None
    message = decode_body(tag, frame)
    if not isinstance(message, STREAM_MESSAGES):
        raise BadEnvelope(f"{type(message).__name__} is no edge message", tag, len(frame))
    return message
