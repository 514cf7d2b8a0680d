"""The formula tables of anchors.md C3, C7 (1)."""

from __future__ import annotations

import pytest

from common.swim.awareness import Awareness
from common.swim.config import LAN, PROFILES, WAN
from common.swim.formulas import (
    confirmations_wanted,
    push_pull_period_ms,
    retransmit_limit,
    suspicion_min_ms,
)
from common.swim.suspicion import Suspicion


@pytest.mark.parametrize(
    ("members", "expected_ms"), [(0, 1000), (1, 1000), (5, 1000), (10, 1000), (50, 1698), (100, 2000), (1000, 3000)]
)
def test_suspicion_minimum_per_multiplier(members: int, expected_ms: int) -> None:
    assert suspicion_min_ms(1, members, 1000) == expected_ms


@pytest.mark.parametrize(
    ("members", "lan_ms", "wan_ms"), [(2, 4000, 12_000), (10, 4000, 12_000), (20, 5204, 15_612), (100, 8000, 24_000)]
)
def test_suspicion_minimum_of_our_profiles(members: int, lan_ms: int, wan_ms: int) -> None:
    assert suspicion_min_ms(LAN.suspicion_mult, members, LAN.probe_interval_ms) == lan_ms
    assert suspicion_min_ms(WAN.suspicion_mult, members, WAN.probe_interval_ms) == wan_ms


def remaining(confirmations: int, wanted: int, elapsed_ms: int, min_ms: int, max_ms: int) -> int:
    """Of a suspicion that began at `elapsed_ms` before now and got so many confirmations."""
    suspicion = Suspicion(b"first", 1_000_000 - elapsed_ms, wanted=wanted, min_ms=min_ms, max_ms=max_ms)
    for number in range(confirmations):
        suspicion.confirm(bytes([number]))
    return suspicion.deadline - 1_000_000


@pytest.mark.parametrize(
    ("confirmations", "elapsed_ms", "remaining_ms"),
    [
        (0, 0, 30_000),
        (1, 2_000, 14_000),
        (2, 3_000, 4_810),
        (3, 4_000, -2_000),
        (4, 5_000, -3_000),
        (5, 10_000, -8_000),
    ],
)
def test_remaining_time_also_when_it_is_negative(confirmations: int, elapsed_ms: int, remaining_ms: int) -> None:
    assert remaining(confirmations, 3, elapsed_ms, 2_000, 30_000) == remaining_ms


def test_no_confirmations_wanted_means_the_minimum_at_once() -> None:
    assert remaining(0, 0, 500, 4_000, 24_000) == 3_500


@pytest.mark.parametrize(("members", "wanted"), [(1, 0), (2, 0), (3, 0), (4, 2), (50, 2)])
def test_confirmations_wanted_only_where_there_are_others(members: int, wanted: int) -> None:
    assert confirmations_wanted(LAN.confirmations_wanted, members) == wanted


@pytest.mark.parametrize(
    ("mult", "members", "limit"), [(3, 0, 0), (3, 1, 3), (3, 9, 3), (3, 10, 6), (3, 99, 6), (4, 6, 4), (4, 100, 12)]
)
def test_retransmit_limit(mult: int, members: int, limit: int) -> None:
    assert retransmit_limit(mult, members) == limit


@pytest.mark.parametrize(("members", "times"), [(1, 1), (32, 1), (33, 2), (64, 2), (65, 3), (128, 3), (1000, 6)])
def test_push_pull_period_is_stretched_above_32_members(members: int, times: int) -> None:
    assert push_pull_period_ms(30_000, members) == times * 30_000


def test_awareness_saturates_at_both_ends_and_scales() -> None:
    health = Awareness(8)
    scores = []
    for delta in (0, -1, 1, 3, 10, -3, -10):
        health.apply(delta)
        scores.append((health.score, health.scale(1000)))
    assert scores == [(0, 1000), (0, 1000), (1, 2000), (4, 5000), (7, 8000), (4, 5000), (0, 1000)]


def test_profiles_are_those_of_the_design() -> None:
    assert set(PROFILES) == {"lan", "wan"}
    assert (LAN.probe_interval_ms, LAN.probe_timeout_ms, LAN.nack_ms) == (1000, 300, 240)
    assert (WAN.probe_interval_ms, WAN.probe_timeout_ms, WAN.nack_ms) == (2000, 800, 640)
    for profile in PROFILES.values():
        assert profile.nack_ms + profile.probe_timeout_ms < profile.probe_interval_ms, "the nack comes within the round"
