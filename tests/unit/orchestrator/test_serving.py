"""Worker loss while serving and before (design.md 6 row 22): suspension, return, silence limits, Unknown."""

from __future__ import annotations

import pytest

from common.addresses import Role
from common.effects import SendFailed
from common.limits import DEAD_WORKER_FAULT_MS, OWN_RETRY_MS, WORKER_SILENT_MS_SERVING, WORKER_SILENT_MS_STARTUP
from common.messages.member import MemberChanged
from common.messages.node_agent import ProvisionStage
from common.messages.serve import PromptActive, ResumeServing, SuspendServing
from common.messages.service import LeaseKept
from common.records import CHANNEL_PROMPT
from services.orchestrator.base import Phase
from services.orchestrator.core import ServiceLost
from tests.unit.orchestrator.playbook import ADDRESS, NODE_ID, Play

SUSPENSION = SuspendServing(error=f"node {NODE_ID} does not answer")


@pytest.mark.spec("S1 4.11")
def test_dead_worker_suspends_after_five_seconds_and_resumes_when_alive() -> None:
    play = Play().until(Phase.SERVING)
    play.member(state="dead")
    play.harness.advance(DEAD_WORKER_FAULT_MS - 1)
    assert play.said() == []
    play.harness.advance(1)
    assert play.said() == [SUSPENSION]
    play.harness.advance(20_000)
    assert play.said() == []
    play.member()
    assert play.said() == [ResumeServing()]
    play.harness.advance(WORKER_SILENT_MS_SERVING * 2)
    assert play.at(Phase.SERVING)


@pytest.mark.spec("S1 4.11")
@pytest.mark.parametrize("state", ["alive", "dead"])
def test_a_word_of_suspension_that_did_not_reach_the_gateway_is_said_again(state: str) -> None:
    """A ResumeServing that was lost left the gateway suspended for ever."""
    play = Play().until(Phase.SERVING)
    play.member(state="dead")
    play.harness.advance(DEAD_WORKER_FAULT_MS)
    if state == "alive":
        play.member()
    word = ResumeServing() if state == "alive" else SUSPENSION
    assert play.said()[-1] == word
    play.tell(SendFailed(ADDRESS[Role.GATEWAY], word, "unroutable"))
    assert play.said() == []
    play.harness.advance(OWN_RETRY_MS)
    assert play.said() == [word]
    play.harness.advance(20 * OWN_RETRY_MS)
    assert play.said() == [] and play.at(Phase.SERVING)


@pytest.mark.spec("S1 10.10", "S1 9.10")
@pytest.mark.parametrize("asked", [True, False])
def test_a_gateway_that_hangs_before_it_has_answered_a_lease_is_lost_with_or_without_a_prompt(asked: bool) -> None:
    play = Play().until(Phase.SERVING)
    play.gateway_hangs = True
    if asked:
        play.gateway(PromptActive(request_id=9, prompt_id=1))
    play.harness.advance(WORKER_SILENT_MS_SERVING + 10_000)
    assert play.run.result.text == "the prompt gateway did not answer for 60 s while serving prompts"


@pytest.mark.spec("S1 10.10", "S1 9.10")
def test_a_gateway_that_answers_no_lease_is_lost_like_a_worker() -> None:
    """Its active request has its one fault on record; a broken way to the bus says nothing of the gateway."""
    play = Play().until(Phase.SERVING)
    play.gateway(PromptActive(request_id=9, prompt_id=1))
    play.gateway(LeaseKept())
    play.gateway_hangs = True
    play.harness.advance(WORKER_SILENT_MS_SERVING - 5000)
    assert play.at(Phase.SERVING)
    play.gateway(LeaseKept())
    play.harness.views.link_up = False
    play.harness.advance(WORKER_SILENT_MS_SERVING * 2)
    assert play.at(Phase.SERVING)
    play.harness.views.link_up = True
    play.harness.advance(WORKER_SILENT_MS_SERVING + 10_000)
    assert play.run.result.text == "the prompt gateway did not answer for 60 s while serving prompts"


