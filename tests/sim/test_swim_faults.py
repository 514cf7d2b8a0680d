"""What must not kill anybody, and how everyone finds together again: anchors.md C7 (5)-(8), (10)-(12)."""

from __future__ import annotations

import random
from functools import partial

import pytest

from common.swim.config import LAN
from common.swim.table import RANK
from tests.sim.swim_world import FIRST_BOOT, SwimWorld, node_key


def formed(members: int, seed: int, **more: object) -> SwimWorld:
    world = SwimWorld(members, seed, validate=True, **more)  # type: ignore[arg-type]
    world.settle()
    world.run(world.rng.randrange(3_000))
    return world


@pytest.mark.spec("S1 7.7")
@pytest.mark.parametrize("members", [2, 4, 6, 10])
@pytest.mark.parametrize("outage_ms", [500, 1_000, 2_000, 5_000, 10_000, 30_000])
def test_no_false_death_while_the_relay_is_out(members: int, outage_ms: int) -> None:
    """Each member notices on its own, up to 3 s late (LINK_SILENT_MS); then its protocol clock stands."""
    for seed in range(3):
        world = formed(members, seed)
        begin = world.now
        world.outage(outage_ms)
        world.run(outage_ms)
        assert world.run_until(world.agreed, 5_000) < 5_000
        world.run(10_000)
        assert world.deaths(begin) == []
        assert world.agreed()


@pytest.mark.parametrize("members", [2, 6, 10])
def test_no_false_death_in_an_outage_that_nobody_notices(members: int) -> None:
    """Shorter than the minimum suspicion: the accused hears of it in time, for its accuser tells it each period."""
    for seed in range(4):
        world = formed(members, seed, pauses=False)
        begin = world.now
        world.outage(4_000)
        world.run(20_000)
        assert world.deaths(begin) == []
        assert world.agreed()


@pytest.mark.spec("S1 7.7")
@pytest.mark.parametrize("members", [2, 6, 10])
@pytest.mark.parametrize("freeze_ms", [1_000, 3_000, 4_000])
def test_no_false_death_for_a_freeze_of_up_to_four_seconds(members: int, freeze_ms: int) -> None:
    for seed in range(6):
        world = formed(members, seed)
        begin = world.now
        world.freeze(world.rng.randrange(members), freeze_ms)
        world.run(freeze_ms + 10_000)
        assert world.deaths(begin) == []
        assert world.agreed()


@pytest.mark.spec("S1 7.7")
@pytest.mark.parametrize("members", [2, 6])
def test_a_member_that_froze_for_long_is_dead_and_comes_back_by_itself(members: int) -> None:
    for seed in range(4):
        world = formed(members, seed)
        begin, victim = world.now, members - 1
        world.freeze(victim, 20_000)
        world.run(19_900)
        assert world.buried(victim)
        assert {seen.transition.peer.node for seen in world.deaths(begin)} == {node_key(victim)}
        assert world.run_until(world.agreed, 5_000) < 5_000
        assert world.hosts[node_key(victim)].core.own.incarnation >= 1


MINUTES_50_MS = 50 * 60_000


@pytest.mark.parametrize("loss", [0.01, 0.03, 0.05])
@pytest.mark.parametrize("seed", [3, 4])
def test_no_false_death_at_up_to_five_percent_loss_in_fifty_minutes(loss: float, seed: int) -> None:
    world = SwimWorld(10, seed, loss=loss)
    world.settle()
    begin = world.now
    world.run(MINUTES_50_MS)
    suspicions = [seen for seen in world.seen if seen.at >= begin and seen.transition.to_state == "suspect"]
    assert suspicions or loss < 0.05
    assert world.deaths(begin) == []


@pytest.mark.parametrize("members", [2, 6, 10])
def test_no_false_death_in_a_hundred_freezes_of_four_seconds(members: int) -> None:
    """One after the other, each of another member; between them everyone is alive to everyone again."""
    world = SwimWorld(members, seed=members)
    world.settle()
    begin = world.now
    for _ in range(100):
        world.freeze(world.rng.randrange(members), 4_000)
        world.run(world.rng.randint(20_000, 30_000))
        assert world.agreed()
    assert world.deaths(begin) == []


@pytest.mark.parametrize("members", [4, 10])
def test_no_false_death_in_fifty_minutes_with_an_outage_of_the_relay_each_minute(members: int) -> None:
    world = SwimWorld(members, seed=members)
    world.settle()
    begin = world.now
    while world.now - begin < MINUTES_50_MS:
        ms = world.rng.randint(100, 30_000)
        world.outage(ms)
        world.run(ms + world.rng.randint(10_000, 40_000))
    assert world.deaths(begin) == []
    assert world.agreed()


