"""Playbooks of failure detection: probe, indirect probe, nack, buddy, stale answers, pause and freeze."""

from __future__ import annotations

import itertools

import pytest

from common.messages.member import MemberId, SwimAck, SwimGossip, SwimNack, SwimPing, SwimPingReq
from common.swim.config import LAN, RELAYS_MAX
from common.swim.outputs import Send
from tests.unit.swim.playbook import BOOT, Stage, actor, facts, key, silent


def ack(stage: Stage, ping: SwimPing | SwimPingReq, target: str, sender: str | None = None) -> None:
    who = MemberId(node=key(target), boot=BOOT)
    stage.tell(SwimAck(sequence=ping.sequence, target=who, incarnation=0), sender or target)


# --- our own round --------------------------------------------------------------------------------------------
@pytest.mark.spec("S2 6.2")
def test_one_probe_a_period_goes_to_each_in_turn() -> None:
    stage = Stage("ann", "bob", "cid")
    whom, at = [], []
    for _ in range(6):
        ping, target = stage.until_ping()
        at.append(stage.now)
        ack(stage, ping, target)
        whom.append(target)
    assert sorted(whom[:3]) == sorted(whom[3:]) == ["ann", "bob", "cid"]
    assert {later - earlier for earlier, later in itertools.pairwise(at)} == {LAN.probe_interval_ms}


def test_an_answered_probe_accuses_nobody_and_heals_us() -> None:
    stage = Stage("ann")
    stage.hear(facts("me", "suspect", by="ann"))
    assert stage.core.health == 1
    ping, _ = stage.until_ping()
    ack(stage, ping, "ann")
    stage.advance(900)
    assert stage.core.health == 0
    assert stage.state("ann") == "alive"


@pytest.mark.spec("S2 6.2")
def test_after_the_timeout_three_others_are_asked() -> None:
    stage = Stage("ann", "bob", "cid", "dan", "eve")
    ping, target = stage.until_ping()
    stage.advance(LAN.probe_timeout_ms - 1)
    assert stage.sent(SwimPingReq) == []
    stage.advance(1)
    asked = stage.sent(SwimPingReq)
    assert len(asked) == 3
    assert stage.sent(SwimPingReq, target) == []
    assert {ask.target.logical_id for ask in asked} == {target}
    assert {ask.sequence for ask in asked} == {ping.sequence}


@pytest.mark.spec("S2 6.2")
def test_an_answer_through_a_helper_saves_the_target_if_that_helper_was_asked() -> None:
    for helper_was_asked in (True, False):
        stage = Stage("ann", "bob", config=silent(indirect_probes=1))
        ping, target = stage.until_ping()
        helper = "bob" if target == "ann" else "ann"
        stage.advance(LAN.probe_timeout_ms)
        ack(stage, ping, target, sender=helper if helper_was_asked else "stranger")
        stage.advance(LAN.probe_interval_ms)
        assert stage.state(target) == ("alive" if helper_was_asked else "suspect")


@pytest.mark.spec("S2 6.2")
def test_no_answer_within_the_period_makes_a_suspect_of_which_everyone_hears() -> None:
    stage = Stage("ann", "bob")
    _, target = stage.until_ping()
    stage.advance(LAN.probe_interval_ms - 1)
    assert stage.state(target) == "alive"
    stage.advance(1)
    assert stage.transitions()[-1] == (target, "alive", "suspect")
    stage.advance(LAN.gossip_interval_ms)
    accusation = facts(target, "suspect", by="me")
    for peer in ("ann", "bob"):
        assert any(accusation in gossip.updates for gossip in stage.sent(SwimGossip, peer))


@pytest.mark.parametrize(("nacks", "health"), [(0, 2), (1, 1), (2, 0)])
def test_missing_nacks_make_us_doubt_ourselves(nacks: int, health: int) -> None:
    stage = Stage("ann", "bob", "cid", config=silent(indirect_probes=2))
    ping, target = stage.until_ping()
    helpers = [peer for peer in ("ann", "bob", "cid") if peer != target]
    stage.advance(LAN.probe_timeout_ms)
    for helper in helpers[:nacks]:
        stage.tell(SwimNack(sequence=ping.sequence), helper)
        stage.tell(SwimNack(sequence=ping.sequence), helper)  # counts once
    stage.tell(SwimNack(sequence=ping.sequence), "stranger")
    stage.tell(SwimNack(sequence=ping.sequence + 1), helpers[0])
    stage.advance(LAN.probe_interval_ms - LAN.probe_timeout_ms)
    assert stage.core.health == health


