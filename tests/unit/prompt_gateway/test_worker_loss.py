"""What the gateway does when its worker is suspended, dead, back again, or cannot be reached (design.md 6 row 22)."""

from __future__ import annotations

import pytest

from common.effects import SendFailed
from common.limits import DEAD_WORKER_FAULT_MS, PROMPT_CANCEL_MS
from common.messages.node_agent import CancelRequest
from common.messages.serve import (
    CloseRpc,
    OpenPromptRpc,
    PromptRpcReady,
    ResumeServing,
    RpcClosed,
    ServingFailed,
    SuspendServing,
)
from common.messages.service import RunEnded
from services.prompt_gateway.tcp import Listening
from tests.unit.prompt_gateway.rig import AGENT, OPEN, ORCHESTRATOR, Rig


@pytest.fixture
def rig() -> Rig:
    rig = Rig().open()
    rig.reports()
    return rig


def test_suspend_faults_the_active_prompt_and_holds_the_rest_until_resume(rig: Rig) -> None:
    conn, other = rig.connect(), rig.connect()
    rig.ask(conn)
    rig.ask(other)
    (infer,) = rig.prompts()
    rig.tell(SuspendServing(error="worker node 1 is dead"), src=ORCHESTRATOR)
    assert [line["error"] for line in rig.lines(conn)] == ["worker node 1 is dead"]
    rig.ask(conn)
    rig.advance(10 * PROMPT_CANCEL_MS)
    assert rig.prompts() == []
    assert rig.lines(other) == []
    # The first CancelRequest may be lost with the worker; the second is answered.
    assert rig.cancels() == [infer.request_id]
    rig.tell(ResumeServing(), src=ORCHESTRATOR)
    assert rig.cancels() == [infer.request_id]
    assert rig.prompts() == []
    rig.cancelled(infer.request_id, known=False)
    (second,) = rig.prompts()
    rig.done(second)
    assert [line["type"] for line in rig.lines(other)] == ["done"]
    assert len(rig.prompts()) == 1
    assert rig.reports() == []


def test_after_resume_the_cancel_limit_runs_again(rig: Rig) -> None:
    rig.ask(rig.connect())
    rig.tell(SuspendServing(error="dead"), src=ORCHESTRATOR)
    rig.tell(ResumeServing(), src=ORCHESTRATOR)
    rig.advance(PROMPT_CANCEL_MS)
    assert isinstance(rig.reports()[0], ServingFailed)


def test_a_dead_member_stops_dispatch_at_once_and_costs_the_active_prompt_after_five_seconds(rig: Rig) -> None:
    conn, other = rig.connect(), rig.connect()
    rig.ask(conn)
    (infer,) = rig.prompts()
    rig.member("suspect")
    rig.member("dead")
    rig.advance(DEAD_WORKER_FAULT_MS - 1)
    rig.member("alive")
    rig.advance(DEAD_WORKER_FAULT_MS)
    rig.done(infer)
    assert [line["type"] for line in rig.lines(conn)] == ["done"]
    rig.ask(conn)
    (infer,) = rig.prompts()
    rig.member("dead")
    rig.ask(other)
    assert rig.lines(conn) == []
    rig.advance(DEAD_WORKER_FAULT_MS)
    (fault,) = rig.lines(conn)
    assert "was lost" in fault["error"]
    rig.advance(10 * PROMPT_CANCEL_MS)
    assert (rig.prompts(), rig.reports()) == ([], [])
    rig.member("alive")
    assert rig.cancels() == [infer.request_id] * 2
    rig.cancelled(infer.request_id)
    assert len(rig.prompts()) == 1


def test_a_member_view_that_is_unknown_stops_nothing(rig: Rig) -> None:
    rig.h.views.members.forget()
    rig.ask(rig.connect())
    assert len(rig.prompts()) == 1


def test_suspension_that_comes_while_the_listener_binds_counts() -> None:
    rig = Rig()
    rig.tell(OPEN, src=ORCHESTRATOR)
    rig.tell(SuspendServing(error="dead"), src=ORCHESTRATOR)
    rig.tell(Listening("127.0.0.1", 1))
    assert isinstance(rig.reports()[0], PromptRpcReady)
    rig.ask(rig.connect())
    assert rig.prompts() == []
    rig.tell(ResumeServing(), src=ORCHESTRATOR)
    assert len(rig.prompts()) == 1


