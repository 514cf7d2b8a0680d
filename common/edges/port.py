"""EdgePort: the edges of one process on their sockets, for the engine's port thread and for the prompt gateway.

Shell around core.py: `pump(now)` whenever `fd` is readable or `next_deadline()` has come. Everything it learns is told
through the callbacks of `EdgeEvents`, from inside `pump`, `write` and `consumed`; all calls come from one thread.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from msgspec.structs import replace

from common.bus import KeyPair
from common.codec import BadEnvelope, Message, encode_body
from common.edge_records import HEADER_BYTES, Record, RecordDecoder, encode_record
from common.edges.core import (
    CARRIED,
    RELAY,
    Arrived,
    Dial,
    EdgeConsumer,
    EdgeDesk,
    EdgeProducer,
    Effect,
    Failed,
    Ready,
    Send,
)
from common.edges.frames import decode_stream_message
from common.edges.network import EdgeNetwork
from common.edges.traffic import EdgeTraffic
from common.local_edges import LocalEdges, frame_bytes
from common.messages.edge import EdgeCredit, EdgeData
from common.messages.node_agent import StageInboundEdgeWire, StageOutboundEdgeWire


class EdgeEvents(Protocol):
    """Who uses the port."""

    def edge_record(self, edge_id: int, record: Record) -> None:
        """A record arrived; give its bytes back with EdgePort.consumed(edge_id, record.end_offset)."""

    def edge_ready(self, edge_id: int, path: str) -> None:
        """The edge is open, or takes another way. path: the candidate, empty at the consumer."""

    def edge_failed(self, edge_id: int, reason: str, detail: str) -> None:
        """The edge is over."""

    def edge_carry(self, peer: bytes, message: Message) -> None:
        """Send a stream message to the same edge's other end over the bus."""


class EdgeTransport(Protocol):
    """What an EdgePort needs of the network: EdgeNetwork, or a simulated one."""

    @property
    def fd(self) -> int:
        """Readable when `drain` has something to do."""

    @property
    def local(self) -> LocalEdges | None:
        """Its part whose connections a fast path can use."""

    def bind(self, addresses: list[str], advertise: str) -> list[str]:
        """Take edges at these addresses; returns what others dial. Raises EdgeSocketError."""

    def dial(self, edge_id: int, endpoint: str, server_key: bytes) -> None:
        """Connect the edge, in place of the connection before."""

    def hang_up(self, edge_id: int) -> None:
        """Close the edge's connection, if it has one."""

    def send(self, edge_id: int, frame: bytes) -> bool:
        """To the consumer. False: nothing is taken now."""

    def reply(self, conn: bytes, frame: bytes) -> bool:
        """To a producer's connection. False: it is gone or full."""

    def drain(
        self,
        on_inbound: Callable[[bytes, bytes], None],
        on_outbound: Callable[[int, bytes], None],
        on_link: Callable[[int, bool], None],
        enough: Callable[[], bool] = lambda: False,
    ) -> None:
        """Hand over everything that has arrived, or until `enough`."""

    def close(self) -> None:
        """Close all."""

    def term(self) -> None:
        """After close: the end of the process."""


Transport = Callable[[KeyPair], EdgeTransport]


@dataclass(frozen=True, slots=True)
class Way:
    """How a record that is foretold goes over a socket of this machine. frame: as it lies in the socket, but for the
    payload, its end, and the sum; conn: where the record comes in."""

    edge_id: int
    descriptor: int
    frame: bytes
    conn: bytes = b""


@dataclass(slots=True)
class _Outbound:
    core: EdgeProducer
    server_key: bytes
    path: str = ""


