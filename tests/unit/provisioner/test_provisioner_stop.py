"""Playbooks of the provisioner's actor: stopping, the guard's drop, and the ends of runs and of itself."""

from __future__ import annotations

import pytest

from common.effects import Exit, Log, OwnerGone, RunJob, StopSignal
from common.limits import LEASE_TTL_MS, OWNER_GONE_EXIT_MS
from common.messages.provision import (
    NodeExited,
    NodeFailed,
    NodesStopped,
    NodeStopped,
    PrepareProvider,
    ProviderPrepared,
    StopNodes,
)
from common.messages.service import Lease, RunEnded
from services.provisioner.core import RECHECK_INTERVAL_MS
from services.provisioner.plugin import (
    Exited,
    PluginNodeHandle,
    StdoutLine,
)
from services.provisioner.state import Minted, Prepared, Rechecked
from tests.unit.provisioner.playbook import Play, start_node, started


# --- stop -------------------------------------------------------------------------------------------------------
@pytest.mark.spec("S1 4.12", "S1 7.6", "S1 10.13")
def test_stop_takes_the_last_started_first_attempts_all_and_keeps_the_first_error(ready: Play) -> None:
    for node in (1, 2, 3):
        ready.live(node)
    ready.order(StopNodes())
    for node, error in ((3, ""), (2, "does not die"), (1, "disk is full")):
        job = ready.job("stop_node")
        assert job.pool == "stop" and job.args == {"handle": PluginNodeHandle(f"h{node}", 1000 + node), "fast": False}
        ready.see(node, Exited(0, "exited with status 0"))
        ready.done(job, error=error)
        answers = ready.sent()
        assert answers[0] == NodeStopped(node_id=node, error=error)
    assert answers[1:] == [NodesStopped(stopped=[3], first_error="node 2: does not die")]
    assert ready.events() == [(3, "NodeStopped"), (2, "NodeStopped"), (1, "NodeStopped")]
    ready.order(StopNodes())
    assert ready.sent() == [NodesStopped(stopped=[3], first_error="node 2: does not die")]


@pytest.mark.spec("S1 8.6")
def test_a_stop_without_an_exit_notice_still_has_its_event(ready: Play) -> None:
    ready.live(1)
    ready.order(StopNodes())
    ready.done(ready.job("stop_node"))
    assert ready.events() == [(1, "NodeStopped")]


def test_a_late_exit_notice_makes_no_second_event(ready: Play) -> None:
    ready.live(1)
    ready.order(StopNodes())
    ready.done(ready.job("stop_node"))
    ready.see(1, StdoutLine("bye"), Exited(0, "exited with status 0"))
    assert ready.events() == [(1, "NodeStopped")]


def test_an_exit_that_was_asked_for_is_no_failure(ready: Play) -> None:
    ready.live(1)
    ready.live(2)
    ready.order(StopNodes())
    ready.see(1, Exited(0, "exited with status 0"))
    assert not [msg for msg in ready.sent() if isinstance(msg, NodeExited)]


@pytest.mark.spec("S1 9.16")
def test_a_dead_workers_handle_is_stopped_too(ready: Play) -> None:
    ready.live(1)
    ready.see(1, Exited(1, "exited with status 1"))
    ready.sent()
    ready.order(StopNodes())
    ready.done(ready.job("stop_node"))
    assert ready.sent() == [NodeStopped(node_id=1), NodesStopped(stopped=[1])]


def test_nothing_to_stop_is_answered_at_once(ready: Play) -> None:
    ready.order(StopNodes())
    assert ready.sent() == [NodesStopped()]


def test_a_stop_during_a_start_waits_for_it_and_then_stops_it_first(ready: Play) -> None:
    ready.live(1)
    job = ready.begin(2)
    ready.order(StopNodes())
    assert ready.effects() == []
    ready.done(job, PluginNodeHandle("h2"))
    assert ready.sent() == [started(2)]
    stop = ready.job("stop_node")
    assert stop.args["handle"].id == "h2"
    ready.done(stop)
    ready.done(ready.job("stop_node"))
    assert ready.sent()[-1] == NodesStopped(stopped=[2, 1])


