"""Both ends of an edge over a transport that loses, cuts, reconnects and stalls at any place (design.md 3 "Edges")."""

from __future__ import annotations

from collections import deque
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from common.codec import Message
from common.edge_records import HEADER, Record, RecordDecoder, RecordFailure, encode_record
from common.edges.core import (
    RELAY,
    Arrived,
    Dial,
    EdgeConsumer,
    EdgeDesk,
    EdgeProducer,
    Failed,
    Ready,
    Send,
)
from common.limits import (
    EDGE_CREDIT_MS,
    EDGE_DIAL_MS,
    EDGE_OPEN_MS,
    EDGE_REDIAL_MS,
    EDGE_RESUME_MS,
    EDGE_SILENT_MS,
)
from common.messages.edge import EdgeCredit, EdgeData, EdgeHello, EdgeNotYet, EdgeRefused, EdgeWelcome

TOKEN, RUN, EDGE, CAPACITY = b"t" * 16, b"r" * 16, 5, 300_000


def consumer(capacity: int = CAPACITY) -> EdgeConsumer:
    return EdgeConsumer(EDGE, TOKEN, RUN, capacity, RecordDecoder(capacity, 4))


def producer(candidates: tuple[str, ...] = ("ipc:///a", "tcp://b:1"), capacity: int = CAPACITY) -> EdgeProducer:
    return EdgeProducer(EDGE, TOKEN, RUN, capacity, candidates, 0)


class Wire:
    """A producer and a consumer; `there` and `back` are what is on its way. The consumer's application is by hand."""

    def __init__(self, *, provisioned: bool = True, capacity: int = CAPACITY) -> None:
        self.now = 0
        self.desk = EdgeDesk()
        self.consumer = consumer(capacity)
        if provisioned:
            self.desk.consumers.append(self.consumer)
        self.producer = producer(capacity=capacity)
        self.there: deque[tuple[bytes, Message]] = deque()
        self.back: deque[tuple[bytes, Message]] = deque()
        self.conn = b""
        self.dialled: list[str] = []
        self.records: list[Record] = []
        self.failures: list[Failed] = []
        self.ready = 0
        self.serial = 0

    def do(self, effects: list[Any], back: bool = False) -> None:
        for effect in effects:
            match effect:
                case Dial():
                    self.dialled.append(effect.candidate)
                    self.connect()
                case Send():
                    (self.back if back else self.there).append((effect.conn if back else self.conn, effect.message))
                case Arrived():
                    self.records.append(effect.record)
                case Ready():
                    self.ready += 1
                case Failed():
                    self.failures.append(effect)
        self.producer.check()
        self.consumer.check()

    def connect(self) -> None:
        """A new connection: what was on its way is lost."""
        self.serial += 1
        self.conn = b"conn%d" % self.serial
        self.there.clear()
        self.back.clear()

    def step(self, ms: int = 10) -> None:
        self.now += ms
        self.do(self.producer.tick(self.now))
        while self.there or self.back:
            if self.there:
                conn, message = self.there.popleft()
                told = self.consumer.foretell(len(message.data)) if isinstance(message, EdgeData) else None
                effects = self.desk.on_message(message, conn)[1]
                if isinstance(message, EdgeData) and told == message.offset and conn == self.consumer.conn:
                    arrived = [encode_record(e.record) for e in effects if isinstance(e, Arrived)]
                    whole = RecordDecoder(CAPACITY, 4, sequenced=False).feed(message.data)
                    assert arrived == [encode_record(one) for one in whole], "what was foretold came otherwise"
                self.do(effects, back=True)
            if self.back:
                conn, message = self.back.popleft()
                if conn == self.conn:
                    self.do(self.producer.on_message(message, self.now))

    def write(self, data: bytes) -> None:
        told = self.producer.foretell(len(data))
        effects = self.producer.write(data, self.now)
        if told is not None:
            assert effects == [Send(EdgeData(edge_id=EDGE, offset=told, data=data))], "it left otherwise than foretold"
        self.do(effects)

    def consume(self) -> None:
        if self.records:
            self.do(self.consumer.on_consumed(self.records[-1].end_offset, self.now), back=True)

    def cut(self) -> None:
        self.do(self.producer.on_link(False, self.now))
        self.connect()

    def reconnect(self) -> None:
        self.do(self.producer.on_link(True, self.now))


