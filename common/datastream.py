"""The producer's half of the orchestrator's datastream (S1 2.8, 3.9, 8): what every service host spawns, and what
producers and collector share. Pure; nothing here blocks, raises on bad input, or grows without end.

A producer numbers its records (producer_seq, from 1 per observer actor); the collector drops what it has seen, so a
producer may send again whatever it is not sure about. What is lost for good is said explicitly, as a Gap.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from common.actors import Actor, Ctx
from common.addresses import Role
from common.effects import SendFailed, StopSignal, ViewChanged
from common.limits import (
    CHANNEL_NAME_BYTES_MAX,
    FRAME_PAYLOAD_BYTES_MAX,
    OBSERVE_RING_RECORDS_MAX,
    STREAM_BATCH_BYTES_MAX,
    STREAM_BATCH_MS,
)
from common.messages.stream import Gap, Observation, Observe, StreamId

OBSERVE_RING_BYTES_MAX = 8 * 1024 * 1024  # a ring of 4096 records of 1 MiB each would be no bound at all
OBSERVE_TAIL_RECORDS_MAX = 1024  # sent and acknowledged, but perhaps not yet written when the collector died
OBSERVE_TAIL_BYTES_MAX = 2 * 1024 * 1024
RECORD_OVERHEAD_BYTES = 64  # field names, seq and channel of a record on the wire, for the 64 KiB batches
RESEND_MS_MIN = 250  # a refused send comes back at once; without a pause it would spin
RESEND_MS_MAX = 5000
SEQ_RANGES_MAX = 64  # a hole in a sequence is rare and short-lived; 64 of them at a time never happen honestly

NOT_EMITTED = b"[not emitted: redaction failed]"

Redact = Callable[[bytes], bytes]


@dataclass(frozen=True, slots=True)
class Emit:
    """Event: one record. The host makes one of each `Observed` effect and delivers it to its observer or publisher."""

    channel: str
    payload: bytes
    source: str = ""


@dataclass(frozen=True, slots=True)
class Drain:
    """Event: send what is pending now, not with its batch: the process is about to end."""


def orchestrator_stream(run_id: int) -> StreamId:
    """The identity of the orchestrator's own stream (S1 8.2)."""
    return StreamId(node="mvp-orchestrator", life=run_id)


def worker_stream(node_id: int, run_id: int) -> StreamId:
    """The identity of a worker's stream (rust-swactor.md 7)."""
    return StreamId(node=str(node_id), life=run_id)


def stream_text(stream: StreamId) -> str:
    """How a stream is named in archive and records: "mvp-orchestrator/1", "2/1"."""
    return f"{stream.node}/{stream.life}"


def keep(payload: bytes) -> bytes:
    """The redaction of nothing, for tests and for producers without secrets."""
    return payload


def emitted(payload: bytes, redact: Redact) -> bytes:
    """The bytes that may leave: redacted first (a cut secret would no longer be recognised), then cut at 1 MiB."""
    try:
        payload = redact(payload)
    except Exception:
        # Whatever is wrong with the redactor, an unredacted payload must not leave, and a record must not kill.
        return NOT_EMITTED
    if len(payload) <= FRAME_PAYLOAD_BYTES_MAX:
        return payload
    marker = b"...[cut: %d bytes in all]" % len(payload)
    return payload[: FRAME_PAYLOAD_BYTES_MAX - len(marker)] + marker


def channel_name(name: str) -> str:
    """A name that can be encoded and is at most 256 bytes."""
    encoded = name.encode("utf-8", "replace")[:CHANNEL_NAME_BYTES_MAX]
    return encoded.decode("utf-8", "ignore") or "unnamed"


