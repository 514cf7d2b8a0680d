"""Another attempt at a node: the worker before it is stopped first, whatever state it is in; there are never two."""

from __future__ import annotations

import msgspec
import pytest

from common.effects import RunJob
from common.messages.bus import Admitted, Revoke
from common.messages.provision import NodeExited, NodeFailed, NodesStopped, NodeStarted, StopNodes
from services.provisioner.plugin import Exited, PluginNodeHandle
from services.provisioner.state import Minted
from tests.unit.provisioner.playbook import ROUTER, Play, start_node


def attempt(node_id: int, number: int) -> object:
    first = start_node(node_id)
    return msgspec.structs.replace(first, spec=msgspec.structs.replace(first.spec, attempt=number))


@pytest.fixture
def play() -> Play:
    made = Play()
    made.prepare()
    return made


def comes(play: Play, node_id: int, number: int) -> NodeStarted:
    """From the mint to NodeStarted; keys and handles differ with each attempt."""
    minted = Minted(bytes([node_id, number]) * 16, f"h{node_id}-{number}", f"nodes/{node_id}/launch.json")
    play.done(play.job("mint"), minted)
    play.harness.sent()
    play.harness.tell(Admitted(key=minted.public_key), src=ROUTER)
    play.done(play.job("start_node"), PluginNodeHandle(minted.handle_id, 2000 + number))
    (started,) = [msg for msg in play.sent() if isinstance(msg, NodeStarted)]
    return started


def test_a_live_worker_is_stopped_at_once_then_the_next_attempt_begins(play: Play) -> None:
    handle = play.live(2)
    play.order(attempt(2, 1))
    job = play.job("replace_node")
    assert job.args == {"handle": handle, "fast": True}
    assert [type(msg) for msg in play.sent(ROUTER)] == [Revoke]
    play.order(attempt(2, 1))
    assert play.effects() == [], "a repeat is not executed again"
    play.done(job)
    started = comes(play, 2, 1)
    assert (started.attempt, started.handle) == (1, "h2-1") and started.node_key != bytes([2]) * 32
    play.see(2, Exited(-9, "killed"))
    assert play.sent() == [], "the old worker's end is nobody's business"


def test_a_dead_worker_is_cleaned_up_before_it_is_replaced(play: Play) -> None:
    play.live(2)
    play.see(2, Exited(-9, "killed by SIGKILL"))
    (exited,) = play.sent()
    assert isinstance(exited, NodeExited) and exited.attempt == 0
    play.order(attempt(2, 1))
    play.done(play.job("replace_node"))
    assert comes(play, 2, 1).attempt == 1


def test_one_that_cannot_be_stopped_is_not_replaced_and_stays_the_guards(play: Play) -> None:
    play.live(2)
    play.order(attempt(2, 1))
    play.done(play.job("replace_node"), error="the engine does not answer")
    (failed,) = play.sent()
    assert isinstance(failed, NodeFailed) and failed.attempt == 1
    assert failed.error == "the worker that it replaces could not be stopped: the engine does not answer"
    play.order(attempt(2, 2))
    play.done(play.job("replace_node"))
    assert comes(play, 2, 2).attempt == 2


def test_a_failed_start_is_replaced_at_once_and_one_under_way_when_it_has_ended(play: Play) -> None:
    job = play.begin(2)
    play.order(attempt(2, 1))
    assert play.effects() == [], "only its end can be waited for"
    play.done(job, PluginNodeHandle("h2", 1002))
    play.done(play.job("replace_node"))
    minted = Minted(b"\x21" * 32, "h2-1", "nodes/2/launch.json")
    play.done(play.job("mint"), minted)
    play.harness.sent()
    play.harness.tell(Admitted(key=minted.public_key), src=ROUTER)
    play.done(play.job("start_node"), error="no space")
    assert [msg.error for msg in play.sent() if isinstance(msg, NodeFailed)] == ["no space"]
    play.effects()
    play.order(attempt(2, 2))
    assert comes(play, 2, 2).attempt == 2


def test_the_end_of_the_run_stops_the_attempt_that_lives(play: Play) -> None:
    play.live(2)
    play.order(attempt(2, 1))
    play.done(play.job("replace_node"))
    comes(play, 2, 1)
    play.order(StopNodes())
    job = play.job("stop_node")
    assert isinstance(job, RunJob) and job.args["handle"].id == "h2-1"
    play.done(job)
    (stopped,) = [msg for msg in play.sent() if isinstance(msg, NodesStopped)]
    assert (stopped.stopped, stopped.first_error) == ([2], "")


def test_a_stop_while_a_worker_is_replaced_starts_no_other(play: Play) -> None:
    play.live(2)
    play.order(attempt(2, 1))
    job = play.job("replace_node")
    play.order(StopNodes())
    (stop,) = [effect for effect in play.effects() if isinstance(effect, RunJob)]
    play.done(job)
    assert not [effect for effect in play.effects() if isinstance(effect, RunJob)]
    play.done(stop)
    assert [msg for msg in play.sent() if isinstance(msg, NodesStopped)]
