"""Rates and latency per message type and link, from what a tap hears: `mvp-tap --stats`. Pure.

The latency of a type is from the envelope that caused one (its `corr`) until it passed the same broker: how long its
sender took to say it, with the ways there and back.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from dataclasses import dataclass, field
from statistics import quantiles

from tools.tap_records import Line, Names, printable

PENDING_MAX = 20_000  # envelopes that may still cause something
LATENCIES_MAX = 2048  # of a row: enough for a 99th percentile
ANYONE = b""
GOOD = frozenset({"forwarded", "local"})
HEAD = ("type", "from", "to", "plane", "count", "per s", "bytes/s", "p50 ms", "p99 ms", "lost")


@dataclass(slots=True)
class Row:
    """One type on one link."""

    plane: str
    count: int = 0
    bytes: int = 0
    lost: Counter[str] = field(default_factory=Counter)
    latencies_ms: deque[int] = field(default_factory=lambda: deque(maxlen=LATENCIES_MAX))
    """Between a cause and this, newest last."""


class Stats:
    """Of everything heard so far, or since `reset`."""

    def __init__(self) -> None:
        self.rows: dict[tuple[str, bytes, bytes], Row] = {}
        self.bad = 0
        self.first_ms = self.last_ms = 0
        self._waiting: OrderedDict[tuple[str, bytes, bytes, int], int] = OrderedDict()
        """(broker, sender, receiver, id) → when it passed; with sender ANYONE the last of these, since ids are counted
        per process, and what is said because of an envelope need not go to who sent it."""

    def add(self, line: Line) -> None:
        """The next record of a tap."""
        if line.bad:
            self.bad += 1
            return
        self.first_ms = self.first_ms or line.wall_ms
        self.last_ms = max(self.last_ms, line.wall_ms)
        row = self.rows.get(key := (line.type, line.src_node, line.dst_node))
        if row is None:
            row = self.rows[key] = Row(line.plane)
        row.count += 1
        row.bytes += line.size
        if line.verdict not in GOOD:
            row.lost[line.verdict] += 1
        for asker in (line.dst_node, ANYONE) if line.corr else ():
            if (began := self._waiting.get((line.broker, asker, line.src_node, line.corr))) is not None:
                row.latencies_ms.append(max(0, line.wall_ms - began))
                break
        for sender in (line.src_node, ANYONE):
            key_of = (line.broker, sender, line.dst_node, line.id)
            self._waiting[key_of] = line.wall_ms
            self._waiting.move_to_end(key_of)
        while len(self._waiting) > 2 * PENDING_MAX:
            self._waiting.popitem(last=False)

    def reset(self) -> None:
        """Count anew; what may still be answered stays known."""
        self.rows, self.bad, self.first_ms, self.last_ms = {}, 0, 0, 0

    def table(self, names: Names, limit: int = 1000) -> list[tuple[str, ...]]:
        """Rows as texts, busiest first, below HEAD."""
        seconds = max(0.001, (self.last_ms - self.first_ms) / 1000)
        ranked = sorted(self.rows.items(), key=lambda item: (-item[1].count, item[0]))
        return [
            (
                printable(kind),
                printable(names.of(source, source)),
                printable(names.of(target, target)),
                row.plane,
                str(row.count),
                f"{row.count / seconds:.1f}",
                f"{row.bytes / seconds:.0f}",
                *_percentiles(row.latencies_ms),
                ", ".join(f"{count} {verdict}" for verdict, count in sorted(row.lost.items())) or "-",
            )
            for (kind, source, target), row in ranked[:limit]
        ]

    def total(self) -> str:
        """All of it in one line."""
        count, size = sum(row.count for row in self.rows.values()), sum(row.bytes for row in self.rows.values())
        seconds = max(0.001, (self.last_ms - self.first_ms) / 1000)
        bad = f", {self.bad} that are no envelopes" if self.bad else ""
        return (
            f"{count} envelopes in {seconds:.1f} s: {count / seconds:.1f} and {size / seconds:.0f} bytes a second{bad}"
        )


def _percentiles(values: deque[int]) -> tuple[str, str]:
    if not values:
        return "-", "-"
    if len(values) == 1:
        return str(values[0]), str(values[0])
    cuts = quantiles(values, n=100, method="inclusive")
    return f"{cuts[49]:.0f}", f"{cuts[98]:.0f}"


def text(stats: Stats, names: Names) -> str:
    """The table as plain lines."""
    rows = [HEAD, *stats.table(names)]
    widths = [max(len(row[at]) for row in rows) for at in range(len(HEAD))]
    lines = []
    for row in rows:
        cells = [
            value.rjust(width) if 3 < at < 9 else value.ljust(width)
            for at, (value, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return "\n".join([*lines, stats.total()]) + "\n"
