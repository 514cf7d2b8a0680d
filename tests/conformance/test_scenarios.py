"""The scenarios of scenario.py on the simulated network and on real ZeroMQ: the same is observed."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conformance.scenario import SCENARIOS
from tests.conformance.stages import RealStage, SimStage


@pytest.mark.spec("S1 6.1", "S1 6.2", "S1 6.11", "S1 7.7", "S1 10.12")
@pytest.mark.parametrize("relay", [False, True], ids=["router", "relay"])
@pytest.mark.parametrize("name", SCENARIOS)
def test_on_real_sockets(name: str, relay: bool, tmp_path: Path) -> None:
    scenario, expected = SCENARIOS[name]
    stage = RealStage(tmp_path / "r", relay=relay)
    try:
        assert scenario(stage) == expected
    finally:
        stage.close()


@pytest.mark.spec("S1 6.1", "S1 6.2", "S1 6.11", "S1 7.7", "S1 10.12")
@pytest.mark.parametrize("relay", [False, True], ids=["router", "relay"])
@pytest.mark.parametrize("name", SCENARIOS)
def test_on_the_simulated_network(name: str, relay: bool) -> None:
    """With several seeds: whatever the delays, the same is observed."""
    scenario, expected = SCENARIOS[name]
    for seed in range(5):
        assert scenario(SimStage(relay=relay, seed=seed)) == expected