class SeqRanges:
    """Which numbers of a sequence were seen: sorted, disjoint, inclusive ranges; usually exactly one.

    Bounded: beyond 64 ranges the two lowest become one, so that a hostile sequence costs records, not memory.
    """

    def __init__(self, ranges: Iterable[tuple[int, int]] = ()) -> None:
        self._ranges: list[tuple[int, int]] = []
        for first, last in ranges:
            self.add(first, last)

    def __contains__(self, number: int) -> bool:
        at = bisect_right(self._ranges, (number, 1 << 80)) - 1
        return at >= 0 and self._ranges[at][1] >= number

    @property
    def ranges(self) -> list[tuple[int, int]]:
        """A copy, lowest first."""
        return list(self._ranges)

    @property
    def last(self) -> int:
        """The highest number seen, 0 if none."""
        return self._ranges[-1][1] if self._ranges else 0

    def add(self, first: int, last: int | None = None) -> None:
        """Mark first..last (default: first alone) as seen."""
        last = first if last is None else last
        if last < first:
            return
        if self._ranges and self._ranges[-1][1] + 1 == first:
            self._ranges[-1] = (self._ranges[-1][0], last)
            return
        low = bisect_right(self._ranges, (first, -1))
        if low and self._ranges[low - 1][1] + 1 >= first:
            low -= 1
        high = low
        while high < len(self._ranges) and self._ranges[high][0] <= last + 1:
            first, last = min(first, self._ranges[high][0]), max(last, self._ranges[high][1])
            high += 1
        self._ranges[low:high] = [(first, last)]
        if len(self._ranges) > SEQ_RANGES_MAX:
            self._ranges[:2] = [(self._ranges[0][0], self._ranges[1][1])]

    def holes(self, first: int, last: int) -> list[tuple[int, int]]:
        """The parts of first..last that were not seen."""
        found = []
        for low, high in self._ranges:
            if high < first:
                continue
            if low > last:
                break
            if low > first:
                found.append((first, low - 1))
            first = high + 1
        if first <= last:
            found.append((first, last))
        return found


class Backoff:
    """The pause after a failed send: 250 ms, doubling to 5 s; short again after a quiet while."""

    def __init__(self) -> None:
        self._delay_ms = RESEND_MS_MIN
        self._failed_ms = 0

    def next_ms(self, now_ms: int) -> int:
        """How long to wait after a failure now."""
        if now_ms - self._failed_ms > 2 * RESEND_MS_MAX:
            self._delay_ms = RESEND_MS_MIN
        delay, self._failed_ms = self._delay_ms, now_ms
        self._delay_ms = min(2 * delay, RESEND_MS_MAX)
        return delay

    def reset(self) -> None:
        """The peer is another one."""
        self._delay_ms = RESEND_MS_MIN


