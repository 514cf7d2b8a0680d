"""The two ends of an edge as pure machines: a byte stream with an offset, a credit window and resume (design.md 3).

Producer: dialing (candidates in order) → waiting (EdgeNotYet) → open → failed. It keeps every byte that is not
credited, at most `capacity` of them on their way; after a reconnect EdgeWelcome says where to go on. A consumer binds
the newest connection that shows its token, drops what it already has and credits what was consumed. A frozen peer
is no broken edge until EDGE_SILENT_MS; a connection that is known to be down is after EDGE_RESUME_MS without a welcome.
Before that it is dialled anew: a transport that got damaged bytes may never reconnect by itself, and one that a
firewall forgot stands for ever without a byte.
"""

from __future__ import annotations

import hmac
from collections.abc import Sequence
from dataclasses import dataclass, field

from common.codec import Message
from common.edge_records import Record, RecordDecoder, RecordError
from common.limits import (
    EDGE_CHUNK_BYTES,
    EDGE_CREDIT_MS,
    EDGE_DIAL_MS,
    EDGE_NOT_YET_MS,
    EDGE_OPEN_MS,
    EDGE_PROBE_MS,
    EDGE_REDIAL_MS,
    EDGE_RESUME_MS,
    EDGE_SILENT_MS,
)
from common.messages.edge import EdgeCredit, EdgeData, EdgeHello, EdgeNotYet, EdgeRefused, EdgeWelcome

RELAY = "relay"
"""The candidate that stands for the bus's edge plane."""
CARRIED = b"bus:"
"""Prefix of a connection id that stands for a peer on the bus."""


# --- what a machine wants done ------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Dial:
    """Connect to this candidate, in place of the present one."""

    candidate: str


@dataclass(frozen=True, slots=True)
class Send:
    """To the other end. conn: the connection (consumer only)."""

    message: Message
    conn: bytes = b""


@dataclass(frozen=True, slots=True)
class Ready:
    """The edge is open for the first time, or takes another way; path: the candidate that answered (consumer: empty,
    and only once)."""

    path: str = ""


@dataclass(frozen=True, slots=True)
class Arrived:
    """A whole record; credit it with `consumed(record.end_offset)` when its bytes are no longer needed."""

    record: Record


@dataclass(frozen=True, slots=True)
class Failed:
    """The edge is over. reason: a StageController reason ("EdgeFault", or a RecordFailure's); detail: one sentence."""

    reason: str
    detail: str


Effect = Dial | Send | Ready | Arrived | Failed


