"""Playbooks of the SWIM core: rumours, refutation, epochs, leave, tables, names (anchors.md C1-C3, C6)."""

from __future__ import annotations

import random

import pytest

from common.messages.bus import NameEntry
from common.messages.member import MemberId, NameUpdate, SwimAck, SwimGossip, SwimPing, SwimPushPull
from common.swim.config import INCARNATION_MAX, LAN, MEMBERS_MAX
from common.swim.core import SwimCore
from common.swim.outputs import Forgotten, Left, NameChanged, Superseded, Updated
from common.swim.spreader import Seed
from common.swim.table import RANK
from tests.unit.swim.playbook import BOOT, Stage, actor, facts, key, replaced, silent


# --- rumours --------------------------------------------------------------------------------------------------
@pytest.mark.spec("S1 7.7")
def test_news_changes_the_table_and_is_passed_on() -> None:
    stage = Stage("ann")
    stage.hear(facts("bob"))
    assert stage.transitions() == [("bob", "unknown", "alive")]
    stage.advance(LAN.gossip_interval_ms)
    assert any(facts("bob") in gossip.updates for gossip in stage.sent(SwimGossip, "ann"))


def test_what_is_no_news_changes_nothing() -> None:
    stage = Stage("ann")
    stage.hear(facts("ann"), facts("ann", "suspect", by="bob"))
    stage.clear()
    stage.hear(facts("ann"), facts("ann", "suspect", by="bob"))
    assert stage.out == []


def test_a_suspect_dies_when_its_time_is_over_and_not_before() -> None:
    stage = Stage("ann")
    stage.hear(facts("ann", "suspect", by="bob"))
    stage.advance(3_999)
    assert stage.state("ann") == "suspect"
    stage.advance(1)
    assert stage.state("ann") == "dead"
    assert stage.transitions() == [("ann", "alive", "suspect"), ("ann", "suspect", "dead")]


def test_a_refuted_suspicion_leaves_no_timer_behind() -> None:
    stage = Stage("ann", config=silent(probe_interval_ms=1000, push_pull_ms=10**6))
    stage.hear(facts("ann", "suspect", by="bob"))
    stage.advance(2_000)
    stage.hear(facts("ann", incarnation=1))
    assert stage.state("ann") == "alive"
    stage.hear(facts("ann", "suspect", 1, by="bob"))
    stage.advance(2_500)  # beyond the first suspicion's end, before the second's
    assert stage.state("ann") == "suspect"


def test_confirmations_from_others_shorten_a_suspicion_and_are_passed_on() -> None:
    stage = Stage("ann", "bob", "cid", "dan")
    stage.hear(facts("ann", "suspect", by="bob"))
    stage.advance(3_900)
    stage.clear()
    stage.hear(facts("ann", "suspect", by="cid"))
    stage.hear(facts("ann", "suspect", by="cid"))
    stage.advance(200)
    assert any(update.by == key("cid") for gossip in stage.sent(SwimGossip) for update in gossip.updates)
    assert stage.state("ann") == "suspect"
    stage.hear(facts("ann", "suspect", by="dan"))
    stage.advance(0)
    assert stage.state("ann") == "dead", "with two confirmations the minimum holds, and it is past"


def test_a_suspicion_that_a_confirmation_ends_in_the_past_is_no_freeze_of_ours() -> None:
    stage = Stage("ann", "bob", "cid", "dan", config=silent(push_pull_ms=10**6))
    stage.hear(facts("ann", "suspect", by="bob"))
    stage.advance(9_500)
    stage.hear(facts("ann", "suspect", by="cid"), facts("ann", "suspect", by="dan"))
    stage.advance(0)
    assert stage.state("ann") == "dead"


def test_rumours_beyond_the_limits_are_ignored() -> None:
    stage = Stage()
    stage.hear(facts("ann", incarnation=INCARNATION_MAX + 1), replaced(facts("ann"), state="zombie"))
    assert stage.state("ann") == "unknown"
    stage.hear(*(facts(f"n{number}") for number in range(MEMBERS_MAX + 10)))
    assert len(stage.core.members()) == MEMBERS_MAX + 1


def test_own_metadata_beyond_the_limit_is_refused() -> None:
    with pytest.raises(ValueError, match="metadata"):
        SwimCore(replaced(facts("me"), metadata={"k": "x" * 600}), LAN, random.Random(1), 0)
    stage = Stage()
    with pytest.raises(ValueError, match="metadata"):
        stage.core.set_metadata({"k": "x" * 600}, stage.now)


