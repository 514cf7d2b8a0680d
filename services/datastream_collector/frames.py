"""Collected frames and the ring that cursors read (design.md 4). Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from common.addresses import short
from common.limits import COLLECTOR_RING_FRAMES_MAX

RING_BYTES_MAX = 32 * 1024 * 1024  # 16384 frames may be of 1 MiB each
COMPACT_FRAMES = 1024  # so many emptied places are given back at once


@dataclass(frozen=True, slots=True)
class CollectedFrame:
    """One frame with its identity (S1 3.9, 8.10); payload is byte for byte what the producer sent.

    source: the archive's source; stream: "mvp-orchestrator/1". unix_ms, producer (16 hex digits of the sending
    actor), producer_seq and run_boot are collection metadata: producer_seq is 0 for frames that keep their own
    positions, run_boot (of the run's orchestrator) also before the first orchestrator.
    """

    source: str
    stream: str
    channel: str
    channel_id: int
    position: int
    payload: bytes
    unix_ms: int = 0
    producer: str = ""
    producer_seq: int = 0
    run_boot: int = 0


@dataclass(frozen=True, slots=True)
class CursorGap:
    """In place of `missed` frames that left the ring before this cursor read them."""

    missed: int


@dataclass(slots=True)
class RecoveredStream:
    """What an archive says of one stream: its highest position, whose run that was, when the last record was collected,
    and its channels by name."""

    position: int = -1
    channels: dict[str, int] = field(default_factory=dict)
    run_boot: int = 0
    unix_ms: int = 0


@dataclass(frozen=True, slots=True)
class Recovered:
    """What an archive says of the time before this process: streams by name, and what was seen of each producer.

    positions: of workers' streams, by publisher and stream. whole: the archive was read from its start; else only its
    tail was, and channels may be missing.
    """

    streams: Mapping[str, RecoveredStream] = field(default_factory=dict)
    producers: Mapping[str, list[tuple[int, int]]] = field(default_factory=dict)
    whole: bool = True
    positions: Mapping[tuple[str, str], list[tuple[int, int]]] = field(default_factory=dict)

    def knows_one(self, actors: Iterable[bytes]) -> bool:
        """Whether one of these actors has spoken in the orchestrator's stream."""
        return any(short(actor) in self.producers for actor in actors)


class Cursor:
    """A reader's place in the ring. A lossless cursor keeps the ring from dropping what it has not read."""

    def __init__(self, ring: FrameRing, at: int, lossless: bool) -> None:
        self._ring = ring
        self.at = at
        self.lossless = lossless

    @property
    def behind(self) -> int:
        """How many frames of the ring this reader has not taken, those that it missed among them."""
        return self._ring.end - self.at

    def take(self, limit: int = 1 << 30) -> list[CollectedFrame | CursorGap]:
        """The next frames, at most `limit`; the first item is a CursorGap where frames were missed."""
        out: list[CollectedFrame | CursorGap] = []
        if self.at < self._ring.first:
            out.append(CursorGap(self._ring.first - self.at))
            self.at = self._ring.first
        frames = self._ring.between(self.at, self.at + limit)
        self.at += len(frames)
        out.extend(frames)
        return out

    def close(self) -> None:
        """Stop holding frames back."""
        self._ring.forget(self)


class FrameRing:
    """The newest frames, by index from 0. Bounded by frames and bytes, but for what a lossless cursor still needs."""

    def __init__(self, frames: int = COLLECTOR_RING_FRAMES_MAX, size: int = RING_BYTES_MAX) -> None:
        self.first = 0
        self._frames: list[CollectedFrame | None] = []
        self._start = 0
        self._frames_max, self._bytes_max = frames, size
        self._bytes = 0
        self._lossless: list[Cursor] = []

    @property
    def end(self) -> int:
        """The index that the next frame gets."""
        return self.first + len(self._frames) - self._start

    def append(self, frame: CollectedFrame) -> None:
        """Add a frame; the oldest go where bounds and cursors allow."""
        self._frames.append(frame)
        self._bytes += len(frame.payload)
        keep = min((cursor.at for cursor in self._lossless), default=self.end)
        while (self.end - self.first > self._frames_max or self._bytes > self._bytes_max) and self.first < keep:
            oldest = self._frames[self._start]
            self._bytes -= len(oldest.payload) if oldest else 0
            # A list with a moving start: readers slice it anywhere, which a deque is slow at.
            self._frames[self._start] = None
            self._start += 1
            self.first += 1
        if self._start > COMPACT_FRAMES and self._start > len(self._frames) // 2:
            del self._frames[: self._start]
            self._start = 0

    def cursor(self, *, lossless: bool = False, replay: bool = False) -> Cursor:
        """A new reader: of future frames, or with replay of everything that is still here."""
        cursor = Cursor(self, self.first if replay else self.end, lossless)
        if lossless:
            self._lossless.append(cursor)
        return cursor

    def forget(self, cursor: Cursor) -> None:
        """The cursor is closed."""
        if cursor in self._lossless:
            self._lossless.remove(cursor)

    def between(self, start: int, stop: int) -> list[CollectedFrame]:
        """Frames start..stop-1 that are here; costs what it returns, wherever the reader is."""
        low, high = max(start, self.first), min(stop, self.end)
        offset = self._start - self.first
        return [frame for frame in self._frames[low + offset : max(low, high) + offset] if frame is not None]
