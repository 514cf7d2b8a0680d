"""The observer actor: batches, order, bounds, replay, redaction; a slow or absent collector costs it nothing."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.addresses import Role
from common.codec import encode_body
from common.datastream import (
    NOT_EMITTED,
    OBSERVE_RING_BYTES_MAX,
    Drain,
    Emit,
    ObserverActor,
    SeqRanges,
    channel_name,
    emitted,
    keep,
)
from common.effects import SendFailed, StopSignal, ViewChanged
from common.limits import (
    CHANNEL_NAME_BYTES_MAX,
    FRAME_PAYLOAD_BYTES_MAX,
    OBSERVE_RING_RECORDS_MAX,
    STREAM_BATCH_BYTES_MAX,
    STREAM_BATCH_MS,
)
from common.messages.bus import RouteEntry, Snapshot
from common.messages.stream import Gap, Observation, Observe
from common.redact import Redactor
from tests.support.harness import Harness

COLLECTOR = b"c" * 32
NODE = b"k" * 32


def route(harness: Harness, boot: int | None, address: bytes = COLLECTOR) -> None:
    """The collector appears with this boot, or goes."""
    entry = RouteEntry(
        address=address, node=NODE, boot=boot or 0, generation=1, role=Role.COLLECTOR, name=Role.COLLECTOR
    )
    harness.views.routes.apply(Snapshot(view="routes", version=1, items=[entry] if boot else []))
    harness.tell(ViewChanged("routes"))


def observed(harness: Harness) -> list[Observation]:
    return [record for _, message in harness.sent() if isinstance(message, Observe) for record in message.records]


def seqs(harness: Harness) -> list[int]:
    return [record.producer_seq for record in observed(harness)]


def test_records_leave_in_batches_of_20_ms() -> None:
    harness = Harness(ObserverActor())
    route(harness, 1)
    for number in range(3):
        harness.tell(Emit("mvp.orch.bootstrap", b"%d" % number, "node_bootstrap_stdio"))
        assert harness.sent() == []
    harness.advance(STREAM_BATCH_MS)
    ((dst, message),) = harness.sent()
    assert dst == COLLECTOR
    assert [(r.producer_seq, r.channel, r.payload, r.source) for r in message.records] == [
        (number + 1, "mvp.orch.bootstrap", b"%d" % number, "node_bootstrap_stdio") for number in range(3)
    ]
    harness.advance(10 * STREAM_BATCH_MS)
    assert harness.sent() == []


def test_a_batch_is_at_most_64_kib_and_a_full_one_does_not_wait() -> None:
    harness = Harness(ObserverActor())
    route(harness, 1)
    for _ in range(40):
        harness.tell(Emit("c", bytes(5000)))
    sent = harness.sent()
    assert len(sent) >= 2
    assert all(len(encode_body(message)) <= STREAM_BATCH_BYTES_MAX for _, message in sent)


def test_holds_while_the_collector_is_away_and_sends_in_order() -> None:
    harness = Harness(ObserverActor())
    for number in range(100):
        harness.tell(Emit("c", b"%d" % number))
    harness.advance(60_000)
    assert harness.sent() == []
    route(harness, 1)
    assert seqs(harness) == list(range(1, 101))


@pytest.mark.spec("S1 9.18", "S1 8.1")
def test_an_absent_collector_costs_bounded_memory_and_the_loss_is_said() -> None:
    harness = Harness(ObserverActor())
    harness.system._validate = False  # the invariants walk the ring; 20,000 times would be too slow
    for number in range(20_000):
        harness.tell(Emit("c", b"%d" % number))
    actor = harness.actor
    assert isinstance(actor, ObserverActor)
    actor.check()
    assert actor.held() == OBSERVE_RING_RECORDS_MAX
    route(harness, 1)
    sent = [message for _, message in harness.sent()]
    lost = 20_000 - OBSERVE_RING_RECORDS_MAX
    assert sent[0] == Gap(first=1, last=lost)
    assert [r.producer_seq for m in sent[1:] for r in m.records] == list(range(lost + 1, 20_001))
    assert actor.dropped == lost


def test_large_records_are_bounded_by_bytes() -> None:
    harness = Harness(ObserverActor())
    for _ in range(30):
        harness.tell(Emit("c", bytes(FRAME_PAYLOAD_BYTES_MAX)))
    actor = harness.actor
    assert isinstance(actor, ObserverActor)
    assert actor.held() * FRAME_PAYLOAD_BYTES_MAX <= OBSERVE_RING_BYTES_MAX


def test_a_collector_that_refuses_everything_is_asked_with_growing_pauses() -> None:
    """A hung or full collector: each send comes back. Nothing spins, nothing grows, nothing is lost while it fits."""
    harness = Harness(ObserverActor())
    route(harness, 1)
    tries = 0
    for number in range(600):
        harness.tell(Emit("c", b"%d" % number))
        harness.advance(50)
        for dst, message in harness.sent():
            tries += 1
            harness.tell(SendFailed(dst, message, "queue_full"))
    assert tries < 20  # 30 s: 250 ms doubling to 5 s
    harness.advance(5000)
    assert seqs(harness) == list(range(1, 601))


def test_what_failed_is_sent_again_before_what_is_newer() -> None:
    harness = Harness(ObserverActor())
    route(harness, 1)
    harness.tell(Emit("c", b"a"))
    harness.advance(STREAM_BATCH_MS)
    ((dst, failed),) = harness.sent()
    harness.tell(Emit("c", b"b"))
    harness.tell(SendFailed(dst, failed, "peer_lost"))
    harness.advance(5000)
    assert [record.payload for record in observed(harness)] == [b"a", b"b"]


def test_a_failed_gap_is_said_again() -> None:
    harness = Harness(ObserverActor())
    for _ in range(OBSERVE_RING_RECORDS_MAX + 5):
        harness.tell(Emit("c", b""))
    route(harness, 1)
    sent = harness.sent()
    harness.tell(SendFailed(*sent[0], "unroutable"))
    harness.advance(1000)
    assert (COLLECTOR, Gap(first=1, last=5)) in harness.sent()


def test_another_incarnation_of_the_collector_gets_the_tail_again() -> None:
    harness = Harness(ObserverActor())
    route(harness, 1)
    for number in range(10):
        harness.tell(Emit("c", b"%d" % number))
    harness.advance(STREAM_BATCH_MS)
    assert len(seqs(harness)) == 10
    route(harness, None)
    harness.tell(Emit("c", b"10"))
    harness.advance(1000)
    assert harness.sent() == []
    route(harness, 2, b"d" * 32)
    assert seqs(harness) == list(range(1, 12))
    # The same incarnation after a restart of the router is no reason to repeat anything.
    route(harness, None)
    route(harness, 2, b"d" * 32)
    assert harness.sent() == []


@pytest.mark.parametrize("event", [Drain(), StopSignal("SIGTERM", 1)])
def test_what_is_pending_leaves_before_the_process_ends(event: object) -> None:
    harness = Harness(ObserverActor())
    route(harness, 1)
    harness.tell(Emit("c", b"last words"))
    harness.tell(event)
    assert [record.payload for record in observed(harness)] == [b"last words"]


def test_an_actor_that_stops_hands_over_what_it_has() -> None:
    harness = Harness(ObserverActor())
    route(harness, 1)
    harness.tell(Emit("c", b"x"))
    harness.system.stop(harness.address)
    harness.run()
    assert seqs(harness) == [1]


SECRET = 'hf_Verys3cretToken/+"x'


@pytest.mark.spec("S1 8.14", "S1 9.20", "S1 10.16")
@given(st.lists(st.one_of(st.binary(max_size=60), st.just(SECRET.encode())), max_size=6))
@settings(max_examples=150)
def test_no_secret_is_in_any_byte_that_leaves(parts: list[bytes]) -> None:
    harness = Harness(ObserverActor(Redactor([SECRET]).redact))
    route(harness, 1)
    harness.tell(Emit("mvp.orch.bootstrap", b"".join(parts)))
    harness.advance(STREAM_BATCH_MS)
    out = b"".join(encode_body(message) for _, message in harness.sent())
    assert SECRET.encode() not in out


def test_a_secret_at_the_cut_of_a_huge_payload_does_not_leave_in_part() -> None:
    payload = b"x" * (FRAME_PAYLOAD_BYTES_MAX - 60) + SECRET.encode() + b"y" * 100
    out = emitted(payload, Redactor([SECRET]).redact)
    assert len(out) == FRAME_PAYLOAD_BYTES_MAX
    assert SECRET.encode()[:8] not in out
    assert b"...[cut: " in out


def test_a_redactor_that_fails_lets_nothing_out() -> None:
    def broken(payload: bytes) -> bytes:
        raise ValueError(payload)

    harness = Harness(ObserverActor(broken))
    route(harness, 1)
    harness.tell(Emit("c", b"secret"))
    harness.advance(STREAM_BATCH_MS)
    assert [record.payload for record in observed(harness)] == [NOT_EMITTED]


@pytest.mark.spec("S1 2.8")
@given(st.binary(max_size=200))
def test_a_payload_is_not_changed(payload: bytes) -> None:
    assert emitted(payload, keep) == payload


@pytest.mark.parametrize("name", ["", "\ud800x", "é" * 300, "a\0b", "x" * 1000])
def test_any_channel_name_can_be_sent(name: str) -> None:
    sane = channel_name(name)
    assert 0 < len(sane.encode()) <= CHANNEL_NAME_BYTES_MAX
    harness = Harness(ObserverActor())
    route(harness, 1)
    harness.tell(Emit(name, b"x"))
    harness.advance(STREAM_BATCH_MS)
    assert [record.channel for record in observed(harness)] == [sane]


def numbers(ranges: list[tuple[int, int]]) -> Iterator[int]:
    for first, last in ranges:
        yield from range(first, last + 1)


@given(st.lists(st.tuples(st.integers(0, 120), st.integers(0, 9)), max_size=40), st.integers(0, 120))
def test_ranges_are_a_set(adds: list[tuple[int, int]], probe: int) -> None:
    ranges, plain = SeqRanges(), set()
    for first, more in adds:
        ranges.add(first, first + more)
        plain |= set(range(first, first + more + 1))
    assert sorted(plain) == list(numbers(ranges.ranges))
    assert (probe in ranges) == (probe in plain)
    assert ranges.last == max(plain, default=0)
    assert list(numbers(ranges.holes(probe, 130))) == [n for n in range(probe, 131) if n not in plain]


def test_ranges_are_bounded() -> None:
    ranges = SeqRanges((number, number) for number in range(0, 1000, 2))
    assert len(ranges.ranges) <= 64
    assert 998 in ranges and 999 not in ranges


@given(st.lists(st.sampled_from(["emit", "fail", "away", "back", "restart", "wait"]), max_size=40), st.data())
@settings(max_examples=80)
def test_nothing_is_lost_whatever_happens_to_the_collector(steps: list[str], data: st.DataObject) -> None:
    harness = Harness(ObserverActor())
    boot, emitted_count = 1, 0
    route(harness, boot)
    got: set[int] = set()
    for step in steps:
        match step:
            case "emit":
                emitted_count += 1
                harness.tell(Emit("c", b"%d" % emitted_count))
            case "away":
                route(harness, None)
            case "restart":
                boot += 1
                route(harness, boot)
            case "back":
                route(harness, boot)
            case _:
                harness.advance(300)
        for dst, message in harness.sent():
            assert isinstance(message, Observe)
            if step == "fail" or data.draw(st.booleans()):
                harness.tell(SendFailed(dst, message, "peer_lost"))
            else:
                got |= {record.producer_seq for record in message.records}
    route(harness, boot)
    harness.advance(11_000)
    got |= set(seqs(harness))
    assert got == set(range(1, emitted_count + 1))