def test_a_stop_before_the_start_calls_it_off(ready: Play) -> None:
    ready.mint(1)
    ready.order(start_node(2))
    minting = ready.job("mint")
    ready.order(StopNodes())
    assert ready.job("discard").args["minted"].handle_id == "h1"
    (failed,) = ready.sent()
    assert failed == NodeFailed(node_id=1, stage_index=0, error="stopped before it was started")
    ready.done(minting, Minted(b"\x02" * 32, "h2", "launch"))
    ready.job("discard")
    assert ready.sent() == [
        NodeFailed(node_id=2, stage_index=1, error="stopped before it was started"),
        NodesStopped(),
    ]


def test_no_start_while_stopping_and_none_after_it(ready: Play) -> None:
    ready.live(1)
    ready.order(StopNodes())
    stop = ready.job("stop_node")
    ready.order(start_node(2))
    assert ready.sent() == [NodeFailed(node_id=2, stage_index=1, error="the workers are being stopped")]
    ready.done(stop)
    ready.sent()
    ready.order(start_node(2))
    assert ready.sent() == [NodeFailed(node_id=2, stage_index=1, error="the workers are being stopped")]


def test_a_fast_stop_hurries_the_one_under_way(ready: Play) -> None:
    ready.live(1)
    ready.live(2)
    ready.order(StopNodes())
    slow = ready.job("stop_node")
    ready.order(StopNodes(fast=True))
    hurry = ready.job("hurry")
    assert hurry.args["handle"].id == "h2"
    ready.done(hurry)
    ready.done(slow)
    assert ready.job("stop_node").args["fast"] is True


def test_a_stop_that_times_out_does_not_hold_up_the_others(ready: Play) -> None:
    ready.live(1)
    ready.live(2)
    ready.order(StopNodes())
    late = ready.job("stop_node")
    ready.done(late, error="timed out after 30000 ms")
    following = ready.job("stop_node")
    assert following.args["handle"].id == "h1"
    ready.done(late)
    assert ready.effects() == []
    ready.done(following)
    assert ready.sent()[-1] == NodesStopped(stopped=[1], first_error="node 2: timed out after 30000 ms")


# --- the guard's drop, and the end ------------------------------------------------------------------------------
@pytest.mark.spec("S1 4.13", "S1 9.16")
def test_a_lost_lease_stops_the_workers_and_tells_whoever_still_listens(ready: Play) -> None:
    ready.live(1)
    ready.order(Lease(ttl_ms=LEASE_TTL_MS))
    ready.harness.advance(LEASE_TTL_MS - 1)
    ready.order(Lease(ttl_ms=LEASE_TTL_MS))
    ready.harness.advance(LEASE_TTL_MS - 1)
    assert ready.effects() == []
    ready.harness.advance(1)
    ready.done(ready.job("stop_node"))
    exited, stopped = ready.sent()
    assert exited.reason == "stopped by the provisioner: the orchestrator's lease ended"
    assert stopped == NodeStopped(node_id=1)
    ready.order(start_node(1))
    assert ready.sent() == [NodeFailed(node_id=1, stage_index=0, error="the provider is not prepared")]


@pytest.mark.spec("S1 4.13", "S1 9.16")
def test_without_its_owner_it_stops_all_without_the_bus_and_exits(ready: Play) -> None:
    ready.live(1)
    ready.live(2)
    ready.harness.views.routes.forget()
    ready.harness.tell(OwnerGone())
    ready.done(ready.job("stop_node"))
    ready.done(ready.job("stop_node"))
    assert ready.effects() == [Exit(0)]


@pytest.mark.spec("S1 4.13")
@pytest.mark.parametrize("end", [OwnerGone(), StopSignal("SIGTERM", 1)])
def test_what_is_asked_for_while_its_last_words_leave_starts_nothing(ready: Play, end: object) -> None:
    """A StartNode that was on its way when the launcher died started a worker that nobody stopped."""
    ready.live(1)
    ready.harness.tell(end)
    ready.done(ready.job("stop_node"))
    assert ready.effects() == [Exit(0)]
    ready.sent()
    ready.order(start_node(2))
    assert ready.sent() == [NodeFailed(node_id=2, stage_index=1, error="the provisioner ends")]
    assert ready.effects() == []


