"""Stacks that tests of a module share."""

from __future__ import annotations

import pytest

from tests.e2e.stack import model_file


@pytest.fixture(scope="session", autouse=True)
def model_is_there() -> None:
    """Without the model nothing here proves anything."""
    assert model_file().exists(), "run ./dev fetch-model first"
