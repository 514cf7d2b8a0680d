"""What the engine is asked for, and its refusals in words: no engine needed."""

from __future__ import annotations

import io
import tarfile
from typing import Any

import docker
import pytest

from common.messages.provision import NodeProvisionSpec, ProviderMount
from services.provisioner.docker_engine import gateway_of, refusal
from services.provisioner.docker_logs import _seconds
from services.provisioner.docker_spec import create_arguments, device_requests, launch_archive, user_of
from services.provisioner.plugin import Owner, ProviderError

API = docker.APIClient(base_url="unix:///nowhere.sock", version="1.41")


@pytest.mark.spec("S1 9.2")
@pytest.mark.parametrize(
    ("gpus", "wanted"),
    [
        ("none", []),
        ("all", [{"Driver": "", "Count": -1, "DeviceIDs": [], "Capabilities": [["gpu"]], "Options": {}}]),
        ("2", [{"Driver": "", "Count": 2, "DeviceIDs": [], "Capabilities": [["gpu"]], "Options": {}}]),
        ("device=0,1", [{"Driver": "", "Count": 0, "DeviceIDs": ["0", "1"], "Capabilities": [["gpu"]], "Options": {}}]),
        (
            "cdi:nvidia.com/gpu=0",
            [{"Driver": "cdi", "Count": 0, "DeviceIDs": ["nvidia.com/gpu=0"], "Capabilities": [], "Options": {}}],
        ),
    ],
)
def test_gpus_become_device_requests(gpus: str, wanted: list[dict[str, Any]]) -> None:
    assert [dict(request) for request in device_requests(gpus)] == wanted


@pytest.mark.parametrize("gpus", ["", "0", "-1", "some", "device=", "device=0,,1", "cdi:", "ALL"])
def test_other_gpus_are_refused(gpus: str) -> None:
    with pytest.raises(ProviderError, match=r"\[docker\] gpus ="):
        device_requests(gpus)


@pytest.mark.spec("S1 5.4")
def test_a_spec_becomes_a_container(spec: NodeProvisionSpec | None = None) -> None:
    spec = NodeProvisionSpec(
        run_id=7,
        node_id=3,
        stage_index=2,
        image="worker:1",
        env={"DEV": "CPU", "HF_TOKEN": "hf_x", "VASTAI_API_KEY": "v"},
        args=["--more"],
        mounts=[ProviderMount(host_path="/host/m.gguf", container_path="/models/cached/m.gguf")],
    )
    made = create_arguments(API, "cafe-3-nonce", spec, "cafe", Owner("fleet", "instance"), "all")
    assert made["name"] == "smq-cafe-3-nonce"
    assert made["entrypoint"] == ["mvp-worker-node"]
    assert made["command"] == ["--launch", "/run/swactor-mq/launch.json", "--more"]
    assert made["environment"] == {"DEV": "CPU", "PYTHONUNBUFFERED": "1"}
    host = made["host_config"]
    assert host["Mounts"] == [
        {"Target": "/models/cached/m.gguf", "Source": "/host/m.gguf", "Type": "bind", "ReadOnly": True}
    ]
    assert host["RestartPolicy"] == {"Name": "no"} and host["CapDrop"] == ["ALL"] and host["Init"]
    assert host["SecurityOpt"] == ["no-new-privileges"]
    assert made["labels"]["swactor-mq.handle"] == "cafe-3-nonce"
    assert made["labels"]["swactor-mq.fleet"] == "fleet" and made["labels"]["swactor-mq.instance"] == "instance"


def test_the_launch_file_is_the_workers_alone() -> None:
    with tarfile.open(fileobj=io.BytesIO(launch_archive(b"{}", 10, 20))) as tar:
        folder, file = tar.getmembers()
    assert (folder.name, folder.mode, folder.uid, folder.gid) == ("run/swactor-mq", 0o700, 10, 20)
    assert (file.name, file.mode, file.uid, file.gid) == ("run/swactor-mq/launch.json", 0o600, 10, 20)


PASSWD = b"root:x:0:0::/root:/bin/sh\nhabit:x:4711:4712::/home/habit:/bin/sh\nbroken\n"


@pytest.mark.parametrize(
    ("user", "numbers"),
    [
        ("", (0, 0)),
        ("habit", (4711, 4712)),
        ("habit:9", (4711, 9)),
        ("4711", (4711, 4712)),
        ("5", (5, 0)),
        ("5:6", (5, 6)),
    ],
)
def test_the_images_user_as_numbers(user: str, numbers: tuple[int, int]) -> None:
    assert user_of(user, PASSWD) == numbers


def test_an_unknown_user_is_refused() -> None:
    with pytest.raises(ProviderError, match="write USER as uid:gid"):
        user_of("nobody-here", None)


def test_the_gateway_also_of_an_engine_that_names_only_its_subnet() -> None:
    assert gateway_of({"IPAM": {"Config": [{"Subnet": "172.17.0.0/16"}]}}) == "172.17.0.1"
    six_first = {"IPAM": {"Config": [{"Subnet": "fd00::/64", "Gateway": "fd00::1"}, {"Gateway": "10.0.0.9"}]}}
    assert gateway_of(six_first) == "10.0.0.9"
    for nothing in ({}, {"IPAM": None}, {"IPAM": {"Config": [{"Subnet": "nonsense"}, {}]}}):
        with pytest.raises(ProviderError, match=r"set \[relay\] bind_addr and advertise_addr"):
            gateway_of(nothing)


@pytest.mark.parametrize(
    ("words", "advice"),
    [
        ('could not select device driver "" with capabilities: [[gpu]]', "install the NVIDIA container toolkit"),
        (
            "invoking the NVIDIA Container Runtime Hook directly; use --runtime=nvidia",
            'gpus = "cdi:nvidia.com/gpu=all"',
        ),
        ("failed to inject CDI devices: unresolvable CDI devices nvidia.com/gpu=9", "nvidia-ctk cdi list"),
        ("nvidia-container-cli: device error: 7: unknown device", "nvidia-smi -L"),
        ("invalid mount config: bind source path does not exist: /m", "the model file is not on the engine's machine"),
        ("OCI runtime create failed: exec: executable file not found in $PATH", "compose/Dockerfile.worker"),
    ],
)
def test_refusals_say_what_to_install(words: str, advice: str) -> None:
    assert advice in refusal(words)
    assert words in refusal(words)


def test_unknown_refusals_stay_as_they_are() -> None:
    assert refusal("no space left on device") == "no space left on device"


def test_timestamps_are_utc() -> None:
    assert _seconds(b"1970-01-02T00:00:01.999999999Z ") == 86401
