"""The member table and the name registry are join-semilattices: the order in which rumours come does not matter."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.messages.member import MemberUpdate, NameUpdate
from common.swim.config import INCARNATION_MAX
from common.swim.names import NameRegistry
from common.swim.table import MemberTable, admissible, precedence
from tests.unit.swim.playbook import facts, key, replaced

STATES = ("alive", "suspect", "dead", "left")


@st.composite
def rumours(draw: st.DrawFn) -> MemberUpdate:
    """Facts depend on (node, boot, incarnation) alone, as only the member itself sets them."""
    name = draw(st.sampled_from(["a", "b", "c"]))
    boot, incarnation = draw(st.integers(1, 3)), draw(st.integers(0, 3))
    update = facts(name, draw(st.sampled_from(STATES)), incarnation, boot=boot)
    return replaced(update, metadata={"at": f"{boot}.{incarnation}"})


def believed(table: MemberTable) -> dict[bytes, MemberUpdate]:
    return {member.update.member.node: member.update for member in table}


@pytest.mark.spec("S1 7.7")
@settings(max_examples=150)
@given(st.lists(rumours(), max_size=20), st.randoms(use_true_random=False))
def test_any_order_leads_to_the_same_table(updates: list[MemberUpdate], rng: random.Random) -> None:
    tables = []
    for order in (updates, rng.sample(updates, len(updates)), updates + updates):
        table = MemberTable()
        for update in order:
            before = table.get(update.member.node)
            seen = precedence(before.update) if before else None
            changed = table.merge(update, 0, "")
            after = table.get(update.member.node)
            assert after is not None
            assert seen is None or (precedence(after.update) > seen if changed else precedence(after.update) == seen)
        assert table.live == sum(member.state in ("alive", "suspect") for member in table)
        tables.append(believed(table))
    assert tables[0] == tables[1] == tables[2]


@pytest.mark.parametrize(
    ("known", "rumour", "wins"),
    [
        (facts("a"), facts("a"), False),
        (facts("a"), facts("a", "suspect"), True),
        (facts("a", "suspect"), facts("a"), False),
        (facts("a", "suspect"), facts("a", incarnation=1), True),
        (facts("a", "suspect"), facts("a", "dead"), True),
        (facts("a", "dead"), facts("a", "suspect"), False),
        (facts("a", "dead", 1), facts("a", incarnation=1), False),
        (facts("a", "dead", 1), facts("a", incarnation=2), True),
        (facts("a", "dead", 100), facts("a", boot=101), True),
        (facts("a", boot=101), facts("a", "dead", 100), False),
        (facts("a", "dead"), facts("a", "left"), True),
        (facts("a", "left"), facts("a", "dead"), False),
    ],
)
def test_precedence(known: MemberUpdate, rumour: MemberUpdate, wins: bool) -> None:
    table = MemberTable()
    table.merge(known, 0, "")
    assert table.merge(rumour, 0, "") is wins


@pytest.mark.parametrize(
    "update",
    [
        replaced(facts("a"), state="happy"),
        replaced(facts("a"), incarnation=INCARNATION_MAX + 1),
        replaced(facts("a"), metadata={"key": "x" * 510}),
        replaced(facts("a"), metadata={"key": "é" * 255}),
    ],
)
def test_rumours_beyond_the_limits_are_inadmissible(update: MemberUpdate) -> None:
    assert not admissible(update)
    assert admissible(replaced(facts("a"), metadata={"key": "x" * 509}))


@st.composite
def name_entries(draw: st.DrawFn) -> NameUpdate:
    return NameUpdate(
        name=draw(st.sampled_from(["inference", "other"])),
        address=key(draw(st.sampled_from(["x", "y"]))),
        node=key(draw(st.sampled_from(["a", "b"]))),
        timestamp_ms=draw(st.integers(0, 3)),
        generation=draw(st.integers(0, 2)),
        tombstone=draw(st.booleans()),
    )


@pytest.mark.spec("S2 6.2")
@settings(max_examples=150)
@given(st.lists(name_entries(), max_size=15), st.randoms(use_true_random=False))
def test_names_converge_in_any_order(updates: list[NameUpdate], rng: random.Random) -> None:
    results = []
    for order in (updates, rng.sample(updates, len(updates)), updates + updates):
        names = NameRegistry()
        for update in order:
            names.merge(update, 0)
        results.append({entry.name: entry for entry in names})
    assert results[0] == results[1] == results[2]


def test_a_claim_wins_over_a_writer_whose_clock_ran_ahead() -> None:
    names = NameRegistry()
    ahead = names.claim("n", key("x"), key("a"), 1, 5_000)
    names.merge(ahead, 0)
    later = names.claim("n", key("y"), key("b"), 1, 4_000)
    assert names.merge(later, 0)
    assert not names.merge(ahead, 0)


def test_tombstones_are_purged_late_and_live_entries_never() -> None:
    names = NameRegistry()
    gone, stays = names.claim("gone", key("x"), key("a"), 1, 0), names.claim("stays", key("x"), key("a"), 1, 0)
    for update in (gone, stays, names.tombstone(gone)):
        names.merge(update, 10)
    names.purge(10)
    assert len(names) == 2
    names.purge(11)
    assert [entry.name for entry in names] == ["stays"]
