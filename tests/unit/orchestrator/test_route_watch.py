"""Each transition of a worker's route is one record with peer, from, to and reason (S1 8.3)."""

from __future__ import annotations

from typing import Any

import pytest

from common.effects import ViewChanged
from common.messages.bus import Delta
from common.records import CHANNEL_STAGE_ROUTE
from services.orchestrator.base import Phase
from tests.unit.orchestrator.playbook import STRANGER, Play


def transitions(play: Play) -> list[dict[str, Any]]:
    details = [
        record["detail"] for record in play.records(CHANNEL_STAGE_ROUTE) if record["phase"] == "route_transition"
    ]
    return [detail for detail in details if detail["kind"] == "node_actor"]


def steps(play: Play) -> list[tuple[str, str, str]]:
    return [(detail["from"], detail["to"], detail["reason"]) for detail in transitions(play)]


@pytest.mark.spec("S1 8.3", "S1 6.2")
def test_from_its_report_to_its_route() -> None:
    play = Play().until(Phase.READINESS)
    play.reported()
    assert steps(play) == [("unknown", "none", "not registered")]
    play.routed()
    (detail,) = transitions(play)
    assert (detail["from"], detail["to"]) == ("none", "routed")
    assert detail["peer"] and detail["actor"] and detail["logical_id"]


@pytest.mark.spec("S1 8.3")
def test_a_dead_member_suspends_and_comes_back() -> None:
    play = Play().until(Phase.SERVING)
    transitions(play)
    play.member(state="dead")
    play.member(state="dead")
    play.member()
    assert [step[:2] for step in steps(play)] == [("routed", "suspended"), ("suspended", "routed")]


@pytest.mark.spec("S1 8.3")
def test_why_a_route_went() -> None:
    play = Play().until(Phase.SERVING)
    transitions(play)
    routes = play.harness.views.routes
    routes.apply(Delta(view="routes", version=routes.version + 1, removed=[play.node_actor()], reason="revoked"))
    play.harness.tell(ViewChanged("routes"))
    assert steps(play) == [("routed", "none", "revoked")]


@pytest.mark.spec("S1 8.3")
def test_a_router_that_restarts_and_an_address_of_somebody_else() -> None:
    play = Play().until(Phase.SERVING)
    transitions(play)
    play.harness.views.routes.forget()
    play.harness.tell(ViewChanged("routes"))
    assert [step[:2] for step in steps(play)] == [("routed", "unknown")]
    play.route(play.node_actor(), node=STRANGER)
    assert [step[:2] for step in steps(play)] == [("unknown", "foreign")]