class EdgePort:
    """Bind once; then open edges in any order."""

    def __init__(
        self,
        keys: KeyPair,
        run: bytes,
        events: EdgeEvents,
        transport: Transport = EdgeNetwork,
        clock_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self._clock_ns = clock_ns
        self._sockets = transport(keys)
        self.run = run
        self._events = events
        self._desk = EdgeDesk()
        self.traffic = EdgeTraffic()
        self._out: dict[int, _Outbound] = {}
        self._now_ms = 0
        self._closed = False
        self._came = False
        self._read_ns: int | None = None
        """When what is being handed over came, if not just now."""
        self._written_ns: dict[int, int] = {}

    @property
    def fd(self) -> int:
        """Watch it for reading."""
        return self._sockets.fd

    def bind(self, addresses: list[str], advertise: str = "127.0.0.1") -> list[str]:
        """The candidates that others dial. Raises EdgeSocketError."""
        return self._sockets.bind(addresses, advertise)

    # --- edges ------------------------------------------------------------------------------------------------
    def accept(self, edge: StageInboundEdgeWire) -> None:
        """Take this edge from now on; until then its producer is told EdgeNotYet. Sequences are checked by the owner:
        the stage's table or the prompt runtime."""
        decoder = RecordDecoder(edge.object_spec.max_extent, edge.object_spec.alignment, sequenced=False)
        capacity = edge.ring_spec.data_capacity
        self._desk.consumers.append(EdgeConsumer(edge.edge_id, edge.edge_token, self.run, capacity, decoder))

    def open(self, edge: StageOutboundEdgeWire, now_ms: int) -> None:
        """Dial the consumer."""
        endpoint = edge.consumer_endpoint
        assert endpoint is not None
        candidates = list(endpoint.candidates)
        if endpoint.relay:
            candidates.append(RELAY)
        core = EdgeProducer(edge.edge_id, edge.edge_token, self.run, edge.ring_spec.data_capacity, candidates, now_ms)
        self._out[edge.edge_id] = _Outbound(core, endpoint.node_key)
        self._produce(edge.edge_id, core.tick(now_ms))

    def write(self, edge_id: int, data: bytes, now_ms: int) -> int:
        """Append to an outbound edge; returns the bytes that wait for credit."""
        self._now_ms = now_ms
        out = self._out[edge_id]
        end = out.core.credited + out.core.held + len(data)
        at_ns = self._written_ns.pop(edge_id, None) or self._clock_ns()
        self.traffic.began(edge_id, len(data), end, at_ns, is_producer=True)
        self._produce(edge_id, out.core.write(data, now_ms))
        return out.core.held

    def has(self, edge_id: int) -> bool:
        """Whether this outbound edge is there."""
        return edge_id in self._out

    def held(self, edge_id: int) -> int:
        """Bytes of an outbound edge that wait for credit."""
        return self._out[edge_id].core.held

    def consumed(self, edge_id: int, end_offset: int) -> bool:
        """An inbound record's bytes are no longer needed. True: `next_deadline` has become earlier."""
        earlier = False
        for consumer in self._desk.consumers:
            if consumer.edge_id == edge_id:
                before, now_ns = consumer.credit_due_ms, self._clock_ns()
                self.traffic.consumed(edge_id, end_offset, now_ns)
                self._consume(consumer, consumer.on_consumed(end_offset, now_ns // 1_000_000))
                earlier = before is None and consumer.credit_due_ms is not None
        return earlier

    def carried(self, peer: bytes, frame: bytes, now_ms: int) -> None:
        """A stream message that came over the bus from node `peer`."""
        self._now_ms = now_ms
        if (message := _decoded(frame)) is None or self._closed:
            return
        for edge_id, out in list(self._out.items()):
            if out.path == RELAY and out.server_key == peer and getattr(message, "edge_id", -1) == edge_id:
                self._answered(edge_id, out, message, now_ms)
                return
        self._inbound(CARRIED + peer, message)

    # --- a fast path ------------------------------------------------------------------------------------------
    # Reads and writes the sockets itself, with what is foretold here; then it tells `was_written` and `was_read`, and
    # the user does what it always does with the record.

    def way_in(self, edge_id: int, record: Record) -> Way | None:
        """How the next record will come, of this size, number and flags; None if that cannot be told."""
        data, local = encode_record(record), self._sockets.local
        consumer = next((consumer for consumer in self._desk.consumers if consumer.edge_id == edge_id), None)
        offset = consumer.foretell(len(data)) if consumer is not None else None
        if local is None or consumer is None or offset is None:
            return None
        descriptor = local.reading(consumer.conn)
        return _way(edge_id, descriptor, offset, data, consumer.conn) if descriptor is not None else None

    def way_out(self, edge_id: int, record: Record) -> Way | None:
        """How this record would leave now, its payload aside; None if not at once and whole."""
        data, local = encode_record(record), self._sockets.local
        out = self._out.get(edge_id)
        offset = out.core.foretell(len(data)) if out is not None else None
        if local is None or offset is None:
            return None
        descriptor = local.writing(edge_id)
        return _way(edge_id, descriptor, offset, data) if descriptor is not None else None

    def was_read(self, way: Way, data: bytes, at_ns: int, now_ms: int) -> None:
        """These bytes came the way, whatever they are."""
        self._now_ms, self._read_ns = now_ms, at_ns
        if (local := self._sockets.local) is not None:
            local.was_read(way.conn, data, self._on_inbound)
        self._read_ns = None

    def was_written(self, way: Way, frame: bytes, sent: int, at_ns: int) -> None:
        """The record that is written next has left; sent: bytes of the frame, or an error number below 0."""
        self._written_ns[way.edge_id] = at_ns
        if (local := self._sockets.local) is not None:
            local.was_written(way.edge_id, frame, sent)

    # --- turning ----------------------------------------------------------------------------------------------
    def pump(self, now_ms: int) -> None:
        """Everything that is there or due."""
        if self._closed:
            return
        self._now_ms = now_ms
        self._sockets.drain(self._on_inbound, self._on_outbound, self._on_link)
        for edge_id, out in list(self._out.items()):
            self._produce(edge_id, out.core.tick(now_ms))
        for consumer in self._desk.consumers:
            self._consume(consumer, consumer.tick(now_ms))
        # What was sent just now may have taken events off a descriptor that would not wake us again.
        self._sockets.drain(self._on_inbound, self._on_outbound, self._on_link)

    def look(self, now_ms: int) -> bool:
        """What is there, up to the first record: whoever waits for it goes on before the rest is looked at. True: a
        record came; call `pump` or this again before sleeping, since the descriptor tells of no event twice."""
        if self._closed:
            return False
        self._now_ms, self._came = now_ms, False
        self._sockets.drain(self._on_inbound, self._on_outbound, self._on_link, lambda: self._came)
        return self._came

    def next_deadline(self) -> int | None:
        """Monotonic ms, or None."""
        if self._closed:
            return None
        times = [at for out in self._out.values() if (at := out.core.next_deadline()) is not None]
        times += [at for consumer in self._desk.consumers if (at := consumer.credit_due_ms) is not None]
        return min(times, default=None)

    def reset(self) -> None:
        """Give up all edges, the endpoint stays: others may be accepted and opened at once."""
        for edge_id in self._out:
            self._sockets.hang_up(edge_id)
        self._out.clear()
        self._written_ns.clear()
        self.traffic.clear()
        self._desk.consumers.clear()

    def close(self) -> None:
        """No byte moves after this; idempotent."""
        if not self._closed:
            self._closed = True
            self._out.clear()
            self.traffic.clear()
            self._desk.consumers.clear()
            self._sockets.close()

    def term(self) -> None:
        """The end of the process."""
        self.close()
        self._sockets.term()

    def check(self) -> None:
        """Invariants of every edge's window."""
        for out in self._out.values():
            out.core.check()
        for consumer in self._desk.consumers:
            consumer.check()

    # --- inner ------------------------------------------------------------------------------------------------
    def _on_inbound(self, conn: bytes, frame: bytes) -> None:
        if (message := _decoded(frame)) is not None:
            self._inbound(conn, message)

    def _inbound(self, conn: bytes, message: Message) -> None:
        consumer, effects = self._desk.on_message(message, conn)
        self._consume(consumer, effects)

    def _on_outbound(self, edge_id: int, frame: bytes) -> None:
        out = self._out.get(edge_id)
        if out is not None and (message := _decoded(frame)) is not None:
            self._answered(edge_id, out, message, self._now_ms)

    def _answered(self, edge_id: int, out: _Outbound, message: Message, now_ms: int) -> None:
        self._produce(edge_id, out.core.on_message(message, now_ms))
        held_us = message.held_us if isinstance(message, EdgeCredit) else 0
        self.traffic.credited(edge_id, out.core.credited, held_us, self._clock_ns())

    def _on_link(self, edge_id: int, up: bool) -> None:
        if (out := self._out.get(edge_id)) is not None:
            self._produce(edge_id, out.core.on_link(up, self._now_ms))

    def _produce(self, edge_id: int, effects: list[Effect]) -> None:
        out = self._out[edge_id]
        for effect in effects:
            match effect:
                case Dial():
                    out.path = effect.candidate
                    if effect.candidate == RELAY:
                        self._sockets.hang_up(edge_id)
                    else:
                        self._sockets.dial(edge_id, effect.candidate, out.server_key)
                case Send():
                    if out.path == RELAY:
                        self._events.edge_carry(out.server_key, effect.message)
                    else:
                        self._sockets.send(edge_id, encode_body(effect.message))
                case Ready():
                    self._events.edge_ready(edge_id, effect.path)
                case Failed():
                    self._sockets.hang_up(edge_id)
                    self._events.edge_failed(edge_id, effect.reason, effect.detail)
                case _:
                    pass

    def _consume(self, consumer: EdgeConsumer | None, effects: list[Effect]) -> None:
        for effect in effects:
            match effect:
                case Send(message, conn):
                    if isinstance(message, EdgeCredit):
                        offset = message.consumed_offset
                        held_us = self.traffic.held_us(message.edge_id, offset, self._clock_ns())
                        message = replace(message, held_us=held_us)
                    if conn.startswith(CARRIED):
                        self._events.edge_carry(conn.removeprefix(CARRIED), message)
                    else:
                        self._sockets.reply(conn, encode_body(message))
                case Ready() if consumer is not None:
                    self._events.edge_ready(consumer.edge_id, effect.path)
                case Arrived() if consumer is not None:
                    self._came = True
                    size = HEADER_BYTES + len(effect.record.payload)
                    end = effect.record.end_offset
                    at_ns = self._read_ns or self._clock_ns()
                    self.traffic.began(consumer.edge_id, size, end, at_ns, is_producer=False)
                    self._events.edge_record(consumer.edge_id, effect.record)
                case Failed() if consumer is not None:
                    self._events.edge_failed(consumer.edge_id, effect.reason, effect.detail)
                case _:
                    pass


def _way(edge_id: int, descriptor: int, offset: int, data: bytes, conn: bytes = b"") -> Way:
    frame = frame_bytes(encode_body(EdgeData(edge_id=edge_id, offset=offset, data=data)))
    return Way(edge_id, descriptor, frame, conn)


def _decoded(frame: bytes) -> Message | None:
    """None for what is no stream message: who sends it has no token, or is broken and notices by the silence."""
    try:
        return decode_stream_message(frame)
    except BadEnvelope:
        return None
