"""What a subscriber of the collector asks and gets: JSON lines over the run directory's stream socket (S1 2.8, 3.9, 8).

Request, one line from the subscriber:
  {"replay": bool, "sources": […], "nodes": […], "streams": […], "channels": […], "prefixes": […]}
      everything is optional, an empty list asks for all; replay: also what the ring still holds
Answers:
  {"header": {"version", "run_id", "boot"}}              first
  {"stream", "channels": [{"channel_id", "name", "content"}]}
                                                         then the channel list of every stream, later each new channel
  an archive record (archive.py), arrival_seq counted from this collector's start
  {"gap": {"missed"}}                                    frames left the ring before this subscriber read them
Nobody waits for a subscriber: what it does not read stays in the ring until it is overtaken. Pure.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from common.messages.stream import ChannelDeclaration
from services.datastream_collector.archive import encode_record
from services.datastream_collector.frames import CollectedFrame, Cursor, CursorGap

SOCKET_NAME = "stream.sock"
VERSION = 1
REQUEST_BYTES_MAX = 64 * 1024
BATCH_FRAMES_MAX = 256  # one turn's work for one subscriber
BATCH_BYTES_MAX = 256 * 1024

Channels = Callable[[], list[tuple[str, list[ChannelDeclaration]]]]


class FrameFilter(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Which frames: each list that is not empty must match; channels and prefixes together are one condition."""

    replay: bool = False
    sources: list[str] = []
    nodes: list[str] = []
    streams: list[str] = []
    channels: list[str] = []
    prefixes: list[str] = []

    def wants_stream(self, stream: str) -> bool:
        """Whether any frame of this stream can match."""
        node = stream.rpartition("/")[0]
        return (not self.streams or stream in self.streams) and (not self.nodes or node in self.nodes)

    def wants_channel(self, channel: str) -> bool:
        """By name or by prefix."""
        if not self.channels and not self.prefixes:
            return True
        return channel in self.channels or channel.startswith(tuple(self.prefixes))

    def wants(self, frame: CollectedFrame) -> bool:
        """Whether the subscriber gets this frame."""
        return (
            (not self.sources or frame.source in self.sources)
            and self.wants_stream(frame.stream)
            and self.wants_channel(frame.channel)
        )


class _Header(msgspec.Struct):
    version: int
    run_id: int
    boot: int


class _HeaderLine(msgspec.Struct):
    header: _Header


class _ChannelsLine(msgspec.Struct):
    stream: str
    channels: list[ChannelDeclaration]


class _Missed(msgspec.Struct):
    missed: int


class _GapLine(msgspec.Struct):
    gap: _Missed


_encoder = msgspec.json.Encoder()
_request_decoder = msgspec.json.Decoder(FrameFilter)


def parse_request(line: bytes) -> FrameFilter:
    """Raises ValueError with a sentence for anything else."""
    try:
        return _request_decoder.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"no subscription: {error}") from None


class Subscriber:
    """One subscription: its cursor and what it was told of channels. `take` gives the next lines."""

    def __init__(self, wanted: FrameFilter, cursor: Cursor, channels: Channels, run_id: int, boot: int) -> None:
        self.filter = wanted
        self.cursor = cursor
        self._channels = channels
        self._told: set[tuple[str, int]] = set()
        self._head = [_line(_HeaderLine(_Header(VERSION, run_id, boot))), *self._declare()]

    @property
    def pending(self) -> bool:
        """Whether there is something to take (it may all be filtered out)."""
        return bool(self._head) or self.cursor.behind > 0

    def take(self) -> bytes:
        """Lines for up to 256 frames or 256 KiB; may be empty although something was taken."""
        lines, self._head = self._head, []
        size = sum(map(len, lines))
        for _ in range(BATCH_FRAMES_MAX):
            items = self.cursor.take(1) if size < BATCH_BYTES_MAX else []
            if not items:
                break
            for item in items:
                lines += self._gap(item) if isinstance(item, CursorGap) else self._frame(item)
            size = sum(map(len, lines[-2:])) + size
        return b"".join(lines)

    def _gap(self, gap: CursorGap) -> list[bytes]:
        return [_line(_GapLine(_Missed(gap.missed)))]

    def _frame(self, frame: CollectedFrame) -> list[bytes]:
        if not self.filter.wants(frame):
            return []
        new = [] if (frame.stream, frame.channel_id) in self._told else self._declare()
        # The cursor stands behind the frame that it has just given.
        return [*new, encode_record(self.cursor.at - 1, frame)]

    def _declare(self) -> list[bytes]:
        """The channels that this subscriber wants and was not told of."""
        lines = []
        for stream, declared in self._channels():
            if not self.filter.wants_stream(stream):
                continue
            new = [
                channel
                for channel in declared
                if (stream, channel.channel_id) not in self._told and self.filter.wants_channel(channel.name)
            ]
            self._told.update((stream, channel.channel_id) for channel in new)
            if new:
                lines.append(_line(_ChannelsLine(stream, new)))
        return lines


def _line(value: msgspec.Struct) -> bytes:
    return _encoder.encode(value) + b"\n"
