"""The InferenceActor and its two bridges as pure actors: S2 3.1, 3.2, 3.4, 3.5, 4.1 to 4.5 and the gaps closed."""

from __future__ import annotations

import json
import random

import pytest

from common.effects import Log
from common.messages.inference import InferenceFault, InferenceNotReady, InferenceResponse
from tests.unit.gpu_node.playbook import LAPTOP, OTHER, PID, SPEC, A, B, Node
from worker.gpu_node.bridges import ProcessBridge
from worker.gpu_node.events import Error, ProcessExited, ProcessStarted, SpawnChild, Started, WorkerReady
from worker.gpu_node.limits import PENDING_REPLIES_MAX, WORKER_LINE_BYTES_MAX
from worker.gpu_node.process_actor import ProcessActor


@pytest.mark.spec("S2 2.1", "S2 2.2", "S2 3.2", "S2 3.4", "S2 4.1")
def test_the_tree_starts_its_own_process_and_bridge() -> None:
    node = Node()
    assert SpawnChild(SPEC) in node.harness.effects()
    system = node.harness.system
    assert isinstance(system.actor(node.inference.process_addr), ProcessActor)
    bridge = system.actor(node.inference.bridge_addr)
    assert isinstance(bridge, ProcessBridge) and bridge.target == node.address
    assert not node.inference.process_alive and not node.inference.ready


@pytest.mark.spec("S2 3.5", "S2 4.1", "S2 6.4")
def test_boot_is_started_then_ready_with_the_pid_though_the_line_comes_in_pieces() -> None:
    node = Node()
    node.process(Started(PID))
    assert node.statuses() == [ProcessStarted(PID)]
    assert node.inference.process_alive and not node.inference.ready
    for piece in ("importing tinygrad\n", '{"stat', 'us": "ready", ', '"pid": 99}', "\n"):
        assert node.statuses() == []
        node.out(piece)
    assert node.statuses() == [WorkerReady(99)]
    assert node.inference.ready and node.inference.worker_pid == 99


@pytest.mark.spec("S2 3.1", "S2 4.2", "S2 6.4")
def test_a_request_becomes_one_line_and_its_answer_goes_to_reply_to_on_the_node_that_asked() -> None:
    node = Node()
    node.boot()
    node.ask(5, A, max_tokens=9, temperature=0.25, prompt="héllo\n")
    assert node.written() == [{"id": 1, "prompt": "héllo\n", "max_tokens": 9, "temperature": 0.25}]
    assert node.replies() == []
    node.out('{"response": "hi"}\n')
    assert node.owners() == [(LAPTOP, A)]
    node.ask(6, B, owner=OTHER)
    node.out('{"id": 2, "response": "ho"}\n')
    assert node.replies() == [(B, InferenceResponse(request_id=6, text="ho"))]


@pytest.mark.spec("S2 4.3", "S2 7.5.2")
def test_concurrent_requests_are_answered_in_order_to_their_own_callers() -> None:
    node = Node()
    node.boot()
    node.ask(1, A)
    node.ask(1, B, owner=OTHER)
    assert [line["prompt"] for line in node.written()] == ["p1", "p1"]
    node.out('{"response":"r1"}\n{"response":"r2"}\n')
    assert node.owners() == [(LAPTOP, A), (OTHER, B)]
    assert not node.inference.pending_replies


@pytest.mark.spec("S2 7.5.2")
def test_an_id_pairs_a_line_with_its_request_whatever_the_order() -> None:
    node = Node()
    node.boot()
    for number in (1, 2, 3):
        node.ask(number, A)
    node.out('{"id":3,"response":"three"}\n{"id":1,"error":"one"}\n{"id":77,"response":"nobody"}\n{"response":"two"}\n')
    assert [reply for _, reply in node.replies()] == [
        InferenceResponse(request_id=3, text="three"),
        InferenceFault(request_id=1, error="one"),
        InferenceResponse(request_id=2, text="two"),
    ]


@pytest.mark.spec("S2 7.3.3", "S2 4.3")
def test_an_error_line_settles_its_request_and_the_next_is_served() -> None:
    node = Node()
    node.boot()
    node.ask(1, A)
    node.ask(2, B)
    node.out('{"error":"generation failed: x"}\n')
    assert node.replies() == [(A, InferenceFault(request_id=1, error="generation failed: x"))]
    assert any(isinstance(effect, Log) and "generation failed" in effect.text for effect in node.harness.effects())
    node.out('{"response":"fine"}\n')
    assert node.replies() == [(B, InferenceResponse(request_id=2, text="fine"))]


@pytest.mark.spec("S2 4.5", "S2 7.3.4")
def test_a_request_before_readiness_is_answered_at_once_and_neither_queued_nor_written() -> None:
    node = Node()
    node.ask(1, A)
    node.process(Started(PID))
    node.ask(2, A)
    assert node.replies() == [
        (A, InferenceNotReady(request_id=1)),
        (A, InferenceNotReady(request_id=2)),
    ]
    assert InferenceNotReady(request_id=1).text == ""
    assert node.written() == [] and not node.inference.pending_replies


