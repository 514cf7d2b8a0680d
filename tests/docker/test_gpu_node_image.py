"""The image of a rented gpu-node: built on the worker's, started as vast.ai starts it (S2 5)."""

from __future__ import annotations

import time

import pytest

from tests.docker.engine import TestEngine

IMAGE = "smq-test-gpu-node:latest"
ONSTART = "exec /usr/local/bin/gpu-node 2>&1"


@pytest.mark.spec("S2 5")
def test_onstart_finds_gpu_node_in_the_image(engine: TestEngine, worker_image: str) -> None:
    engine.build("worker/gpu_node/Dockerfile", IMAGE)
    api = engine.client()
    environ = {"SEED_ADDR": "ab" * 32, "SEED_RELAY": "tcp://127.0.0.1:7700", "GPU_NODE_MODEL": "hf://o/r/f.gguf"}
    container = api.create_container(IMAGE, ["bash", "-c", ONSTART], environment=environ)["Id"]
    try:
        api.start(container)
        said, until = b"", time.monotonic() + 150
        while b"\n" not in said and time.monotonic() < until:
            time.sleep(0.2)
            said = api.logs(container)
        assert said == b"gpu-node: waiting for this node's key in /run/smq/node.key\n"
    finally:
        api.remove_container(container, force=True)
