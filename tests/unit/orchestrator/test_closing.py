"""The shutdown sequence: every step bounded, the guard always asked, one result (S1 4.12, 4.13, 5.10, 9.16, 10.13)."""

from __future__ import annotations

import pytest

from common.addresses import Role
from common.effects import SendFailed, StopSignal
from common.limits import FLUSH_MS, PROVIDER_STOP_LIMIT_MS, RPC_CLOSED_MS, STAGE_STOPPED_MS
from common.messages.node_agent import StopRun
from common.messages.provision import StopNodes
from common.messages.serve import CloseRpc
from common.messages.stream import Flush
from services.orchestrator.base import Phase, RunOver
from services.orchestrator.core import ServiceLost, StopLine
from tests.unit.orchestrator.playbook import ADDRESS, NODE_ID, Play

SILENT = "provider stop: no answer from the provisioner within 40 s; the next start of the provider stops what is left"


def stopping(phase: Phase) -> Play:
    """A run that was asked to stop while serving, in this step of its end."""
    play = Play().until(Phase.SERVING)
    play.tell(StopLine("stop"))
    for at, action in (
        (Phase.CLOSING_RPC, play.rpc_closed),
        (Phase.STOPPING_STAGES, play.stage_stopped),
        (Phase.STOPPING_NODES, play.nodes_stopped),
    ):
        if play.run.phase is phase:
            break
        assert play.run.phase is at
        action()
    assert play.at(phase)
    play.said()
    return play


@pytest.mark.spec("S1 4.12", "S1 9.16")
def test_nobody_answers_and_the_run_ends_all_the_same() -> None:
    play = Play().until(Phase.SERVING)
    play.tell(StopLine("stop"))
    assert play.names() == ["CloseRpc"]
    play.harness.advance(RPC_CLOSED_MS - 1)
    assert play.names() == []
    play.harness.advance(1)
    assert play.names() == ["StopRun"]
    play.harness.advance(STAGE_STOPPED_MS)
    assert play.names() == ["StopNodes"]
    play.harness.advance(PROVIDER_STOP_LIMIT_MS)
    assert play.names()[-1] == "Flush"
    play.not_over()
    play.harness.advance(FLUSH_MS)
    assert play.over() == RunOver(1, SILENT)
    play.harness.advance(600_000)
    play.not_over()


def test_late_answers_of_steps_that_are_over_change_nothing() -> None:
    play = stopping(Phase.STOPPING_NODES)
    play.rpc_closed()
    play.stage_stopped()
    play.opened()
    play.loaded()
    play.acked()
    assert (play.run.phase, play.names()) == (Phase.STOPPING_NODES, [])
    play.nodes_stopped()
    play.nodes_stopped("late")
    play.flushed()
    play.flushed()
    assert play.over() == RunOver(0, "")


@pytest.mark.parametrize("phase", [Phase.CLOSING_RPC, Phase.STOPPING_STAGES])
def test_second_signal_skips_to_the_workers_without_grace(phase: Phase) -> None:
    play = stopping(phase)
    play.tell(StopSignal("SIGINT", 2))
    assert play.said() == [StopNodes(fast=True)]
    play.nodes_stopped()
    play.tell(StopSignal("SIGINT", 3))
    assert play.over() == RunOver(0, "")


def test_second_signal_hurries_a_stop_under_way() -> None:
    play = stopping(Phase.STOPPING_NODES)
    play.tell(StopSignal("SIGINT", 2))
    assert play.said() == [StopNodes(fast=True)]
    play.nodes_stopped()
    play.flushed()
    assert play.over() == RunOver(0, "")


def test_first_signal_during_the_end_after_an_error_takes_no_grace_away() -> None:
    play = Play().until(Phase.SERVING)
    play.faulted("x")
    play.said()
    play.tell(StopSignal("SIGINT", 1))
    assert play.said() == []
    play.tell(StopSignal("SIGINT", 2))
    assert play.said() == [StopNodes(fast=True)]


@pytest.mark.spec("S1 10.13", "S1 10.1", "S1 9.16")
def test_stop_error_alone_makes_the_run_fail() -> None:
    play = stopping(Phase.STOPPING_NODES)
    play.records()
    play.node_stopped("cannot be killed")
    play.nodes_stopped(f"node {NODE_ID}: cannot be killed")
    failed = play.records()
    assert [(record["phase"], record["status"]) for record in failed] == [
        ("provider_stop", "failed"),
        ("provider_stop", "failed"),
        ("orch_exit", "failed"),
    ]
    assert failed[-1]["detail"]["phase"] == "provider_stop"
    play.flushed()
    assert play.over() == RunOver(1, f"provider stop: node {NODE_ID}: cannot be killed")