def test_without_its_owner_it_is_gone_in_time_whatever_hangs(ready: Play) -> None:
    ready.live(1)
    ready.harness.tell(OwnerGone())
    ready.job("stop_node")
    ready.harness.advance(8_000)
    assert ready.job("hurry").args["fast"] is True
    ready.harness.advance(OWNER_GONE_EXIT_MS - 8_000)
    (last,) = ready.effects()
    assert isinstance(last, Exit) and last.status == 1


def test_sigterm_stops_what_is_left_and_the_second_one_skips_the_grace(ready: Play) -> None:
    ready.live(1)
    ready.harness.tell(StopSignal("SIGTERM", 1))
    stop = ready.job("stop_node")
    ready.harness.tell(StopSignal("SIGTERM", 2))
    ready.job("hurry")
    ready.done(stop, error="does not die")
    assert ready.effects() == [Exit(1, "node 1: does not die")]


def test_sigterm_with_nothing_left_exits_at_once(ready: Play) -> None:
    ready.live(1)
    ready.order(StopNodes())
    ready.done(ready.job("stop_node"))
    ready.order(RunEnded(status=0))
    ready.harness.tell(StopSignal("SIGTERM", 1))
    assert ready.effects() == [Exit(0)]


def test_the_end_of_a_run_clears_it_for_the_next(ready: Play) -> None:
    ready.live(1)
    ready.order(RunEnded(status=1, error="x"))
    stop = ready.job("stop_node")
    ready.order(PrepareProvider(run_id=1, provider="process"), src=b"p" * 32)
    assert ready.effects() == []
    ready.done(stop)
    ready.sent()
    ready.done(ready.job("prepare"), Prepared(0))
    assert ready.sent(b"p" * 32) == [ProviderPrepared(provider="process")]
    ready.done(stop)  # a late result of the run before
    ready.order(start_node(1, run=b"\x09" * 16), src=b"p" * 32)
    ready.job("mint")


def test_another_orchestrator_takes_over_only_after_everything_is_stopped(ready: Play) -> None:
    ready.live(1)
    ready.order(PrepareProvider(run_id=1, provider="process"), src=b"p" * 32)
    stop = ready.job("stop_node")
    ready.done(stop)
    assert [type(msg) for msg in ready.sent()] == [NodeExited, NodeStopped]
    ready.job("prepare")


def test_the_same_orchestrator_may_begin_again_after_a_stop(ready: Play) -> None:
    ready.live(1)
    ready.order(StopNodes())
    ready.done(ready.job("stop_node"))
    ready.sent()
    ready.prepare()
    ready.live(1)


def test_what_may_be_left_is_looked_for_while_the_provisioner_lives(ready: Play) -> None:
    ready.live(1)
    ready.order(StopNodes())
    ready.done(ready.job("stop_node"), error="it may still run and cost money")
    ready.harness.advance(RECHECK_INTERVAL_MS)
    look = ready.job("recheck")
    assert look.pool == "stop"
    ready.order(RunEnded(status=1))
    ready.done(look, Rechecked(1))
    ready.harness.advance(RECHECK_INTERVAL_MS)
    ready.done(ready.job("recheck"), Rechecked(0))
    ready.harness.advance(10 * RECHECK_INTERVAL_MS)
    assert not [effect for effect in ready.effects() if isinstance(effect, RunJob)]


def test_what_a_look_cannot_stop_is_said_once(ready: Play) -> None:
    ready.live(1)
    ready.order(StopNodes())
    ready.done(ready.job("stop_node"), error="it may still run")
    ready.effects()
    said = []
    looks = [Rechecked(1, ("worker x may be left",)), Rechecked(1, ("worker x may be left",)), "it took too long"]
    for found in [*looks, Rechecked(0)]:
        ready.harness.advance(RECHECK_INTERVAL_MS)
        look = ready.job("recheck")
        if isinstance(found, str):
            ready.done(look, error=found)
        else:
            ready.done(look, found)
        said.append([effect.text for effect in ready.harness.effects() if isinstance(effect, Log)])
    assert said[:2] == [["worker x may be left"], []]
    assert len(said[2]) == 1 and "it took too long" in said[2][0] and "mvp-orchestrator workers" in said[2][0]
    assert said[3] == []
