"""Frames of an edge: one stream message of common/messages/edge.py each, nothing else is accepted."""

from __future__ import annotations

from functools import reduce
from operator import or_

import msgspec

from common.codec import BadEnvelope, Message
from common.messages.edge import EdgeCredit, EdgeData, EdgeHello, EdgeNotYet, EdgeRefused, EdgeWelcome

STREAM_MESSAGES = (EdgeHello, EdgeNotYet, EdgeWelcome, EdgeData, EdgeCredit, EdgeRefused)


_decoder = msgspec.msgpack.Decoder(reduce(or_, STREAM_MESSAGES))


def decode_stream_message(frame: bytes) -> Message:
    """Raises BadEnvelope."""
    try:
        message: Message = _decoder.decode(frame)
    except (msgspec.DecodeError, RecursionError) as error:
        raise BadEnvelope(f"no edge message: {error}", None, len(frame)) from None
    return message
