"""The small parts: suspicion, rumour queue, probe list, protocol clock."""

from __future__ import annotations

import random

from common.swim.clock import ProtocolClock
from common.swim.probe import ProbeList
from common.swim.queue import Rumours
from common.swim.suspicion import Suspicion


def suspicion(wanted: int = 2) -> Suspicion:
    return Suspicion(b"first", 1_000, wanted=wanted, min_ms=4_000, max_ms=24_000)


def test_confirmations_shorten_a_suspicion_from_its_start() -> None:
    doubt = suspicion()
    assert doubt.deadline == 25_000
    assert doubt.confirm(b"second")
    assert 12_000 < doubt.deadline < 13_000
    assert doubt.confirm(b"third")
    assert doubt.deadline == 5_000


def test_an_accuser_counts_once_and_the_first_one_not_at_all() -> None:
    doubt = suspicion()
    assert not doubt.confirm(b"first")
    assert doubt.confirm(b"second")
    assert not doubt.confirm(b"second")
    assert doubt.confirm(b"third")
    assert not doubt.confirm(b"fourth"), "no more are wanted, so it is not passed on"


def test_without_wanted_confirmations_the_minimum_holds() -> None:
    doubt = suspicion(wanted=0)
    assert doubt.deadline == 5_000
    assert not doubt.confirm(b"second")


def test_a_restarted_suspicion_begins_anew_without_its_confirmations() -> None:
    doubt = suspicion()
    doubt.confirm(b"second")
    doubt.restart(9_000)
    assert doubt.deadline == 33_000


def test_a_newer_rumour_replaces_the_older() -> None:
    queue: Rumours[str] = Rumours()
    queue.put(b"a", "old", 10)
    queue.put(b"a", "new", 10)
    assert queue.take(100, 3) == (["new"], 10)
    assert len(queue) == 1


def test_fewest_sent_first_then_largest_that_fits_then_newest() -> None:
    queue: Rumours[str] = Rumours()
    queue.put(b"sent", "sent", 10)
    queue.take(100, 9)
    queue.put(b"small old", "small old", 10)
    queue.put(b"small new", "small new", 10)
    queue.put(b"large", "large", 50)
    queue.put(b"huge", "huge", 500)
    assert queue.take(100, 9) == (["large", "small new", "small old", "sent"], 80)
    assert queue.take(30, 9)[0] == ["small new", "small old", "sent"]


def test_a_rumour_leaves_with_its_last_time() -> None:
    queue: Rumours[str] = Rumours()
    queue.put(b"a", "a", 10)
    assert [queue.take(100, 2)[0] for _ in range(3)] == [["a"], ["a"], []]
    assert b"a" not in queue


def test_each_round_probes_everyone_once_in_another_order() -> None:
    nodes = [bytes([number]) for number in range(10)]
    probes = ProbeList(random.Random(3))
    for node in nodes:
        probes.add(node)
        probes.add(node)
    rounds = [[probes.next(lambda _: True) for _ in nodes] for _ in range(4)]
    assert all(sorted(filter(None, round)) == nodes for round in rounds)
    assert len({tuple(round) for round in rounds}) == 4


def test_a_newcomer_neither_doubles_nor_skips_anyone_in_the_round() -> None:
    for seed in range(20):
        probes = ProbeList(random.Random(seed))
        for number in range(6):
            probes.add(bytes([number]))
        first = [probes.next(lambda _: True) for _ in range(3)]
        probes.add(b"new")
        rest = []
        while (node := probes.next(lambda _: True)) not in first and node not in rest:
            rest.append(node)
        old = [node for node in first + rest if node != b"new"]
        assert sorted(filter(None, old)) == [bytes([number]) for number in range(6)]


def test_unwanted_nodes_are_skipped_and_reaped_at_the_wrap() -> None:
    probes = ProbeList(random.Random(1))
    probes.add(b"dead")
    probes.add(b"live")
    assert [probes.next(lambda node: node == b"live") for _ in range(3)] == [b"live"] * 3
    assert b"dead" not in probes
    assert probes.next(lambda _: False) is None


def test_the_protocol_clock_stands_during_a_pause() -> None:
    clock = ProtocolClock()
    clock.pause(1_000)
    clock.pause(1_500)
    assert clock.at(5_000) == 1_000
    clock.resume(6_000)
    clock.resume(9_000)
    assert clock.at(6_500) == 1_500
    assert clock.real(1_500) == 6_500
    clock.skip(500)
    assert clock.at(7_000) == 1_500
