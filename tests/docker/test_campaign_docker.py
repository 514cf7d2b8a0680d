"""A sample of the fault campaign on a real engine, also one that is killed or restarted (tests/campaign)."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.campaign.cases import Case, cases
from tests.campaign.world import World
from tests.docker.engine import TestEngine

SAMPLE = [case for case in cases() if case.provider == "docker"][4::14]


@pytest.fixture(scope="module")
def world(engine: TestEngine) -> Iterator[World]:
    made = World(engine)
    yield made
    made.close()


@pytest.mark.spec("S1 4.13", "S1 9.16", "S1 10.13")
@pytest.mark.parametrize("case", SAMPLE, ids=str)
def test_no_container_of_ours_is_left_and_none_of_others_is_touched(world: World, case: Case) -> None:
    assert world.play(case) == []