class EdgeProducer:
    """The writing end."""

    def __init__(
        self, edge_id: int, token: bytes, run: bytes, capacity: int, candidates: Sequence[str], now_ms: int
    ) -> None:
        self.edge_id, self.capacity = edge_id, capacity
        self.state = "dialing"
        self._hello = EdgeHello(token=token, edge_id=edge_id, run=run)
        self._candidates = tuple(candidates)
        self._at = -1
        self._kept = bytearray()
        self._base = 0
        """Stream offset of the first kept byte."""
        self._sent = 0
        self._started_ms = now_ms
        self._next_ms = now_ms
        self._heard_ms = now_ms
        self._dialled_ms = now_ms
        self._down_ms: int | None = None
        self._stands = False
        """The present connection is known to be up: only then its end is a broken connection, and not a handshake that
        a frozen peer did not answer."""
        self._was_open = False
        self._way = -1
        """The candidate that was last told as the edge's way."""

    # --- the stream -------------------------------------------------------------------------------------------
    @property
    def held(self) -> int:
        """Bytes written and not credited."""
        return len(self._kept)

    @property
    def credited(self) -> int:
        """Offset in the stream below which every byte was given back."""
        return self._base

    @property
    def candidate(self) -> str:
        """What is dialled or connected."""
        return self._candidates[self._at] if self._at >= 0 else ""

    def write(self, data: bytes, now_ms: int) -> list[Effect]:
        """Append to the stream; what the window allows leaves at once. The caller bounds `held`."""
        if self.state == "failed":
            return []
        if not self._kept:
            self._heard_ms = now_ms
        self._kept += data
        return self._flush()

    def foretell(self, size: int) -> int | None:
        """At which offset of the stream the next `size` bytes leave as one piece, at once; None if they would not."""
        is_clear = self.state == "open" and self._down_ms is None and self._sent == self._base + len(self._kept)
        fits = size <= EDGE_CHUNK_BYTES and len(self._kept) + size <= self.capacity
        return self._sent if is_clear and fits else None

    def _flush(self) -> list[Effect]:
        if self.state != "open" or self._down_ms is not None:
            return []
        limit = min(self._base + len(self._kept), self._base + self.capacity)
        effects: list[Effect] = []
        while self._sent < limit:
            end = min(limit, self._sent + EDGE_CHUNK_BYTES)
            piece = bytes(memoryview(self._kept)[self._sent - self._base : end - self._base])
            effects.append(Send(EdgeData(edge_id=self.edge_id, offset=self._sent, data=piece)))
            self._sent = end
        return effects

    def _credit(self, offset: int) -> str:
        """Forget what is consumed. Returns what is wrong with the offset, or nothing."""
        if not 0 <= offset <= self._base + len(self._kept):
            return f"credit for byte {offset} of {self._base + len(self._kept)}"
        if offset > self._base:
            del self._kept[: offset - self._base]
            self._base = offset
            self._sent = max(self._sent, offset)
        return ""

    # --- events -----------------------------------------------------------------------------------------------
    def on_message(self, message: Message, now_ms: int) -> list[Effect]:
        """An answer of the consumer."""
        if self.state == "failed" or getattr(message, "edge_id", self.edge_id) != self.edge_id:
            return []
        self._heard_ms = now_ms
        match message:
            case EdgeWelcome():
                return self._welcome(message, now_ms)
            case EdgeNotYet() if self._was_open:
                return self._fail("the consumer does not know this edge any more")
            case EdgeNotYet():
                self.state, self._next_ms, self._down_ms = "waiting", now_ms + EDGE_NOT_YET_MS, None
                return []
            case EdgeCredit():
                if wrong := self._credit(message.consumed_offset):
                    return self._fail(f"the consumer sent {wrong}")
                return self._flush()
            case EdgeRefused():
                return self._fail(f"the consumer refused it: {message.error}")
            case _:
                return []

    def _welcome(self, message: EdgeWelcome, now_ms: int) -> list[Effect]:
        if wrong := self._credit(message.consumed):
            return self._fail(f"the consumer sent {wrong}")
        if not self._base <= message.next_offset <= self._base + len(self._kept):
            return self._fail(
                f"the consumer wants to go on at byte {message.next_offset}, kept are {self._base} to "
                f"{self._base + len(self._kept)}"
            )
        self.state, self._down_ms, self._stands = "open", None, True
        self._sent = message.next_offset
        self._next_ms = now_ms + EDGE_PROBE_MS
        first: list[Effect] = [] if self._way == self._at else [Ready(self.candidate)]
        self._was_open, self._way = True, self._at
        return [*first, *self._flush()]

    def on_link(self, up: bool, now_ms: int) -> list[Effect]:
        """The transport's word: the connection broke, or stands (again)."""
        if self.state in ("failed", "dialing"):
            return []
        if not up:
            if self._stands and self._down_ms is None:
                self._down_ms = now_ms
            return []
        self._stands = True
        self._next_ms = now_ms + EDGE_PROBE_MS
        return [Send(self._hello)]

    def tick(self, now_ms: int) -> list[Effect]:
        """Dial, ask again, give up."""
        if self.state == "failed":
            return []
        if self._down_ms is not None and now_ms - self._down_ms >= EDGE_RESUME_MS:
            return self._fail(
                f"the connection to {self.candidate} broke and nobody welcomed it again within "
                f"{EDGE_RESUME_MS // 1000} s"
            )
        if self.state == "open" and self._kept and now_ms - self._heard_ms >= EDGE_SILENT_MS:
            return self._fail(f"the consumer at {self.candidate} did not answer for {EDGE_SILENT_MS // 1000} s")
        if now_ms < self._next_ms:
            return []
        if self.state == "dialing":
            if now_ms - self._started_ms >= EDGE_OPEN_MS:
                names = ", ".join(self._candidates) or "none was given"
                return self._fail(f"no candidate answered within {EDGE_OPEN_MS // 1000} s: {names}")
            if not self._candidates:
                self._next_ms = now_ms + EDGE_DIAL_MS
                return []
            self._next_ms = now_ms + EDGE_DIAL_MS
            return [self._dial_next(now_ms), Send(self._hello)]
        if self.state == "waiting":
            self._next_ms = now_ms + EDGE_NOT_YET_MS
            return [Send(self._hello)]
        self._next_ms = now_ms + EDGE_PROBE_MS
        if self._down_ms is not None or (self._kept and now_ms - self._heard_ms >= EDGE_PROBE_MS):
            return [*self._redial(now_ms), Send(self._hello)]
        return []

    def _redial(self, now_ms: int) -> list[Effect]:
        """A new connection in place of one that is down, or that stands and carries nothing: the next candidate, which
        may be the bus."""
        since, limit_ms = self._heard_ms, EDGE_RESUME_MS
        if self._down_ms is not None:
            since, limit_ms = self._down_ms, EDGE_REDIAL_MS
        if now_ms - max(since, self._dialled_ms) < limit_ms or self._candidates == (RELAY,):
            return []
        return [self._dial_next(now_ms)]

    def _dial_next(self, now_ms: int) -> Dial:
        self._at = (self._at + 1) % len(self._candidates)
        self._dialled_ms, self._stands = now_ms, False
        return Dial(self.candidate)

    def next_deadline(self) -> int | None:
        """When tick has something to do, monotonic ms."""
        if self.state == "failed":
            return None
        if self._down_ms is not None:
            return min(self._next_ms, self._down_ms + EDGE_RESUME_MS)
        return self._next_ms if self.state != "open" or self._kept else None

    def _fail(self, why: str) -> list[Effect]:
        self.state = "failed"
        return [Failed("EdgeFault", f"edge {self.edge_id}: {why}")]

    def check(self) -> None:
        """Invariants of the window."""
        assert self._base <= self._sent <= self._base + len(self._kept), "sent is outside of what is kept"
        assert self._sent - self._base <= self.capacity, "more is on its way than the window allows"


