"""tests/kill_matrix.toml, read: the cells, and the rule of each. Used on virtual time and on real processes."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

MATRIX: dict[str, Any] = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())
WORKER = ("agent", "engine")
Cell = tuple[str, str, str]
"""(process, signal, phase)."""


def listed(value: str | list[str]) -> list[str]:
    """A key that holds one or several names."""
    return [value] if isinstance(value, str) else value


def rule_of(process: str, signal: str, phase: str) -> dict[str, Any] | None:
    """The first rule that decides this cell."""
    for rule in MATRIX["rule"]:
        if process in listed(rule["process"]) and signal in listed(rule["signal"]) and phase in rule["phases"]:
            return dict(rule)
    return None


def cells() -> list[Cell]:
    """All cells that can be played."""
    return [
        (process, signal, phase)
        for process in MATRIX["processes"]
        for signal in MATRIX["signals"]
        for phase in MATRIX["phases"]
        if not (process in WORKER and phase in MATRIX["no_worker_yet"])
    ]