@pytest.mark.spec("S1 7.7")
def test_a_crash_during_an_outage_is_still_noticed() -> None:
    for seed in range(4):
        world = formed(6, seed)
        world.outage(10_000)
        world.run(2_000)
        world.crash(4)
        world.run(8_000)
        passed = world.run_until(partial(world.buried, 4), 30_000)
        assert passed <= 4_000 + 7 * LAN.probe_interval_ms
        assert {seen.transition.peer.node for seen in world.deaths()} == {node_key(4)}


@pytest.mark.spec("S1 7.7", "S2 6.2")
def test_a_restarted_membership_service_is_joined_by_everyone_again() -> None:
    for seed in range(4):
        world = formed(6, seed)
        world.crash(0)
        world.run(1_500)
        world.start(0, boot=FIRST_BOOT + 1)
        assert world.run_until(world.agreed, 5_000) < 5_000


@pytest.mark.spec("S1 7.7")
def test_a_mass_restart_converges_although_the_old_boots_are_remembered() -> None:
    """memberlist #311: there, members that come back are held for dead by those who remember a higher incarnation."""
    for seed in range(4):
        world = formed(8, seed)
        for index in range(1, 8):
            world.crash(index)
        world.run(20_000)
        for index in range(1, 8):
            world.start(index, boot=FIRST_BOOT + 1)
        assert world.run_until(world.agreed, 5_000) < 5_000
        for index in range(8):
            world.crash(index)
        world.run(3_000)
        for index in range(8):
            world.start(index, boot=FIRST_BOOT + 2)
        assert world.run_until(world.agreed, 5_000) < 5_000


@pytest.mark.spec("S1 7.7")
def test_who_leaves_is_left_to_everyone_and_dead_to_nobody() -> None:
    for seed in range(4):
        world = formed(6, seed)
        world.leave(3)
        world.run(LAN.leave_ms)
        world.crash(3)
        world.run(15_000)
        assert set(world.states(3)) == {"left"}
        assert world.deaths() == []


def test_after_a_split_that_both_sides_took_for_death_all_agree_again() -> None:
    """Worst case: nobody noticed the outage, everyone buried everyone. Within a push-pull period and five more."""
    for seed in range(3):
        world = formed(6, seed, pauses=False)
        world.outage(180_000)
        world.run(180_000)
        assert all(world.buried(index) for index in range(6))
        limit = LAN.push_pull_ms + 5 * LAN.probe_interval_ms
        assert world.run_until(world.agreed, limit) < limit


@pytest.mark.spec("S1 7.7")
@pytest.mark.parametrize("seed", range(6))
def test_under_any_mix_of_faults_states_only_climb_and_incarnations_never_fall(seed: int) -> None:
    """Safety while faults last, then liveness: healed, everyone agrees."""
    world, chance = formed(6, seed, loss=0.03), random.Random(seed)
    boots = dict.fromkeys(range(6), FIRST_BOOT)
    for _ in range(12):
        index = chance.randrange(1, 6)
        match chance.choice(["freeze", "outage", "restart", "wait"]):
            case "freeze":
                world.freeze(index, chance.randrange(100, 12_000))
            case "outage" if world.relay_up:
                world.outage(chance.randrange(100, 8_000))
            case "restart":
                world.crash(index)
                world.run(chance.randrange(8_000))
                boots[index] += 1
                world.start(index, boot=boots[index])
            case _:
                pass
        world.run(chance.randrange(12_000))
    highest: dict[tuple[bytes, bytes, int], tuple[int, int, int]] = {}
    for seen in world.seen:
        update = seen.transition.update
        if seen.transition.to_state != update.state:
            continue  # the end of a superseded boot
        about = (seen.by, update.member.node, world.hosts[seen.by].core.own.member.boot)
        height = (update.member.boot, update.incarnation, RANK[update.state])
        if seen.transition.from_state == "unknown" and seen.transition.reason == "started":
            highest.pop(about, None)
        if update.member.node != seen.by:
            fresh = seen.transition.from_state == "unknown"
            assert fresh or height > highest.get(about, (0, 0, -1)), "a state moved against the lattice"
            highest[about] = height
    world.loss = 0.0
    limit = LAN.push_pull_ms + 25_000
    assert world.run_until(world.agreed, limit) < limit
