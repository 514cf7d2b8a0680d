"""What went over an edge: records, bytes and times, counted where the sockets are. Pure.

The producer knows how long a record takes from its write until the consumer gives its bytes back; the consumer knows
how long of that it held them. The difference is the way there and back, whatever the clocks of the two machines say.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class EdgeCount:
    """One edge as one of its ends sees it. records, bytes: since it was opened; times: mean of the records that were
    finished since the last look, in milliseconds, None without one."""

    edge_id: int
    records: int
    bytes: int
    latency_ms: float | None = None
    """Producer: from the write of a record until its bytes came back."""
    held_ms: float | None = None
    """Consumer: from the arrival of a record until its bytes were given back."""


@dataclass(slots=True)
class _End:
    is_producer: bool
    records: int = 0
    bytes: int = 0
    told: int = 0
    finished: int = 0
    total_ns: int = 0
    pending: deque[tuple[int, int]] = field(default_factory=deque)
    """(end offset in the stream, when) of records that are not given back yet."""


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

    def given_back(self, edge_id: int, offset: int, at_ns: int) -> None:
        """All bytes of the stream below offset are credited (producer) or consumed (consumer)."""
        end = self._ends.get(edge_id)
        while end is not None and end.pending and end.pending[0][0] <= offset:
            end.finished += 1
            end.total_ns += at_ns - end.pending.popleft()[1]

    def take(self) -> list[EdgeCount]:
        """What changed since the last call."""
        counts = []
        for edge_id, end in self._ends.items():
            if end.records == end.told and not end.finished:
                continue
            mean = round(end.total_ns / end.finished / 1e6, 3) if end.finished else None
            times = {"latency_ms" if end.is_producer else "held_ms": mean}
            counts.append(EdgeCount(edge_id, end.records, end.bytes, **times))
            end.told, end.finished, end.total_ns = end.records, 0, 0
        return counts

    def clear(self) -> None:
        """The edges are closed."""
        self._ends.clear()
