"""What the bus could not deliver: a partner that is out of reach for a while is nobody's end; for long it is the error
of the phase that wanted to tell it something."""

from __future__ import annotations

from typing import Any

import pytest

from common.addresses import Role
from common.effects import SendFailed
from common.limits import OWN_RETRY_MS, WORKER_SILENT_MS_SERVING, WORKER_SILENT_MS_STARTUP
from common.messages.node_agent import RuntimeReadyAck
from common.messages.provision import CompleteBootstrap, PrepareProvider, StartNode
from common.messages.serve import HoldServing, OpenPromptRpc, OpenTokenOut, RestoreServing
from services.orchestrator.base import Phase
from tests.unit.orchestrator.playbook import ADDRESS, NODE_ID, Play
from tests.unit.orchestrator.test_restart import RestartPlay

GATEWAY, PROVISIONER = ADDRESS[Role.GATEWAY], ADDRESS[Role.PROVISIONER]
AWAY_MS = 17_000  # a router or relay that was frozen, or restarts under load
STEPS: list[tuple[Phase, Phase, Any, Role]] = [
    (Phase.SERVICES, Phase.PROVIDER, PrepareProvider, Role.PROVISIONER),
    (Phase.PROVIDER, Phase.START, StartNode, Role.PROVISIONER),
    (Phase.ACK, Phase.BOOTSTRAP, CompleteBootstrap, Role.PROVISIONER),
    (Phase.WEIGHTS, Phase.RPC, OpenPromptRpc, Role.GATEWAY),
]


def asked(before: Phase, after: Phase, kind: type) -> tuple[Play, Any]:
    """A run that has just sent its first message of this kind."""
    play = Play().until(before)
    match before:
        case Phase.SERVICES:
            play.configure()
            play.services_ready()
        case Phase.PROVIDER:
            play.prepared()
        case Phase.ACK:
            play.acked()
        case Phase.WEIGHTS:
            play.loaded()
            play.stage_ready()
    assert play.at(after)
    (message,) = play.said(kind)
    return play, message


@pytest.mark.spec("S1 10.12")
@pytest.mark.parametrize("reason", ["unroutable", "link_down", "queue_full"])
@pytest.mark.parametrize(("before", "after", "kind", "role"), STEPS)
def test_what_a_service_could_not_be_told_for_a_while_is_said_again(
    before: Phase, after: Phase, kind: type, role: Role, reason: str
) -> None:
    play, message = asked(before, after, kind)
    repeated = play.out_of_reach(ADDRESS[role], message, AWAY_MS, reason)
    assert len(repeated) == AWAY_MS // OWN_RETRY_MS
    play.until(Phase.SERVING)
    play.harness.advance(2 * WORKER_SILENT_MS_SERVING)
    assert play.at(Phase.SERVING)


@pytest.mark.spec("S1 10.12", "S1 6.11")
@pytest.mark.parametrize(("before", "after", "kind", "role"), STEPS)
def test_a_service_that_stays_out_of_reach_is_named_by_the_phase_that_wanted_it(
    before: Phase, after: Phase, kind: type, role: Role
) -> None:
    play, message = asked(before, after, kind)
    play.out_of_reach(ADDRESS[role], message, WORKER_SILENT_MS_STARTUP)
    failed = play.failure()
    assert failed["phase"] == after
    who = str(role).replace("_", " ")
    assert failed["detail"]["error"] == (
        f"the {who} did not answer: {kind.__name__} could not be delivered: unroutable"
    )


@pytest.mark.spec("S1 10.12", "S1 6.11")
def test_what_will_never_be_taken_is_not_repeated() -> None:
    play, message = asked(Phase.WEIGHTS, Phase.RPC, OpenPromptRpc)
    play.tell(SendFailed(GATEWAY, message, "refused"))
    failed = play.failure()
    assert (failed["phase"], failed["detail"]["error"]) == (
        Phase.RPC,
        "OpenPromptRpc could not be delivered: refused",
    )


@pytest.mark.spec("S1 10.12")
def test_absences_that_heal_do_not_add_up() -> None:
    play, message = asked(Phase.WEIGHTS, Phase.RPC, OpenPromptRpc)
    for _ in range(3):
        play.out_of_reach(GATEWAY, message, AWAY_MS)
        play.harness.advance(WORKER_SILENT_MS_STARTUP // 2)
    assert play.at(Phase.RPC)


def test_what_is_said_meanwhile_does_not_overtake_what_is_to_be_said_again() -> None:
    """A RestoreServing before its HoldServing would leave the gateway holding for ever."""
    play = RestartPlay().serving()
    play.exited(1)
    (hold,) = play.said(HoldServing)
    play.tell(SendFailed(GATEWAY, hold, "unroutable"))
    play.waited().next_attempt(1)
    for said in (play.started, play.reported, play.routed, play.member, play.acked):
        said(1)
    play.completed()
    assert play.said(OpenTokenOut, RestoreServing) == [], "it waits behind"
    play.harness.advance(OWN_RETRY_MS)
    assert [type(said) for said in play.said(HoldServing, OpenTokenOut)] == [HoldServing, OpenTokenOut]


def test_a_hold_voids_what_an_earlier_attempt_had_to_say() -> None:
    play = RestartPlay().serving()
    play.exited(1)
    play.waited().next_attempt(1)
    for said in (play.started, play.reported, play.routed, play.member, play.acked):
        said(1)
    play.completed()
    (opening,) = play.said(OpenTokenOut)
    play.tell(SendFailed(GATEWAY, opening, "link_down"))
    play.exited(1)
    assert play.said(HoldServing) == []
    play.harness.advance(OWN_RETRY_MS)
    assert [type(said) for said in play.said(HoldServing, OpenTokenOut)] == [HoldServing]


# --- workers ----------------------------------------------------------------------------------------------------
ACK = RuntimeReadyAck(run_id=7, node_id=NODE_ID, stage_index=0, readiness_id=1)


@pytest.mark.spec("S1 10.12", "S1 9.15")
def test_a_worker_that_the_bus_misses_first_is_lost_with_the_word_of_its_provider() -> None:
    play = Play().until(Phase.ACK)
    play.out_of_reach(play.node_actor(), ACK, 2000)
    play.exited(status=137)
    assert play.failure()["detail"]["error"] == f"node {NODE_ID} exited before ready: exit status 137"


@pytest.mark.spec("S1 10.12")
@pytest.mark.parametrize("reason", ["peer_lost", "unroutable", "link_down"])
def test_a_worker_that_was_out_of_reach_for_a_while_is_not_lost(reason: str) -> None:
    play = Play().until(Phase.ACK)
    play.out_of_reach(play.node_actor(), ACK, AWAY_MS, reason)
    play.until(Phase.SERVING)
    play.harness.advance(2 * WORKER_SILENT_MS_SERVING)
    assert play.at(Phase.SERVING)
