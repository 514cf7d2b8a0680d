"""What a container costs: time to runtime-ready over a process worker's, and a two-stage pipeline's tokens a second;
and how fast agents behind a NAT join.

Whole runs of mvp-orchestrator on a Docker engine of our own (root, dockerd), workers through the relay's TCP door.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from tests.campaign.__main__ import run as play_campaign
from tests.campaign.cases import cases
from tests.docker import nat
from tests.docker.engine import ROOT, WORKER_IMAGE, TestEngine, why_not
from tests.docker.joins import campaign
from tests.unit.provisioner.vastai_stage import no_machines
from tools.fetch_model import default_model_path
from tools.prompt_client import PromptClient

ROUNDS = 3
PROVIDERS = ("process", "docker")
PIPELINES = {
    "process": ("process", "auto"),
    "process_relayed": ("process", "relay"),
    "docker_relayed": ("docker", "relay"),
    "docker": ("docker", "auto"),
}
"""Of two stages, by provider and [pipeline] edges. auto: on one machine workers reach each other directly."""
SHARES = {
    "docker_share_2_stages": ("docker_relayed", "process"),
    "docker_share_2_stages_same_edges": ("docker_relayed", "process_relayed"),
    "docker_share_2_stages_direct": ("docker", "process"),
}
"""Figures: one pipeline's tokens a second over another's. The first is what the relay and the containers cost together,
the second what the containers do, the third what both do where containers reach each other."""
PROMPTS = 5  # of each pipeline in a round
JOINS, JOINS_AT_ONCE, RESTART_EVERY = 100, 10, 3
READY_S = 180.0
PARTS = ("relay", "containers", "faults")
PROMPT, TOKENS = "Write a very long story about a lighthouse keeper and the sea.", 128
CONFIG = """\
[runtime]
pipeline_stages = {stages}
[provider]
kind = "{provider}"
[image]
node = "{image}"
[docker]
gpus = "none"
pull = "never"
[model]
cached_path = "{model}"
[pipeline]
edges = "{edges}"
[relay]
mode = "default"
[prompt]
rpc_addr = "127.0.0.1:0"
[observability]
datastream_frame_log = "{archive}"
"""


def times(archive: Path) -> dict[tuple[str, str], tuple[float, dict[str, Any]]]:
    """(phase, status) → seconds and detail of its last record."""
    found = {}
    with contextlib.suppress(FileNotFoundError):
        for line in archive.read_text().splitlines():
            with contextlib.suppress(json.JSONDecodeError):
                frame = json.loads(line)
                if frame["channel"] == "mvp.orch.bootstrap":
                    record = json.loads(frame["payload"]["value"])
                    at = frame["collected"]["unix_ms"] / 1000
                    found[record["phase"], record["status"]] = at, record["detail"]
    return found


class Stack:
    """A run of mvp-orchestrator whose prompts are served; its workers are processes or containers."""

    def __init__(self, engine: TestEngine, folder: Path, provider: str, stages: int, edges: str = "auto") -> None:
        folder.mkdir()
        archive, config = folder / "archive.jsonl", folder / "config.toml"
        wanted = {"provider": provider, "stages": stages, "edges": edges, "image": WORKER_IMAGE}
        config.write_text(CONFIG.format(model=default_model_path(), archive=archive, **wanted))
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "services.orchestrator", "--runtime-config", str(config)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            env=engine.environment | {"XDG_STATE_HOME": str(folder / "state"), "PYTHONPATH": str(ROOT)},
        )
        until = time.monotonic() + READY_S
        while ("prompt_rpc", "ready") not in (seen := times(archive)):
            if self._process.poll() is not None or time.monotonic() > until:
                self.close()
                raise RuntimeError(f"{provider} with {stages} stages was not ready")
            time.sleep(0.1)
        self.ready_s = seen["node_runtime_ready", "ready"][0] - seen["node_spec", "ready"][0]
        """From the order to start the workers to the last one's report that it is ready."""
        self._addr = seen["prompt_rpc", "ready"][1]["addr"]

    def rate(self) -> float:
        """Tokens a second of one prompt."""
        with contextlib.closing(PromptClient.connect(self._addr, wait_s=5)) as client:
            client.complete(PROMPT, max_tokens=4)
            began = time.monotonic()
            done = client.complete(PROMPT, max_tokens=TOKENS)
            return done.tokens_generated / (time.monotonic() - began)

    def close(self) -> None:
        """Until it has ended."""
        if self._process.poll() is None:
            self._process.terminate()
            self._process.wait(60)


