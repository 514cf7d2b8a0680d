"""Edges on real sockets: two EdgePorts in one process, CURVE, reconnect by a new port at the same address."""

from __future__ import annotations

import os
import select
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import zmq
from zmq.utils import z85

from common.bus import KeyPair, mint_keypair
from common.bus_edges import EdgeSocketError
from common.codec import Message, encode_body
from common.edge_records import Record, encode_record
from common.edges.port import EdgePort
from common.local_edges import frame_bytes
from common.messages.edge import EdgeData, EdgeHello
from common.messages.node_agent import ObjectSpec, RingSpec, StageInboundEdgeWire, StageOutboundEdgeWire
from common.messages.orchestrator import EndpointWire
from tests.support.socket_proxy import SocketProxy

RUN, TOKEN = b"r" * 16, b"t" * 16
SPEC, RING = ObjectSpec(max_extent=400_000, alignment=4), RingSpec(data_capacity=400_040, alignment=64)


class End:
    """A port with its events in lists; `carry_to` is the other end for edges over the bus."""

    def __init__(self, keys: KeyPair | None = None) -> None:
        self.keys = keys or mint_keypair()
        self.port = EdgePort(self.keys, RUN, self)
        self.records: list[Record] = []
        self.ready: list[tuple[int, str]] = []
        self.failed: list[tuple[int, str, str]] = []
        self.carry_to: End | None = None
        self.carrying: list[tuple[bytes, bytes]] = []

    def edge_record(self, edge_id: int, record: Record) -> None:
        self.records.append(record)
        self.port.consumed(edge_id, record.end_offset)

    def edge_ready(self, edge_id: int, path: str) -> None:
        self.ready.append((edge_id, path))

    def edge_failed(self, edge_id: int, reason: str, detail: str) -> None:
        self.failed.append((edge_id, reason, detail))

    def edge_carry(self, peer: bytes, message: Message) -> None:
        self.carrying.append((peer, encode_body(message)))


def now_ms() -> int:
    return time.monotonic_ns() // 1_000_000


def turn(*ends: End, until: Callable[[], bool], limit_s: float = 60) -> None:
    """Only the descriptors and the deadlines wake the ports, as in a real loop."""
    stop = time.monotonic() + limit_s
    while not until():
        assert time.monotonic() < stop, "not in time"
        deadlines = [at for end in ends if (at := end.port.next_deadline()) is not None]
        wait = max(0, min([*deadlines, now_ms() + 1000]) - now_ms()) / 1000
        ready, _, _ = select.select([end.port.fd for end in ends], [], [], min(wait, 1))
        for end in ends:
            if end.port.fd in ready or (end.port.next_deadline() or now_ms() + 1) <= now_ms():
                end.port.pump(now_ms())
            for peer, frame in end.carrying:
                if end.carry_to is not None and peer == end.carry_to.keys.public:
                    end.carry_to.port.carried(end.keys.public, frame, now_ms())
            end.carrying.clear()


def wait_until(condition: Callable[[], bool], limit_s: float = 60) -> None:
    stop = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < stop, "not in time"
        time.sleep(0.002)


def inbound(edge_id: int = 2) -> StageInboundEdgeWire:
    return StageInboundEdgeWire(edge_id=edge_id, kind="Activation", object_spec=SPEC, ring_spec=RING, edge_token=TOKEN)


def outbound(to: End, candidates: list[str], edge_id: int = 2, relay: bool = False) -> StageOutboundEdgeWire:
    return StageOutboundEdgeWire(
        edge_id=edge_id,
        kind="Activation",
        object_spec=SPEC,
        ring_spec=RING,
        consumer_node_id=3,
        consumer_endpoint=EndpointWire(node_key=to.keys.public, candidates=candidates, relay=relay),
        edge_token=TOKEN,
    )


def payload(sequence: int) -> bytes:
    return encode_record(Record(sequence, sequence, bytes([sequence]) * 147_456))


@pytest.mark.parametrize("transport", ["ipc", "tcp"])
def test_records_cross_and_come_whole(tmp_path: Path, transport: str) -> None:
    left, right = End(), End()
    address = f"ipc://{tmp_path}/e" if transport == "ipc" else "tcp://127.0.0.1:*"
    candidates = right.port.bind([address])
    left.port.bind([])
    left.port.open(outbound(right, ["tcp://127.0.0.1:1", *candidates]), now_ms())
    turn(left, right, until=lambda: left.port._out[2].core.state == "waiting")
    right.port.accept(inbound())
    turn(left, right, until=lambda: bool(left.ready and right.ready))
    assert left.ready == [(2, candidates[0])]
    for sequence in range(20):
        left.port.write(2, payload(sequence), now_ms())
        turn(left, right, until=lambda sequence=sequence: len(right.records) == sequence + 1)
    turn(left, right, until=lambda: left.port.held(2) == 0)
    assert [r.payload[:1] for r in right.records] == [bytes([s]) for s in range(20)]
    left.port.term()
    right.port.term()