def record(sequence: int, size: int) -> bytes:
    return encode_record(Record(sequence, sequence, bytes([sequence % 256]) * size))


ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("write"), st.integers(0, 40_000)),
        st.tuples(st.just("consume"), st.just(0)),
        st.tuples(st.just("step"), st.integers(1, 1500)),
        st.tuples(st.just("break"), st.integers(0, 3000)),
        st.tuples(st.just("lose"), st.integers(0, 3)),
    ),
    max_size=40,
)


@settings(max_examples=200)
@given(ACTIONS)
def test_every_record_arrives_once_and_in_order(actions: list[tuple[str, int]]) -> None:
    wire = Wire()
    wire.step()
    written = 0
    for action, amount in actions:
        match action:
            case "write":
                if wire.producer.held + amount + 44 < 2 * CAPACITY:
                    wire.write(record(written, amount // 4 * 4))
                    written += 1
            case "consume":
                wire.consume()
            case "step":
                wire.step(amount)
            case "break":
                wire.cut()
                wire.now += amount
                wire.reconnect()
                wire.step(1)
            case "lose":
                # A frame that the sockets did not take: only the probe and the offsets find out.
                for _ in range(min(amount, len(wire.there))):
                    wire.there.pop()
    for _ in range(60):
        wire.step(500)
        wire.consume()
    assert not wire.failures
    assert [r.sequence for r in wire.records] == list(range(written))
    assert wire.producer.held == 0 and wire.ready >= 2


def test_the_window_is_never_exceeded_and_credit_moves_it() -> None:
    wire = Wire(capacity=100_000)
    wire.step()
    for sequence in range(5):
        wire.write(record(sequence, 40_000))
    wire.step()
    assert [r.sequence for r in wire.records] == [0, 1]
    assert wire.consumer.received == 100_000
    wire.consume()
    wire.step()
    assert [r.sequence for r in wire.records] == [0, 1, 2, 3]


def test_what_is_foretold_leaves_and_comes_as_one_piece() -> None:
    wire = Wire(capacity=100_000)
    assert wire.producer.foretell(100) is None and wire.consumer.foretell(100) is None, "not open yet"
    wire.step()
    size = len(record(0, 40_000))
    assert wire.producer.foretell(size) == wire.consumer.foretell(size) == 0
    assert wire.producer.foretell(65_537) is None and wire.consumer.foretell(65_537) is None, "two pieces"
    wire.write(record(0, 40_000))
    assert wire.producer.foretell(size) == size, "nothing has to be credited for that"
    wire.step()
    assert wire.consumer.foretell(size) == size
    wire.write(record(1, 40_000))
    wire.step()
    assert wire.producer.foretell(size) is None and wire.consumer.foretell(size) is None, "the window is full"
    assert wire.producer.foretell(19_920) == 2 * size
    wire.write(record(2, 40_000))
    wire.step()
    assert wire.producer.foretell(40) is None and wire.consumer.foretell(40) is None, "in the middle of one"
    wire.consume()
    wire.step()
    assert wire.producer.foretell(40) == wire.consumer.foretell(40) == 3 * size
    wire.cut()
    assert wire.producer.foretell(40) is None, "the connection is down"
    wire.reconnect()
    wire.step()
    assert wire.producer.foretell(40) == 3 * size


def test_candidates_are_tried_in_order_and_then_given_up() -> None:
    one = producer()
    dialled, failed, now = [], [], 0
    while not failed and now < 60_000:
        for effect in one.tick(now):
            if isinstance(effect, Dial):
                dialled.append((now, effect.candidate))
            if isinstance(effect, Failed):
                failed.append((now, effect))
        now += 100
    assert dialled[:3] == [(0, "ipc:///a"), (EDGE_DIAL_MS, "tcp://b:1"), (2 * EDGE_DIAL_MS, "ipc:///a")]
    at, failure = failed[0]
    assert at == EDGE_OPEN_MS and failure.reason == "EdgeFault"
    assert failure.detail == "edge 5: no candidate answered within 45 s: ipc:///a, tcp://b:1"


def test_not_yet_is_asked_again_until_it_is_provisioned() -> None:
    wire = Wire(provisioned=False)
    for _ in range(100):
        wire.step(300)
    assert wire.producer.state == "waiting" and not wire.failures and wire.dialled == ["ipc:///a"]
    wire.desk.consumers.append(wire.consumer)
    wire.step(300)
    assert wire.producer.state == "open" and wire.ready == 2


def test_a_connection_that_stays_away_is_a_fault() -> None:
    wire = Wire()
    wire.step()
    wire.write(record(0, 100))
    wire.cut()
    broken = wire.now
    while not wire.failures and wire.now < broken + 2 * EDGE_RESUME_MS:
        wire.now += 100
        wire.do(wire.producer.tick(wire.now))
        wire.there.clear()
    assert wire.now - broken == EDGE_RESUME_MS and [f.reason for f in wire.failures] == ["EdgeFault"]
    assert "broke and nobody welcomed it again within 5 s" in wire.failures[0].detail
    assert 3 <= len(wire.dialled) <= 1 + EDGE_RESUME_MS // EDGE_REDIAL_MS, "some transports never reconnect"


def test_a_frozen_consumer_is_a_fault_only_after_the_limit() -> None:
    """The connection stands and nothing comes back: it is dialled anew now and then; a consumer that is back in time
    gets every byte."""
    for frozen_ms in (EDGE_SILENT_MS - 2000, EDGE_SILENT_MS):
        wire = Wire()
        wire.step()
        wire.write(record(0, 100))
        until = wire.now + frozen_ms
        while wire.now < until:
            wire.there.clear()
            wire.now += 1000
            wire.do(wire.producer.tick(wire.now))
            if len(wire.dialled) > 1:  # nobody shakes hands with the new connection: the transport gives it up
                wire.do(wire.producer.on_link(False, wire.now))
        assert len(wire.dialled) > frozen_ms // EDGE_RESUME_MS // 2
        if frozen_ms < EDGE_SILENT_MS:
            wire.step(1000)
            assert [r.sequence for r in wire.records] == [0] and not wire.failures
        else:
            assert [f.reason for f in wire.failures] == ["EdgeFault"]
            assert "did not answer for 75 s" in wire.failures[0].detail


def test_a_direct_way_that_carries_nothing_any_more_is_left_for_the_bus() -> None:
    one = producer(("ipc:///a", RELAY))
    one.tick(0)
    one.on_message(EdgeWelcome(edge_id=EDGE, next_offset=0), 1)
    one.on_link(True, 1)
    one.write(b"x" * 40, 2)
    dialled = [
        effect.candidate for now in range(100, 20_000, 100) for effect in one.tick(now) if isinstance(effect, Dial)
    ]
    assert dialled[:2] == [RELAY, "ipc:///a"]
    (way, again, *_) = one.on_message(EdgeWelcome(edge_id=EDGE, next_offset=0), 20_000)
    assert way == Ready(one.candidate) and isinstance(again, Send) and one.held == 40
    assert one.on_message(EdgeWelcome(edge_id=EDGE, next_offset=0), 20_001) == [again]


def test_an_edge_without_bytes_on_their_way_may_be_silent_for_ever() -> None:
    wire = Wire()
    wire.step()
    wire.do(wire.producer.tick(wire.now + 10 * EDGE_SILENT_MS))
    assert not wire.failures and wire.producer.next_deadline() is None


def test_wrong_tokens_edges_and_runs_get_nothing() -> None:
    desk = EdgeDesk()
    mine = consumer()
    desk.consumers.append(mine)
    hello = EdgeHello(token=b"x" * 16, edge_id=EDGE, run=RUN)
    assert desk.on_message(hello, b"c") == (None, [Send(EdgeNotYet(edge_id=EDGE), b"c")])
    for wrong in (EdgeHello(token=TOKEN, edge_id=6, run=RUN), EdgeHello(token=TOKEN, edge_id=EDGE, run=b"z" * 16)):
        (answer,) = desk.on_message(wrong, b"c")[1]
        assert isinstance(answer, Send) and isinstance(answer.message, EdgeRefused)
    # Data of a connection that has shown no token moves nothing.
    assert desk.on_message(EdgeData(edge_id=EDGE, offset=0, data=b"MO01"), b"c") == (None, [])
    assert mine.received == 0


def test_bad_records_and_overruns_are_faults_of_the_right_kind() -> None:
    for data, reason, says in (
        (b"garbage!", "ObjectFailed", "edge 5: UnsupportedMagic"),
        (record(0, 400_000), "EdgeFault", "without credit, allowed are 300000"),
        (encode_record(Record(1, 7, b"")), "ObjectFailed", "SequenceViolation: expected 0, got 7"),
    ):
        mine = consumer()
        mine.on_hello(EdgeHello(token=TOKEN, edge_id=EDGE, run=RUN), b"c")
        refused, failed = mine.on_data(EdgeData(edge_id=EDGE, offset=0, data=data), b"c")
        assert isinstance(failed, Failed) and failed.reason == reason and says in failed.detail
        assert isinstance(refused, Send) and isinstance(refused.message, EdgeRefused)
        one = producer()
        one.tick(0)
        one.on_message(EdgeWelcome(edge_id=EDGE, next_offset=0), 1)
        (fault,) = one.on_message(refused.message, 2)
        assert isinstance(fault, Failed) and "the consumer refused it" in fault.detail


def test_a_bad_record_is_a_fault_of_its_kinds_reason_alone_and_behind_a_good_one() -> None:
    good = encode_record(Record(1, 0, b"\0" * 8))
    for at, before in ((0, b""), (1, good)):
        for kind, bad in (
            (RecordFailure.UNSUPPORTED_MAGIC, b"MO02" + bytes(36)),
            (RecordFailure.UNSUPPORTED_VERSION, HEADER.pack(b"MO01", 2, 40, 9, at, 4, 0, 0)),
            (RecordFailure.MALFORMED_HEADER_LENGTH, HEADER.pack(b"MO01", 1, 48, 9, at, 4, 0, 0)),
            (RecordFailure.MALFORMED_HEADER, HEADER.pack(b"MO01", 1, 40, 9, at, 4, 4, 0)),
            (RecordFailure.EXTENT_EXCEEDS_MAX, HEADER.pack(b"MO01", 1, 40, 9, at, CAPACITY + 4, 0, 0)),
            (RecordFailure.EXTENT_ALIGNMENT_VIOLATION, HEADER.pack(b"MO01", 1, 40, 9, at, 6, 0, 0)),
            (RecordFailure.SEQUENCE_VIOLATION, HEADER.pack(b"MO01", 1, 40, 9, at + 3, 4, 0, 0)),
        ):
            mine = consumer()
            mine.on_hello(EdgeHello(token=TOKEN, edge_id=EDGE, run=RUN), b"c")
            *arrived, refused, failed = mine.on_data(EdgeData(edge_id=EDGE, offset=0, data=before + bad), b"c")
            assert isinstance(failed, Failed) and failed.reason == kind.stage_reason == "ObjectFailed", kind
            assert failed.detail.startswith(f"edge {EDGE}: {kind}: ") and isinstance(refused, Send)
            assert len(arrived) == at and all(isinstance(effect, Arrived) for effect in arrived)
    # These two no stream shows while it lasts.
    assert RecordFailure.EOF_BEFORE_FULL_PAYLOAD.stage_reason == "EdgeFault"
    assert RecordFailure.DEVICE_COPY_FAILED.stage_reason == "StepFailed"


def test_a_lying_consumer_is_a_fault() -> None:
    for message in (
        EdgeCredit(edge_id=EDGE, consumed_offset=10),
        EdgeWelcome(edge_id=EDGE, next_offset=10),
        EdgeWelcome(edge_id=EDGE, next_offset=0, consumed=9),
    ):
        one = producer()
        one.tick(0)
        (failed,) = one.on_message(message, 1)
        assert isinstance(failed, Failed) and failed.reason == "EdgeFault"
        assert one.next_deadline() is None and one.write(b"x", 2) == [] and one.tick(9) == []


@given(st.lists(st.tuples(st.integers(0, 5000), st.binary(max_size=200)), max_size=20))
def test_any_data_frames_leave_the_consumer_sane(frames: list[tuple[int, bytes]]) -> None:
    mine = consumer()
    mine.on_hello(EdgeHello(token=TOKEN, edge_id=EDGE, run=RUN), b"c")
    for offset, data in frames:
        mine.on_data(EdgeData(edge_id=EDGE, offset=offset, data=data), b"c")
        mine.check()


def test_credits_go_together() -> None:
    """At once when a quarter of the window is used, else 50 ms after the first; a welcome tells it, too."""
    end = consumer(4000)
    hello = EdgeHello(token=TOKEN, edge_id=EDGE, run=RUN)

    def credit(offset: int) -> list[Send]:
        return [Send(EdgeCredit(edge_id=EDGE, consumed_offset=offset), b"bus:p")]

    end.on_hello(hello, b"bus:p")
    end.received = 4000
    assert end.on_consumed(100, 1000) == end.on_consumed(200, 1040) == []
    assert end.credit_due_ms == 1000 + EDGE_CREDIT_MS and end.tick(1049) == []
    assert end.tick(1050) == credit(200) and end.credit_due_ms is None
    assert end.on_consumed(1100, 1060) == []
    assert end.on_consumed(1200, 1061) == credit(1200), "a quarter of the window"
    end.on_consumed(1300, 1062)
    end.on_hello(hello, b"bus:p")
    assert end.credit_due_ms is None and end.tick(2000) == []
