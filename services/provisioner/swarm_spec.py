"""From a NodeProvisionSpec to the service that the swarm is asked for: one task, never started again. Pure; no secret.

Services know no device requests: GPUs are `node-generic-resources` of the nodes (providers.md F).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import docker.types

from common.messages.provision import NodeProvisionSpec
from services.provisioner.docker_spec import (
    LAUNCH_PATH,
    LOG_BYTES_MAX,
    NAME_PREFIX,
    PIDS_MAX,
    WORKER_PROGRAM,
    environment,
    user_of,
)
from services.provisioner.plugin import ProviderError

GPU_RESOURCE = "NVIDIA-GPU"
"""As in Docker's own example: `"node-generic-resources": ["NVIDIA-GPU=GPU-<uuid>"]` in a node's daemon.json."""
NS_PER_S = 1_000_000_000


def service_name(handle_id: str) -> str:
    """Of the service and of its secret; at most 63 characters."""
    return f"{NAME_PREFIX}{handle_id}"


def gpu_count(gpus: str) -> int | None:
    """How many GPUs the task reserves; None: it reserves none and sees what its node's runtime gives. Raises
    ProviderError for names of devices: who gets which is the swarm's business."""
    if gpus in ("none", "all"):
        return None
    if gpus.isdecimal() and int(gpus) > 0:
        return int(gpus)
    raise ProviderError(
        f'[docker] gpus = "{gpus}" names devices, which a swarm does not take; use "none", "all" or a count, which '
        f"needs {GPU_RESOURCE} in the nodes' node-generic-resources"
    )


def image_reference(image: str, found: Mapping[str, Any]) -> str:
    """What every node is asked for: the very image that this manager has. found: its inspect data.

    One that comes from a registry is named by its digest, so that nodes pull that one. One that was only built here is
    named by its id, which no node tries to pull.
    """
    repository = image.partition("@")[0]
    if ":" in repository.rpartition("/")[2]:
        repository = repository.rpartition(":")[0]
    for digest in found.get("RepoDigests") or []:
        if str(digest).startswith(f"{repository}@"):
            return str(digest)
    return str(found["Id"])


def launch_user(image: Mapping[str, Any]) -> tuple[int, int]:
    """(uid, gid) of the image's user. Raises ProviderError for a name without numbers: nobody reads the image here."""
    return user_of(str((image.get("Config") or {}).get("User") or ""), None)


def launch_secret(secret: str, name: str, user: tuple[int, int]) -> Any:
    """The secret as the launch file: readable for that user alone."""
    uid, gid = user
    return docker.types.SecretReference(secret, name, filename=LAUNCH_PATH, uid=str(uid), gid=str(gid), mode=0o400)


def service_arguments(
    handle_id: str,
    spec: NodeProvisionSpec,
    image: str,
    secret: Any,
    marks: Mapping[str, str],
    gpus: str,
    constraints: Sequence[str],
    grace_s: int,
) -> dict[str, Any]:
    """Keyword arguments of create_service. marks: the labels by which it is known to be ours."""
    count = gpu_count(gpus)
    resources = docker.types.Resources(generic_resources={GPU_RESOURCE: count} if count else None)
    resources["Limits"] = {"Pids": PIDS_MAX}
    visible = {} if count else {"NVIDIA_VISIBLE_DEVICES": "void" if gpus == "none" else "all"}
    container = docker.types.ContainerSpec(
        image,
        command=[WORKER_PROGRAM],
        args=["--launch", LAUNCH_PATH, *spec.args],
        env=[f"{name}={value}" for name, value in sorted((visible | environment(spec.env)).items())],
        labels=dict(marks),
        mounts=[
            docker.types.Mount(mount.container_path, mount.host_path, type="bind", read_only=mount.readonly)
            for mount in spec.mounts
        ],
        secrets=[secret],
        init=True,
        cap_drop=["ALL"],
        stop_grace_period=grace_s * NS_PER_S,
        # With one, a task counts as started only once it is healthy, and is killed when it is not: ours to decide.
        healthcheck=docker.types.Healthcheck(test=["NONE"]),
    )
    template = docker.types.TaskTemplate(
        container,
        resources=resources,
        # The orchestrator decides what a lost worker means; a second start of the same one would be nobody's.
        restart_policy=docker.types.RestartPolicy(condition="none"),
        placement=docker.types.Placement(constraints=[constraint.strip() for constraint in constraints]),
        log_driver=docker.types.DriverConfig("json-file", options={"max-size": LOG_BYTES_MAX, "max-file": "2"}),
    )
    return {
        "task_template": template,
        "name": service_name(handle_id),
        "labels": dict(marks),
        "mode": docker.types.ServiceMode("replicated", replicas=1),
        "endpoint_spec": docker.types.EndpointSpec(mode="dnsrr"),
    }
