"""Some stages of a pipeline in one process: each with its two threads, real sockets between them; the test is the rest
of the pipeline with an EdgePort, so the gateway and whatever stage is missing."""

from __future__ import annotations

import os
import select
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import pytest

from common.bus import mint_keypair
from common.codec import Message, encode_body
from common.edge_records import Record, decode_tokens, encode_record, encode_tokens
from common.edges.port import EdgePort
from common.messages.engine import CloseEdges, EdgeBind, EngineBegin, EngineBegun, Initialize, OpenEdges
from common.messages.node_agent import (
    ObjectSpec,
    RingSpec,
    Sampling,
    StageInboundEdgeWire,
    StageOutboundEdgeWire,
)
from common.messages.orchestrator import EndpointWire
from tests.unit.engine.tiny_model import TinySpec, write_model
from worker.engine.engine import Engine
from worker.engine.fast_path import FastPath, Outcome
from worker.engine.mailbox import Mailbox
from worker.engine.parts import Part
from worker.engine.process import _sampling
from worker.engine.progress import ProgressPage
from worker.engine.stage_port import StagePort
from worker.engine.stage_role import StageRole
from worker.stage_controller import StageState

RUN, FEEDBACK = b"r" * 16, 90
LIMIT_S = 60
CAPACITY = 4 << 20


def wait_until(condition: Callable[[], object], limit_s: float = LIMIT_S) -> None:
    stop = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < stop, "not in time"
        time.sleep(0.002)


def now_ms() -> int:
    return time.monotonic_ns() // 1_000_000