@pytest.mark.spec("S2 6.2")
def test_metadata_travels_with_a_new_incarnation() -> None:
    stage = Stage("ann")
    stage.do(stage.core.set_metadata({"gpu": "H200"}, stage.now))
    assert stage.core.own.incarnation == 1
    stage.hear(replaced(facts("ann", incarnation=1), metadata={"gpu": "A4000"}))
    assert [given.update.metadata for given in stage.given(Updated)] == [{"gpu": "H200"}, {"gpu": "A4000"}]
    stage.advance(LAN.gossip_interval_ms)
    told = [update for gossip in stage.sent(SwimGossip) for update in gossip.updates]
    assert {"gpu": "H200"} in [update.metadata for update in told]


# --- about ourselves ------------------------------------------------------------------------------------------
@pytest.mark.parametrize("state", ["suspect", "dead", "left"])
@pytest.mark.parametrize("accused", [0, 5])
def test_an_accusation_is_refuted_with_a_higher_incarnation(state: str, accused: int) -> None:
    stage = Stage("ann")
    stage.hear(facts("me", state, accused, by="ann"))
    assert stage.core.own.incarnation == accused + 1
    assert stage.core.health == 1, "being accused means that we may be slow"
    stage.advance(LAN.gossip_interval_ms)
    assert any(stage.core.own in gossip.updates for gossip in stage.sent(SwimGossip, "ann"))


def test_a_stale_accusation_is_answered_without_a_new_incarnation() -> None:
    stage = Stage("ann")
    stage.hear(facts("me", "suspect", 3, by="ann"))
    stage.advance(5_000)
    stage.clear()
    stage.hear(facts("me", "dead", 2, by="ann"))
    assert stage.core.own.incarnation == 4
    stage.advance(LAN.gossip_interval_ms)
    assert any(stage.core.own in gossip.updates for gossip in stage.sent(SwimGossip, "ann"))


def test_the_incarnation_never_goes_down() -> None:
    rng = random.Random(5)
    stage = Stage("ann")
    before = 0
    for _ in range(200):
        stage.hear(facts("me", rng.choice(list(RANK)), rng.randrange(40), boot=rng.choice([BOOT - 1, BOOT])))
        assert stage.core.own.incarnation >= before
        before = stage.core.own.incarnation


# --- epochs ---------------------------------------------------------------------------------------------------
@pytest.mark.spec("S1 7.7")
def test_a_new_boot_supersedes_the_old_at_once_whatever_its_incarnation() -> None:
    stage = Stage("ann")
    stage.hear(facts("ann", incarnation=100))
    stage.clear()
    stage.hear(facts("ann", boot=BOOT + 1))
    assert stage.transitions() == [("ann", "alive", "dead"), ("ann", "unknown", "alive")]
    stage.hear(facts("ann", "dead", 100))
    assert stage.state("ann") == "alive"


def test_a_new_boot_of_a_dead_member_is_simply_alive() -> None:
    stage = Stage("ann")
    stage.hear(facts("ann", "dead", 100, by="bob"))
    stage.clear()
    stage.hear(facts("ann", boot=BOOT + 1))
    assert stage.transitions() == [("ann", "unknown", "alive")]


def test_an_older_process_with_our_key_makes_us_speak() -> None:
    stage = Stage("ann")
    stage.advance(3_000)
    stage.clear()
    stage.hear(facts("me", boot=BOOT - 1))
    stage.advance(LAN.gossip_interval_ms)
    assert any(stage.core.own in gossip.updates for gossip in stage.sent(SwimGossip, "ann"))


def test_a_newer_process_with_our_key_silences_us() -> None:
    stage = Stage("ann")
    stage.hear(facts("me", boot=BOOT + 1))
    assert stage.given(Superseded) == [Superseded(BOOT + 1)]
    stage.clear()
    stage.hear(facts("me", "suspect", boot=BOOT + 1))
    stage.ping("ann")
    stage.advance(5_000)
    assert stage.out == []
    assert stage.core.next_deadline() is None


def test_a_ping_for_our_predecessor_is_not_answered_in_its_name() -> None:
    stage = Stage("ann")
    stage.ping("ann", target=MemberId(node=key("me"), boot=BOOT - 1))
    assert stage.sent(SwimAck) == []
    assert stage.sent(SwimGossip, "ann") == [SwimGossip(updates=[stage.core.own])]


# --- join and tables ------------------------------------------------------------------------------------------
@pytest.mark.spec("S1 7.7", "S2 6.2")
def test_a_joiner_asks_each_second_until_it_is_answered() -> None:
    stage = Stage()
    stage.do(stage.core.set_seed(Seed(key("hub"), BOOT, actor("hub")), stage.now))
    stage.advance(3_500)
    assert len(stage.sent(SwimPushPull, "hub")) == 4
    assert not stage.core.joined
    stage.offer("hub", facts("ann"), reply=True)
    assert stage.core.joined
    assert (stage.state("hub"), stage.state("ann")) == ("alive", "alive")
    stage.clear()
    stage.advance(3_500)
    assert stage.sent(SwimPushPull) == []


