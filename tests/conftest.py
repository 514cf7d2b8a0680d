"""What holds for every test: what `./dev test` counts, and that in CI nothing may be left out."""

from __future__ import annotations

import os
import time
from collections.abc import Generator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from tools.spec import normalise

# In CI a missing compiler, model or tool must not turn into a green run that proved nothing.
SKIPS_FAIL = os.environ.get("CI", "").lower() in ("true", "1")
E2E = Path(__file__).parent / "e2e"

# How long an example takes says how busy this machine is, and nothing of what it tries.
settings.register_profile("patient", settings.default, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("patient")

_started = time.monotonic()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--spec", action="append", metavar="CLAUSE", help="only the tests that prove this clause, as 'S1 4.6'"
    )


def _clauses(item: pytest.Item) -> list[str]:
    return [normalise(str(clause)) for mark in item.iter_markers("spec") for clause in mark.args]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        # The folder decides, so that no test of it falls out of the tier for want of a marker.
        if E2E in item.path.parents:
            item.add_marker("e2e")
        item.user_properties += [("spec", clause) for clause in _clauses(item)]
    chosen = config.getoption("--spec")
    if chosen:
        wanted = {normalise(clause) for clause in chosen}
        dropped = [item for item in items if not wanted.intersection(_clauses(item))]
        config.hook.pytest_deselected(items=dropped)
        items[:] = [item for item in items if item not in dropped]


def _skip_to_failure(report: pytest.TestReport | pytest.CollectReport) -> None:
    if SKIPS_FAIL and report.skipped and not hasattr(report, "wasxfail"):
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr
        report.outcome = "failed"
        report.longrepr = f"skipped, which CI does not accept: {reason}"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    _skip_to_failure(report)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    report = yield
    _skip_to_failure(report)
    return report


@pytest.hookimpl(trylast=True)
def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Leave the counts where `./dev test` adds up its tiers: passed, failed, skipped, seconds."""
    file = os.environ.get("SMQ_TIER_REPORT")
    if not file:
        return
    count = {name: len(reports) for name, reports in terminalreporter.stats.items()}
    passed = count.get("passed", 0)
    failed = count.get("failed", 0) + count.get("error", 0) + count.get("xpassed", 0)
    Path(file).write_text(
        f"{passed} {failed} {count.get('skipped', 0)} {time.monotonic() - _started:.1f}\n", encoding="utf-8"
    )