def test_a_broken_connection_is_resumed_where_it_stopped(tmp_path: Path) -> None:
    """The consumer's socket is closed and bound anew in the middle of a stream; not a byte is lost or doubled."""
    left, right = End(), End()
    address = f"ipc://{tmp_path}/e"
    right.port.bind([address])
    right.port.accept(inbound())
    left.port.open(outbound(right, [address]), now_ms())
    turn(left, right, until=lambda: bool(left.ready))
    left.port.write(2, payload(0) + payload(1), now_ms())
    turn(left, right, until=lambda: len(right.records) >= 1)
    right.port._sockets.close()
    left.port.write(2, payload(2), now_ms())
    left.port.pump(now_ms())
    time.sleep(0.3)
    right.port.bind([address])
    turn(left, right, until=lambda: len(right.records) == 3)
    left.port.write(2, payload(3), now_ms())
    turn(left, right, until=lambda: len(right.records) == 4 and left.port.held(2) == 0)
    assert [r.sequence for r in right.records] == [0, 1, 2, 3] and not left.failed and not right.failed
    left.port.term()
    right.port.term()


def test_a_consumer_that_stays_away_is_an_edge_fault(tmp_path: Path) -> None:
    left, right = End(), End()
    address = f"ipc://{tmp_path}/e"
    right.port.bind([address])
    right.port.accept(inbound())
    left.port.open(outbound(right, [address]), now_ms())
    turn(left, right, until=lambda: bool(left.ready))
    right.port.term()
    started = time.monotonic()
    turn(left, until=lambda: bool(left.failed))
    assert 4.5 < time.monotonic() - started < 40, "not only after the silence of 75 s"
    assert left.failed[0][1] == "EdgeFault" and address in left.failed[0][2]
    left.port.term()


@pytest.mark.parametrize("way", ["there", "back"])
def test_a_damaged_byte_costs_the_connection_and_no_byte_of_the_stream(tmp_path: Path, way: str) -> None:
    """The transport ends a connection whose bytes do not decrypt, and at its dialling end it never comes back."""
    left, right = End(), End()
    address = f"ipc://{tmp_path}/e"
    right.port.bind([address])
    right.port.accept(inbound())
    with SocketProxy(tmp_path / "e") as proxy:
        wait_until(lambda: (tmp_path / "e.real").exists() and (tmp_path / "e").exists())
        left.port.open(outbound(right, [address]), now_ms())
        turn(left, right, until=lambda: bool(left.ready))
        for sequence in range(6):
            if sequence in (1, 4):
                proxy.flip(way)
            left.port.write(2, payload(sequence), now_ms())
            turn(left, right, until=lambda sequence=sequence: len(right.records) > sequence)
            if way == "back":  # what came back was damaged, so that the credit has not arrived
                turn(left, right, until=lambda: left.port.held(2) == 0)
        assert proxy.flipped == 2
    assert [r.sequence for r in right.records] == list(range(6)) and not left.failed and not right.failed
    left.port.term()
    right.port.term()


def test_another_key_at_the_address_is_nobody() -> None:
    """The consumer's key is pinned: an impostor at its address never sees the token."""
    left, impostor, real = End(), End(), End()
    (address,) = impostor.port.bind(["tcp://127.0.0.1:*"])
    impostor.port.accept(inbound())
    left.port.open(outbound(real, [address]), now_ms())
    until = time.monotonic() + 1.5
    turn(left, impostor, until=lambda: time.monotonic() > until)
    assert not impostor.ready and not left.ready and left.port._out[2].core.state == "dialing"
    left.port.term()
    impostor.port.term()
    real.port.term()


def test_edges_over_the_bus_when_no_candidate_answers(tmp_path: Path) -> None:
    left, right = End(), End()
    left.carry_to, right.carry_to = right, left
    right.port.bind([])
    right.port.accept(inbound())
    left.port.open(outbound(right, [f"ipc://{tmp_path}/nobody"], relay=True), now_ms())
    turn(left, right, until=lambda: bool(left.ready and right.ready))
    assert left.ready == [(2, "relay")]
    for sequence in range(4):
        left.port.write(2, payload(sequence), now_ms())
    turn(left, right, until=lambda: len(right.records) == 4 and left.port.held(2) == 0)
    left.port.term()
    right.port.term()


