"""A token's way back to the first stage with as little Python as it takes.

The stages stand still while the gateway looks at a token, and on the way through loop, codec and actors that is half a
millisecond. So the actor's answer to the next token is foretold while the stages compute (`Foretold`); if exactly that
token comes, the answer leaves first, and then everything goes its usual way, where the actor's own record must be the
same, byte by byte.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

from common.edge_records import Record
from common.edges.port import EdgePort, Way
from common.local_edges import FRAME_HEAD_BYTES, frame_bytes

_READ_BYTES = 64 * 1024


@dataclass(frozen=True, slots=True)
class Foretold:
    """A token-out record that is fed back at once, and what is fed back for it; the token aside, which is the payload
    of both."""

    token_out: int
    received: Record
    token_in: int
    fed_back: Record


class TokenEcho:
    """`arm` when nothing is to be done, `turn` as soon as something has come."""

    def __init__(self) -> None:
        self._armed: tuple[Foretold, Way, Way] | None = None

    def arm(self, port: EdgePort, told: Foretold | None) -> None:
        """Work out the bytes of both frames, where they are local and nothing is in their way. Again whenever the edges
        may have moved: a descriptor is good until then."""
        self._armed = None
        if told is not None and (way_in := port.way_in(told.token_out, told.received)) is not None:
            way_out = port.way_out(told.token_in, told.fed_back)
            self._armed = (told, way_in, way_out) if way_out is not None else None

    def disarm(self) -> None:
        """The edges have moved."""
        self._armed = None

    def turn(self, port: EdgePort, told: Foretold | None, now_ns: int) -> None:
        """Answer the token if it is there. `told`: the actor's word of now, without anything that it has not handled
        yet; its record is to be written next."""
        armed, self._armed = self._armed, None
        if armed is None or armed[0] != told:
            return
        _, way_in, way_out = armed
        try:
            data = os.read(way_in.descriptor, _READ_BYTES)
        except OSError:  # nothing yet, or the port will meet the same error
            return
        if not data:  # so is the end
            return
        size = len(told.received.payload)
        if data == _with_payload(way_in, data[-size:]):
            frame = _with_payload(way_out, data[-size:])
            try:
                sent = os.write(way_out.descriptor, frame)
            except OSError as error:
                sent = -(error.errno or 1)
            os.sched_yield()  # the stage may have been woken on this very core
            port.was_written(way_out, frame, sent, now_ns)
        port.was_read(way_in, data, now_ns, now_ms=now_ns // 1_000_000)


def _with_payload(way: Way, payload: bytes) -> bytes:
    """The whole frame that was foretold."""
    return frame_bytes(way.frame[FRAME_HEAD_BYTES : -len(payload)] + payload)