def test_a_member_in_bad_health_gives_others_more_time() -> None:
    stage = Stage("ann")
    stage.hear(facts("me", "suspect", by="ann"))
    assert stage.core.health == 1
    stage.until_ping()
    stage.advance(2 * LAN.probe_interval_ms - 1)
    assert stage.state("ann") == "alive"
    stage.advance(1)
    assert stage.state("ann") == "suspect"


def test_stale_foreign_and_doubled_answers_change_nothing() -> None:
    stage = Stage("ann", "bob")
    ping, target = stage.until_ping()
    other = "bob" if target == "ann" else "ann"
    stage.clear()
    ack(stage, ping, other)  # another member than the one asked
    stage.tell(SwimAck(sequence=ping.sequence + 5, target=ping.target, incarnation=0), target)
    stage.tell(SwimAck(sequence=ping.sequence, target=ping.target, incarnation=0), other)
    stage.tell(SwimAck(sequence=ping.sequence, target=MemberId(node=key(target), boot=BOOT + 1), incarnation=0), target)
    stage.advance(LAN.probe_interval_ms)
    assert stage.state(target) == "suspect"
    health = stage.core.health
    stage.clear()
    ack(stage, ping, target)  # too late
    assert stage.out == []
    assert (stage.state(target), stage.core.health) == ("suspect", health)


def test_an_early_late_or_doubled_tick_is_harmless() -> None:
    stage = Stage("ann")
    ping, _ = stage.until_ping()
    stage.clear()
    for _ in range(3):
        stage.do(stage.core.tick(stage.now))
    assert stage.out == []
    ack(stage, ping, "ann")
    stage.do(stage.core.tick(stage.now + LAN.probe_timeout_ms))
    assert stage.sent(SwimPingReq) == []


def test_a_target_superseded_during_the_round_is_not_accused() -> None:
    stage = Stage("ann", "bob")
    _, target = stage.until_ping()
    stage.hear(facts(target, boot=BOOT + 1))
    stage.advance(LAN.probe_interval_ms)
    assert stage.state(target) == "alive"


# --- buddy ----------------------------------------------------------------------------------------------------
def test_who_is_suspected_hears_it_in_the_ping_and_in_the_ack() -> None:
    stage = Stage("ann")
    accusation = facts("ann", "suspect", by="bob")
    stage.hear(accusation)
    ping, _ = stage.until_ping()
    assert ping.updates[0] == accusation
    stage.clear()
    stage.ping("ann")
    (answer,) = stage.sent(SwimAck, "ann")
    assert answer.updates[0] == accusation


def test_who_is_held_for_dead_hears_it_when_it_pings() -> None:
    stage = Stage("ann")
    stage.hear(facts("ann", "dead", by="bob"))
    stage.advance(10_000)
    stage.clear()
    stage.ping("ann")
    (answer,) = stage.sent(SwimAck, "ann")
    assert answer.updates[0].state == "dead"
    stage.ping("ann", incarnation=1)
    assert stage.state("ann") == "alive"


def test_our_answer_to_an_accusing_ping_starts_with_our_refutation() -> None:
    stage = Stage("ann")
    stage.ping("ann", facts("me", "suspect", by="ann"))
    (answer,) = stage.sent(SwimAck, "ann")
    assert answer.incarnation == 1
    assert answer.updates[0] == stage.core.own
    assert answer.updates.count(stage.core.own) == 1


def test_the_accuser_tells_the_accused_again_each_period() -> None:
    stage = Stage("ann")
    stage.until_ping()
    stage.advance(LAN.probe_interval_ms)
    stage.clear()
    stage.advance(3_000)
    told = [gossip for gossip in stage.sent(SwimGossip, "ann") if gossip.updates == [facts("ann", "suspect", by="me")]]
    assert len(told) >= 3


# --- on behalf of others --------------------------------------------------------------------------------------
def ask(stage: Stage, target: str = "cid", sequence: int = 9) -> None:
    stage.tell(SwimPingReq(sequence=sequence, sender=facts("ann"), target=facts(target)), "ann")