@dataclass(slots=True)
class EdgeConsumer:
    """The reading end of a provisioned edge."""

    edge_id: int
    token: bytes
    run: bytes
    capacity: int
    decoder: RecordDecoder
    conn: bytes = b""
    received: int = 0
    consumed: int = 0
    failed: str = ""
    credit_due_ms: int | None = None
    """When what was consumed is told at the latest."""
    _told: int = 0
    _was_open: bool = field(default=False)

    def on_hello(self, hello: EdgeHello, conn: bytes) -> list[Effect]:
        """A connection with the right token becomes the edge's, whatever connection was it before."""
        if self.failed:
            return [Send(EdgeRefused(edge_id=self.edge_id, error=self.failed), conn)]
        if hello.edge_id != self.edge_id or hello.run != self.run:
            return [Send(EdgeRefused(edge_id=hello.edge_id, error="this token is for another edge or run"), conn)]
        self.conn = conn
        self._told, self.credit_due_ms = self.consumed, None
        first: list[Effect] = [] if self._was_open else [Ready()]
        self._was_open = True
        return [*first, Send(self._welcome(), conn)]

    def _welcome(self) -> EdgeWelcome:
        return EdgeWelcome(edge_id=self.edge_id, next_offset=self.received, consumed=self.consumed)

    def on_data(self, data: EdgeData, conn: bytes) -> list[Effect]:
        """Bytes of the stream: what is known already is cut off, a gap is asked for again."""
        if conn != self.conn or self.failed:
            return []
        if data.offset > self.received:
            return [Send(self._welcome(), conn)]
        fresh = data.data[self.received - data.offset :]
        if not fresh:
            return []
        if self.received + len(fresh) - self.consumed > self.capacity:
            return self._fail(
                "EdgeFault",
                f"the producer sent {self.received + len(fresh) - self.consumed} bytes without credit, "
                f"allowed are {self.capacity}",
            )
        self.received += len(fresh)
        try:
            records = self.decoder.feed(fresh)
        except RecordError as error:
            return self._fail(error.kind.stage_reason, str(error))
        arrived: list[Effect] = [Arrived(record) for record in records]
        if (broken := self.decoder.broken) is not None:
            return [*arrived, *self._fail(broken.kind.stage_reason, str(broken))]
        return arrived

    def foretell(self, size: int) -> int | None:
        """At which offset of the stream a next record of `size` bytes comes as one piece; None in the middle of one."""
        is_clear = self.conn and not self.failed and not self.decoder.held and self.decoder.broken is None
        fits = size <= EDGE_CHUNK_BYTES and self.received + size - self.consumed <= self.capacity
        return self.received if is_clear and fits else None

    def on_consumed(self, end_offset: int, now_ms: int) -> list[Effect]:
        """The bytes below end_offset are done with. Credits go together."""
        if end_offset <= self.consumed or self.failed:
            return []
        self.consumed = end_offset
        if end_offset - self._told < self.capacity // 4:
            if self.credit_due_ms is None:
                self.credit_due_ms = now_ms + EDGE_CREDIT_MS
            return []
        return self._credit()

    def tick(self, now_ms: int) -> list[Effect]:
        """Tell what is due."""
        return self._credit() if self.credit_due_ms is not None and now_ms >= self.credit_due_ms else []

    def _credit(self) -> list[Effect]:
        self._told, self.credit_due_ms = self.consumed, None
        if not self.conn or self.failed:
            return []
        return [Send(EdgeCredit(edge_id=self.edge_id, consumed_offset=self.consumed), self.conn)]

    def _fail(self, reason: str, why: str) -> list[Effect]:
        self.failed = f"edge {self.edge_id}: {why}"
        refused: list[Effect] = []
        if self.conn:
            refused.append(Send(EdgeRefused(edge_id=self.edge_id, error=why), self.conn))
        return [*refused, Failed(reason, self.failed)]

    def check(self) -> None:
        """Invariants."""
        assert 0 <= self.consumed <= self.received <= self.consumed + self.capacity


class EdgeDesk:
    """The consumers of one endpoint by token: who says Hello with which."""

    def __init__(self) -> None:
        self.consumers: list[EdgeConsumer] = []

    def find(self, token: bytes) -> EdgeConsumer | None:
        """In constant time per edge: the token is the only secret of an edge."""
        found = None
        for consumer in self.consumers:
            if hmac.compare_digest(consumer.token, token):
                found = consumer
        return found

    def on_message(self, message: Message, conn: bytes) -> tuple[EdgeConsumer | None, list[Effect]]:
        """A frame of a connection: the consumer it is for, and what follows."""
        if isinstance(message, EdgeHello):
            consumer = self.find(message.token)
            if consumer is None:
                return None, [Send(EdgeNotYet(edge_id=message.edge_id), conn)]
            return consumer, consumer.on_hello(message, conn)
        if isinstance(message, EdgeData):
            for consumer in self.consumers:
                if consumer.conn == conn and consumer.edge_id == message.edge_id:
                    return consumer, consumer.on_data(message, conn)
        return None, []