def test_a_restarted_seed_is_joined_again() -> None:
    stage = Stage()
    stage.do(stage.core.set_seed(Seed(key("hub"), BOOT, actor("hub")), stage.now))
    stage.advance(0)
    stage.offer("hub", reply=True)
    stage.clear()
    stage.do(stage.core.set_seed(Seed(key("hub"), BOOT, actor("hub")), stage.now))
    assert stage.core.joined, "the same seed again is no news"
    stage.do(stage.core.set_seed(Seed(key("hub"), BOOT + 1, actor("hub2")), stage.now))
    stage.advance(0)
    assert len(stage.sent(SwimPushPull, "hub2")) == 1
    stage.offer("hub", reply=True)
    assert not stage.core.joined, "that was the old one's answer"


def test_a_member_that_holds_its_seed_for_dead_asks_it_again() -> None:
    stage = Stage()
    stage.do(stage.core.set_seed(Seed(key("hub"), BOOT, actor("hub")), stage.now))
    stage.advance(0)
    stage.offer("hub", reply=True)
    stage.hear(facts("hub", "dead", by="ann"))
    stage.clear()
    stage.advance(3_000)
    offers = stage.sent(SwimPushPull, "hub")
    assert len(offers) >= 2
    assert offers[0].updates[0].state == "dead", "so that the seed learns of it and refutes"


@pytest.mark.spec("S1 7.7")
def test_an_offer_is_answered_with_the_whole_table() -> None:
    stage = Stage("ann", "bob")
    stage.hear(facts("bob", "dead", by="ann"))
    stage.clear()
    stage.offer("cid")
    (answer,) = stage.sent(SwimPushPull, "cid")
    assert answer.reply
    assert answer.sender == stage.core.own
    assert {(update.logical_id, update.state) for update in answer.updates} == {
        ("ann", "alive"),
        ("bob", "dead"),
        ("cid", "alive"),
    }
    stage.clear()
    stage.offer("cid", reply=True)
    assert stage.sent(SwimPushPull) == [], "an answer is not answered"


def test_the_dead_of_another_table_are_only_our_suspects() -> None:
    stage = Stage("ann")
    stage.offer("cid", facts("ann", "dead", by="cid"), facts("bob", "dead", by="cid"), facts("eve", "left"))
    assert (stage.state("ann"), stage.state("bob"), stage.state("eve")) == ("suspect", "suspect", "left")
    member = stage.core.member(key("ann"))
    assert member is not None and member.update.by == key("me")
    stage.hear(facts("ann", incarnation=1))
    assert stage.state("ann") == "alive"
    stage.advance(24_000)  # four members: without confirmations a suspicion lives for its maximum
    assert stage.state("bob") == "dead"


def test_another_table_that_holds_us_for_dead_is_refuted() -> None:
    stage = Stage("ann")
    stage.offer("ann", facts("me", "dead", 7, by="ann"), reply=True)
    assert stage.core.own.incarnation == 8


def test_the_dead_are_offered_our_table_now_and_then() -> None:
    stage = Stage("ann")
    stage.hear(facts("ann", "dead", by="bob"))
    stage.advance(LAN.push_pull_ms + 1)
    assert stage.sent(SwimPushPull, "ann")


def test_the_departed_are_forgotten_at_the_end_of_the_run() -> None:
    stage = Stage("ann", "bob", "cid")
    stage.hear(facts("ann", "dead", by="bob"), facts("bob", "left"))
    stage.do(stage.core.forget_departed(stage.now))
    assert [given.peer.node for given in stage.given(Forgotten)] == [key("ann"), key("bob")]
    assert (stage.state("ann"), stage.state("bob"), stage.state("cid")) == ("unknown", "unknown", "alive")


def test_the_dead_are_forgotten_after_their_time() -> None:
    stage = Stage("ann", config=silent(forget_dead_ms=60_000))
    stage.hear(facts("ann", "dead", by="bob"))
    stage.advance(59_000)
    assert stage.state("ann") == "dead"
    stage.advance(40_000)
    assert stage.state("ann") == "unknown"


# --- leave ----------------------------------------------------------------------------------------------------
@pytest.mark.spec("S1 7.7")
def test_a_leave_is_told_at_once_and_ends() -> None:
    stage = Stage("ann", "bob")
    stage.do(stage.core.leave(stage.now))
    for peer in ("ann", "bob"):
        (word,) = stage.sent(SwimGossip, peer)
        assert [(update.logical_id, update.state) for update in word.updates] == [("me", "left")]
    stage.advance(LAN.leave_ms)
    assert stage.core.has_left
    assert stage.given(Left) == [Left()]
    stage.clear()
    stage.advance(10_000)
    assert stage.out == []