@pytest.mark.spec("S2 6.2")
def test_a_helper_probes_and_passes_the_answer_on() -> None:
    stage = Stage("ann")
    ask(stage)
    (ping,) = stage.sent(SwimPing, "cid")
    refutation = facts("cid", incarnation=3)
    who = MemberId(node=key("cid"), boot=BOOT)
    stage.tell(SwimAck(sequence=ping.sequence, target=who, incarnation=3, updates=[refutation]), "cid")
    (answer,) = stage.sent(SwimAck, "ann")
    assert (answer.sequence, answer.target, answer.incarnation) == (9, who, 3)
    assert refutation in answer.updates
    stage.advance(900)
    assert stage.sent(SwimNack) == [], "an answered probe needs no nack"


def test_a_helper_without_an_answer_nacks_at_four_fifths_of_the_timeout_and_still_passes_a_late_one_on() -> None:
    stage = Stage("ann")
    ask(stage)
    (ping,) = stage.sent(SwimPing, "cid")
    stage.advance(LAN.nack_ms - 1)
    assert stage.sent(SwimNack) == []
    stage.advance(1)
    assert stage.sent(SwimNack, "ann") == [SwimNack(sequence=9)]
    ack(stage, ping, "cid")
    assert len(stage.sent(SwimAck, "ann")) == 1
    ack(stage, ping, "cid")
    assert len(stage.sent(SwimAck, "ann")) == 1


def test_a_helper_takes_only_so_many_requests() -> None:
    stage = Stage("ann")
    for sequence in range(RELAYS_MAX + 5):
        ask(stage, sequence=sequence)
    assert len(stage.sent(SwimPing, "cid")) == RELAYS_MAX
    stage.advance(LAN.probe_interval_ms)
    stage.clear()
    ask(stage)
    assert len(stage.sent(SwimPing, "cid")) == 1


# --- own link, own freeze -------------------------------------------------------------------------------------
@pytest.mark.spec("S1 7.7")
def test_while_our_link_is_down_we_probe_nobody_and_bury_nobody() -> None:
    stage = Stage("ann", "bob")
    stage.hear(facts("ann", "suspect", by="bob"))
    stage.do(stage.core.pause(stage.now))
    stage.clear()
    assert stage.core.next_deadline() is None
    stage.now += 60_000
    stage.do(stage.core.tick(stage.now))
    assert stage.out == []
    assert stage.state("ann") == "suspect"
    stage.do(stage.core.resume(stage.now))
    stage.advance(3_999)
    assert stage.state("ann") == "suspect"


def test_a_probe_that_overlaps_a_pause_is_void() -> None:
    stage = Stage("ann")
    ping, _ = stage.until_ping()
    stage.advance(100)
    stage.do(stage.core.pause(stage.now))
    stage.now += 10_000
    stage.do(stage.core.resume(stage.now))
    stage.advance(900)
    assert stage.state("ann") == "alive"
    ack(stage, ping, "ann")
    assert stage.core.health == 0


def test_an_old_suspicion_is_shifted_by_a_pause_and_a_young_one_begins_anew() -> None:
    config = silent(suspicion_mult=20, dubious_ms=4_000, push_pull_ms=10**6, probe_interval_ms=1000)
    stage = Stage("ann", "bob", config=config)
    stage.hear(facts("ann", "suspect", by="cid"))
    stage.advance(10_000)
    stage.hear(facts("bob", "suspect", by="cid"))
    stage.advance(3_000)
    stage.do(stage.core.pause(stage.now))
    stage.now += 30_000
    stage.do(stage.core.resume(stage.now))
    stage.advance(20_000 - 13_000 - 1)
    assert stage.state("ann") == "suspect"
    stage.advance(1)
    assert stage.state("ann") == "dead"
    assert stage.state("bob") == "suspect"


def test_a_paused_member_still_answers() -> None:
    stage = Stage("ann")
    stage.do(stage.core.pause(stage.now))
    stage.ping("ann")
    assert len(stage.sent(SwimAck, "ann")) == 1


def test_after_our_own_freeze_nobody_else_pays_for_it() -> None:
    stage = Stage("ann", "bob")
    stage.hear(facts("bob", "suspect", by="ann"))
    stage.until_ping()
    stage.clear()
    stage.now += 20_000  # SIGSTOP: no tick in between
    stage.do(stage.core.tick(stage.now))
    assert stage.transitions() == []
    stage.hear(facts("bob", incarnation=1))
    assert stage.state("bob") == "alive"


def test_the_helper_address_is_the_one_in_the_request() -> None:
    stage = Stage()
    ask(stage, "unknown")
    assert [output.dst for output in stage.given(Send)] == [actor("unknown")]
