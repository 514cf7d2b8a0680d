"""What went over an edge: records, bytes and times, counted where the sockets are. Pure.

A credit says how long its consumer kept the record that ends there, waiting for other credits included. What the
producer waited beyond that is the way there and back, whatever the clocks of the two machines say. Of the samples since
the last look the least counts: the others were read late by an end that computed.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

HELD_US_MAX = (1 << 32) - 1


@dataclass(frozen=True, slots=True)
class EdgeCount:
    """One edge as one of its ends sees it. records, bytes: since it was opened; times: of the records that were
    finished since the last look, in milliseconds, None without one."""

    edge_id: int
    records: int
    bytes: int
    latency_ms: float | None = None
    """Producer: the way there and back, the least."""
    held_ms: float | None = None
    """Consumer: from the arrival of a record until it was done with, the mean."""


@dataclass(slots=True)
class _End:
    is_producer: bool
    records: int = 0
    bytes: int = 0
    told: int = 0
    finished: int = 0
    total_ns: int = 0
    least_ns: int = 0
    pending: deque[tuple[int, int]] = field(default_factory=deque)
    """(end offset in the stream, when) of records that are not given back yet."""
    done: tuple[int, int] = (-1, 0)
    """Consumer: the last one that was done with, as in pending."""

    def finish(self, took_ns: int) -> None:
        self.least_ns = min(self.least_ns, took_ns) if self.finished else took_ns
        self.finished += 1
        self.total_ns += took_ns


class EdgeTraffic:
    """The edges of one process. Times in monotonic nanoseconds."""

    def __init__(self) -> None:
        self._ends: dict[int, _End] = {}

    def began(self, edge_id: int, nbytes: int, end_offset: int, at_ns: int, *, is_producer: bool) -> None:
        """A record was written (producer) or has arrived (consumer)."""
        end = self._ends.get(edge_id)
        if end is None:
            end = self._ends[edge_id] = _End(is_producer)
        end.records += 1
        end.bytes += nbytes
        end.pending.append((end_offset, at_ns))

    def consumed(self, edge_id: int, offset: int, at_ns: int) -> None:
        """Consumer: all bytes of the stream below offset are done with."""
        end = self._ends.get(edge_id)
        while end is not None and end.pending and end.pending[0][0] <= offset:
            end.done = end.pending.popleft()
            end.finish(at_ns - end.done[1])

    def held_us(self, edge_id: int, offset: int, at_ns: int) -> int:
        """Consumer: what a credit for offset says of the record that ends there; 0 if none does."""
        end = self._ends.get(edge_id)
        if end is None or end.done[0] != offset:
            return 0
        return min(HELD_US_MAX, max(1, (at_ns - end.done[1]) // 1000))

    def credited(self, edge_id: int, offset: int, held_us: int, at_ns: int) -> None:
        """Producer: all bytes of the stream below offset came back."""
        end = self._ends.get(edge_id)
        while end is not None and end.pending and end.pending[0][0] <= offset:
            end_offset, written_ns = end.pending.popleft()
            if held_us and end_offset == offset:
                end.finish(max(0, at_ns - written_ns - held_us * 1000))

    def take(self) -> list[EdgeCount]:
        """What changed since the last call."""
        counts = []
        for edge_id, end in self._ends.items():
            if end.records == end.told and not end.finished:
                continue
            time_ms = None
            if end.finished:
                time_ms = round((end.least_ns if end.is_producer else end.total_ns / end.finished) / 1e6, 3)
            times = {"latency_ms" if end.is_producer else "held_ms": time_ms}
            counts.append(EdgeCount(edge_id, end.records, end.bytes, **times))
            end.told, end.finished, end.total_ns = end.records, 0, 0
        return counts

    def clear(self) -> None:
        """The edges are closed."""
        self._ends.clear()
