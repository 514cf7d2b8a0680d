"""The launch: how long until prompts are taken, what the services cost while nobody asks, how long the end takes.

Each round is one whole run of mvp-orchestrator with a real worker and the real model, in directories of its own; the
model's file is in the page cache after the first. The idle share is CPU time over wall time, so what else runs on the
machine hardly changes it; ready_s and shutdown_s it does.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Iterable
from pathlib import Path

from tests.e2e.stack import READY_S, Process, Stack, model_file, wait_for
from tools.fetch_model import fetch_default

ROUNDS = 3
SETTLE_S = 3.0
IDLE_S = 15.0
WORKER = ("agent", "engine")
TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of this bench."""
    parser.add_argument("--idle", type=float, default=IDLE_S, help="seconds of idling per round (%(default)s)")


def cpu_s(processes: Iterable[Process]) -> dict[Process, float]:
    """User and system seconds that each has used so far."""
    used = {}
    for process in processes:
        words = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
        used[process] = (int(words[11]) + int(words[12])) / TICKS_PER_S
    return used


def resident_bytes(process: Process) -> int:
    """Its resident set."""
    return int(Path(f"/proc/{process.pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def one_run(idle_s: float) -> tuple[dict[str, float], dict[str, object]]:
    """The figures of one run, and those by service."""
    started = time.monotonic()
    with Stack() as stack:
        wait_for("the prompt RPC", lambda: stack.archive.find("prompt_rpc", "ready"), READY_S)
        ready_s = time.monotonic() - started
        time.sleep(SETTLE_S)
        services = [process for process in stack.left() if process.part not in WORKER]
        before, began = cpu_s(services), time.monotonic()
        time.sleep(idle_s)
        after, took_s = cpu_s(services), time.monotonic() - began
        resident = {process.part: resident_bytes(process) for process in services}
        share = {process.part: (after[process] - before[process]) / took_s for process in services}
        stopped = time.monotonic()
        stack.say("stop\n")
        status = stack.wait()
        shutdown_s = time.monotonic() - stopped
        if status != 0:
            raise RuntimeError(f"the run ended with status {status}: {stack.stderr}")
    figures = {
        "ready_s": ready_s,
        "shutdown_s": shutdown_s,
        "services_rss_bytes": float(sum(resident.values())),
        "idle_cpu_share": sum(share.values()),
    }
    return figures, {"rss_bytes_by_service": resident, "idle_cpu_share_by_service": share}


def tidy(key: str, value: float) -> float | int:
    """Bytes are whole."""
    return round(value) if key.endswith("_bytes") else round(value, 4)


def run(arguments: argparse.Namespace) -> dict[str, object]:
    """Medians over the rounds, with the extremes of all."""
    if not model_file().exists():
        fetch_default(model_file().parent)
    rounds: list[dict[str, float]] = []
    parts: dict[str, object] = {}
    for number in range(arguments.rounds):
        found, parts = one_run(arguments.idle)
        rounds.append(found)
        print(f"round {number + 1}: {found}", file=sys.stderr)
    figures: dict[str, object] = {}
    for key in rounds[0]:
        values = [found[key] for found in rounds]
        figures[key] = tidy(key, statistics.median(values))
        figures[f"{key}_min"], figures[f"{key}_max"] = tidy(key, min(values)), tidy(key, max(values))
    return {**figures, **parts}
