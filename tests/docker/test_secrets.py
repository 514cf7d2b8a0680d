"""Secrets of a real run, looked for wherever somebody could read them: argv, engine, swarm, logs, archive (S1 8.14)."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from common.door import free_ports
from common.launch_file import LaunchFile
from tests.docker.engine import TestEngine
from tests.docker.swarm_engines import GATEWAY, TestSwarm
from tests.docker.test_docker_run import Run

HF_TOKEN = "hf_" + "Secret0Of0This0Test" * 2
API_KEY = "vast" + "Secret0Of0This0Test" * 2


def hidden(run: Run) -> list[str]:
    """Every secret of the run: tokens, and the secret keys of services, workers and tunnels."""
    found = [HF_TOKEN, API_KEY]
    found += [path.read_text().strip() for path in (run.run_dir / "keys").iterdir()]
    launches = list((run.run_dir / "nodes").glob("*/launch.json"))
    assert launches
    found += [LaunchFile.read(path).secret_key for path in launches]
    return found


def assert_not_in(secrets: list[str], where: str, text: str) -> None:
    assert text, where
    for secret in secrets:
        assert secret not in text, f"a secret stands in {where}"


def command_lines() -> str:
    """Of every process of this machine, containers' included."""
    lines = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal() and int(entry.name) != os.getpid():
            try:
                lines.append((entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace"))
            except OSError:
                continue
    return "\n".join(lines)


def containers(engine: TestEngine) -> Iterator[tuple[str, str]]:
    api = engine.client()
    for found in engine.containers():
        yield "docker inspect", json.dumps(api.inspect_container(found["Id"]))
        yield "docker logs", api.logs(found["Id"]).decode(errors="replace") + " "
        yield "docker top", json.dumps(api.top(found["Id"], "auxww"))
    yield "docker ps", json.dumps(api.containers(all=True))
    yield "docker events", json.dumps(list(api.events(since=1, until=int(time.time()), decode=True)))


def of_the_run(run: Run) -> Iterator[tuple[str, str]]:
    yield "argv", command_lines()
    yield "the archive", run.archive.read_text(errors="replace")
    for path in (run.run_dir / "bus").iterdir():
        yield f"bus/{path.name}", path.read_text()
    ledger = run.archive.parent.parent / "state" / "swactor-mq" / "ledger"
    for path in ledger.glob("*.jsonl"):
        yield "the ledger", path.read_text()


@pytest.fixture
def environ() -> dict[str, str]:
    return {"HF_TOKEN": HF_TOKEN, "VASTAI_API_KEY": API_KEY}


@pytest.mark.spec("S1 8.14", "S1 9.20", "S1 7.2")
def test_docker(engine: TestEngine, worker_image: str, tmp_path: Path, environ: dict[str, str]) -> None:
    run = Run(engine, tmp_path / "run", tmp_path / "state", worker_image, environ=environ)
    try:
        run.ready()
        secrets = hidden(run)
        for where, text in (*of_the_run(run), *containers(engine)):
            assert_not_in(secrets, where, text)
        assert run.stop() == 0
        assert_not_in(secrets, "the archive", run.archive.read_text(errors="replace"))
        assert_not_in(secrets, "stderr", run.error() + " ")
    finally:
        _end(run)


@pytest.mark.spec("S1 8.14", "S1 9.20", "S1 7.2")
def test_swarm(swarm: TestSwarm, worker_image: str, tmp_path: Path, environ: dict[str, str]) -> None:
    relay = f'[relay]\nbind_addr = "{GATEWAY}:{free_ports(GATEWAY)}"\n'
    run = Run(
        swarm.manager, tmp_path / "run", tmp_path / "state", worker_image, relay, provider="swarm", environ=environ
    )
    try:
        run.ready()
        secrets = hidden(run)
        api: Any = swarm.manager.client()
        listed = {"services": api.services(), "tasks": api.tasks(), "secrets": api.secrets(), "nodes": api.nodes()}
        shown = [(f"docker {name}", json.dumps(found)) for name, found in listed.items()]
        for engine in swarm.engines:
            shown += list(containers(engine))
        for where, text in (*of_the_run(run), *shown):
            assert_not_in(secrets, where, text)
        assert run.stop() == 0
        assert_not_in(secrets, "the archive", run.archive.read_text(errors="replace"))
    finally:
        _end(run)
        swarm.clear()


def _end(run: Run) -> None:
    if run.process.poll() is None:
        run.process.kill()
        run.process.wait()
    shutil.rmtree(run.run_dir, ignore_errors=True)