class ObserverActor(Actor):
    """Every service host has one: takes `Emit`, sends `Observe` batches to the collector's main actor.

    While no collector is routed it holds at most 4096 records or 8 MiB, then the oldest go and a Gap says so. What a
    collector may have lost (SendFailed, a new boot) is sent again; producer_seq lets the collector drop duplicates.
    """

    Incoming = (Emit, Drain, SendFailed, ViewChanged, StopSignal)

    def __init__(self, redact: Redact = keep) -> None:
        self._redact = redact
        self._next_seq = 1
        self._pending: deque[Observation] = deque()
        self._pending_bytes = 0
        self._tail: deque[Observation] = deque()
        self._tail_bytes = 0
        self._returned: list[Observation] = []
        self._lost = SeqRanges()
        self._unsaid: list[tuple[int, int]] = []
        self._collector: tuple[bytes, int] | None = None
        self._last_collector: tuple[bytes, int] | None = None
        self._batching = False
        self._holding = False
        self._backoff = Backoff()
        self.dropped = 0
        """Records lost at this producer since its start."""

    def on_start(self, ctx: Ctx) -> None:
        """Look for the collector."""
        ctx.watch("routes")
        self._find_collector(ctx)

    def receive(self, msg: Any, ctx: Ctx) -> None:
        """Take a record, or learn that the collector came, went or missed something."""
        match msg:
            case Emit():
                self._emit(msg, ctx)
            case ViewChanged():
                if msg.view == "routes":
                    self._find_collector(ctx)
            case SendFailed():
                self._send_failed(msg, ctx)
            case Drain() | StopSignal():
                self._holding = False
                self._flush(ctx)

    def on_timer(self, key: str, ctx: Ctx) -> None:
        """ "batch": a batch's time is over; "retry": the pause after a failed send is."""
        if key == "retry":
            self._holding = False
        else:
            self._batching = False
        self._flush(ctx)

    def on_stop(self, ctx: Ctx) -> None:
        """Hand over what is left."""
        self._holding = False
        self._flush(ctx)

    def check(self) -> None:
        """Order and bounds of the ring."""
        seqs = [record.producer_seq for record in self._pending]
        assert seqs == sorted(set(seqs)), "pending records out of order"
        assert len(seqs) <= OBSERVE_RING_RECORDS_MAX
        assert len(self._tail) <= OBSERVE_TAIL_RECORDS_MAX
        assert len(self._returned) <= 2 * OBSERVE_RING_RECORDS_MAX
        assert self._pending_bytes == sum(_size(record) for record in self._pending)

    def held(self) -> int:
        """Records that are held here, pending or for a replay (for tests and figures)."""
        return len(self._pending) + len(self._tail) + len(self._returned)

    # --- records in -------------------------------------------------------------------------------------------
    def _emit(self, event: Emit, ctx: Ctx) -> None:
        record = Observation(
            producer_seq=self._next_seq,
            channel=channel_name(event.channel),
            payload=emitted(event.payload, self._redact),
            source=event.source,
        )
        self._next_seq += 1
        self._pending.append(record)
        self._pending_bytes += _size(record)
        self._bound()
        if self._collector is None or self._holding:
            return
        if self._pending_bytes >= STREAM_BATCH_BYTES_MAX:
            self._flush(ctx)
        elif not self._batching:
            self._batching = True
            ctx.timer("batch", STREAM_BATCH_MS)

    def _bound(self) -> None:
        while len(self._pending) > OBSERVE_RING_RECORDS_MAX or self._pending_bytes > OBSERVE_RING_BYTES_MAX:
            record = self._pending.popleft()
            self._pending_bytes -= _size(record)
            self.dropped += 1
            seq = record.producer_seq
            self._lost.add(seq)
            if self._unsaid and self._unsaid[-1][1] + 1 == seq:
                self._unsaid[-1] = (self._unsaid[-1][0], seq)
            else:
                self._unsaid = SeqRanges([*self._unsaid, (seq, seq)]).ranges

    # --- the collector ----------------------------------------------------------------------------------------
    def _find_collector(self, ctx: Ctx) -> None:
        route = ctx.views.routes.named(Role.COLLECTOR)
        found = (route.address, route.boot) if route else None
        if found == self._collector:
            return
        self._collector = found
        if found is None:
            return
        if found != self._last_collector:
            # Another incarnation: what the old one acknowledged it may not have written.
            self._returned.extend(self._tail)
            self._tail.clear()
            self._tail_bytes = 0
            self._last_collector = found
            self._backoff.reset()
            ctx.cancel("retry")
            self._holding = False
        self._flush(ctx)

    def _send_failed(self, failed: SendFailed, ctx: Ctx) -> None:
        match failed.message:
            case Observe():
                self._returned.extend(failed.message.records)
                if len(self._returned) > OBSERVE_RING_RECORDS_MAX:
                    self._take_back()
            case Gap():
                self._unsaid = SeqRanges([*self._unsaid, (failed.message.first, failed.message.last)]).ranges
            case _:
                return
        if not self._holding:
            self._holding = True
            ctx.timer("retry", self._backoff.next_ms(ctx.now_ms))

    def _take_back(self) -> None:
        """Merge what came back into the ring, in order, without what was given up."""
        if not self._returned:
            return
        back = {record.producer_seq: record for record in self._returned if record.producer_seq not in self._lost}
        back.update((record.producer_seq, record) for record in self._pending)
        self._returned.clear()
        self._pending = deque(back[seq] for seq in sorted(back))
        self._pending_bytes = sum(_size(record) for record in self._pending)
        self._bound()

    def _flush(self, ctx: Ctx) -> None:
        if self._collector is None or self._holding:
            return
        self._take_back()
        address = self._collector[0]
        for first, last in self._unsaid:
            ctx.send(address, Gap(first=first, last=last))
        self._unsaid = []
        batch: list[Observation] = []
        size = 0
        while self._pending:
            record = self._pending.popleft()
            if batch and size + _size(record) > STREAM_BATCH_BYTES_MAX:
                ctx.send(address, Observe(records=batch))
                batch, size = [], 0
            batch.append(record)
            size += _size(record)
            self._remember(record)
        self._pending_bytes = 0
        if batch:
            ctx.send(address, Observe(records=batch))

    def _remember(self, record: Observation) -> None:
        self._tail.append(record)
        self._tail_bytes += _size(record)
        while len(self._tail) > OBSERVE_TAIL_RECORDS_MAX or self._tail_bytes > OBSERVE_TAIL_BYTES_MAX:
            self._tail_bytes -= _size(self._tail.popleft())


def _size(record: Observation) -> int:
    return len(record.payload) + len(record.channel) + RECORD_OVERHEAD_BYTES
