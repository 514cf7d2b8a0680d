from __future__ import annotations

from pathlib import Path

import pytest

from common import config_rules
from tests.unit.config.config_world import World, make_world


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    """Nothing of this checkout or its environment is found by accident."""
    monkeypatch.setattr(config_rules, "CHECKOUT", tmp_path / "checkout")
    monkeypatch.setattr("sys.prefix", str(tmp_path / "prefix"))
    return make_world(tmp_path.resolve())
