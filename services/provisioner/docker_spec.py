"""From a NodeProvisionSpec to what the engine is asked to create (S1 5.4, 7.2). Pure; no secret is in any of it."""

from __future__ import annotations

import io
import posixpath
import tarfile
from collections.abc import Mapping
from typing import Any

import docker.types

from common.messages.provision import NodeProvisionSpec
from services.provisioner.plugin import Owner, ProviderError
from services.provisioner.process_provider import NEVER_PASSED

WORKER_PROGRAM = "mvp-worker-node"
LAUNCH_PATH = "/run/swactor-mq/launch.json"
LABEL = "swactor-mq"
LABEL_HANDLE = f"{LABEL}.handle"
LABEL_FLEET = f"{LABEL}.fleet"
NAME_PREFIX = "smq-"
PIDS_MAX = 1024  # a worker has about twenty threads; tinygrad and numpy pools stay far below
LOG_BYTES_MAX = "16m"  # the followers read at once; this only bounds the engine's disk


def labels(handle_id: str, spec: NodeProvisionSpec, run: str, owner: Owner) -> dict[str, str]:
    """By these, and by nothing else, a container is known to be ours."""
    return {
        LABEL: "worker",
        LABEL_HANDLE: handle_id,
        LABEL_FLEET: owner.fleet,
        f"{LABEL}.instance": owner.instance,
        f"{LABEL}.run": run,
        f"{LABEL}.run_id": str(spec.run_id),
        f"{LABEL}.node": str(spec.node_id),
        f"{LABEL}.stage": str(spec.stage_index),
    }


def device_requests(gpus: str) -> list[Any]:
    """[docker] gpus: none | all | N | device=0,1 | cdi:vendor/class=name. Raises ProviderError for anything else."""
    gpu = [["gpu"]]
    if gpus == "none":
        return []
    if gpus == "all":
        return [docker.types.DeviceRequest(count=-1, capabilities=gpu)]
    if gpus.isdecimal() and int(gpus) > 0:
        return [docker.types.DeviceRequest(count=int(gpus), capabilities=gpu)]
    kind, _, names = gpus.partition("=")
    if kind == "device" and all(ids := names.split(",")):
        return [docker.types.DeviceRequest(device_ids=ids, capabilities=gpu)]
    if gpus.startswith("cdi:") and len(gpus) > 4:
        return [docker.types.DeviceRequest(driver="cdi", device_ids=gpus[4:].split(","))]
    raise ProviderError(f'[docker] gpus = "{gpus}" is none of none, all, a count, device=0,1 and cdi:<name>')


def environment(wanted: Mapping[str, str]) -> dict[str, str]:
    """Env is readable to everyone who may use the engine: secrets are refused even when a spec names them."""
    passed = {name: value for name, value in wanted.items() if name not in NEVER_PASSED}
    return passed | {"PYTHONUNBUFFERED": "1"}


def create_arguments(
    api: Any, handle_id: str, spec: NodeProvisionSpec, run: str, owner: Owner, gpus: str
) -> dict[str, Any]:
    """Keyword arguments of create_container. api: builds the host configuration for its own API version."""
    mounts = [
        docker.types.Mount(mount.container_path, mount.host_path, type="bind", read_only=mount.readonly)
        for mount in spec.mounts
    ]
    return {
        "name": f"{NAME_PREFIX}{handle_id}",
        "image": spec.image,
        # Named here, so that an image with an entrypoint of its own starts the same program or says why not.
        "entrypoint": [WORKER_PROGRAM],
        "command": ["--launch", LAUNCH_PATH, *spec.args],
        "environment": environment(spec.env),
        "labels": labels(handle_id, spec, run, owner),
        "host_config": api.create_host_config(
            mounts=mounts,
            device_requests=device_requests(gpus) or None,
            # A worker is never restarted by the engine: the orchestrator decides what a lost one means.
            restart_policy={"Name": "no"},
            init=True,
            cap_drop=["ALL"],
            security_opt=["no-new-privileges"],
            pids_limit=PIDS_MAX,
            extra_hosts={"host.docker.internal": "host-gateway"},
            log_config=docker.types.LogConfig(type="json-file", config={"max-size": LOG_BYTES_MAX, "max-file": "2"}),
        ),
    }


def launch_archive(content: bytes, uid: int, gid: int) -> bytes:
    """The launch file as a tar for put_archive at /: readable for the worker's user alone."""
    folder = tarfile.TarInfo(posixpath.dirname(LAUNCH_PATH).lstrip("/"))
    folder.type, folder.mode, folder.uid, folder.gid = tarfile.DIRTYPE, 0o700, uid, gid
    file = tarfile.TarInfo(LAUNCH_PATH.lstrip("/"))
    file.mode, file.uid, file.gid, file.size = 0o600, uid, gid, len(content)
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as tar:
        tar.addfile(folder)
        tar.addfile(file, io.BytesIO(content))
    return out.getvalue()


def user_of(image_user: str, passwd: bytes | None) -> tuple[int, int]:
    """(uid, gid) of an image's User, "name", "uid", "uid:gid" or "" for root; passwd: the image's /etc/passwd."""
    user, _, group = image_user.partition(":")
    if not user:
        return 0, 0
    if user.isdecimal() and (group.isdecimal() or not group):
        entry = _passwd(passwd, 2, user)
        return int(user), int(group) if group else (entry[1] if entry else 0)
    entry = _passwd(passwd, 0, user)
    if entry is None:
        raise ProviderError(
            f"the image's user {image_user} has no number in its /etc/passwd; write USER as uid:gid in its Dockerfile"
        )
    return entry[0], int(group) if group.isdecimal() else entry[1]


def _passwd(passwd: bytes | None, column: int, value: str) -> tuple[int, int] | None:
    for line in (passwd or b"").decode("utf-8", "replace").splitlines():
        fields = line.split(":")
        if len(fields) >= 4 and fields[column] == value and fields[2].isdecimal() and fields[3].isdecimal():
            return int(fields[2]), int(fields[3])
    return None
