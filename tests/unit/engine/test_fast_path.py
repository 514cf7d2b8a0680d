"""The fast path of a stage: whatever comes while it waits in the kernels, it answers what it answers without."""

from __future__ import annotations

import dataclasses
import errno
import signal
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from common.codec import encode_body
from common.edge_records import decode_tokens, encode_tokens
from common.local_edges import _Peer
from common.messages.edge import EdgeCredit
from common.messages.engine import Cancel, Cancelled, CloseEdges, EdgeCarry, EdgesClosed, StageFaulted
from common.messages.node_agent import Sampling
from tests.unit.engine.stage_rig import LIMIT_S, Rig, Waits, cut, now_ms, rows, wait_until
from tests.unit.engine.tiny_model import TinySpec
from worker.engine.engine import Engine
from worker.engine.fast_path import Outcome
from worker.engine.stage_port import EdgeObject

PROMPT = [int(value) for value in np.random.default_rng(5).integers(3, 250, 9)]
TOKENS = 16


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> Waits:
    return Waits(monkeypatch)


def without(engines: list[Engine], patch: pytest.MonkeyPatch) -> None:
    """From here on nothing is fast."""
    for engine in engines:
        patch.setattr(engine.model, "fast_path", None)


@pytest.fixture
def answer(halves: list[Engine], tmp_path: Path) -> list[int]:
    """The greedy answer, without the fast path."""
    with pytest.MonkeyPatch.context() as patch:
        without(halves, patch)
        (tmp_path / "slow").mkdir()
        with Rig(halves, tmp_path / "slow") as rig:
            tokens = rig.generate(PROMPT, TOKENS, settled=False)
    assert len(tokens) == TOKENS and len(set(tokens)) > 3, "the model says nothing"
    return tokens


# --- the same tokens -----------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("sampling", "dtype"),
    [
        (None, "f32"),
        (Sampling(temperature=0.9, top_k=40, seed=7), "f32"),
        (Sampling(repetition_penalty=1.3), "f32"),
        (None, "f16"),
    ],
    ids=["greedy", "sampled", "penalty", "f16"],
)
def test_tokens_are_the_same_and_all_are_fast(
    halves: list[Engine],
    waits: Waits,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    sampling: Sampling | None,
    dtype: str,
) -> None:
    with Rig(halves, tmp_path, dtype=dtype) as rig:
        tokens = rig.generate(PROMPT, TOKENS, sampling, settled=dtype == "f32")
        again = rig.generate(PROMPT[:5], TOKENS, sampling, settled=dtype == "f32")
    first, last = (waits.of(engine) for engine in halves)
    if dtype == "f16":
        assert not waits.outcomes, "rows of other widths are converted by Python"
    else:
        assert len(first) == len(last) == len(tokens) + len(again) - 2
        assert all(len(outcome.sent) == 1 for outcome in first)
        assert all(len(outcome.sent) == (sampling is None) for outcome in last), "only the likeliest token is chosen"
    without(halves, monkeypatch)
    (tmp_path / "slow").mkdir()
    with Rig(halves, tmp_path / "slow", dtype=dtype) as rig:
        assert rig.generate(PROMPT, TOKENS, sampling, settled=False) == tokens
        assert rig.generate(PROMPT[:5], TOKENS, sampling, settled=False) == again
    assert len(tokens) == TOKENS


