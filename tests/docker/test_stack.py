"""`docker stack deploy` of the services on one node of a real swarm: prompts are answered on that node's loopback."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.docker.engine import ROOT, SERVICES_IMAGE, TestEngine
from tests.docker.swarm_engines import NODES, TestSwarm
from tests.e2e.stack import wait_for
from tools.fetch_model import default_model_path

UP_S = 240


@pytest.fixture
def deployed(swarm: TestSwarm, engine: TestEngine, worker_image: str) -> Iterator[TestSwarm]:
    if shutil.which("docker") is None:
        pytest.skip("docker is missing: apt-get install docker.io")
    engine.build("compose/Dockerfile.services", SERVICES_IMAGE)
    swarm.load(SERVICES_IMAGE, engine)
    api = swarm.manager.client()
    environment = swarm.manager.environment | {
        "SMQ_NODE": api.info()["Name"],
        "SMQ_ADDR": NODES[0][1],
        "SMQ_MODELS": os.path.dirname(default_model_path().resolve()),
        # By their ids: no node asks a registry for them.
        "SMQ_SERVICES_IMAGE": api.inspect_image(SERVICES_IMAGE)["Id"],
        "SMQ_WORKER_IMAGE": api.inspect_image(worker_image)["Id"],
    }
    file = str(ROOT / "compose" / "docker-stack.yml")
    deploy = ["docker", "stack", "deploy", "--resolve-image", "never", "-c", file, "smqtest"]
    remove = ["docker", "stack", "rm", "smqtest"]
    # Both engines of the test are on one machine and so have one host name: node 2 takes nothing.
    swarm.set_availability(NODES[1][1], "drain")
    try:
        done = subprocess.run(deploy, env=environment, capture_output=True, text=True, timeout=300, check=False)
        assert done.returncode == 0, done.stderr
        yield swarm
    finally:
        subprocess.run(remove, env=environment, capture_output=True, timeout=300, check=False)
        swarm.clear()
        swarm.wait_gone()
        swarm.set_availability(NODES[1][1], "active")


def on_node(*command: str) -> subprocess.CompletedProcess[str]:
    """Run it on node 1's own network."""
    line = ["nsenter", f"--net=/run/netns/{NODES[0][0]}", *command]
    return subprocess.run(line, capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.spec("S1 2.6")
def test_the_stack_answers_on_its_nodes_loopback(deployed: TestSwarm) -> None:
    chat = str(Path(sys.executable).with_name("mvp-chat"))
    until = time.monotonic() + UP_S
    while True:
        done = on_node(chat, "--connect", "127.0.0.1:19777", "--prompt", "What is the capital of France? One word.")
        if done.returncode == 0:
            break
        if time.monotonic() > until:
            api = deployed.manager.client()
            tasks = [(task["Status"]["State"], task["Status"].get("Err")) for task in api.tasks()]
            pytest.fail(f"{done.stderr} {tasks}")
        time.sleep(2)
    assert "Paris" in done.stdout
    get = "import sys, urllib.request as r; sys.stdout.write(r.urlopen(sys.argv[1], timeout=20).read().decode())"
    for url, word in (("http://127.0.0.1:8090/", "swactor"), ("http://127.0.0.1:8080/v1/models", "default")):
        # The prompt RPC may be up before the pages are.
        wait_for(url, lambda url=url, word=word: word in on_node(sys.executable, "-c", get, url).stdout, UP_S)
    listening = on_node("ss", "-Hltn").stdout
    beyond = {line.split()[3] for line in listening.splitlines() if not line.split()[3].startswith("127.")}
    ours = {address for address in beyond if address.rpartition(":")[2] in ("19777", "8080", "8090")}
    assert ours == set(), "prompts and pages are for the node's loopback only"
    assert {f"0.0.0.0:{port}" for port in range(19800, 19804)} <= beyond
