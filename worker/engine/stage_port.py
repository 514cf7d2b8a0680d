"""The edges of a pipeline stage on their sockets, between the agent's link and the main thread.

Both threads turn them, one at a time: the port thread while the main thread computes many rows, so that the transport
keeps moving; the main thread itself while it waits for records or decodes, since each hand-over between threads costs
a token 0.1 ms, twice a stage. Where the next decode step can be told in advance, the main thread waits in the kernels
(fast_path.py); whoever else wants the edges meanwhile gets it out of there.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from common.bus import KeyPair
from common.bus_edges import EdgeSocketError
from common.codec import Message, encode_body
from common.edge_records import Record, encode_record
from common.edges.network import EdgeNetwork
from common.edges.port import EdgePort, Transport
from common.limits import EDGE_CREDIT_LATE_MS, ENGINE_HEARTBEAT_MS
from common.messages.engine import (
    Cancel,
    CloseEdges,
    EdgeCarry,
    EdgeMoved,
    EdgeReady,
    EngineBegin,
    Fatal,
    Initialize,
    OpenEdges,
    ReleaseRun,
    ResetRole,
    StageFaulted,
)
from worker.engine.mailbox import Mailbox

if TYPE_CHECKING:
    from worker.engine.fast_path import FastPath, Forecast


_AFTER_STEP_MS = 20  # what is due while a step is computed is looked at this often


@dataclass(frozen=True, slots=True)
class EdgeObject:
    """For the main thread: a record of the inbound edge."""

    edge_id: int
    record: Record


@dataclass(frozen=True, slots=True)
class EdgeOpened:
    """For the main thread: an edge is ready."""

    edge_id: int


class StagePort:
    """tell: queue a message to the agent; wake: make the port thread turn. Both from any thread."""

    def __init__(
        self,
        mailbox: Mailbox,
        tell: Callable[[Message], None],
        wake: Callable[[], None],
        *,
        transport: Transport = EdgeNetwork,
        clock_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self._mailbox, self._tell, self._wake = mailbox, tell, wake
        self._transport, self._clock_ns = transport, clock_ns
        self._edges: EdgePort | None = None
        self.candidates: list[str] = []
        self._begun: int | None = None
        self._opened = False
        self._lock = threading.RLock()
        """Of the edges: a ZeroMQ socket may be used by one thread after the other, with a lock between them."""
        self._fast: FastPath | None = None
        """The main thread waits there, with the lock."""
        self._wanted = 0
        """How many others want the lock."""
        self._is_put_off = False
        """The main thread sleeps elsewhere, since the lock was wanted."""
        self.forecast: Callable[[], tuple[FastPath, Forecast] | None] = lambda: None
        """What the main thread's next step will be, if that can be told."""
        self.fast_record: Callable[[EdgeObject], None] = lambda _object: None
        """A record whose step is computed and whose results have left already."""
        self._read: list[EdgeObject] | None = None
        self._main_reads = False
        """The main thread watches the edges' descriptor, the port thread does not."""
        self._closed = False
        self._generation = 0
        """Of the edges that are open; what the main thread still has for earlier ones is dropped."""
        self._beats_ms = 0
        self.alive: Callable[[], None] = lambda: None
        """Bumps the progress page: called while the main thread waits for work, so that idle differs from frozen."""

    def _now_ms(self) -> int:
        return self._clock_ns() // 1_000_000

    # --- main thread ------------------------------------------------------------------------------------------
    def write(self, generation: int, edge_id: int, record: Record) -> None:
        """Append a record to the outbound edge."""
        data = encode_record(record)
        with self._lock:
            if self._edges is not None and generation == self._generation and not self._closed:
                self._edges.write(edge_id, data, self._now_ms())
        self._touched()

    def consumed(self, generation: int, edge_id: int, end_offset: int) -> None:
        """An inbound record is no longer in use."""
        earlier = False
        with self._lock:
            if self._edges is not None and generation == self._generation and not self._closed:
                earlier = self._edges.consumed(edge_id, end_offset)
        if earlier:  # it is the port thread that looks at deadlines
            self._wake()
        else:
            self._touched()

    def _touched(self) -> None:
        """A send may have taken events off the descriptor: who watches it looks again. The main thread does before it
        sleeps."""
        if not self._main_reads:
            self._wake()

    def leave_to_port(self) -> None:
        """The main thread is going to be busy for long."""
        if self._main_reads:
            self._main_reads = False
            self._wake()

    def take_over(self) -> int | None:
        """The main thread is going to wait: it turns the edges, and gets the descriptor to watch."""
        if self._edges is None or not self._opened:
            return None
        self._main_reads = True
        with self._lock:
            if not self._edges.look(self._now_ms()):
                self._edges.pump(self._now_ms())
            return self._edges.fd

    def fast_wait(self, wake: int) -> bool:
        """The main thread is going to sleep: on the fast path, if the next step is foretold. wake: a descriptor that
        ends it. False: it is not."""
        with self._lock:
            if self._wanted:
                self._is_put_off = True
                return False
            edges, told = self._edges, self.forecast() if self._main_reads else None
            if edges is None or told is None:
                return False
            path, forecast = told
            way_in = edges.way_in(forecast.edge_id, forecast.record)
            ways_out = [edges.way_out(leaving.edge_id, leaving.record) for leaving in forecast.departing]
            ways = [way for way in ways_out if way is not None]
            if way_in is None or len(ways) < len(ways_out):
                return False
            self._fast = path
            if self._wanted:  # whoever came before that line has not seen that somebody sleeps here
                self._fast, self._is_put_off = None, True
                return False
            outcome = path.wait(forecast, way_in, ways, wake, edges.fd)
            self._fast = None
            for way, frame, sent in outcome.sent:
                edges.was_written(way, frame, sent, outcome.left_ns)
            if outcome.computed:
                self._read = []
            if outcome.data:
                edges.was_read(way_in, outcome.data, outcome.arrived_ns, self._now_ms())
            if self._read is not None:
                (event,), self._read = self._read, None
                self.fast_record(event)
                assert path.pending is None, "what the fast path computed was not used"
        return True

    @contextmanager
    def _exclusive(self) -> Iterator[None]:
        """The edges, for the port thread; it waits for a decode step at most."""
        self._wanted += 1
        if self._fast is not None:
            self._mailbox.nudge()
        with self._lock:
            self._wanted -= 1
            yield
            if self._is_put_off:
                self._is_put_off = False
                self._mailbox.nudge()

    # --- port thread ------------------------------------------------------------------------------------------
    @property
    def fd(self) -> int | None:
        """For the port thread to watch, if it has to."""
        return self._edges.fd if self._edges and not self._main_reads else None

    def wait_ms(self) -> int | None:
        """How long the port may sleep."""
        if self._edges is None:
            return None
        times = [self._beats_ms] if self._opened else []
        if (at := self._due_ms()) is not None:
            times.append(at)
        at_least = _AFTER_STEP_MS if self._is_computing else 0
        return max(at_least, min(times) - self._now_ms()) if times else None

    @property
    def _is_computing(self) -> bool:
        """The main thread has the edges for the time of a step: only what cannot wait waits for it, since the link to
        the agent is this thread's, too."""
        fast = self._fast
        return fast is not None and fast.is_computing

    def _due_ms(self) -> int | None:
        """When the edges need the port thread, whatever else happens."""
        due = self._edges.next_deadline() if self._edges is not None else None
        return due if due is None or not self._main_reads else due + EDGE_CREDIT_LATE_MS

    def pump(self) -> None:
        """Whatever moves or is due."""
        if self._edges is None or self._is_computing:
            return
        at, due = self._now_ms(), self._due_ms()
        beats = self._opened and at >= self._beats_ms
        if self._main_reads and not beats and (due is None or due > at):
            return  # the main thread sees to what moves; at a heartbeat it may be busy with something else than steps
        if beats:
            self._beats_ms = at + ENGINE_HEARTBEAT_MS
            if self._mailbox.is_waiting:
                self.alive()
        with self._exclusive():
            self._edges.pump(at)
            counts = self._edges.traffic.take() if beats else []
        for count in counts:
            self._tell(
                EdgeMoved(
                    edge_id=count.edge_id,
                    records=count.records,
                    bytes=count.bytes,
                    latency_ms=count.latency_ms,
                    held_ms=count.held_ms,
                )
            )

    def receive(self, message: Message) -> bool:
        """A message of the agent. True: taken care of, the port need not do anything more with it."""
        match message:
            case Initialize() if message.edge is not None:
                keys = KeyPair(message.edge.public_key, message.edge.secret_key)
                self._edges = EdgePort(keys, message.edge.run, self, self._transport, self._clock_ns)
                try:
                    self.candidates = self._edges.bind(message.edge.addresses, message.edge.advertise)
                except EdgeSocketError as error:
                    self._tell(Fatal(error=str(error)))
                    return True
            case OpenEdges():
                self._open(message)
                return True
            case EdgeCarry():
                if self._edges is not None:
                    with self._exclusive():
                        self._edges.carried(message.peer, message.frame, self._now_ms())
                return True
            case EngineBegin():
                self._begun = message.request_id
                self._mailbox.put(message)
                return True
            case Cancel() if message.request_id == self._begun:
                self._mailbox.cancel(message.request_id)
                self._mailbox.put(message)
                return True
            case CloseEdges() | ReleaseRun() | ResetRole():
                self._close()
        return False

    def _open(self, message: OpenEdges) -> None:
        if self._edges is None:
            detail = "this engine has no edge endpoint"
            self._tell(StageFaulted(reason="EdgeFault", detail=detail, generation=message.generation))
            return
        if self._opened and self._begun is not None:
            # The step that runs for the edges before is cut short.
            self._mailbox.cancel(self._begun)
            self._begun = None
        with self._exclusive():
            self._edges.reset()
            self._generation = message.generation
            # First the main thread's table, so that it knows the edges before it hears of them.
            self._mailbox.put(message)
            self._opened = True
            self._edges.accept(message.inbound)
            if message.feedback_in is not None:
                self._edges.accept(message.feedback_in)
            for edge in (message.outbound, message.feedback_out):
                if edge is not None:
                    self._edges.open(edge, self._now_ms())

    def _close(self) -> None:
        """No byte moves any more; the step that runs is cut short."""
        if self._begun is not None:
            self._mailbox.cancel(self._begun)
        with self._exclusive():
            self._closed, self._opened, self._main_reads = True, False, False
            if self._edges is not None:
                self._edges.close()

    def check(self) -> None:
        """Invariants of the edges."""
        if self._edges is not None:
            self._edges.check()

    # --- EdgeEvents -------------------------------------------------------------------------------------------
    def edge_record(self, edge_id: int, record: Record) -> None:
        """To the main thread; it is credited after its step."""
        event = EdgeObject(edge_id, record)
        if self._read is not None:
            self._read.append(event)
        else:
            self._mailbox.put(event)

    def edge_ready(self, edge_id: int, path: str) -> None:
        """The agent's half and the engine's half of the stage table both want to know."""
        self._mailbox.put(EdgeOpened(edge_id))
        self._tell(EdgeReady(edge_id=edge_id, path=path, generation=self._generation))

    def edge_failed(self, edge_id: int, reason: str, detail: str) -> None:
        """Nothing more can come in or go out in order."""
        self._tell(StageFaulted(reason=reason, detail=detail, generation=self._generation))

    def edge_carry(self, peer: bytes, message: Message) -> None:
        """Over the bus, by the agent."""
        self._tell(EdgeCarry(peer=peer, frame=encode_body(message)))