@pytest.mark.spec("S2 4.4", "S2 7.3.2")
def test_the_death_of_the_worker_drains_the_queue_and_the_node_goes_on_to_say_why() -> None:
    node = Node()
    node.boot()
    node.ask(1, A)
    node.ask(2, B, owner=OTHER)
    node.out("Traceback\nCUDA out of memory\n", "stderr")
    node.die(-9)
    why = "the worker was killed by signal 9; its last words: CUDA out of memory"
    assert node.replies() == [
        (A, InferenceFault(request_id=1, error=why)),
        (B, InferenceFault(request_id=2, error=why)),
    ]
    assert InferenceFault(request_id=1, error=why).text == ""
    assert node.statuses() == [ProcessExited(-9, why)]
    assert not node.inference.process_alive and not node.inference.ready
    node.ask(3, A)
    assert node.replies() == [(A, InferenceFault(request_id=3, error=why))]


@pytest.mark.spec("S2 4.4")
def test_a_worker_that_cannot_start_or_whose_pipes_fail_leaves_nobody_hanging() -> None:
    """The original's Error path cleared the flags and forgot the queue (rust-swactor.md 11.2)."""
    node = Node()
    node.process(Error("worker: No such file or directory"))
    assert node.statuses() == [ProcessExited(None, "the worker failed: worker: No such file or directory")]
    node.ask(1, A)
    assert [type(reply) for _, reply in node.replies()] == [InferenceFault]
    node = Node()
    node.boot()
    node.ask(1, A)
    node.process(Error("it has not read"))
    node.die(1)
    assert [type(reply) for _, reply in node.replies()] == [InferenceFault]
    assert len(node.statuses()) == 1, "one end is told once"


@pytest.mark.spec("S2 6.4", "S2 3.2")
@pytest.mark.parametrize(
    "noise",
    [
        b"Downloading: 40%\n",
        b"\xff\xfe\n",
        b"{\n",
        b'"text"\n',
        b"17\n",
        b"[]\n",
        b'{"response": 5}\n',
        b'{"status": "busy"}\n',
        b"[" * 5000 + b"\n",
        b"\n\r\n",
        b"1" * 5000 + b"\n",
    ],
)
def test_what_is_none_of_the_shapes_is_logged_and_settles_nobody(noise: bytes) -> None:
    node = Node()
    node.boot()
    node.ask(1, A)
    node.out(noise)
    assert node.replies() == []
    node.out('{"response":"ok"}\n')
    assert node.replies() == [(A, InferenceResponse(request_id=1, text="ok"))]


def test_a_line_that_never_ends_costs_its_request_and_no_memory() -> None:
    node = Node()
    node.boot()
    node.ask(1, A)
    node.ask(2, A)
    for _ in range(5):
        node.out(b"x" * (WORKER_LINE_BYTES_MAX // 2))
    assert len(node.inference.output_buffer) <= WORKER_LINE_BYTES_MAX
    node.out('\n{"response":"two"}\n')
    first, second = (reply for _, reply in node.replies())
    assert isinstance(first, InferenceFault) and "longer than" in first.error
    assert second == InferenceResponse(request_id=2, text="two")


def test_lone_surrogates_of_a_worker_do_not_break_the_reply() -> None:
    node = Node()
    node.boot()
    node.ask(1, A)
    node.ask(2, A)
    node.out('{"response":"a\\ud800b"}\n{"error":"c\\ud800"}\n')
    first, second = (reply for _, reply in node.replies())
    assert first == InferenceResponse(request_id=1, text="a?b")
    assert isinstance(second, InferenceFault)


def test_a_repeated_request_is_served_once_and_a_full_queue_refuses() -> None:
    node = Node()
    node.boot()
    node.ask(1, A)
    node.ask(1, A)
    assert len(node.written()) == 1
    for number in range(2, PENDING_REPLIES_MAX + 2):
        node.ask(number, A)
    ((_, reply),) = node.replies()
    assert isinstance(reply, InferenceFault) and reply.request_id == PENDING_REPLIES_MAX + 1


@pytest.mark.spec("S2 3.2")
def test_stopping_the_actor_kills_the_child_and_settles_the_queue() -> None:
    from worker.gpu_node.events import SignalChild

    node = Node()
    node.boot()
    node.ask(1, A)
    node.harness.system.stop(node.address)
    node.harness.run()
    assert SignalChild(kill=True) in node.harness.effects()
    assert [type(reply) for _, reply in node.replies()] == [InferenceFault]


@pytest.mark.parametrize("seed", range(30))
def test_whatever_happens_every_request_gets_exactly_one_reply(seed: int) -> None:
    """S2 7.5.2 and row 20 under random events; the harness checks the invariants after each."""
    rng = random.Random(seed)
    node, asked, settled = Node(), 0, []
    for _ in range(200):
        match rng.randrange(8):
            case 0 if rng.random() < 0.3:
                node.process(Started(PID))
            case 1 if node.inference.process_alive:
                node.out('{"status":"ready","pid":1}\n')
            case 2 | 3:
                asked += 1
                node.ask(asked, rng.choice([A, B]))
            case 4:
                node.out(json.dumps({"response": "x"}) + "\n")
            case 5:
                node.out(json.dumps({"error": "x", "id": rng.randrange(20)}) + "\n")
            case 6:
                node.out(rng.choice(["noise\n", "{", "\n", '{"id":1}\n']))
            case 7 if rng.random() < 0.02:
                node.die()
            case _:
                pass
        settled += [reply.request_id for _, reply in node.replies()]
    node.die()
    settled += [reply.request_id for _, reply in node.replies()]
    assert sorted(settled) == list(range(1, asked + 1))
