"""Sessions: ordered, exactly-once delivery between two incarnations over brokers that may drop anything (design.md 3).

A session is (own boot, peer node, peer boot, plane): sequence numbers, a cumulative ack, a window that is also the
credit, and a retained tail. Brokers are lossy switches, so reliability lives here and nowhere else. A sender that
gives messages up moves `base` past them; the receiver never waits for a position below it. Pure: time comes in,
frames go out.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace

import msgspec

from common.addresses import Plane
from common.codec import Message, encode_body, encode_envelope, tag_of
from common.envelope import ENVELOPE_VERSION, Envelope
from common.limits import (
    ACK_DELAY_MS,
    ACK_EVERY_MESSAGES,
    RETRANSMIT_MS_MAX,
    RETRANSMIT_MS_MIN,
    SESSION_EARLY_BYTES_MAX,
    SESSION_QUEUE_BYTES_MAX,
    SESSION_QUEUE_MESSAGES_MAX,
    SESSION_WINDOW_BYTES,
    SESSION_WINDOW_MESSAGES,
    UNROUTABLE_HOLD_MS,
)
from common.messages.bus import Ack

_FILLER = encode_body(Ack())
_FILLER_TAG = tag_of(Ack)


@dataclass(slots=True)
class Item:
    """One message on its way: who sent it to which actor, the message itself for a SendFailed, and its bytes."""

    id: int
    run: bytes
    src: bytes
    dst: bytes
    corr: int
    message: Message
    tag: int
    body: bytes
    seq: int = 0
    sent_ms: int = -1


@dataclass(slots=True)
class Failure:
    """A message that will not be delivered, and why (see SendFailed)."""

    item: Item
    reason: str


class Session:
    """Both directions between this node and one peer on one plane.

    first_seq: where its numbers start; above 1 after an earlier session of these incarnations was forgotten (`base`
    moves the receiver there).
    """

    def __init__(self, me: bytes, my_boot: int, peer: bytes, plane: Plane, first_seq: int = 1) -> None:
        self.me, self.my_boot, self.peer, self.plane = me, my_boot, peer, plane
        self.peer_boot = 0
        self.used_ms = 0
        """When anything was last sent or received: what is idle for long is forgotten."""
        self._next_seq = first_seq
        self._unacked: deque[Item] = deque()
        self._unacked_bytes = 0
        self._queued: deque[Item] = deque()
        self._queued_bytes = 0
        self._rto_ms = RETRANSMIT_MS_MIN
        self._retransmit_at: int | None = None
        self._unroutable_since: int | None = None
        self._expected = 1
        self._early: dict[int, Envelope] = {}
        self._early_bytes = 0
        self._ack_at: int | None = None
        self._ack_owed = 0

    # --- sending ----------------------------------------------------------------------------------------------
    def send(self, item: Item) -> bool:
        """Queue a message. False: window and queue are full (S1 6.11), nothing was taken."""
        full = len(self._queued) >= SESSION_QUEUE_MESSAGES_MAX
        if full or self._queued_bytes + len(item.body) > SESSION_QUEUE_BYTES_MAX:
            return False
        self._queued.append(item)
        self._queued_bytes += len(item.body)
        return True

    def poll(self, now_ms: int) -> list[bytes]:
        """The frames to send now: new ones within the window, due retransmissions, a due ack."""
        frames: list[bytes] = []
        if self._retransmit_at is not None and now_ms >= self._retransmit_at and self._unacked:
            for item in self._unacked:
                item.sent_ms = now_ms
                frames.append(self._frame(item))
            self._rto_ms = min(self._rto_ms * 2, RETRANSMIT_MS_MAX)
            self._retransmit_at = now_ms + self._rto_ms
        while self._queued and self._window_open():
            item = self._queued.popleft()
            self._queued_bytes -= len(item.body)
            item.seq, item.sent_ms = self._next_seq, now_ms
            self._next_seq += 1
            self._unacked.append(item)
            self._unacked_bytes += len(item.body)
            frames.append(self._frame(item))
        if self._unacked and self._retransmit_at is None:
            self._retransmit_at = now_ms + self._rto_ms
        if frames:
            self._ack_at, self._ack_owed = None, 0
            self.used_ms = now_ms
        elif self._ack_at is not None and now_ms >= self._ack_at:
            self._ack_at, self._ack_owed = None, 0
            frames.append(self.ack_frame())
        return frames

    def resend_now(self, now_ms: int) -> None:
        """The path is new (a Welcome): what is unacknowledged goes out again at once."""
        if self._unacked:
            self._rto_ms = RETRANSMIT_MS_MIN
            self._retransmit_at = now_ms

    def _window_open(self) -> bool:
        return len(self._unacked) < SESSION_WINDOW_MESSAGES and (
            not self._unacked or self._unacked_bytes + len(self._queued[0].body) <= SESSION_WINDOW_BYTES
        )

    def _base(self) -> int:
        return self._unacked[0].seq if self._unacked else self._next_seq

    def _frame(self, item: Item) -> bytes:
        return encode_envelope(
            Envelope(
                ENVELOPE_VERSION,
                item.tag,
                item.id,
                item.run,
                self.me,
                self.my_boot,
                item.src,
                self.peer,
                self.peer_boot,
                item.dst,
                item.corr,
                item.seq,
                self._base(),
                self._expected - 1,
                msgspec.Raw(item.body),
            )
        )

    def owed_ack(self) -> bytes | None:
        """The ack that poll would send later, for a node that leaves now: its peers need not wait for it in vain."""
        if self._ack_at is None:
            return None
        self._ack_at, self._ack_owed = None, 0
        return self.ack_frame()

    def repeated_last(self) -> bytes | None:
        """What was sent last once more, for a node that leaves: a repetition is acknowledged at once."""
        return self._frame(self._unacked[-1]) if self._unacked else None

    def ack_frame(self) -> bytes:
        """A datagram that carries only boots and the ack."""
        return self._frame(Item(0, bytes(16), self.me, self.peer, 0, Ack(), _FILLER_TAG, _FILLER))

    # --- failing ----------------------------------------------------------------------------------------------
    def fail_all(self, reason: str) -> list[Failure]:
        """Give up everything on its way and in the queue; the session itself goes on behind the new base."""
        failed = [Failure(item, reason) for item in (*self._unacked, *self._queued) if item.tag != _FILLER_TAG]
        self._unacked.clear()
        self._queued.clear()
        self._unacked_bytes = self._queued_bytes = 0
        self._retransmit_at = None
        self._rto_ms = RETRANSMIT_MS_MIN
        self._unroutable_since = None
        return failed

    def item(self, id: int) -> Item | None:
        """The message `id` if it is still on its way."""
        return next((item for item in self._unacked if item.id == id and item.tag != _FILLER_TAG), None)

    def on_undeliverable(self, id: int, reason: str, now_ms: int) -> list[Failure]:
        """A broker could not forward message `id`. "refused" fails it now, "unbound" after a hold of 5 s."""
        if reason == "refused":
            item = self.item(id)
            if item is None:
                return []
            failure = Failure(replace(item), "refused")
            # The position stays, or the receiver would wait for it: it now carries nothing.
            self._unacked_bytes += len(_FILLER) - len(item.body)
            item.tag, item.body = _FILLER_TAG, _FILLER
            self._retransmit_at = now_ms
            return [failure]
        if reason == "unbound" and self._unacked:
            if self._unroutable_since is None:
                self._unroutable_since = now_ms
            give_up_at = self._unroutable_since + UNROUTABLE_HOLD_MS
            if now_ms >= give_up_at:
                return self.fail_all("unroutable")
            # The answer to a try at the end of the hold decides, wherever the back-off stands.
            self._retransmit_at = min(self._retransmit_at or give_up_at, give_up_at)
        return []

    # --- receiving --------------------------------------------------------------------------------------------
    def note_boot(self, boot: int) -> list[Failure]:
        """The peer's incarnation, from an envelope or a route. A newer one ends the session with the old."""
        if boot <= self.peer_boot:
            return []
        known, self.peer_boot = self.peer_boot, boot
        if not known:
            return []
        self._expected = 1
        self._early.clear()
        self._early_bytes = 0
        self._ack_at, self._ack_owed = None, 0
        return self.fail_all("peer_lost")

    def on_ack(self, ack: int, now_ms: int) -> None:
        """Everything up to `ack` has arrived in order; the peer is there."""
        progressed = False
        while self._unacked and self._unacked[0].seq <= ack:
            self._unacked_bytes -= len(self._unacked.popleft().body)
            progressed = True
        if progressed:
            self._rto_ms = RETRANSMIT_MS_MIN
            self._retransmit_at = now_ms + self._rto_ms if self._unacked else None
        self._unroutable_since = None

    def on_envelope(self, envelope: Envelope, now_ms: int) -> list[Envelope]:
        """The envelopes that can be delivered now, in order; duplicates and gaps give none."""
        seq = envelope.plane_seq
        self.used_ms = now_ms
        if envelope.base > self._expected:
            self._expected = envelope.base
            if self._early:
                self._early = {at: early for at, early in self._early.items() if at >= envelope.base}
                self._early_bytes = sum(len(memoryview(early.body)) for early in self._early.values())
        self._ack_owed += 1
        if self._ack_at is None:
            self._ack_at = now_ms + ACK_DELAY_MS
        if self._ack_owed >= ACK_EVERY_MESSAGES or seq < self._expected:
            self._ack_at = now_ms
        ready: list[Envelope] = []
        if seq == self._expected:
            ready.append(envelope)
            self._expected += 1
        elif self._expected < seq < self._expected + 2 * SESSION_WINDOW_MESSAGES and seq not in self._early:
            size = len(memoryview(envelope.body))
            if self._early_bytes + size <= SESSION_EARLY_BYTES_MAX:
                # More than that no window holds: as good as lost, the sender repeats it.
                self._early[seq] = envelope
                self._early_bytes += size
        while self._early and (early := self._early.pop(self._expected, None)) is not None:
            self._early_bytes -= len(memoryview(early.body))
            ready.append(early)
            self._expected += 1
        return [envelope for envelope in ready if envelope.tag != _FILLER_TAG]

    @property
    def received(self) -> int:
        """The cumulative ack: the highest position received in order."""
        return self._expected - 1

    # --- time -------------------------------------------------------------------------------------------------
    def next_deadline(self) -> int | None:
        """When poll has something to do, or None. A non-empty queue within the window is due at once."""
        if self._queued and self._window_open():
            return 0
        if self._retransmit_at is None or (self._ack_at is not None and self._ack_at < self._retransmit_at):
            return self._ack_at
        return self._retransmit_at

    @property
    def outstanding(self) -> int:
        """Messages sent or queued but not acknowledged."""
        return len(self._unacked) + len(self._queued)

    @property
    def unroutable(self) -> bool:
        """A broker says that nobody by the peer's key is there, and nothing came from it since. What a leaving node
        has received it acknowledges before its Goodbye, so the rest will not be."""
        return self._unroutable_since is not None

    @property
    def next_seq(self) -> int:
        """The position of the next message."""
        return self._next_seq

    def idle(self, since_ms: int) -> bool:
        """Nothing on its way in either direction, and nothing since `since_ms`: the session may be forgotten."""
        return self.used_ms <= since_ms and not (
            self._unacked or self._queued or self._early or self._ack_at is not None
        )

    def check(self) -> None:
        """Invariants: positions ascend without holes, limits hold."""
        seqs = [item.seq for item in self._unacked]
        assert seqs == list(range(seqs[0], seqs[0] + len(seqs))) if seqs else True
        assert not seqs or seqs[-1] == self._next_seq - 1
        assert len(seqs) <= SESSION_WINDOW_MESSAGES
        assert not seqs or self._retransmit_at is not None
        assert len(self._early) <= 2 * SESSION_WINDOW_MESSAGES
        assert len(self._queued) <= SESSION_QUEUE_MESSAGES_MAX
        assert self._unacked_bytes == sum(len(item.body) for item in self._unacked)
        assert self._queued_bytes == sum(len(item.body) for item in self._queued) <= SESSION_QUEUE_BYTES_MAX
        assert self._early_bytes == sum(len(memoryview(early.body)) for early in self._early.values())
        assert self._early_bytes <= SESSION_EARLY_BYTES_MAX and self._expected not in self._early
