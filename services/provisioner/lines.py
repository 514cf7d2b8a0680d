"""From the bytes of a pipe to log lines and datastream frames (S1 8.9; rust-swactor.md 6.1)."""

from __future__ import annotations

import re
from collections.abc import Callable

import msgspec

from common.limits import CHANNEL_NAME_BYTES_MAX, FRAME_PAYLOAD_BYTES_MAX, LOG_LINE_BYTES_MAX
from services.provisioner.plugin import DatastreamFrame

BRIDGE_LINE_BYTES_MAX = FRAME_PAYLOAD_BYTES_MAX + 64 * 1024  # a full frame, its channel and some JSON escapes
REDACTION_OVERLAP_BYTES = 1024  # longer than any form of a secret that we hold

_BRIDGE_START = re.compile(rb'\s{0,8}\{\s{0,8}"mvp_stdio_event"')


class LineSplitter:
    """Cuts a byte stream at newlines; a line longer than the limit comes in pieces, so that memory stays bounded.

    Bridge lines may be as long as a frame. Pieces end between characters: a split never makes a U+FFFD. `redact` sees
    a line before it is cut, and a long one with REDACTION_OVERLAP_BYTES beyond the cut, so that no half secret stays.
    """

    def __init__(
        self,
        redact: Callable[[bytes], bytes] = bytes,
        line_bytes_max: int = LOG_LINE_BYTES_MAX,
        bridge_bytes_max: int = BRIDGE_LINE_BYTES_MAX,
    ) -> None:
        self._redact = redact
        self._line_max, self._bridge_max = line_bytes_max, bridge_bytes_max
        self._held = bytearray()
        self._searched = 0

    def feed(self, data: bytes) -> list[str]:
        """The lines that `data` completes."""
        self._held += data
        lines: list[str] = []
        while True:
            end = self._held.find(b"\n", self._searched)
            limit = self._bridge_max if _BRIDGE_START.match(self._held) else self._line_max
            if end >= 0:
                lines += self._pieces(bytes(self._held[:end]), limit)
                del self._held[: end + 1]
            elif len(self._held) > limit + REDACTION_OVERLAP_BYTES:
                clean = self._redact(bytes(self._held))
                if len(clean) > limit:
                    cut = _boundary(clean, limit)
                    lines.append(_text(clean[:cut]))
                    clean = clean[cut:]
                self._held = bytearray(clean)
            else:
                self._searched = len(self._held)
                return lines
            self._searched = 0

    def flush(self) -> list[str]:
        """What stands after the last newline, when the stream ends."""
        rest, self._held, self._searched = bytes(self._held), bytearray(), 0
        return self._pieces(rest, self._line_max) if rest else []

    def _pieces(self, raw: bytes, limit: int) -> list[str]:
        clean = self._redact(raw)
        pieces = []
        while len(clean) > limit:
            cut = _boundary(clean, limit)
            pieces.append(_text(clean[:cut]))
            clean = clean[cut:]
        return [*pieces, _text(clean)]


def bridge_frame(line: str) -> DatastreamFrame | None:
    """The frame of a bridge line; None for every other line, which is a log line then."""
    if '"mvp_stdio_event"' not in line:
        return None
    try:
        event = msgspec.json.decode(line, type=_Bridge)
    except (msgspec.DecodeError, UnicodeEncodeError, RecursionError):
        return None
    if event.mvp_stdio_event != 1 or event.kind != "datastream_frame":
        return None
    payload = event.payload.encode() if isinstance(event.payload, str) else msgspec.json.encode(event.payload)
    channel_bytes = len(event.channel.encode())
    if not 0 < channel_bytes <= CHANNEL_NAME_BYTES_MAX or not event.channel.isprintable():
        return None
    return DatastreamFrame(event.channel, payload) if len(payload) <= FRAME_PAYLOAD_BYTES_MAX else None


class _Bridge(msgspec.Struct):
    mvp_stdio_event: int
    kind: str
    channel: str
    payload: str | dict[str, object] | list[object]


def _text(raw: bytes) -> str:
    return raw.removesuffix(b"\r").decode("utf-8", "replace")


def _boundary(data: bytes, at: int) -> int:
    """The last character boundary at or before `at`; a run of continuation bytes longer than UTF-8 has is cut."""
    for cut in range(at, at - 4, -1):
        if data[cut] & 0xC0 != 0x80:
            return cut
    return at
