"""A sample of the fault campaign (`python -P -m tests.campaign` plays the whole of it), and the shape of its table."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.campaign.cases import POINTS, STOPPING, WRONGS, Case, cases, sample
from tests.campaign.world import World
from tests.unit.provisioner.vastai_stage import no_machines


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    if why := no_machines():
        pytest.skip(why)
    made = World()
    yield made
    made.close()


@pytest.mark.e2e
@pytest.mark.spec("S1 4.13", "S1 9.16", "S1 10.13", "S1 10.6")
@pytest.mark.parametrize("case", sample(), ids=str)
def test_nothing_of_ours_is_left_and_nothing_of_others_is_touched(world: World, case: Case) -> None:
    assert world.play(case) == []


def test_the_table_is_whole() -> None:
    found = cases()
    assert len(found) >= 300 and len({str(case)[4:] for case in found}) == len(found)
    for provider, points in POINTS.items():
        mine = [case for case in found if case.provider == provider]
        assert {case.point for case in mine} == set(points)
        assert {case.event for case in mine} >= {"kill", "gone", "term", "stop"}
        assert {case.wrong for case in mine} == {"", *WRONGS[provider]}
        assert not [case for case in mine if case.event == "stop" and case.point in STOPPING]
    assert {case.provider for case in sample()} == {"process", "external", "vastai"} and len(sample()) == 12