def test_rows_of_a_wide_model(waits: Waits, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """32 KB a row."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for engines in cut(tmp_path / "m.gguf", TinySpec(width=8192, head_size=16, layers=2)):
        with Rig(engines, tmp_path) as rig:
            tokens = rig.generate(PROMPT, 6)
        assert [len(waits.of(engine)) for engine in engines] == 2 * [len(tokens) - 1] and len(tokens) > 3
        without(engines, monkeypatch)
        with Rig(engines, tmp_path) as rig:
            assert rig.generate(PROMPT, 6, settled=False) == tokens
        monkeypatch.undo()


def test_tokens_are_fed_back_directly(halves: list[Engine], waits: Waits, tmp_path: Path, answer: list[int]) -> None:
    """Both stages here, as fast as they are: whoever is first, the answer is the same."""
    with Rig(halves, tmp_path, direct=True) as rig:
        assert rig.generate(PROMPT, TOKENS, settled=False) == answer
        rig.check()


# --- one stage, the test is the others -----------------------------------------------------------------------------
class Last:
    """The last stage, waiting for its first decode step; the test sends the rows of the answer's tokens."""

    def __init__(self, engines: list[Engine], folder: Path, answer: list[int], *, direct: bool = False) -> None:
        self.first, self.engine = engines
        self.rig = Rig([None, self.engine], folder, direct=direct)
        self.stage = self.rig.stages[1]
        self._answer = answer
        self._position = 0

    def begin(self, sampling: Sampling | None = None) -> int:
        """The next request, up to its first decode step."""
        self._position = 0
        request = self.rig.begin(PROMPT, sampling)
        self.rig.feed(2, self.rows(), begin=True)
        self.rig.arrived(3, self.rig.sequences[2])
        self.rig.settle()
        return request

    def rows(self) -> bytes:
        """The next ones."""
        at = self._position
        ids = PROMPT if at == 0 else [self._answer[at - len(PROMPT)]]
        self._position += len(ids)
        return rows(self.first, ids, at)

    def step(self) -> None:
        """Rows in, token out, and wait again."""
        self.rig.feed(2, self.rows())
        self.rig.arrived(3, self.rig.sequences[2])
        self.rig.settle()

    def tokens(self) -> list[int]:
        return [token for record in self.rig.records[3] for token in decode_tokens(record.payload)]

    def __enter__(self) -> Last:
        self.rig.__enter__()
        self.begin()
        return self

    def __exit__(self, *error: object) -> None:
        self.rig.__exit__(*error)  # type: ignore[arg-type]


class Held:
    """The main thread on its way into the kernels' wait (before=True) or out of a step, until `release`."""

    def __init__(self, last: Last, waits: Waits, *, before: bool) -> None:
        self._waits = waits
        self.reached, self._go = threading.Event(), threading.Event()
        if before:
            waits.before = lambda _path: self._hold()
            last.stage.mailbox.nudge()
            self.wait()
        else:
            waits.after = lambda _path, outcome: self._hold() if outcome.computed else None

    def _hold(self) -> None:
        self.reached.set()
        assert self._go.wait(LIMIT_S)

    def wait(self) -> None:
        assert self.reached.wait(LIMIT_S), "the stage did not come by"

    def release(self) -> None:
        self._waits.before, self._waits.after = lambda _path: None, lambda _path, _outcome: None
        self._go.set()


@pytest.fixture
def last(halves: list[Engine], waits: Waits, tmp_path: Path, answer: list[int]) -> Iterator[Last]:
    with Last(halves, tmp_path, answer) as last:
        yield last


def fast(waits: Waits, last: Last) -> list[Outcome]:
    """Its fast steps until now."""
    last.rig.settle(fast=False)
    return waits.of(last.engine)


def test_feedback_leaves_before_the_token_and_comes_back_as_the_next_object(
    halves: list[Engine], waits: Waits, tmp_path: Path, answer: list[int]
) -> None:
    with Last(halves, tmp_path, answer, direct=True) as last:
        for _ in range(4):
            last.step()
        fed = last.rig.records[90]
        assert last.tokens() == answer[:5] and [record.object_id for record in fed] == [1, 2, 3, 4, 5]
        assert [decode_tokens(record.payload) for record in fed] == [[token] for token in answer[:5]]
    outcomes = waits.of(last.engine)
    assert len(outcomes) == 4
    assert all([way.edge_id for way, _, _ in outcome.sent] == [90, 3] for outcome in outcomes)


def test_what_is_fed_back_is_computed_once_and_waits_for_the_gateway(
    halves: list[Engine], waits: Waits, tmp_path: Path, answer: list[int]
) -> None:
    with Rig([halves[0], None], tmp_path, direct=True) as rig:
        rig.begin(PROMPT)
        rig.token_in(PROMPT, begin=True)
        rig.arrived(2, 1)
        rig.sequences[90] = 1
        for step in range(4):
            rig.settle()
            rig.feed(90, encode_tokens(answer[step : step + 1]))
            rig.arrived(2, step + 2)
            rig.settle(fast=False)
            rig.token_in(answer[step : step + 1])
        rig.settle()
        assert len(waits.of(halves[0])) == 4
        rig.token_in([])  # the sequence is over: what is fed now is dropped
        rig.settle(fast=False)
        rig.feed(90, encode_tokens([5]))
        rig.settle(fast=False)
        assert [record.object_id for record in rig.arrived(2, 6)] == list(range(6)) and not rig.records[2][5].payload
        assert not rig.stages[0].said(StageFaulted)


def test_the_end_token_is_flagged_and_not_fed_back(
    halves: list[Engine], waits: Waits, tmp_path: Path, answer: list[int]
) -> None:
    with Last(halves, tmp_path, answer, direct=True) as last:
        steps = last.stage.role._steps
        assert steps is not None
        steps._shape = dataclasses.replace(steps._shape, end_ids=frozenset([answer[1], 9999]))
        seen = len(waits.outcomes)
        last.stage.mailbox.nudge()
        wait_until(lambda: len(waits.outcomes) > seen)
        last.rig.settle()
        fed = len(last.rig.records[90])
        last.rig.feed(2, last.rows())
        record = last.rig.arrived(3, 2)[1]
        assert record.end and decode_tokens(record.payload) == answer[1:2]
        last.rig.settle(fast=False)
        assert len(last.rig.records[90]) == fed
    (outcome,) = waits.of(last.engine)
    assert [way.edge_id for way, _, _ in outcome.sent] == [3]


def test_a_token_outside_of_the_vocabulary_faults_the_stage_once(
    halves: list[Engine], waits: Waits, tmp_path: Path
) -> None:
    with Rig([halves[0], None], tmp_path) as rig:
        rig.begin(PROMPT)
        rig.token_in(PROMPT, begin=True)
        rig.arrived(2, 1)
        rig.settle()
        rig.token_in([halves[0].header.vocab_size])
        stage = rig.stages[0]
        wait_until(lambda: stage.said(StageFaulted))
        (fault,) = stage.said(StageFaulted)
        assert isinstance(fault, StageFaulted) and "outside the vocabulary" in fault.detail
        assert not waits.of(halves[0]) and len(rig.records[2]) == 1


def test_logits_that_are_no_numbers_are_left_to_python(last: Last, waits: Waits) -> None:
    row = np.full(last.engine.header.embedding_length, np.nan, np.float32)
    last.rig.feed(2, row.tobytes())
    record = last.rig.arrived(3, 2)[1]
    (outcome,) = fast(waits, last)
    assert not outcome.sent and decode_tokens(record.payload) == [0]  # numpy's argmax: the first that is no number


# --- anything else than what was foretold --------------------------------------------------------------------------
@pytest.mark.parametrize("piece", [1, 7, 8, 100])
def test_a_frame_in_pieces(last: Last, waits: Waits, answer: list[int], piece: int) -> None:
    frame = last.rig.raw(2, last.rows())
    last.rig.send_raw(2, frame[:piece])
    wait_until(lambda: any(outcome.data for _, outcome in waits.outcomes))
    last.rig.send_raw(2, frame[piece:])
    last.rig.arrived(3, 2)
    assert last.tokens() == answer[:2] and not fast(waits, last)
    follows(last, waits, answer)


def test_two_frames_at_once(last: Last, waits: Waits, answer: list[int]) -> None:
    last.rig.send_raw(2, last.rig.raw(2, last.rows()) + last.rig.raw(2, last.rows()))
    last.rig.arrived(3, 3)
    assert last.tokens() == answer[:3] and not fast(waits, last)
    follows(last, waits, answer)


@pytest.mark.parametrize("at", [4, 30, -1])
def test_a_damaged_frame_costs_the_connection_and_is_sent_again(
    last: Last, waits: Waits, answer: list[int], at: int
) -> None:
    frame = bytearray(last.rig.raw(2, last.rows()))
    frame[at] ^= 0x10
    last.rig.send_raw(2, frame)
    wait_until(lambda: any(outcome.data for _, outcome in waits.outcomes))
    assert not waits.of(last.engine), "it was taken for what was foretold"
    last.rig.arrived(3, 2)
    assert last.tokens() == answer[:2]
    follows(last, waits, answer)


def test_an_object_that_the_gateway_gave_up(last: Last, waits: Waits, answer: list[int]) -> None:
    last.rig.feed(2, b"")
    assert last.rig.arrived(3, 2)[1].payload == b"" and not fast(waits, last)


def test_a_producer_that_hangs_up_and_comes_back(last: Last, waits: Waits, answer: list[int]) -> None:
    local = last.rig.port._sockets.local
    assert local is not None
    local._lost(local._outbound[2])
    last.rig.turn(lambda: 2 in local._outbound and last.rig.port._out[2].core._down_ms is None)
    follows(last, waits, answer)


def follows(last: Last, waits: Waits, answer: list[int]) -> None:
    """After whatever came, steps are fast again, and right."""
    before, done = len(fast(waits, last)), len(last.tokens())
    last.rig.settle()
    for _ in range(3):
        last.step()
    assert last.tokens() == answer[: done + 3] and len(fast(waits, last)) == before + 3
    assert not last.stage.said(StageFaulted) and not last.rig.failed


# --- what is sent --------------------------------------------------------------------------------------------------
def test_what_a_full_socket_takes_in_part_follows(
    waits: Waits, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for engines in cut(tmp_path / "m.gguf", TinySpec(width=8192, head_size=16, layers=2)):
        with Rig([engines[0], None], tmp_path) as rig:
            rig.begin(PROMPT)
            rig.token_in(PROMPT, begin=True)
            rig.arrived(2, 1)
            rig.settle()
            narrow(rig)
            rig.token_in([5])
            found = rig.arrived(2, 2)[1].payload
            rig.settle()
            ((_, frame, sent),) = waits.of(engines[0])[0].sent
            assert 0 < sent < len(frame)
            assert found == rows(engines[0], [5], len(PROMPT))
        monkeypatch.undo()


def test_what_a_full_socket_does_not_take_follows(halves: list[Engine], waits: Waits, tmp_path: Path) -> None:
    with Rig([halves[0], None], tmp_path) as rig:
        rig.begin(PROMPT)
        rig.token_in(PROMPT, begin=True)
        rig.arrived(2, 1)
        rig.settle()
        peer = narrow(rig)
        stage, count = rig.stages[0], 12
        for step in range(count):  # nobody reads meanwhile
            rig.token_in([step + 5])
            wait_until(lambda step=step: stage.role._steps.position == len(PROMPT) + step + 1)
            wait_until(lambda: stage.port._fast is not None or peer.unsent)
        found = [record.payload for record in rig.arrived(2, count + 1)[1:]]
        assert found == [rows(halves[0], [step + 5], len(PROMPT) + step) for step in range(count)]
    sent = [sent for outcome in waits.of(halves[0]) for _, _, sent in outcome.sent]
    assert -errno.EAGAIN in sent and max(sent) > 0, sent


def narrow(rig: Rig) -> _Peer:
    """The kernel takes little from the first stage."""
    local = rig.stages[0].edges._sockets.local
    assert local is not None
    peer = local._outbound[2]
    peer.sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)
    return peer


def test_a_send_to_a_broken_connection_is_resumed(last: Last, waits: Waits, answer: list[int]) -> None:
    """The consumer hangs up between the forecast and the send."""
    local = last.rig.port._sockets.local
    assert local is not None
    held = Held(last, waits, before=True)
    last.rig.feed(2, last.rows())
    for peer in list(local._inbound.values()):
        local._close(peer)
    held.release()
    wait_until(lambda: waits.of(last.engine))
    last.stage.beat_at(0)  # its port looks at deadlines then
    last.rig.arrived(3, 2)
    ((_, _, sent),) = fast(waits, last)[0].sent
    assert sent == -errno.EPIPE and last.tokens() == answer[:2]
    last.stage.beat_at(now_ms() + 3_600_000)
    follows(last, waits, answer)


# --- what else wants the stage meanwhile ---------------------------------------------------------------------------
def test_a_cancel_before_a_step(last: Last, waits: Waits) -> None:
    last.stage.send(Cancel(request_id=1))
    wait_until(lambda: last.stage.said(Cancelled))
    last.rig.feed(2, last.rows())
    assert last.rig.arrived(3, 2)[1].payload == b"" and not fast(waits, last)


@pytest.mark.parametrize("direct", [False, True])
def test_a_cancel_during_a_step_comes_too_late_for_it(
    halves: list[Engine], waits: Waits, tmp_path: Path, answer: list[int], direct: bool
) -> None:
    with Last(halves, tmp_path, answer, direct=direct) as last:
        held = Held(last, waits, before=False)
        last.rig.feed(2, last.rows())
        held.wait()
        last.stage.send(Cancel(request_id=1))
        held.release()
        wait_until(lambda: last.stage.said(Cancelled))
        last.rig.feed(2, last.rows())
        records = last.rig.arrived(3, 3)
        assert [decode_tokens(record.payload) for record in records] == [answer[:1], answer[1:2], []]
        assert last.stage.said(Cancelled) == [Cancelled(request_id=1, known=True)]
        assert len(fast(waits, last)) == 1
        assert last.begin() == 2  # and nothing is left of it
        last.step()
        assert last.tokens() == [*answer[:2], *answer[:2]]


def test_a_cancel_after_a_step(last: Last, waits: Waits, answer: list[int]) -> None:
    last.step()
    last.stage.send(Cancel(request_id=1))
    wait_until(lambda: last.stage.said(Cancelled))
    last.rig.feed(2, last.rows())
    assert last.rig.arrived(3, 3)[2].payload == b""
    assert last.tokens() == answer[:2] and len(fast(waits, last)) == 1


def test_the_next_request_begins_while_the_stage_waits(last: Last, waits: Waits, answer: list[int]) -> None:
    last.step()
    assert last.begin() == 2
    last.step()
    assert last.tokens() == [*answer[:2], *answer[:2]] and len(fast(waits, last)) == 2


@pytest.mark.parametrize("computing", [False, True])
def test_edges_are_closed_at_once(last: Last, waits: Waits, answer: list[int], computing: bool) -> None:
    held = Held(last, waits, before=False) if computing else None
    if held is not None:
        last.rig.feed(2, last.rows())
        held.wait()
    last.stage.send(CloseEdges(), wait=held is None)
    if held is not None:
        wait_until(lambda: last.stage.port._wanted)
        held.release()
    wait_until(lambda: last.stage.said(EdgesClosed))
    if computing:
        last.rig.arrived(3, 2)
        assert last.tokens() == answer[:2], "what had left has left"
    assert last.stage.port._fast is None and not last.stage.said(StageFaulted)


@pytest.mark.parametrize("computing", [False, True])
def test_edges_of_the_next_generation(last: Last, waits: Waits, answer: list[int], computing: bool) -> None:
    if computing:
        held = Held(last, waits, before=False)
        last.rig.feed(2, last.rows())
        held.wait()
        threading.Timer(0.2, held.release).start()
    last.rig.open()
    last.begin()
    follows(last, waits, answer)


def test_what_comes_over_the_bus_meanwhile(last: Last, waits: Waits, answer: list[int]) -> None:
    """The port thread gets the edges at once, and the stage waits again."""
    for _ in range(20):
        last.stage.send(EdgeCarry(peer=b"p" * 32, frame=encode_body(EdgeCredit(edge_id=3, consumed_offset=0))))
    follows(last, waits, answer)


def test_signals_get_it_out_of_the_kernels_and_it_waits_again(last: Last, waits: Waits, answer: list[int]) -> None:
    before, (main, _) = signal.signal(signal.SIGUSR1, lambda *_: None), last.stage.threads

    def is_out(count: int) -> bool:
        """One that comes a moment before the thread waits interrupts nothing."""
        signal.pthread_kill(main.ident or 0, signal.SIGUSR1)
        time.sleep(0.05)
        return len(waits.outcomes) >= count

    try:
        for count in range(len(waits.outcomes) + 1, len(waits.outcomes) + 6):
            last.rig.settle()
            wait_until(lambda count=count: is_out(count))
    finally:
        signal.signal(signal.SIGUSR1, before)
    follows(last, waits, answer)


def test_a_heartbeat_tells_of_steps_and_of_waiting_but_not_while_it_computes(last: Last, waits: Waits) -> None:
    stage = last.stage
    beats = stage.alive
    stage.beat_at(0)
    wait_until(lambda: stage.alive > beats)
    stage.beat_at(now_ms() + 1500)
    last.rig.settle()
    held = Held(last, waits, before=False)
    last.rig.feed(2, last.rows())
    held.wait()
    path = last.engine.model.fast_path
    assert path is not None
    path._block.is_computing = 1  # as if it had not come back
    beats = stage.alive
    time.sleep(2.5)
    assert stage.alive == beats and not stage.port._wanted
    stage.call(lambda: None)  # the port serves the agent meanwhile
    path._block.is_computing = 0
    held.release()
    wait_until(lambda: stage.alive > beats)


def test_traffic_is_counted_as_without(last: Last, waits: Waits) -> None:
    """held_ms: from arrival, which is before the step; latency_ms: from the write until the bytes came back."""
    last.stage.edges.traffic.take()
    held = Held(last, waits, before=False)
    last.rig.feed(2, last.rows())
    held.wait()
    time.sleep(0.05)
    held.release()
    last.rig.arrived(3, 2)
    last.rig.settle(fast=False)
    wait_until(lambda: not last.stage.edges.held(3))
    counts = {count.edge_id: count for count in last.stage.edges.traffic.take()}
    assert counts[2].records == counts[3].records == 2
    assert 50 <= (counts[2].held_ms or 0) < 60_000 and 50 <= (counts[3].latency_ms or 0) < 60_000


def test_a_stage_that_is_busy_with_something_else_still_answers_on_its_edges(last: Last) -> None:
    """It loads its weights, for one, while its neighbours dial: the port thread turns the edges then."""
    go = threading.Event()
    last.stage.beat_at(0)
    last.stage.mailbox.put(lambda: go.wait(LIMIT_S))
    wait_until(lambda: not last.stage.mailbox.is_waiting)
    try:
        last.rig.feed(2, last.rows())
        last.rig.turn(lambda: any(isinstance(item, EdgeObject) for item in list(last.stage.mailbox._commands)), 20)
    finally:
        go.set()
    last.rig.arrived(3, 2)
