"""Provider swarm on a real swarm of two engines: secrets as files, no second start, node loss, and nothing left."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from common.messages.provision import NodeProvisionSpec, ProviderMount
from services.provisioner.plugin import (
    Exited,
    Failed,
    LeftBehind,
    Owner,
    PluginNodeHandle,
    ProviderError,
    ProviderLine,
    StderrLine,
    StdoutLine,
)
from services.provisioner.swarm_provider import SwarmProvider
from tests.docker.engine import SWARM_HABIT_IMAGE, TestEngine
from tests.docker.swarm_engines import NODES, TestSwarm
from tests.e2e.stack import wait_for
from tests.unit.provisioner.conftest import Watched

SECRET = "s3cret-of-the-worker"
WAIT_S = 150


class Stage:
    """Starts fake workers as tasks and removes whatever the test left."""

    def __init__(self, swarm: TestSwarm, folder: Path) -> None:
        self.swarm, self._folder, self._count = swarm, folder, 0

    def provider(
        self, *, image: str = SWARM_HABIT_IMAGE, engine: TestEngine | None = None, **more: Any
    ) -> SwarmProvider:
        owner = more.pop("owner", Owner("0123456789abcdef", "test"))
        settings = {"gpus": "none", "pull": "never", "constraints": (), **more}
        environment = (engine or self.swarm.manager).environment
        return SwarmProvider(image, owner=owner, environment=environment, **settings)

    def start(
        self, habit: str, provider: SwarmProvider | None = None, *, image: str = SWARM_HABIT_IMAGE, **spec: Any
    ) -> tuple[SwarmProvider, PluginNodeHandle, Watched]:
        provider = provider or self.provider(image=image)
        provider.prepare()
        self._count += 1
        launch = self._folder / f"launch-{self._count}.json"
        launch.write_text(json.dumps({"secret_key": SECRET}))
        env = {"HABIT": habit, **spec.pop("env", {})}
        wanted = NodeProvisionSpec(run_id=1, node_id=self._count, stage_index=0, image=image, env=env, **spec)
        watched = Watched()
        handle_id = f"cafe0123-{self._count}-{os.getpid():x}{time.monotonic_ns():x}"
        return provider, provider.start_node(handle_id, wanted, launch, watched), watched

    def on_node(self, number: int, **more: Any) -> SwarmProvider:
        """A provider whose tasks run on that node only."""
        name = next(node["ID"] for node in self.swarm.raw_nodes() if node["Status"]["Addr"] == NODES[number - 1][1])
        return self.provider(constraints=[f"node.id == {name}"], **more)


@pytest.fixture
def stage(swarm: TestSwarm, tmp_path: Path) -> Iterator[Stage]:
    yield Stage(swarm, tmp_path)
    swarm.clear()


def gone(swarm: TestSwarm) -> None:
    assert swarm.left() == ([], [])
    until = time.monotonic() + WAIT_S
    while swarm.workers() and time.monotonic() < until:
        time.sleep(0.2)
    assert swarm.workers() == []


@pytest.mark.spec("S1 5.4", "S1 7.5", "S1 8.9")
def test_a_polite_worker_is_heard_stopped_and_removed(stage: Stage) -> None:
    provider, handle, watched = stage.start("polite", stage.on_node(2, grace_ms=60_000))
    watched.wait(lambda seen: StdoutLine("ready") in seen and StderrLine("careful") in seen, WAIT_S)
    assert any(isinstance(item, ProviderLine) and "runs on swarm node" in item.line for item in watched.seen)
    assert stage.swarm.workers() == ["node2 running"]
    provider.stop_node(handle, False)
    assert isinstance(watched.ended(), Exited) and StdoutLine("bye") in watched.seen

    def readers() -> list[str]:
        return [thread.name for thread in threading.enumerate() if thread.name.startswith(("stdout-", "stderr-"))]

    wait_for("the end of reading the log of a task that has ended", lambda: not readers(), WAIT_S)
    gone(stage.swarm)
    provider.stop_node(handle, False)


@pytest.mark.spec("S1 10.6")
def test_an_exit_is_told_once_after_the_last_words_and_nothing_is_started_again(stage: Stage) -> None:
    provider, handle, watched = stage.start("exits", stage.on_node(2))
    watched.wait(lambda seen: any(isinstance(item, Exited | Failed) for item in seen), WAIT_S)
    said = [item for item in watched.seen if not isinstance(item, ProviderLine)]
    assert said == [StderrLine("cannot: no such model"), Exited(3, "exited with status 3")]
    time.sleep(3)
    (service,) = stage.swarm.manager.client().services()
    assert len(stage.swarm.manager.client().tasks(filters={"service": service["ID"]})) == 1
    provider.stop_node(handle, False)
    gone(stage.swarm)


@pytest.mark.spec("S1 5.4", "S1 7.2")
def test_the_launch_file_is_a_secret_in_memory_and_shown_nowhere(stage: Stage, tmp_path: Path) -> None:
    model = tmp_path / "model.gguf"
    model.write_text("weights")
    model.chmod(0o666)
    mount = ProviderMount(host_path=str(model), container_path="/models/cached/model.gguf")
    env = {"HF_TOKEN": "hf_secret", "VASTAI_API_KEY": "vast_secret", "DEV": "CPU"}
    provider, handle, watched = stage.start("looks", mounts=[mount], args=["/models/cached/model.gguf"], env=env)
    watched.wait(lambda seen: any(isinstance(item, StdoutLine) for item in seen), WAIT_S)
    found = json.loads(next(item.line for item in watched.seen if isinstance(item, StdoutLine)))
    assert json.loads(found["launch"]) == {"secret_key": SECRET}
    assert found["modes"][1] == "0o400" and found["owners"][1:] == [4711, 4711] and found["uid"] == 4711
    assert (found["model"], found["writable"]) == ("weights", "Read-only file system")
    assert found["environment"]["DEV"] == "CPU" and found["environment"]["NVIDIA_VISIBLE_DEVICES"] == "void"
    api = stage.swarm.manager.client()
    shown = json.dumps([api.inspect_service(handle.facts["service"]), api.secrets(), api.tasks()])
    for engine in stage.swarm.engines:
        shown += json.dumps([engine.client().inspect_container(item["Id"]) for item in engine.containers()])
    for secret in (SECRET, "hf_secret", "vast_secret"):
        assert secret not in shown
    labels = api.inspect_service(handle.facts["service"])["Spec"]["Labels"]
    assert labels["swactor-mq.fleet"] == "0123456789abcdef" and labels["swactor-mq.handle"] == handle.id
    assert (labels["swactor-mq.run"], labels["swactor-mq.node"]) == ("cafe0123", str(1))
    provider.stop_node(handle, True)
    gone(stage.swarm)


@pytest.mark.spec("S1 10.5")
def test_refusals_say_what_to_do_and_leave_nothing(stage: Stage, engine: TestEngine) -> None:
    with pytest.raises(ProviderError, match="is not part of a swarm; run `docker swarm init` here"):
        stage.provider(engine=engine).prepare()
    with pytest.raises(ProviderError, match=r"only a manager can start services; set DOCKER_HOST to a manager"):
        stage.provider(engine=stage.swarm.second).prepare()
    with pytest.raises(ProviderError, match="names devices, which a swarm does not take"):
        stage.provider(gpus="device=0").prepare()
    with pytest.raises(ProviderError, match=r"no node fits \[swarm\] constraints; see `docker node inspect`"):
        stage.start("polite", stage.provider(constraints=["node.labels.gpu==true"]))
    with pytest.raises(ProviderError, match="no node has enough free NVIDIA-GPU; see its node-generic-resources"):
        stage.start("polite", stage.provider(gpus="2"))
    mount = ProviderMount(host_path="/nowhere/model.gguf", container_path="/models/model.gguf")
    with pytest.raises(ProviderError, match="a node does not have the model file; put it at the same path on every"):
        stage.start("polite", mounts=[mount])
    gone(stage.swarm)


def test_an_image_that_one_node_lacks_is_said_so(stage: Stage, engine: TestEngine) -> None:
    image = "smq-test-one-node:latest"
    api = stage.swarm.manager.client()
    api.tag(SWARM_HABIT_IMAGE, "smq-test-one-node", "latest")
    made = api.create_container(image, ["true"])["Id"]
    committed = api.commit(made, "smq-test-one-node", "latest", changes="LABEL only=here")["Id"]
    api.remove_container(made)
    try:
        provider = stage.on_node(2)
        with pytest.raises(ProviderError, match="a node does not have the image; push it to a registry"):
            stage.start("polite", provider, image=image)
        gone(stage.swarm)
    finally:
        api.remove_image(committed, force=True)


@pytest.mark.spec("S1 9.16")
def test_leftovers_are_found_by_label_and_nobody_elses_are_touched(stage: Stage) -> None:
    _, mine, _ = stage.start("polite")
    _, theirs, _ = stage.start("polite", stage.provider(owner=Owner("fedcba9876543210", "other")))
    third = stage.provider()
    listing = third.list_owned()
    assert [(one.id, one.where, one.state) for one in listing.owned] == [(mine.id, f"service smq-{mine.id}", "running")]
    assert listing.foreign == 1
    left = LeftBehind(mine.id, "swarm", "cafe0123", 1, "", mine)
    assert third.stop_left_behind(left)
    assert not third.stop_left_behind(left)
    assert stage.swarm.left() == ([f"smq-{theirs.id}"], [f"smq-{theirs.id}"])
    # Died between intent and handle: by the label alone.
    assert third.stop_left_behind(LeftBehind(theirs.id, "swarm", "cafe0123", 1, ""))
    foreign = LeftBehind(mine.id, "swarm", "cafe0123", 1, "", PluginNodeHandle(mine.id, None, {"swarm": "another"}))
    with pytest.raises(ProviderError, match="started in another swarm"):
        third.stop_left_behind(foreign)
    gone(stage.swarm)


@pytest.mark.spec("S1 9.15")
def test_a_lost_node_is_noticed_and_its_worker_never_started_elsewhere(stage: Stage) -> None:
    provider, handle, watched = stage.start("ticks", stage.on_node(2))
    watched.wait(lambda seen: StdoutLine("tick 3") in seen, WAIT_S)
    stage.swarm.cut(off=True)
    try:
        watched.wait(lambda seen: any(isinstance(item, Exited | Failed) for item in seen), WAIT_S)
        end = watched.seen[-1]
        assert isinstance(end, Failed) and "its swarm node" in end.reason and end.reason.endswith("is down")
        # The worker runs on out there; nothing has taken its place here.
        assert stage.swarm.workers() == ["node2 running"]
        provider.stop_node(handle, False)
        assert stage.swarm.left() == ([], [])
    finally:
        stage.swarm.cut(off=False)
    stage.swarm.wait_nodes("ready", "ready")
    gone(stage.swarm)  # the node that is back was told to end it


def test_a_manager_that_restarts_loses_neither_worker_nor_lines(stage: Stage) -> None:
    provider, handle, watched = stage.start("ticks", stage.on_node(2))
    watched.wait(lambda seen: StdoutLine("tick 3") in seen, WAIT_S)
    stage.swarm.manager.end(signal.SIGTERM)
    time.sleep(1)
    stage.swarm.manager.start()
    watched.wait(lambda seen: StdoutLine("tick 120") in seen, WAIT_S)
    ticks = [item.line for item in watched.seen if isinstance(item, StdoutLine) and item.line.startswith("tick")]
    assert ticks == [f"tick {count}" for count in range(len(ticks))]
    stage.swarm.wait_nodes("ready", "ready")
    provider.stop_node(handle, False)
    gone(stage.swarm)
