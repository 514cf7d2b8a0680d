"""The formulas of memberlist and Lifeguard as plain functions (anchors.md C3), milliseconds in and out."""

from __future__ import annotations

import math

PUSH_PULL_SCALE_FROM = 32  # members; above, whole tables are exchanged less often, for their number grows as n squared


def suspicion_min_ms(mult: int, members: int, probe_interval_ms: int) -> int:
    """The shortest life of a suspicion: mult · max(1, log10(max(1, n))) · interval."""
    return int(mult * max(1.0, math.log10(max(1, members))) * probe_interval_ms)


def confirmations_wanted(configured: int, members: int) -> int:
    """How many confirmations shorten a suspicion; 0 when there are not so many others (self and suspect excluded)."""
    return 0 if members - 2 < configured else configured


def suspicion_total_ms(confirmations: int, wanted: int, min_ms: int, max_ms: int) -> int:
    """A suspicion's whole life after so many confirmations: from max down to min, by the logarithm."""
    if wanted < 1:
        return min_ms
    fraction = math.log(confirmations + 1) / math.log(wanted + 1)
    return max(min_ms, math.floor(max_ms - fraction * (max_ms - min_ms)))


def retransmit_limit(mult: int, members: int) -> int:
    """How often one member passes a rumour on: mult · ceil(log10(n + 1))."""
    return mult * math.ceil(math.log10(members + 1))


def push_pull_period_ms(period_ms: int, members: int) -> int:
    """The period of table exchanges: stretched above 32 members."""
    if members <= PUSH_PULL_SCALE_FROM:
        return period_ms
    return period_ms * (math.ceil(math.log2(members) - math.log2(PUSH_PULL_SCALE_FROM)) + 1)
