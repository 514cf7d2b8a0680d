"""Sessions: whatever the brokers lose or repeat, between two incarnations everything arrives once and in order."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.addresses import Plane
from common.codec import decode_body, decode_envelope, encode_body, tag_of
from common.envelope import Envelope
from common.limits import (
    ACK_DELAY_MS,
    ACK_EVERY_MESSAGES,
    RETRANSMIT_MS_MAX,
    RETRANSMIT_MS_MIN,
    SESSION_EARLY_BYTES_MAX,
    SESSION_IDLE_MS,
    SESSION_QUEUE_BYTES_MAX,
    SESSION_QUEUE_MESSAGES_MAX,
    SESSION_WINDOW_BYTES,
    SESSION_WINDOW_MESSAGES,
    UNROUTABLE_HOLD_MS,
)
from common.messages.prompt import TokensDecoded
from common.session import Failure, Item, Session
from common.session_table import SWEEP_MS, SessionTable

A, B = b"a" * 32, b"b" * 32


def item(number: int, size: int = 0) -> Item:
    message = TokensDecoded(request_id=number, text="x" * size)
    return Item(1000 + number, bytes(16), A, B, 0, message, tag_of(TokensDecoded), encode_body(message))


def number_of(envelope: Envelope) -> int:
    message = decode_body(envelope.tag, envelope.body)
    assert isinstance(message, TokensDecoded)
    return message.request_id


def sender(boot: int = 1, peer_boot: int = 2) -> Session:
    session = Session(A, boot, B, Plane.PROMPT)
    session.note_boot(peer_boot)
    return session


def seqs(frames: list[bytes]) -> list[int]:
    return [decode_envelope(frame).plane_seq for frame in frames]


class Pair:
    """A sender and a receiver; every frame meets `fate(rng)` → delays (none: lost, two: doubled)."""

    def __init__(self, fate: Callable[[], list[int]]) -> None:
        self.fate, self.now = fate, 0
        self.ends = {A: Session(A, 1, B, Plane.PROMPT), B: Session(B, 2, A, Plane.PROMPT)}
        self.boots = {A: 1, B: 2}
        self.got: dict[tuple[bytes, int], list[int]] = {}
        self.failed: dict[bytes, list[tuple[int, str]]] = {A: [], B: []}
        self.air: list[tuple[int, int, bytes, bytes]] = []
        self.count = 0
        self.met = 0
        for me, other in ((A, B), (B, A)):
            self.ends[me].note_boot(self.boots[other])

    def other(self, me: bytes) -> bytes:
        return B if me == A else A

    def send(self, me: bytes, number: int) -> bool:
        return self.ends[me].send(item(number))

    def restart(self, me: bytes) -> None:
        """A new incarnation that has learnt nothing yet but the route to the other."""
        self.boots[me] += 10
        self.ends[me] = Session(me, self.boots[me], self.other(me), Plane.PROMPT)
        self.ends[me].note_boot(self.boots[self.other(me)])

    def note(self, me: bytes, failures: list[Failure]) -> None:
        self.failed[me] += [(one.item.id - 1000, one.reason) for one in failures]

    def step(self, ms: int) -> None:
        self.now += ms
        due = sorted(entry for entry in self.air if entry[0] <= self.now)
        self.air = [entry for entry in self.air if entry[0] > self.now]
        for _, _, to, frame in due:
            self.arrive(to, decode_envelope(frame))
        for me, session in self.ends.items():
            for frame in session.poll(self.now):
                for delay in self.fate():
                    self.count += 1
                    self.air.append((self.now + delay, self.count, self.other(me), frame))
            session.check()

    def arrive(self, me: bytes, envelope: Envelope) -> None:
        """As Node._receive."""
        session = self.ends[me]
        if envelope.dst_boot and envelope.dst_boot != self.boots[me]:
            if envelope.plane_seq:
                self.air.append((self.now, self.count, self.other(me), session.ack_frame()))
            return
        if envelope.src_boot < session.peer_boot:
            return
        self.note(me, session.note_boot(envelope.src_boot))
        if envelope.dst_boot:
            session.on_ack(envelope.ack, self.now)
        if envelope.plane_seq:
            for ready in session.on_envelope(envelope, self.now):
                self.got.setdefault((self.other(me), envelope.src_boot), []).append(number_of(ready))

    def settle(self) -> None:
        """A quiet network until nothing is on its way."""
        self.fate = lambda: [1]
        for _ in range(400):
            self.step(50)
            if not any(session.outstanding for session in self.ends.values()) and not self.air:
                return
        raise AssertionError("it does not settle")


def faulty(rng: random.Random, loss: float, double: float, late: int) -> Callable[[], list[int]]:
    def fate() -> list[int]:
        if rng.random() < loss:
            return []
        return [rng.randint(0, late) for _ in range(2 if rng.random() < double else 1)]

    return fate


@pytest.mark.spec("S1 6.11")
@settings(max_examples=60)
@given(st.integers(0, 2**32), st.floats(0, 0.6), st.floats(0, 0.4), st.integers(0, 900))
def test_loss_doubling_and_reordering_change_nothing(seed: int, loss: float, double: float, late: int) -> None:
    rng = random.Random(seed)
    pair = Pair(faulty(rng, loss, double, late))
    sent = {A: 0, B: 0}
    for _ in range(rng.randint(5, 60)):
        for me in (A, B):
            for _ in range(rng.randint(0, 12)):
                sent[me] += 1
                assert pair.send(me, sent[me])
        pair.step(rng.randint(1, 400))
    pair.settle()
    for me in (A, B):
        assert pair.got.get((me, pair.boots[me]), []) == list(range(1, sent[me] + 1))
        assert pair.failed[me] == []


@settings(max_examples=60)
@given(st.integers(0, 2**32), st.floats(0, 0.4))
def test_restarts_in_between_nothing_is_doubled_and_every_loss_is_said_once(seed: int, loss: float) -> None:
    rng = random.Random(seed)
    pair = Pair(faulty(rng, loss, 0.2, 300))
    number, mine = 0, list[int]()
    for _ in range(rng.randint(5, 40)):
        for _ in range(rng.randint(0, 10)):
            number += 1
            mine.append(number)
            pair.send(A, number)
        pair.step(rng.randint(1, 300))
        if rng.random() < 0.15:
            pair.restart(B)
    # The last incarnation of B is met by a message, as it would be by its route.
    pair.note(A, pair.ends[A].note_boot(pair.boots[B]))
    pair.settle()
    got = [one for (_, _), numbers in pair.got.items() for one in numbers]
    for numbers in pair.got.values():
        assert len(numbers) == len(set(numbers))
    failed = [one for one, _ in pair.failed[A]]
    assert len(failed) == len(set(failed)) and {reason for _, reason in pair.failed[A]} <= {"peer_lost"}
    assert set(got) | set(failed) == set(mine), "what neither arrived nor failed"


def test_the_retransmission_schedule_doubles_up_to_5_s() -> None:
    session = sender()
    session.send(item(1))
    assert seqs(session.poll(0)) == [1]
    now, times = 0, []
    while now < 20_000:
        due = session.next_deadline()
        assert due is not None
        assert session.poll(due - 1) == []
        assert seqs(session.poll(due)) == [1]
        times.append(due - now)
        now = due
    assert times[:5] == [500, 1000, 2000, 4000, 5000] and set(times[4:]) == {RETRANSMIT_MS_MAX}


def test_progress_and_a_welcome_start_the_schedule_anew() -> None:
    session = sender()
    for number in (1, 2):
        session.send(item(number))
    session.poll(0)
    session.poll(500)
    session.on_ack(1, 600)
    assert session.next_deadline() == 600 + RETRANSMIT_MS_MIN
    session.poll(1100)
    session.poll(2100)
    session.resend_now(2200)
    assert seqs(session.poll(2200)) == [2]
    assert session.next_deadline() == 2200 + 2 * RETRANSMIT_MS_MIN
    session.on_ack(2, 2300)
    assert session.next_deadline() is None
    session.resend_now(2400)
    assert session.poll(2400) == []


@pytest.mark.spec("S1 6.11", "S1 10.12")
def test_window_and_queue_are_the_limit_and_refuse_what_is_beyond() -> None:
    session = sender()
    for number in range(SESSION_QUEUE_MESSAGES_MAX):
        assert session.send(item(number))
    assert not session.send(item(9))
    assert seqs(session.poll(0)) == list(range(1, SESSION_WINDOW_MESSAGES + 1))
    assert session.poll(1) == []
    assert session.send(item(9))
    session.on_ack(10, 2)
    assert seqs(session.poll(2)) == list(range(SESSION_WINDOW_MESSAGES + 1, SESSION_WINDOW_MESSAGES + 11))
    session.check()


def test_the_window_is_also_bytes_but_one_message_always_passes() -> None:
    session = sender()
    for number in range(5):
        assert session.send(item(number, size=SESSION_WINDOW_BYTES // 2 - 100))
    assert len(session.poll(0)) == 2
    session.on_ack(2, 1)
    assert session.send(item(6, size=2 * SESSION_WINDOW_BYTES))
    assert len(session.poll(1)) == 2
    session.on_ack(5, 2)
    assert len(session.poll(2)) == 1
    session.on_ack(5, 3)
    session.check()
    session = sender()
    taken = 0
    while session.send(item(taken, size=1024 * 1024)):
        taken += 1
    assert taken == SESSION_QUEUE_BYTES_MAX // (1024 * 1024 + 30)


def test_what_was_given_up_is_not_waited_for() -> None:
    pair = Pair(list)
    for number in range(1, 4):
        pair.send(A, number)
    pair.step(10)
    pair.note(A, pair.ends[A].fail_all("link_down"))
    pair.send(A, 4)
    pair.settle()
    assert pair.got == {(A, 1): [4]}
    assert pair.failed[A] == [(1, "link_down"), (2, "link_down"), (3, "link_down")]


def test_a_base_that_moves_to_what_came_early_delivers_it() -> None:
    receiver = Session(B, 2, A, Plane.PROMPT)
    first = sender()
    frames = []
    for number in range(1, 6):
        first.send(item(number))
    frames = [decode_envelope(frame) for frame in first.poll(0)]
    assert receiver.on_envelope(frames[3], 0) == [] and receiver.on_envelope(frames[2], 0) == []
    first.on_ack(2, 1)
    late = [decode_envelope(frame) for frame in first.poll(501)]
    assert [number_of(one) for one in receiver.on_envelope(late[2], 502)] == [3, 4, 5]
    receiver.check()


def test_a_refused_message_fails_and_its_position_carries_nothing() -> None:
    pair = Pair(list)
    for number in (1, 2, 3):
        pair.send(A, number)
    pair.step(1)
    session = pair.ends[A]
    pair.note(A, session.on_undeliverable(1002, "refused", 2))
    assert session.on_undeliverable(1002, "refused", 3) == []
    assert session.on_undeliverable(77, "refused", 3) == []
    session.check()
    pair.settle()
    assert pair.got == {(A, 1): [1, 3]}
    assert pair.failed[A] == [(2, "refused")]


@pytest.mark.spec("S1 6.11")
def test_an_unbound_peer_is_tried_for_5_s_and_then_given_up() -> None:
    session = sender()
    session.send(item(1))
    now = 0
    session.poll(now)
    failures: list[Failure] = []
    while not failures:
        assert session.unroutable is (now > 0)
        failures = session.on_undeliverable(1001, "unbound", now + 3)
        if failures:
            break
        due = session.next_deadline()
        assert due is not None
        now = due
        assert session.poll(now)
    assert [one.reason for one in failures] == ["unroutable"]
    assert UNROUTABLE_HOLD_MS <= now + 3 <= UNROUTABLE_HOLD_MS + 10, "the back-off does not stretch the hold"
    assert session.outstanding == 0 and not session.unroutable


def test_a_sign_of_the_peer_ends_the_hold() -> None:
    session = sender()
    session.send(item(1))
    session.poll(0)
    session.on_undeliverable(1001, "unbound", 1)
    session.on_ack(0, 100)
    assert session.on_undeliverable(1001, "unbound", 6000) == []
    assert session.on_undeliverable(1001, "full", 20_000) == [], "a full pipe is the window's business"


def test_what_is_repeated_is_acknowledged_at_once() -> None:
    """A node that leaves asks so for the acks that others would delay."""
    first, receiver = sender(), Session(B, 2, A, Plane.PROMPT)
    receiver.note_boot(1)
    assert first.repeated_last() is None
    for number in (1, 2, 3):
        first.send(item(number))
    for frame in first.poll(0):
        receiver.on_envelope(decode_envelope(frame), 0)
    assert receiver.poll(1) == []
    again = first.repeated_last()
    assert again is not None
    assert receiver.on_envelope(decode_envelope(again), 1) == [], "delivered once"
    (ack,) = receiver.poll(1)
    first.on_ack(decode_envelope(ack).ack, 2)
    assert first.outstanding == 0 and first.repeated_last() is None


def test_acks_are_delayed_and_carried_by_answers() -> None:
    first, receiver = sender(), Session(B, 2, A, Plane.PROMPT)
    receiver.note_boot(1)
    for number in range(1, ACK_EVERY_MESSAGES + 1):
        first.send(item(number))
    frames = [decode_envelope(frame) for frame in first.poll(0)]
    receiver.on_envelope(frames[0], 0)
    assert receiver.poll(ACK_DELAY_MS - 1) == []
    assert [decode_envelope(one).ack for one in receiver.poll(ACK_DELAY_MS)] == [1]
    receiver.on_envelope(frames[1], 100)
    receiver.send(item(1))
    (answer,) = receiver.poll(101)
    assert (decode_envelope(answer).ack, decode_envelope(answer).plane_seq) == (2, 1)
    receiver.on_ack(1, 102)
    assert receiver.next_deadline() is None
    for frame in frames[2:]:
        receiver.on_envelope(frame, 200)
    receiver.on_envelope(frames[5], 200)
    assert receiver.next_deadline() == 200, "a repeated message means a lost ack: at once"
    assert receiver.owed_ack() is not None and receiver.owed_ack() is None


def test_what_comes_early_is_bounded() -> None:
    receiver = Session(B, 2, A, Plane.PROMPT)
    big = decode_envelope(sender_frame(1 << 20))

    def at(seq: int) -> Any:
        return Envelope(*(getattr(big, name) if name != "plane_seq" else seq for name in big.__struct_fields__))

    for seq in range(2, 600):
        assert receiver.on_envelope(at(seq), 0) == []
        receiver.check()
    assert len(receiver._early) == SESSION_EARLY_BYTES_MAX // (1 << 20) - 1


def sender_frame(size: int) -> bytes:
    session = sender()
    session.send(item(1, size=size))
    (frame,) = session.poll(0)
    return frame


def test_a_forgotten_session_starts_above_its_old_numbers() -> None:
    """Or its peer, which remembers, would take what comes for duplicates."""
    table = SessionTable(A, 1)
    receiver = Session(B, 2, A, Plane.PROMPT)
    first = table.get(B, Plane.PROMPT)
    first.note_boot(2)
    for number in (1, 2, 3):
        first.send(item(number))
    for frame in first.poll(0):
        receiver.on_envelope(decode_envelope(frame), 0)
    table.sweep(0)
    table.sweep(SWEEP_MS + SESSION_IDLE_MS)
    assert len(table) == 1, "something is on its way"
    first.on_ack(3, 10)
    first.used_ms = 10
    table.sweep(2 * SWEEP_MS + SESSION_IDLE_MS)
    assert len(table) == 0
    again = table.get(B, Plane.PROMPT)
    again.note_boot(2)
    again.send(item(4))
    (frame,) = again.poll(9)
    assert [number_of(one) for one in receiver.on_envelope(decode_envelope(frame), 9)] == [4]


def test_forgetting_a_peer_fails_what_was_on_its_way() -> None:
    table = SessionTable(A, 1)
    session = table.get(B, Plane.CONTROL)
    session.send(item(1))
    assert table.unsettled == 1
    assert [one.reason for one in table.forget(B, "unroutable")] == ["unroutable"]
    assert table.unsettled == 0 and table.known(B, Plane.CONTROL) is None
