"""`mvp-orchestrator doctor` in front of a real engine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.docker.engine import HABIT_IMAGE, TestEngine
from tests.unit.engine.tiny_model import TinySpec, write_model

CONFIG = """\
[provider]
kind = "{kind}"
[image]
node = "{image}"
[docker]
gpus = "{gpus}"
pull = "never"
[relay]
bind_addr = "127.0.0.1:19800"
[model]
id = "tiny"
cached_path = "{model}"
"""


def doctor(engine: TestEngine, folder: Path, kind: str, image: str, gpus: str) -> dict[str, list[dict[str, str]]]:
    model, config = folder / "tiny.gguf", folder / "run.toml"
    write_model(model, TinySpec(layers=2))
    config.write_text(CONFIG.format(kind=kind, image=image, gpus=gpus, model=model))
    command = [sys.executable, "-P", "-m", "services.orchestrator", "doctor", "--config", str(config), "--json"]
    environ = {**os.environ, **engine.environment}
    done = subprocess.run(command, capture_output=True, text=True, env=environ, timeout=180, check=False)
    found: dict[str, list[dict[str, str]]] = {}
    for row in json.loads(done.stdout)["checks"]:
        found.setdefault(row["name"], []).append(row)
    return found


def test_image_gpus_and_swarm_are_asked_of_the_engine(engine: TestEngine, tmp_path: Path) -> None:
    there = doctor(engine, tmp_path, "docker", HABIT_IMAGE, "none")["docker"]
    assert [row["status"] for row in there] == ["ok", "ok"], there
    missing = doctor(engine, tmp_path, "docker", "no-such-image:1", "all")["docker"]
    assert [row["status"] for row in missing] == ["ok", "fail", "fail"], missing
    assert missing[1]["do"] == "docker build -f compose/Dockerfile.worker -t no-such-image:1 ."
    assert 'gpus = "none"' in missing[2]["do"]
    (swarm,) = doctor(engine, tmp_path, "swarm", HABIT_IMAGE, "none")["swarm"]
    assert swarm["status"] == "fail" and swarm["do"].startswith("docker swarm init"), swarm
