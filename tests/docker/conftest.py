"""The engine, once for all tests of this tier, and fake workers in containers: one habit each."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from common.messages.provision import NodeProvisionSpec
from services.provisioner.docker_provider import DockerProvider
from services.provisioner.plugin import Owner, PluginNodeHandle
from tests.docker.engine import HABIT_IMAGE, SWARM_HABIT_IMAGE, WORKER_IMAGE, EngineError, TestEngine, why_not
from tests.docker.swarm_engines import TestSwarm
from tests.unit.provisioner.conftest import Watched

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker("docker")


@pytest.fixture(scope="session")
def engine() -> Iterator[TestEngine]:
    """Started, with the base and the habit image."""
    if why := why_not():
        pytest.skip(why)
    folder = Path(tempfile.mkdtemp(prefix="smq-docker-", dir="/tmp"))
    made = TestEngine(folder)
    try:
        made.start()
        made.clear()
        made.build_base()
        made.build("Dockerfile", HABIT_IMAGE, HERE / "habits")
        yield made
    except EngineError as error:
        pytest.fail(str(error))
    finally:
        made.close()
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="session")
def worker_image(engine: TestEngine) -> str:
    """The image that users build."""
    engine.build("compose/Dockerfile.worker", WORKER_IMAGE)
    return WORKER_IMAGE


class Stage:
    """Starts fake workers in containers and removes whatever the test left."""

    def __init__(self, engine: TestEngine, folder: Path) -> None:
        self.engine = engine
        self._folder = folder
        self._count = 0

    def provider(
        self, *, image: str = HABIT_IMAGE, gpus: str = "none", pull: str = "never", **more: Any
    ) -> DockerProvider:
        owner = more.pop("owner", Owner("0123456789abcdef", "test"))
        return DockerProvider(image, gpus, pull, owner, self.engine.environment, **more)

    def start(
        self, habit: str, provider: DockerProvider | None = None, *, image: str = HABIT_IMAGE, **spec: Any
    ) -> tuple[DockerProvider, PluginNodeHandle, Watched]:
        provider = provider or self.provider(image=image)
        provider.prepare()
        self._count += 1
        launch = self._folder / f"launch-{self._count}.json"
        launch.write_text('{"secret_key": "s3cret-of-the-worker"}')
        env = {"HABIT": habit, **spec.pop("env", {})}
        wanted = NodeProvisionSpec(run_id=1, node_id=self._count, stage_index=0, image=image, env=env, **spec)
        watched = Watched()
        handle_id = f"cafe0123-{self._count}-{os.getpid():x}{time.monotonic_ns():x}"
        return provider, provider.start_node(handle_id, wanted, launch, watched), watched


@pytest.fixture
def stage(engine: TestEngine, tmp_path: Path) -> Iterator[Stage]:
    made = Stage(engine, tmp_path)
    yield made
    left = engine.containers()
    for found in left:
        engine.client().remove_container(found["Id"], force=True, v=True)


@pytest.fixture(scope="session")
def swarm(engine: TestEngine, worker_image: str) -> Iterator[TestSwarm]:
    """Two engines in two network namespaces, joined, with the worker's and the habit image on both."""
    folder = Path(tempfile.mkdtemp(prefix="smq-swarm-", dir="/tmp"))
    engine.build("Dockerfile", SWARM_HABIT_IMAGE, HERE / "habits", RUN_AS="4711:4711")
    made = TestSwarm(folder)
    try:
        made.start()
        for image in (SWARM_HABIT_IMAGE, worker_image):
            made.load(image, engine)
        yield made
    except EngineError as error:
        pytest.fail(str(error))
    finally:
        made.close()
        shutil.rmtree(folder, ignore_errors=True)