def test_a_record_that_is_foretold_goes_the_ways_that_are_told(tmp_path: Path) -> None:
    """Who knows only its header writes and reads the sockets itself; both ports go on as if they had done it."""
    left, right = End(), End()
    address = f"ipc://{tmp_path}/e"
    right.port.bind([address])
    right.port.accept(inbound())
    left.port.open(outbound(right, [address]), now_ms())
    blank = [Record(number, number, bytes(64), end=True) for number in range(2)]
    assert left.port.way_out(2, blank[0]) is None and right.port.way_in(2, blank[0]) is None, "not open yet"
    turn(left, right, until=lambda: bool(left.ready and right.ready))
    for number in range(2):
        way_out, way_in = left.port.way_out(2, blank[number]), right.port.way_in(2, blank[number])
        assert way_out is not None and way_in is not None and way_out.frame == way_in.frame
        sent = Record(number, number, bytes(range(64)), end=True)
        frame = frame_bytes(way_out.frame[8:-64] + sent.payload)
        wrote_ns = time.monotonic_ns()
        left.port.was_written(way_out, frame, os.write(way_out.descriptor, frame), wrote_ns)
        time.sleep(0.02)
        came_ns = time.monotonic_ns()
        right.port.was_read(way_in, os.read(way_in.descriptor, 10_000), came_ns, now_ms())
        assert right.records[-1].payload == sent.payload and right.records[-1].object_id == number
        left.port.write(2, encode_record(sent), now_ms())
        turn(left, right, until=lambda: left.port.held(2) == 0)
    (latency,), (held,) = left.port.traffic.take(), right.port.traffic.take()
    assert latency.records == held.records == 2
    assert (latency.latency_ms or 0) >= (held.held_ms or 0) + 20, "from when it left, and from when it came"
    right.port.reset()
    assert left.port.way_out(3, blank[0]) is None and right.port.way_in(2, blank[0]) is None
    left.port.term()
    right.port.term()


def test_no_way_is_told_over_another_transport() -> None:
    left, right = End(), End()
    candidates = right.port.bind(["tcp://127.0.0.1:*"])
    right.port.accept(inbound())
    left.port.open(outbound(right, candidates), now_ms())
    turn(left, right, until=lambda: bool(left.ready and right.ready))
    blank = Record(0, 0, bytes(64))
    assert left.port.way_out(2, blank) is None and right.port.way_in(2, blank) is None
    left.port.term()
    right.port.term()


@pytest.mark.parametrize("name", [b"bus:", b"unix:1"])
def test_a_stranger_cannot_take_the_name_of_a_connection_of_another_kind(name: bytes) -> None:
    """Over ZeroMQ a peer may choose how it is called: the edge's data is taken from who said its token only."""
    left, right = End(), End()
    (address,) = right.port.bind(["tcp://127.0.0.1:*"])
    right.port.accept(inbound())
    hello = EdgeHello(token=TOKEN, edge_id=2, run=RUN)
    if name == b"bus:":
        name += left.keys.public
        right.port.carried(left.keys.public, encode_body(hello), now_ms())
        assert right.ready == [(2, "")]
    try:
        with zmq.Context(1) as context, context.socket(zmq.DEALER) as stranger:
            stranger.setsockopt(zmq.IDENTITY, name)
            stranger.curve_publickey, stranger.curve_secretkey = zmq.curve_keypair()
            stranger.curve_serverkey = z85.encode(right.keys.public)
            stranger.linger = 0
            stranger.connect(address)
            stranger.send(encode_body(EdgeData(edge_id=2, offset=0, data=payload(0))))
            stranger.send(encode_body(hello))
            stop = time.monotonic() + 1
            while time.monotonic() < stop:
                select.select([right.port.fd], [], [], 0.1)
                right.port.pump(now_ms())
                assert not right.records and not stranger.poll(0)
            assert len(right.ready) == name.startswith(b"bus:"), "its Hello opens nothing"
    finally:
        left.port.term()
        right.port.term()


def test_an_address_that_cannot_be_bound_is_one_sentence(tmp_path: Path) -> None:
    end = End()
    with pytest.raises(EdgeSocketError, match="the edge endpoint ipc:///nowhere/at/all/e cannot be bound"):
        end.port.bind(["ipc:///nowhere/at/all/e"])
    end.port.term()
