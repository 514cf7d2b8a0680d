"""`docker-compose up` serves prompts on the host's loopback, and down leaves nothing (design.md 2, Hosted)."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from common.door import free_ports
from tests.docker.engine import ROOT, SERVICES_IMAGE, TestEngine
from tests.e2e.stack import wait_for
from tools.fetch_model import default_model_path
from tools.prompt_client import PromptClient, PromptClientError

UP_S = 300
PORTS = ("SMQ_PORT", "SMQ_HTTP_PORT", "SMQ_DASHBOARD_PORT", "SMQ_METRICS_PORT")


@pytest.fixture
def compose(engine: TestEngine, worker_image: str) -> Iterator[tuple[Callable[..., str], list[int]]]:
    if shutil.which("docker-compose") is None:
        pytest.skip("docker-compose is missing: apt-get install docker-compose")
    engine.build("compose/Dockerfile.services", SERVICES_IMAGE)
    # Below those that the connections of other tests take from until they are bound.
    first = free_ports("127.0.0.1")
    ports = list(range(first, first + len(PORTS)))
    environment = engine.environment | {
        **dict(zip(PORTS, map(str, ports), strict=True)),
        "SMQ_MODELS": os.path.dirname(default_model_path().resolve()),
        "COMPOSE_PROJECT_NAME": "smqtest",
        "COMPOSE_DOCKER_CLI_BUILD": "0",
        "DOCKER_BUILDKIT": "0",
    }

    def run(*arguments: str, limit_s: float = UP_S) -> str:
        command = ["docker-compose", "-f", str(ROOT / "compose" / "docker-compose.yml"), *arguments]
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=limit_s, stdin=subprocess.DEVNULL
        )
        assert done.returncode == 0, done.stderr[-3000:]
        return done.stdout

    yield run, ports
    with contextlib.suppress(AssertionError, subprocess.TimeoutExpired):
        run("down", "-v", "-t", "5")


def ask(port: int, run: Callable[..., str], prompt: str) -> str:
    until = time.monotonic() + UP_S
    while True:
        try:
            with contextlib.closing(PromptClient.connect(f"127.0.0.1:{port}", wait_s=2)) as client:
                return client.complete(prompt, max_tokens=12).final_text
        except (PromptClientError, OSError):
            if time.monotonic() > until:
                pytest.fail(run("ps") + run("logs", "--no-color", "--tail", "30"))
            time.sleep(1)


def get(url: str) -> httpx.Response:
    """Once somebody answers there: the prompt RPC may be up before the pages are."""

    def answer() -> httpx.Response | None:
        with contextlib.suppress(httpx.TransportError):
            return httpx.get(url, timeout=60)
        return None

    found = wait_for(url, answer, UP_S)
    assert isinstance(found, httpx.Response)
    return found


def services(engine: TestEngine) -> dict[str, dict[str, Any]]:
    found = engine.client().containers(all=True, filters={"label": ["com.docker.compose.project=smqtest"]})
    return {item["Labels"]["com.docker.compose.service"]: item for item in found}


@pytest.mark.spec("S1 2.6", "S1 7.2")
def test_the_whole_stack_comes_up_answers_and_goes(compose: Any, engine: TestEngine) -> None:
    run, ports = compose
    port, http, dashboard, metrics = ports
    run("up", "-d", "--no-build")
    assert "Paris" in ask(port, run, "What is the capital of France? One word.")
    asked = {"role": "user", "content": "What is the capital of France? One word."}
    question = {"model": "default", "messages": [asked], "temperature": 0}  # OpenAI's default is 1
    get(f"http://127.0.0.1:{http}/healthz")
    answer = httpx.post(f"http://127.0.0.1:{http}/v1/chat/completions", json=question | {"max_tokens": 12}, timeout=120)
    assert "Paris" in answer.json()["choices"][0]["message"]["content"], answer.text
    assert "swactor" in get(f"http://127.0.0.1:{dashboard}/").text
    assert "smq_" in get(f"http://127.0.0.1:{metrics}/metrics").text
    # A page of another site that names itself into this machine gets nothing.
    assert httpx.get(f"http://127.0.0.1:{dashboard}/", headers={"Host": "evil.example"}, timeout=60).status_code == 421
    up = services(engine)
    assert up.pop("keys")["State"] == "exited"
    assert {item["State"] for item in up.values()} == {"running"}, run("ps")
    for name, item in up.items():
        shown = engine.client().inspect_container(item["Id"])
        assert shown["Config"]["User"] == "10001:10001", name
        assert not any("docker.sock" in mount["Source"] for mount in shown["Mounts"]), name
    published = [shown for item in up.values() for shown in item["Ports"] if shown.get("PublicPort")]
    assert {(item["IP"], item["PublicPort"]) for item in published} == {("127.0.0.1", number) for number in ports}
    run("stop", "orchestrator")
    ended = engine.client().inspect_container(up["orchestrator"]["Id"])["State"]
    assert ended["ExitCode"] == 0, run("logs", "--no-color", "orchestrator")
    # The worker is told by the run's end, not by the engine.
    until = time.monotonic() + 90
    while services(engine)["worker"]["State"] == "running" and time.monotonic() < until:
        time.sleep(0.2)
    assert services(engine)["worker"]["State"] == "exited"
    run("down", "-v", "-t", "5")
    assert services(engine) == {}
    volumes = engine.client().volumes()["Volumes"] or []
    assert not [volume for volume in volumes if volume["Name"].startswith("smqtest_")]
