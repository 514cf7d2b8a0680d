"""What a swarm is asked for, and its refusals in words: no engine needed."""

from __future__ import annotations

import json
from typing import Any

import pytest

from common.messages.provision import NodeProvisionSpec, ProviderMount
from services.provisioner.docker_engine import EngineGone
from services.provisioner.plugin import NotHere, Owner, ProviderError
from services.provisioner.swarm_engine import NoManager, has_begun, is_over, trouble
from services.provisioner.swarm_provider import SwarmProvider
from services.provisioner.swarm_spec import (
    gpu_count,
    image_reference,
    launch_secret,
    launch_user,
    service_arguments,
    service_name,
)

HANDLE = "cafe0123-3-0123456789abcdef01234567"
MARKS = {"swactor-mq": "worker", "swactor-mq.handle": HANDLE}
ID = "sha256:" + "1" * 64


def asked(gpus: str = "none", **spec: Any) -> dict[str, Any]:
    wanted = NodeProvisionSpec(run_id=1, node_id=3, stage_index=0, image="img", **spec)
    secret = launch_secret("secret-id", service_name(HANDLE), (7, 8))
    arguments = service_arguments(HANDLE, wanted, ID, secret, MARKS, gpus, ["node.labels.gpu == true "], 2)
    found: dict[str, Any] = json.loads(json.dumps(arguments))
    return found


@pytest.mark.spec("S1 5.4", "S1 7.2")
def test_one_task_that_is_never_started_again_with_its_launch_file_as_a_secret() -> None:
    mount = ProviderMount(host_path="/m.gguf", container_path="/models/m.gguf")
    service = asked(args=["--x"], env={"DEV": "CPU", "HF_TOKEN": "hidden"}, mounts=[mount])
    task, container = service["task_template"], service["task_template"]["ContainerSpec"]
    assert service["name"] == f"smq-{HANDLE}" and len(service["name"]) < 64
    assert service["labels"] == MARKS == container["Labels"]
    assert service["mode"] == {"replicated": {"Replicas": 1}}
    assert task["RestartPolicy"]["Condition"] == "none"
    assert task["Placement"] == {"Constraints": ["node.labels.gpu == true"]}
    assert container["Image"] == ID and container["Healthcheck"]["Test"] == ["NONE"]
    assert container["Command"] == ["mvp-worker-node"]
    assert container["Args"] == ["--launch", "/run/swactor-mq/launch.json", "--x"]
    assert container["Env"] == ["DEV=CPU", "NVIDIA_VISIBLE_DEVICES=void", "PYTHONUNBUFFERED=1"]
    (secret,) = container["Secrets"]
    assert secret["File"] == {"Name": "/run/swactor-mq/launch.json", "UID": "7", "GID": "8", "Mode": 0o400}
    assert container["Mounts"][0]["ReadOnly"] is True and container["StopGracePeriod"] == 2_000_000_000
    assert "hidden" not in json.dumps(service)


def test_gpus_are_generic_resources() -> None:
    assert [gpu_count(gpus) for gpus in ("none", "all", "2")] == [None, None, 2]
    for gpus in ("device=0,1", "cdi:nvidia.com/gpu=all"):
        with pytest.raises(ProviderError, match="names devices, which a swarm does not take"):
            gpu_count(gpus)
    reserved = asked("2")["task_template"]["Resources"]["Reservations"]["GenericResources"]
    assert reserved == [{"DiscreteResourceSpec": {"Kind": "NVIDIA-GPU", "Value": 2}}]
    assert "NVIDIA_VISIBLE_DEVICES=all" in asked("all")["task_template"]["ContainerSpec"]["Env"]


@pytest.mark.parametrize(
    ("image", "digests", "expected"),
    [
        ("reg.example.org:5000/a/b:1", ["reg.example.org:5000/a/b@sha256:2"], "reg.example.org:5000/a/b@sha256:2"),
        ("reg.example.org:5000/a/b", ["other/b@sha256:3", "reg.example.org:5000/a/b@sha256:2"], None),
        ("b:latest", ["other/b@sha256:3"], ID),
        ("b:latest", None, ID),
    ],
)
def test_nodes_run_the_very_image_of_the_manager(image: str, digests: list[str] | None, expected: str | None) -> None:
    wanted = expected or "reg.example.org:5000/a/b@sha256:2"
    assert image_reference(image, {"Id": ID, "RepoDigests": digests}) == wanted