def test_lost_provisioner_is_not_waited_for() -> None:
    play = stopping(Phase.STOPPING_NODES)
    play.tell(ServiceLost(Role.PROVISIONER, "was killed by SIGKILL"))
    play.flushed()
    assert play.over() == RunOver(
        1, "provider stop: the provisioner was killed by SIGKILL; the next start of the provider stops what is left"
    )


@pytest.mark.spec("S1 4.13")
def test_provisioner_lost_while_serving_fails_the_run_and_workers_still_hear_stop_run() -> None:
    play = Play().until(Phase.SERVING)
    play.tell(ServiceLost(Role.PROVISIONER, "ended with status 1"))
    play.rpc_closed()
    assert [type(msg) for msg in play.said()] == [CloseRpc, StopRun]
    play.stage_stopped()
    assert play.said(StopNodes) == []
    play.flushed()
    assert play.over().error == (
        "the provisioner ended with status 1; its workers end with it, "
        "and the next start of the provider stops what is left"
    )


def test_restarted_provisioner_cannot_answer_for_the_workers_of_the_one_before() -> None:
    play = stopping(Phase.STOPPING_NODES)
    play.service_ready(Role.PROVISIONER, boot=2)
    assert play.at(Phase.FLUSHING)
    assert "restarted" in play.run.result.text


def test_lost_gateway_is_not_waited_for() -> None:
    play = stopping(Phase.CLOSING_RPC)
    play.tell(ServiceLost(Role.GATEWAY, "ended with status 0"))
    assert play.at(Phase.STOPPING_STAGES)
    play.stage_stopped()
    play.nodes_stopped()
    play.flushed()
    assert play.over() == RunOver(0, "")


@pytest.mark.parametrize(
    ("phase", "role", "message", "following"),
    [
        (Phase.CLOSING_RPC, Role.GATEWAY, CloseRpc(reason="x"), Phase.STOPPING_STAGES),
        (Phase.STOPPING_STAGES, None, StopRun(run_id=7), Phase.STOPPING_NODES),
        (Phase.STOPPING_NODES, Role.PROVISIONER, StopNodes(), Phase.FLUSHING),
        (Phase.FLUSHING, Role.COLLECTOR, Flush(), Phase.OVER),
    ],
)
def test_step_whose_message_cannot_be_delivered_is_over(
    phase: Phase, role: Role | None, message: object, following: Phase
) -> None:
    play = stopping(phase)
    dst = ADDRESS[role] if role else play.node_actor()
    play.tell(SendFailed(dst, message, "peer_lost"))  # type: ignore[arg-type]
    assert play.at(following)


def test_worker_that_exits_is_not_waited_for() -> None:
    play = stopping(Phase.STOPPING_STAGES)
    play.exited(status=0)
    assert play.said() == [StopNodes()]


def test_dead_worker_is_told_but_not_waited_for() -> None:
    play = Play().until(Phase.SERVING)
    play.member(state="dead")
    play.tell(StopLine("stop"))
    play.rpc_closed()
    assert [type(msg) for msg in play.said()] == [CloseRpc, StopRun, StopNodes]


def test_exited_worker_is_told_nothing() -> None:
    play = Play().until(Phase.SERVING)
    play.exited()
    play.rpc_closed()
    assert [type(msg) for msg in play.said()] == [CloseRpc, StopNodes]


@pytest.mark.spec("S1 10.14")
def test_stop_before_the_provider_was_asked_stops_no_workers() -> None:
    play = Play()
    play.tell(StopSignal("SIGTERM", 1))
    assert play.said(StopNodes) == []
    play.flushed()
    assert play.over() == RunOver(
        1,
        "shutdown requested while waiting for services (the configuration, "
        "config_resolver, provisioner, membership, prompt_gateway, datastream_collector)",
    )


def test_worker_that_reports_during_the_end_is_not_acknowledged() -> None:
    play = Play().until(Phase.READINESS)
    play.tell(StopLine("stop"))
    play.said()
    play.reported()
    play.routed()
    play.member()
    assert play.said() == []
    play.nodes_stopped()
    play.flushed()
    assert play.over().status == 1


def test_without_any_service_a_failed_run_is_over_at_once() -> None:
    play = Play()
    play.unroute(*ADDRESS.values())
    play.tell(StopSignal("SIGTERM", 1))
    assert play.over().status == 1