def test_a_dead_worker_that_cannot_be_provisioned_has_until_its_limit() -> None:
    play = Play().until(Phase.WEIGHTS)
    play.member()
    play.member(state="dead")
    resent = ProvisionStage(provision=play.run.stage_wire(play.run.workers[0]))
    play.tell(SendFailed(play.node_actor(), resent, "unroutable"))
    assert play.at(Phase.WEIGHTS)
    play.harness.advance(WORKER_SILENT_MS_STARTUP + 1000)
    assert "dead in SWIM for 30 s" in play.run.result.text


def test_short_absence_is_not_told_to_anybody() -> None:
    play = Play().until(Phase.SERVING)
    play.member(state="dead")
    play.harness.advance(4_000)
    play.member()
    play.harness.advance(120_000)
    assert play.said() == [] and play.run.phase is Phase.SERVING


@pytest.mark.parametrize("state", ["dead", "left"])
def test_worker_that_stays_dead_fails_the_run(state: str) -> None:
    play = Play().until(Phase.SERVING)
    play.member(state=state)
    play.harness.advance(WORKER_SILENT_MS_SERVING - 1)
    assert play.at(Phase.SERVING)
    play.harness.advance(1)
    play.records()
    assert play.run.result.text == f"node {NODE_ID} was lost while serving prompts: dead in SWIM for 60 s"
    assert play.finish().status == 1


@pytest.mark.parametrize("phase", [Phase.READINESS, Phase.WEIGHTS])
def test_at_start_up_the_limit_is_shorter(phase: Phase) -> None:
    play = Play().until(phase)
    play.member()
    play.member(state="dead")
    play.harness.advance(WORKER_SILENT_MS_STARTUP - 1)
    assert play.at(phase)
    play.harness.advance(1)
    assert "dead in SWIM for 30 s" in play.run.result.text


@pytest.mark.parametrize("phase", [Phase.WEIGHTS, Phase.RPC, Phase.SERVING])
def test_unknown_never_fails_a_run(phase: Phase) -> None:
    play = Play().until(phase)
    play.membership_restarts()
    play.harness.advance(100_000)
    assert play.at(phase)


def test_unknown_after_dead_neither_fails_nor_resumes() -> None:
    play = Play().until(Phase.SERVING)
    play.member(state="dead")
    play.harness.advance(DEAD_WORKER_FAULT_MS)
    assert play.said() == [SUSPENSION]
    play.membership_restarts()
    play.harness.advance(300_000)
    assert play.at(Phase.SERVING) and play.said() == []
    play.member()
    assert play.said() == [ResumeServing()]


def test_worker_that_died_while_the_rpc_was_opened_suspends_it_soon_after() -> None:
    play = Play().until(Phase.RPC)
    play.member(state="dead")
    play.harness.advance(6_000)
    play.said()
    play.opened()
    play.harness.advance(0)
    assert play.said() == [SUSPENSION]


def test_transition_message_alone_decides_nothing() -> None:
    play = Play().until(Phase.SERVING)
    play.tell(
        MemberChanged(
            peer=play.key(), boot=1, logical_id="node", from_state="alive", to_state="dead", reason="x", incarnation=1
        )
    )
    play.harness.advance(120_000)
    assert play.at(Phase.SERVING)


@pytest.mark.spec("S1 9.10", "S1 10.10")
def test_a_dead_gateways_active_request_has_its_one_fault_on_record() -> None:
    """design.md 2: the gateway cannot say it any more; a request that had ended gets no second end."""
    play = Play().until(Phase.SERVING)
    play.tell(PromptActive(request_id=7, prompt_id=1))
    play.tell(PromptActive(request_id=7, prompt_id=1, ended=True))
    play.tell(PromptActive(request_id=8, prompt_id=2))
    play.tell(ServiceLost(Role.GATEWAY, "was killed by SIGKILL"))
    faults = play.records(CHANNEL_PROMPT)
    assert [(fault["request_id"], fault["phase"], fault["status"]) for fault in faults] == [
        (8, "prompt_complete", "failed")
    ]
    assert faults[0]["detail"] == {"prompt_id": 2, "error": "the prompt gateway was killed by SIGKILL"}