def relay() -> dict[str, object]:
    """Agents behind a NAT with random ports: how many joined, and the slowest, through restarts of the relay."""
    if why := nat.why_not():
        return dict.fromkeys(("relay_joins_ok", "relay_join_max_s")) | {
            "relay_joins_ok_why": why,
            "relay_join_max_s_why": why,
        }
    took, failed, restarts = campaign(JOINS, JOINS_AT_ONCE, RESTART_EVERY)
    slow = max(took, default=None)
    return {
        "relay_joins_ok": len(took),
        "relay_joins_failed": failed,
        "relay_join_max_s": None if slow is None else round(slow, 2),
        "relay_join_median_s": round(statistics.median(took), 2) if took else None,
        "relay_restarts": restarts,
    }


def spread(key: str, values: list[float], digits: int = 3) -> dict[str, object]:
    """Median, smallest and largest."""
    named = {key: statistics.median(values), f"{key}_min": min(values), f"{key}_max": max(values)}
    return {name: round(value, digits) for name, value in named.items()}


def one_round(engine: TestEngine, folder: Path, found: dict[str, list[float]]) -> None:
    """Starts one after the other; then all pipelines live and answer in turn, so that what else runs hits both."""
    for provider in PROVIDERS:
        stack = Stack(engine, folder / f"one-{provider}", provider, 1)
        stack.close()
        found.setdefault(f"{provider}_ready_s", []).append(stack.ready_s)
    stacks: dict[str, Stack] = {}
    try:
        for name, (provider, edges) in PIPELINES.items():
            stacks[name] = Stack(engine, folder / name, provider, 2, edges)
        for turn in range(PROMPTS):
            for name in PIPELINES if turn % 2 else reversed(PIPELINES):
                found.setdefault(f"{name}_2_stages_tokens_per_s", []).append(stacks[name].rate())
    finally:
        for stack in stacks.values():
            stack.close()


def containers(rounds: int) -> dict[str, object]:
    """One and two workers in containers against the same as processes, in turn."""
    if why := why_not():
        return dict.fromkeys(("docker_ready_extra_s", "docker_share_2_stages")) | {
            "docker_ready_extra_s_why": why,
            "docker_share_2_stages_why": why,
        }
    folder = Path(tempfile.mkdtemp(prefix="smq-docker-", dir="/tmp"))
    engine = TestEngine(folder / "engine")
    found: dict[str, list[float]] = {}
    try:
        engine.start()
        engine.build_base()
        engine.build("compose/Dockerfile.worker", WORKER_IMAGE)
        for number in range(rounds):
            (folder / str(number)).mkdir()
            one_round(engine, folder / str(number), found)
            newest = {key: round(statistics.median(values), 2) for key, values in found.items()}
            print(f"medians after round {number + 1}: {newest}", file=sys.stderr)
        left = len(engine.containers())
    finally:
        engine.close()
        shutil.rmtree(folder, ignore_errors=True)
    pairs = zip(found["docker_ready_s"], found["process_ready_s"], strict=True)
    extras = [docker - process for docker, process in pairs]
    figures = spread("docker_ready_extra_s", extras, 2)
    for key, (upper, lower) in SHARES.items():
        pairs = zip(found[f"{upper}_2_stages_tokens_per_s"], found[f"{lower}_2_stages_tokens_per_s"], strict=True)
        figures |= spread(key, [one / other for one, other in pairs])
    for key, values in found.items():
        figures |= spread(key, values, 2)
    return {**figures, "containers_left": left}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The campaign is long: half an hour on two idle cores."""
    parser.add_argument("--every", type=int, default=1, metavar="N", help="play each Nth case of the fault campaign")
    parser.add_argument("--part", choices=PARTS, action="append", help="only this; may be repeated")


def faults(every: int) -> dict[str, object]:
    """The provisioner hurt at each of its steps (tests/campaign): cases, and in how many a thing was left."""
    if why := no_machines() or why_not():
        return dict.fromkeys(("fault_cases", "leaked")) | {"fault_cases_why": why, "leaked_why": why}
    played = play_campaign(cases()[::every], say=False)
    return {key: played[key] for key in ("fault_cases", "leaked")}


def run(arguments: argparse.Namespace) -> dict[str, object]:
    """The relay's joins once, the containers in rounds, the fault campaign once."""
    wanted = arguments.part or PARTS
    figures: dict[str, object] = {}
    if "relay" in wanted:
        figures |= relay()
    if "containers" in wanted:
        figures |= containers(arguments.rounds)
    if "faults" in wanted:
        figures |= faults(arguments.every)
    return {**figures, "rounds": arguments.rounds, "cpus": os.cpu_count()}