@pytest.mark.spec("S1 10.10", "S1 10.12", "S1 6.11")
@pytest.mark.parametrize("reason", ["unroutable", "peer_lost", "queue_full", "link_down", "refused", "unsupported"])
def test_a_prompt_that_cannot_be_sent_is_a_serving_failure(rig: Rig, reason: str) -> None:
    conn, other = rig.connect(), rig.connect()
    rig.ask(conn)
    rig.ask(other)
    (infer,) = rig.prompts()
    rig.records()
    rig.tell(SendFailed(AGENT, infer, reason))
    (failed,) = rig.reports()
    assert isinstance(failed, ServingFailed)
    assert "could not be sent" in failed.error
    assert [rig.lines(c)[0]["error"] for c in (conn, other)] == [failed.error] * 2
    assert [(r["phase"], r["status"]) for r in rig.records()][:2] == [
        ("node_prompt_send", "failed"),
        ("prompt_complete", "failed"),
    ]
    rig.done(infer)
    assert (rig.lines(conn), rig.prompts()) == ([], [])


@pytest.mark.parametrize("how", ["suspended", "dead"])
def test_a_lost_worker_that_cannot_be_reached_is_the_orchestrators_business(rig: Rig, how: str) -> None:
    conn, other = rig.connect(), rig.connect()
    rig.ask(conn)
    rig.ask(other)
    (infer,) = rig.prompts()
    if how == "dead":
        rig.member("dead")
    else:
        rig.tell(SuspendServing(error="dead"), src=ORCHESTRATOR)
    rig.tell(SendFailed(AGENT, infer, "unroutable"))
    assert [line["type"] for line in rig.lines(conn)] == ["fault"]
    assert (rig.reports(), rig.prompts(), rig.lines(other)) == ([], [], [])
    if how == "dead":
        rig.member("alive")
    else:
        rig.tell(ResumeServing(), src=ORCHESTRATOR)
    assert len(rig.prompts()) == 1


def test_a_cancel_for_a_worker_that_was_restarted_frees_the_slot(rig: Rig) -> None:
    conn = rig.connect()
    rig.ask(conn)
    (infer,) = rig.prompts()
    rig.close(conn)
    rig.tell(SendFailed(AGENT, CancelRequest(request_id=infer.request_id), "unroutable"))
    rig.ask(rig.connect())
    assert rig.prompts() == []
    rig.tell(SendFailed(AGENT, CancelRequest(request_id=infer.request_id), "peer_lost"))
    assert len(rig.prompts()) == 1
    assert rig.reports() == []


@pytest.mark.spec("S1 10.10", "S1 9.10")
def test_a_workers_fault_is_a_prompt_fault_and_serving_goes_on(rig: Rig) -> None:
    conn = rig.connect()
    rig.ask(conn)
    rig.fault(rig.prompts()[0], "context is full")
    assert [line["error"] for line in rig.lines(conn)] == ["context is full"]
    rig.ask(conn)
    rig.cancelled(rig.prompts()[0].request_id)
    assert [line["type"] for line in rig.lines(conn)] == ["fault"]
    assert rig.reports() == []


def test_no_nodes_named_means_no_member_is_watched() -> None:
    rig = Rig().open(
        OpenPromptRpc(run_id=1, node_id=1, mode="direct", encode_actor=AGENT, decode_actor=AGENT, nodes=[])
    )
    rig.member("dead")
    rig.ask(rig.connect())
    assert len(rig.prompts()) == 1


@pytest.mark.spec("S1 10.10", "S1 10.12")
def test_prompts_wait_while_the_gateway_is_cut_off_from_the_bus(rig: Rig) -> None:
    """To send one would fail, and end the run."""
    conn = rig.connect()
    rig.link(up=False)
    rig.ask(conn)
    rig.advance(60_000)
    assert rig.prompts() == [] and rig.lines(conn) == []
    rig.link(up=True)
    (infer,) = rig.prompts()
    rig.done(infer)
    assert [line["type"] for line in rig.lines(conn)] == ["done"]


@pytest.mark.spec("S1 9.10")
def test_another_orchestrator_does_not_end_this_run(rig: Rig) -> None:
    """A word of the run before that comes late, or a second orchestrator."""
    conn = rig.connect()
    rig.ask(conn)
    (infer,) = rig.prompts()
    stranger = b"\x77" * 32
    for word in (SuspendServing(error="not ours"), RunEnded(status=0, error=""), CloseRpc(reason="not ours")):
        rig.h.tell(word, src=stranger)
    assert (stranger, RpcClosed(settled=0)) in rig.h.sent()
    assert rig.lines(conn) == []
    rig.done(infer)
    assert [line["type"] for line in rig.lines(conn)] == ["done"]