def test_who_leaves_neither_probes_nor_refutes() -> None:
    stage = Stage("ann")
    stage.do(stage.core.leave(stage.now))
    stage.clear()
    stage.hear(facts("me", "suspect", 9, by="ann"))
    stage.advance(2_000)
    assert stage.core.own.incarnation == 0
    assert stage.sent(SwimPing) == []


def test_a_leave_alone_or_without_a_link_ends_at_once() -> None:
    alone = Stage()
    alone.do(alone.core.leave(alone.now))
    assert alone.core.has_left
    cut = Stage("ann")
    cut.do(cut.core.pause(cut.now))
    cut.do(cut.core.leave(cut.now))
    assert cut.core.has_left


def test_who_left_is_not_probed_and_not_dead() -> None:
    stage = Stage("ann")
    stage.hear(facts("ann", "left"))
    stage.advance(20_000)
    assert stage.transitions() == [("ann", "alive", "left")]
    assert stage.sent(SwimPing) == []


# --- names ----------------------------------------------------------------------------------------------------
def name_update(name: str, owner: str, *, at: int = 1, generation: int = 0, dead: bool = False) -> NameUpdate:
    return NameUpdate(
        name=name,
        address=actor(owner),
        node=key(owner),
        timestamp_ms=at,
        generation=generation,
        tombstone=dead,
        boot=BOOT,
    )


@pytest.mark.spec("S2 6.2")
def test_a_registered_name_is_gossiped_and_resolves() -> None:
    stage = Stage("ann")
    stage.do(stage.core.register_name("inference", actor("me"), 5_000, stage.now))
    assert stage.core.resolve_name("inference") == NameEntry(name="inference", address=actor("me"), node=key("me"))
    stage.advance(LAN.gossip_interval_ms)
    (told, *_) = [name for gossip in stage.sent(SwimGossip, "ann") for name in gossip.names]
    other = Stage("me")
    other.tell(SwimGossip(names=[told]), "me")
    assert other.core.resolve_name("inference") == stage.core.resolve_name("inference")
    assert [given.name for given in other.given(NameChanged)] == ["inference"]


@pytest.mark.spec("S2 6.2")
@pytest.mark.parametrize("end", ["dead", "left", "superseded"])
def test_names_of_a_member_that_is_gone_resolve_to_nothing(end: str) -> None:
    stage = Stage("ann")
    stage.tell(SwimGossip(names=[name_update("inference", "ann")]), "ann")
    stage.clear()
    stage.hear(facts("ann", boot=BOOT + 1) if end == "superseded" else facts("ann", end, by="bob"))
    assert stage.core.resolve_name("inference") is None
    assert stage.given(NameChanged) == [NameChanged("inference", None)]


def test_a_name_buried_by_mistake_comes_back_with_its_owner() -> None:
    stage = Stage("ann")
    stage.do(stage.core.register_name("inference", actor("me"), 5_000, stage.now))
    buried = name_update("inference", "me", at=5_000, generation=1, dead=True)
    stage.tell(SwimGossip(names=[buried]), "ann")
    assert stage.core.resolve_name("inference") is not None
    stage.advance(LAN.gossip_interval_ms)
    told = [name for gossip in stage.sent(SwimGossip, "ann") for name in gossip.names]
    assert any(not name.tombstone and name.generation == buried.generation + 1 for name in told)


def test_a_name_given_up_stays_given_up() -> None:
    stage = Stage("ann")
    stage.do(stage.core.register_name("inference", actor("me"), 5_000, stage.now))
    stage.do(stage.core.unregister_name("inference", stage.now))
    stage.do(stage.core.unregister_name("unknown", stage.now))
    stage.tell(SwimGossip(names=[name_update("inference", "me", at=5_000, generation=1, dead=True)]), "ann")
    assert stage.core.resolve_name("inference") is None


@pytest.mark.spec("S2 6.2")
def test_the_last_writer_wins() -> None:
    stage = Stage("ann", "bob")
    stage.tell(SwimGossip(names=[name_update("inference", "ann", at=10)]), "ann")
    stage.tell(SwimGossip(names=[name_update("inference", "bob", at=9)]), "bob")
    assert stage.core.names()[0].node == key("ann")
    stage.do(stage.core.register_name("inference", actor("me"), 5, stage.now))
    assert stage.core.names()[0].node == key("me"), "a new claim wins over a clock that ran ahead"


def test_an_unchanged_registration_is_no_news() -> None:
    stage = Stage("ann")
    stage.do(stage.core.register_name("inference", actor("me"), 5, stage.now))
    stage.clear()
    stage.do(stage.core.register_name("inference", actor("me"), 99, stage.now))
    assert stage.out == []