class Waits:
    """What the fast paths did. before, after: called on the main thread around the kernels' wait, with the lock."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.outcomes: list[tuple[FastPath, Outcome]] = []
        self.before: Callable[[FastPath], None] = lambda _path: None
        self.after: Callable[[FastPath, Outcome], None] = lambda _path, _outcome: None
        real = FastPath.wait

        def wait(path: FastPath, *args: Any) -> Outcome:
            self.before(path)
            outcome = real(path, *args)
            self.outcomes.append((path, outcome))
            self.after(path, outcome)
            return outcome

        patch.setattr(FastPath, "wait", wait)

    def of(self, engine: Engine) -> list[Outcome]:
        """Those of this engine that computed something."""
        return [outcome for path, outcome in self.outcomes if path is engine.model.fast_path and outcome.computed]


class Stage:
    """One stage. `call` runs something on its port thread, as a message of the agent does."""

    def __init__(self, engine: Engine, index: int, address: str) -> None:
        self.engine, self.index, self.address = engine, index, address
        self.keys = mint_keypair()
        self.mailbox = Mailbox()
        self.told: list[Message] = []
        self.failure: BaseException | None = None
        self.alive = 0
        self._event = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._calls: deque[Callable[[], object]] = deque()
        self._is_over = False
        self.port = StagePort(self.mailbox, self.told.append, self._wake)
        self.port.alive = self._bump
        self.mailbox.before_wait, self.mailbox.fast_wait = self.port.take_over, self.port.fast_wait
        self.role = StageRole(self.mailbox, self.port, ProgressPage(None), self.told.append, _sampling)
        self.threads = [threading.Thread(target=target, daemon=True) for target in (self._main, self._turn)]
        for thread in self.threads:
            thread.start()
        bind = EdgeBind(run=RUN, public_key=self.keys.public, secret_key=self.keys.secret, addresses=[address])
        self.call(lambda: self.port.receive(Initialize(edge=bind)))

    def _bump(self) -> None:
        self.alive += 1

    def _wake(self) -> None:
        os.eventfd_write(self._event, 1)

    def call(self, what: Callable[[], object], *, wait: bool = True) -> None:
        """On the port thread; wait: until it is done."""
        done = threading.Event()
        self._calls.append(what)
        self._calls.append(done.set)
        self._wake()
        assert not wait or done.wait(LIMIT_S), "the port thread hangs"

    def send(self, message: Message, *, wait: bool = True) -> None:
        """As the agent."""
        self.call(lambda: self.port.receive(message) or self.mailbox.put(message), wait=wait)

    def beat_at(self, ms: int) -> None:
        """Its next heartbeat, which gets it out of the kernels; then each second."""
        self.call(lambda: setattr(self.port, "_beats_ms", ms))

    def said(self, kind: type[Message]) -> list[Message]:
        return [message for message in self.told if isinstance(message, kind)]

    def _main(self) -> None:
        try:
            while not self._is_over:
                message = self.mailbox.get()
                if callable(message):
                    message()
                else:
                    self.role.handlers[type(message)](message)
        except BaseException as error:
            self.failure = error

    def _turn(self) -> None:
        while not self._is_over:
            poll = select.poll()
            for descriptor in (self._event, self.port.fd):
                if descriptor is not None:
                    poll.register(descriptor, select.POLLIN)
            ready = dict(poll.poll(self.port.wait_ms()))
            if self._event in ready:
                os.eventfd_read(self._event)
            while self._calls:
                self._calls.popleft()()
            self.port.pump()

    @property
    def edges(self) -> EdgePort:
        assert self.port._edges is not None
        return self.port._edges

    @property
    def is_ready(self) -> bool:
        controller = self.role._controller
        return controller is not None and controller.state is StageState.READY_IDLE

    @property
    def is_settled(self) -> bool:
        """It waits, and nothing is on its way that would get it out of there."""
        return self.mailbox.is_waiting and not any(self.edges.held(edge) for edge in list(self.edges._out))

    def close(self) -> None:
        self.send(CloseEdges())

        def stop() -> None:
            self._is_over = True
            self.mailbox.put(lambda: None)

        self.call(stop, wait=False)
        for thread in self.threads:
            thread.join(LIMIT_S)
            assert not thread.is_alive(), "a thread of a stage hangs"
        if self.port._edges is not None:
            self.port._edges.term()
        assert self.failure is None, self.failure


class Rig:
    """`with Rig(engines, folder)`. engines: by stage, None: the test is that stage. direct: tokens are fed back."""

    def __init__(
        self, engines: Sequence[Engine | None], folder: Path, *, direct: bool = False, dtype: str = "f32"
    ) -> None:
        self.direct, self._dtype, self.count, self._folder = direct, dtype, len(engines), folder
        self.keys = mint_keypair()
        self.port = EdgePort(self.keys, RUN, self)
        self.port.bind([self._address("rig")])
        self.records: dict[int, list[Record]] = {}
        self.failed: list[str] = []
        self.ready: set[int] = set()
        self.is_holding = False
        """Records are not given back."""
        self.generation = 0
        self.stages = {
            index: Stage(engine, index, self._address(f"s{index}"))
            for index, engine in enumerate(engines)
            if engine is not None
        }
        self.requests = 0
        self.sequences: dict[int, int] = {}
        self.open()

    def _address(self, name: str) -> str:
        return f"ipc://{self._folder}/{name}"

    # --- edges ------------------------------------------------------------------------------------------------
    def _spec(self, edge: int) -> ObjectSpec:
        is_token = edge in (1, self.count + 1, FEEDBACK)
        return ObjectSpec(max_extent=1 << 22, alignment=4, dtype="u32" if is_token else self._dtype)

    def _inbound(self, edge: int) -> StageInboundEdgeWire:
        return StageInboundEdgeWire(
            edge_id=edge,
            kind="Activation",
            object_spec=self._spec(edge),
            ring_spec=RingSpec(data_capacity=CAPACITY, alignment=64),
            edge_token=bytes([edge, self.generation]) * 8,
        )

    def _outbound(self, edge: int, consumer: int) -> StageOutboundEdgeWire:
        to = self.stages.get(consumer)
        return StageOutboundEdgeWire(
            edge_id=edge,
            kind="Activation",
            object_spec=self._spec(edge),
            ring_spec=RingSpec(data_capacity=CAPACITY, alignment=64),
            consumer_node_id=3,
            consumer_endpoint=EndpointWire(
                node_key=to.keys.public if to else self.keys.public,
                candidates=[to.address if to else self._address("rig")],
            ),
            edge_token=bytes([edge, self.generation]) * 8,
        )

    def open(self) -> None:
        """All edges, of the next generation."""
        self.generation += 1
        self.port.reset()
        self.records = {edge: [] for edge in (*range(1, self.count + 2), FEEDBACK)}
        self.ready.clear()
        last = self.count - 1
        for edge in range(1, self.count + 2):
            if edge - 1 not in self.stages and edge - 2 in self.stages:
                self.port.accept(self._inbound(edge))
        if self.direct and 0 not in self.stages:
            self.port.accept(self._inbound(FEEDBACK))
        for index, stage in sorted(self.stages.items(), reverse=True):
            stage.send(
                OpenEdges(
                    orchestrator=b"o" * 32,
                    run_id=1,
                    node_id=index,
                    stage_index=index,
                    stage_count=self.count,
                    inbound=self._inbound(index + 1),
                    outbound=self._outbound(index + 2, index + 1),
                    generation=self.generation,
                    feedback_in=self._inbound(FEEDBACK) if self.direct and index == 0 else None,
                    feedback_out=self._outbound(FEEDBACK, 0) if self.direct and index == last else None,
                )
            )
            stage.mailbox.put(lambda stage=stage: stage.role.loaded(stage.engine))
        for edge in range(1, self.count + 2):
            if edge - 1 in self.stages and edge - 2 not in self.stages:
                self.port.open(self._outbound(edge, edge - 1), now_ms())
        if self.direct and 0 in self.stages and last not in self.stages:
            self.port.open(self._outbound(FEEDBACK, 0), now_ms())
        self.turn(lambda: all(stage.is_ready for stage in self.stages.values()) and len(self.ready) == self._mine())
        self.sequences = dict.fromkeys(self.records, 0)
        for stage in self.stages.values():
            stage.beat_at(now_ms() + 3_600_000)

    def _mine(self) -> int:
        return len(self.port._out) + len(self.port._desk.consumers)

    def turn(self, until: Callable[[], object], limit_s: float = LIMIT_S) -> None:
        """The test's own edges, until the condition holds."""
        stop = time.monotonic() + limit_s
        while not until():
            assert time.monotonic() < stop, [stage.failure for stage in self.stages.values()]
            select.select([self.port.fd], [], [], 0.01)
            self.port.pump(now_ms())

    def edge_record(self, edge_id: int, record: Record) -> None:
        self.records[edge_id].append(record)
        if not self.is_holding:
            self.port.consumed(edge_id, record.end_offset)

    def edge_ready(self, edge_id: int, path: str) -> None:
        self.ready.add(edge_id)

    def edge_failed(self, edge_id: int, reason: str, detail: str) -> None:
        self.failed.append(detail)

    def edge_carry(self, peer: bytes, message: Message) -> None:
        raise AssertionError(encode_body(message))

    # --- what the gateway does --------------------------------------------------------------------------------
    def begin(self, prompt: Sequence[int], sampling: Sampling | None = None) -> int:
        """The next request; its number."""
        self.requests += 1
        for stage in self.stages.values():
            stage.send(
                EngineBegin(
                    request_id=self.requests,
                    first_object_id=self.sequences[min(self.stages) + 1],
                    sampling=sampling,
                    recent=list(prompt),
                )
            )
            wait_until(lambda stage=stage: len(stage.said(EngineBegun)) >= self.requests)
        return self.requests

    def record(self, edge: int, payload: bytes, *, begin: bool = False) -> Record:
        """The next one of an edge that the test produces."""
        at = self.sequences[edge]
        return Record(at, at, payload, begin=begin, end=True)

    def feed(self, edge: int, payload: bytes, *, begin: bool = False) -> Record:
        record = self.record(edge, payload, begin=begin)
        self.sequences[edge] += 1
        self.port.write(edge, encode_record(record), now_ms())
        return record

    def raw(self, edge: int, payload: bytes) -> bytes:
        """The frame of the next record, that the test sends by `send_raw`; its edge takes it for sent."""
        record = self.record(edge, payload)
        way = self.port.way_out(edge, record)
        assert way is not None
        self.sequences[edge] += 1
        self.port.was_written(way, way.frame, len(way.frame), time.monotonic_ns())
        self.port.write(edge, encode_record(record), now_ms())
        return way.frame

    def send_raw(self, edge: int, data: bytes) -> None:
        local = self.port._sockets.local
        assert local is not None
        local._outbound[edge].sock.send(data)

    def token_in(self, ids: Sequence[int], *, begin: bool = False) -> Record:
        return self.feed(1, encode_tokens(list(ids)), begin=begin)

    def settle(self, *, fast: bool = True) -> None:
        """Until all stages wait; fast: in the kernels."""

        def is_done() -> bool:
            waiting = not any(self.port.held(edge) for edge in self.port._out)
            waiting = waiting and all(stage.is_settled for stage in self.stages.values())
            return waiting and not (fast and any(stage.port._fast is None for stage in self.stages.values()))

        self.turn(is_done)

    def arrived(self, edge: int, count: int) -> list[Record]:
        """The first records of an edge that the test consumes."""
        self.turn(lambda: len(self.records[edge]) >= count)
        return self.records[edge]

    def generate(
        self, prompt: Sequence[int], count: int, sampling: Sampling | None = None, *, settled: bool = True
    ) -> list[int]:
        """Tokens of a pipeline that is all stages, up to the end token. settled: each step finds the stages waiting in
        the kernels."""
        self.begin(prompt, sampling)
        tokens: list[int] = []
        feed, out = list(prompt), self.count + 1
        while len(tokens) < count:
            if tokens and settled:
                self.settle()
            self.token_in(feed, begin=not tokens)
            record = self.arrived(out, self.sequences[1])[self.sequences[1] - 1]
            feed = decode_tokens(record.payload)
            tokens += feed
            if record.end:
                break
        return tokens

    def check(self) -> None:
        """Each consumed edge is gapless; what is fed back counts as its objects do, and an aborted one is not."""
        for edge, records in self.records.items():
            found = [record.sequence for record in records]
            if edge == FEEDBACK:
                assert found == sorted(set(found)) and found == [record.object_id for record in records]
            else:
                assert found == list(range(len(found))), f"edge {edge}: {found}"

    def __enter__(self) -> Rig:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            for stage in self.stages.values():
                stage.close()
            if kind is None:
                self.check()
        finally:
            self.port.term()


def rows(engine: Engine, ids: Sequence[int], start: int) -> bytes:
    """What a stage before would send for these tokens."""
    assert engine.model.fast_path is not None and engine.model.fast_path.pending is None
    return np.ascontiguousarray(engine.model.run_blocks(list(ids), start), np.float32).tobytes()


def cut(path: Path, spec: TinySpec) -> Iterator[list[Engine]]:
    """A tiny model cut in two."""
    write_model(path, spec)

    def part(index: int) -> Engine:
        at = spec.layers // 2
        span = (0, at) if index == 0 else (at, spec.layers)
        engine = Engine.load(path, part_of=lambda _: Part(*span, index == 0, index == 1), threads=1)
        engine.warm_up()
        return engine

    engines = [part(0), part(1)]
    yield engines
    for engine in engines:
        engine.close()
