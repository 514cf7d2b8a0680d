"""What is counted of an edge, at both of its ends."""

from __future__ import annotations

import time
from pathlib import Path

from common.edge_records import Record
from common.edges.traffic import EdgeCount, EdgeTraffic
from tests.unit.edges.test_edge_port import End, inbound, now_ms, outbound, payload, turn


class Holding(End):
    """A consumer that keeps the bytes until it is told."""

    def edge_record(self, edge_id: int, record: Record) -> None:
        self.records.append(record)


def test_times_are_of_what_was_finished_since_the_last_look() -> None:
    traffic = EdgeTraffic()
    traffic.began(2, 100, 100, 0, is_producer=True)
    traffic.began(2, 50, 150, 1_000_000, is_producer=True)
    assert traffic.take() == [EdgeCount(2, 2, 150)]
    traffic.credited(2, 99, 1, 2_000_000)
    assert traffic.take() == [], "half a record is none"
    traffic.credited(2, 150, 3_500, 5_000_000)
    assert traffic.take() == [EdgeCount(2, 2, 150, latency_ms=0.5)], "of the record that the credit speaks of"
    traffic.credited(7, 1, 1, 1)
    assert traffic.take() == []
    traffic.began(3, 8, 8, 0, is_producer=False)
    assert traffic.held_us(3, 8, 100_000) == 0, "not done with"
    traffic.consumed(3, 8, 250_000)
    assert traffic.take() == [EdgeCount(3, 1, 8, held_ms=0.25)]
    assert (traffic.held_us(3, 8, 900_000), traffic.held_us(3, 9, 900_000)) == (900, 0)


def test_the_way_of_a_real_edge_is_without_what_the_consumer_held(tmp_path: Path) -> None:
    producer, consumer = End(), Holding()
    candidates = consumer.port.bind([f"ipc://{tmp_path}/c.sock"])
    producer.port.bind([])
    consumer.port.accept(inbound())
    producer.port.open(outbound(consumer, candidates), now_ms())
    turn(producer, consumer, until=lambda: bool(producer.ready and consumer.ready))
    began = time.monotonic()
    for sequence in range(2):
        producer.port.write(2, payload(sequence), now_ms())
    turn(producer, consumer, until=lambda: len(consumer.records) == 2)
    (said,) = producer.port.traffic.take()
    assert said.records == 2 and said.latency_ms is None
    time.sleep(0.05)
    consumer.port.consumed(2, consumer.records[-1].end_offset)
    turn(producer, consumer, until=lambda: producer.port.held(2) == 0)
    whole_ms = (time.monotonic() - began) * 1000
    (sent,), (taken,) = producer.port.traffic.take(), consumer.port.traffic.take()
    size = sum(len(payload(sequence)) for sequence in range(2))
    assert (sent.records, sent.bytes) == (taken.records, taken.bytes) == (2, size)
    assert sent.latency_ms is not None and taken.held_ms is not None
    assert 50 <= taken.held_ms <= whole_ms
    assert 0 < sent.latency_ms <= whole_ms - taken.held_ms
    for end in (producer, consumer):
        end.port.term()
        assert end.port.traffic.take() == []
