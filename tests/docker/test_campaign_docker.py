"""A sample of the fault campaign on a real engine, also one that is killed or restarted (tests/campaign)."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.campaign.cases import Case, cases
from tests.campaign.world import World
from tests.docker.engine import TestEngine
from tests.docker.swarm_engines import NODES, TestSwarm

SWARM_SAMPLE = [case for case in cases() if case.provider == "swarm"][6::23]
SAMPLE = [case for case in cases() if case.provider == "docker"][4::14]


@pytest.fixture(scope="module")
def world(engine: TestEngine) -> Iterator[World]:
    made = World(engine)
    yield made
    made.close()


@pytest.fixture(scope="module")
def managed(swarm: TestSwarm) -> Iterator[World]:
    """Workers on the manager's node only: the world looks there."""
    swarm.set_availability(NODES[1][1], "drain")
    made = World(swarm.manager, swarm=True)
    yield made
    made.close()
    swarm.set_availability(NODES[1][1], "active")
    swarm.wait_gone()


@pytest.mark.spec("S1 4.13", "S1 9.16", "S1 10.13")
@pytest.mark.parametrize("case", SAMPLE, ids=str)
def test_no_container_of_ours_is_left_and_none_of_others_is_touched(world: World, case: Case) -> None:
    assert world.play(case) == []


@pytest.mark.spec("S1 4.13", "S1 9.16", "S1 10.13")
@pytest.mark.parametrize("case", SWARM_SAMPLE, ids=str)
def test_no_service_secret_or_container_of_ours_is_left_in_a_swarm(managed: World, case: Case) -> None:
    assert managed.play(case) == []