def test_the_images_user_has_to_have_numbers() -> None:
    assert launch_user({"Config": {"User": "7:8"}}) == (7, 8)
    assert launch_user({"Config": None}) == (0, 0)
    with pytest.raises(ProviderError, match="write USER as uid:gid in its Dockerfile"):
        launch_user({"Config": {"User": "habit"}})


@pytest.mark.spec("S1 10.5")
@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("", ""),
        ("no suitable node (scheduling constraints not satisfied on 2 nodes)", "no node fits [swarm] constraints"),
        ("no suitable node (insufficient resources on 1 node)", "no node has enough free NVIDIA-GPU"),
        ("no suitable node (1 node not available for new tasks)", "no node of the swarm can run it"),
        ("No such image: sha256:0", "a node does not have the image; push it"),
        ('invalid mount config for type "bind": bind source path does not exist: /m', "does not have the model file"),
        ("task: non-zero exit (3)", "task: non-zero exit (3)"),
    ],
)
def test_refusals_say_what_to_do(words: str, says: str) -> None:
    found = trouble({"Status": {"State": "pending", "Err": words}})
    assert says in found and words in found and bool(found) == bool(words)


def test_states_of_a_task() -> None:
    assert is_over({"Status": {"State": "failed"}}) and not is_over({"Status": {"State": "running"}})
    assert has_begun({"Status": {"State": "running", "ContainerStatus": {"PID": 7}}})
    assert not has_begun({"Status": {"State": "preparing", "ContainerStatus": None}})
    # Programs that ended before anybody looked have no PID any more.
    assert has_begun({"Status": {"State": "complete", "ContainerStatus": {"ContainerID": "7"}}})
    ran = {"State": "failed", "Err": "task: non-zero exit (3)", "ContainerStatus": {"ContainerID": "7", "ExitCode": 3}}
    assert has_begun({"Status": ran})
    assert not has_begun({"Status": ran | {"Err": "starting container failed: OCI runtime create failed"}})
    assert not has_begun({"Status": {"State": "rejected", "Err": "No such image: sha256:0"}})


@pytest.mark.spec("S1 9.16")
def test_a_listing_that_cannot_be_read_is_no_empty_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only without a swarm to ask is nothing owned there."""
    provider = SwarmProvider("img", "none", "never", [], Owner("fleet"), {})

    def raising(error: Exception) -> Any:
        def call(*_: object) -> Any:
            raise error

        return call

    for error in (EngineGone("no engine"), NoManager("no swarm")):
        monkeypatch.setattr(provider._engine, "swarm_id", raising(error))
        with pytest.raises(NotHere, match=str(error)):
            provider.list_owned()
    monkeypatch.setattr(provider._engine, "swarm_id", raising(ProviderError("the swarm is locked")))
    with pytest.raises(ProviderError, match="locked") as caught:
        provider.list_owned()
    assert not isinstance(caught.value, NotHere)
    monkeypatch.setattr(provider._engine, "swarm_id", lambda: "here")
    monkeypatch.setattr(provider._engine, "secrets", lambda _: [])
    monkeypatch.setattr(provider._engine, "services", raising(ProviderError("the swarm has no leader")))
    with pytest.raises(ProviderError, match="no leader") as caught:
        provider.list_owned()
    assert not isinstance(caught.value, NotHere)


def test_a_worker_is_listed_once_as_its_service(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its secret bears the same handle; alone it is what a start that was cut short left."""

    def item(handle: str, fleet: str) -> dict[str, Any]:
        marks = {"swactor-mq": "worker", "swactor-mq.handle": handle, "swactor-mq.fleet": fleet}
        return {"ID": f"id-{handle}", "CreatedAt": "2026-01-01T00:00:01.5Z", "Spec": {"Name": handle, "Labels": marks}}

    provider = SwarmProvider("img", "none", "never", [], Owner("mine"), {})
    engine = provider._engine
    monkeypatch.setattr(engine, "swarm_id", lambda: "here")
    monkeypatch.setattr(engine, "services", lambda _: [item("a", "mine"), item("x", "theirs")])
    monkeypatch.setattr(engine, "secrets", lambda _: [item("a", "mine"), item("b", "mine"), item("x", "theirs")])
    monkeypatch.setattr(engine, "tasks", lambda _: [{"Status": {"State": "running"}}])
    listing = provider.list_owned()
    assert {(one.id, one.where, one.state) for one in listing.owned} == {
        ("a", "service a", "running"),
        ("b", "secret b", "made"),
    }
    assert listing.foreign == 1 and listing.owned[0].since_unix_ms == 1_767_225_601_000
