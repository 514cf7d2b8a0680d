"""The manager of a Docker Swarm behind provider `swarm`: what it is asked, and its refusals as what to do.

The engine is the one that the docker command uses, and has to be a manager of the swarm.
"""

from __future__ import annotations

import contextlib
import socket
import struct
from collections.abc import Iterator
from typing import Any

import urllib3.exceptions

from services.provisioner.docker_engine import CALL_LIMIT_S, Engine, Missing, explain, refusal
from services.provisioner.plugin import ProviderError
from services.provisioner.swarm_spec import GPU_RESOURCE


class NoManager(ProviderError):
    """The engine answers, but it manages no swarm: nothing of ours can be there."""


STREAM_HEADER = struct.Struct(">BxxxL")  # of each frame: which stream, how many bytes

ENDED = frozenset({"complete", "failed", "shutdown", "rejected", "remove", "orphaned"})
"""Task states after which nothing runs any more."""

PROGRAM_ENDED = "non-zero exit"  # how the swarm words the failure of a program that was started


class SwarmEngine(Engine):
    """An engine that is asked for services instead of containers."""

    def swarm_id(self) -> str:
        """Which swarm this is a manager of; service ids of another one mean nothing here. Raises NoManager, or
        ProviderError."""
        with self.sentences("ask the Docker engine for its swarm"):
            found = self.api().info().get("Swarm") or {}
        state = str(found.get("LocalNodeState") or "inactive")
        if state == "locked":
            raise ProviderError("this manager's swarm is locked; run `docker swarm unlock`")
        if state != "active":
            detail = f" ({found['Error']})" if found.get("Error") else ""
            raise NoManager(
                f"the Docker engine is not part of a swarm{detail}; run `docker swarm init` here, and on every other "
                "machine the `docker swarm join` that it prints"
            )
        if not found.get("ControlAvailable"):
            managers = ", ".join(str(manager.get("Addr")) for manager in found.get("RemoteManagers") or [])
            raise NoManager(
                "the Docker engine is a worker of its swarm, and only a manager can start services; set DOCKER_HOST to "
                f"a manager{f' ({managers})' if managers else ''}, or run `docker node promote` there"
            )
        return str((found.get("Cluster") or {}).get("ID", ""))

    def services(self, label: str) -> list[dict[str, Any]]:
        """The services that bear the label `name=value`."""
        with self.sentences("list the swarm's services"):
            return list(self.api().services(filters={"label": label}))

    def secrets(self, label: str) -> list[dict[str, Any]]:
        """The secrets that bear the label; never their content."""
        with self.sentences("list the swarm's secrets"):
            return list(self.api().secrets(filters={"label": [label]}))

    def tasks(self, service: str) -> list[dict[str, Any]]:
        """Every task of a service, the newest first. Raises Missing if the service is gone."""
        with self.sentences(f"look at service {service[:12]}"):
            found = list(self.api().tasks(filters={"service": service}))
        return sorted(found, key=lambda task: str(task.get("CreatedAt")), reverse=True)

    def task(self, task: str) -> dict[str, Any]:
        """One task. Raises Missing when the swarm has forgotten it: then its container is removed."""
        with self.sentences(f"look at task {task[:12]}"):
            return dict(self.api().inspect_task(task))

    def node(self, node: str) -> tuple[str, bool]:
        """(name, whether it is lost) of a swarm node."""
        try:
            with self.sentences(f"look at swarm node {node[:12]}"):
                found = self.api().inspect_node(node)
        except Missing:
            return node[:12], True
        return str(found["Description"]["Hostname"]), found["Status"]["State"] == "down"

    def task_logs(self, task: str, stream: str, since: int, follow: bool) -> TaskLog:
        """The SDK itself can only ask for the logs of a whole service, which end with it."""
        api = self.stream()
        wanted = {stream: 1, "timestamps": 1, "follow": int(follow), "since": since}
        response = api._get(
            api._url("/tasks/{0}/logs", task),
            params=wanted,
            stream=True,
            timeout=(CALL_LIMIT_S, None if follow else CALL_LIMIT_S),
        )
        return TaskLog(response, api._get_raw_response_socket(response))

    def remove_service(self, service: str) -> None:
        """Its task is told to stop; a service that is gone already is fine."""
        with contextlib.suppress(Missing), self.sentences(f"remove service {service[:12]}"):
            self.api().remove_service(service)

    def remove_secret(self, secret: str) -> None:
        """Once no service uses it; one that is gone already is fine."""
        with contextlib.suppress(Missing), self.sentences("remove a worker's secret"):
            self.api().remove_secret(secret)


class TaskLog:
    """Timestamped frames. A followed log of a task that has ended does not end by itself: somebody hangs up."""

    def __init__(self, response: Any, stream: Any) -> None:
        # Of a local or TLS engine it is the file on the socket, of one over ssh the channel itself.
        self._response, self._socket = response, getattr(stream, "_sock", stream)

    def __iter__(self) -> Iterator[bytes]:
        # What was cut off in the middle is no frame, and is read again by whoever asks again.
        with contextlib.suppress(urllib3.exceptions.HTTPError, struct.error):
            while header := self._response.raw.read(STREAM_HEADER.size):
                _, size = STREAM_HEADER.unpack(header)
                data = self._response.raw.read(size)
                if len(data) < size:
                    return
                if data:
                    yield data

    def hang_up(self) -> None:
        """From any thread: who reads comes to the end."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)


def is_over(task: dict[str, Any]) -> bool:
    """Whether nothing of it runs any more."""
    return task["Status"]["State"] in ENDED


def has_begun(task: dict[str, Any]) -> bool:
    """Whether its program runs or has run."""
    status = task["Status"]
    if status["State"] in ("running", "complete") or (status.get("ContainerStatus") or {}).get("PID"):
        return True
    # A program that ends at once is never seen with a PID.
    return status["State"] == "failed" and PROGRAM_ENDED in str(status.get("Err"))


def trouble(task: dict[str, Any]) -> str:
    """What the swarm has against starting a task, with what to do; "" if nothing."""
    text = explain(task["Status"].get("Err") or "")
    if not text:
        return ""
    if "no suitable node" in text:
        if "insufficient resources" in text:
            what = f"no node has enough free {GPU_RESOURCE}; see its node-generic-resources and [docker] gpus"
        elif "constraints" in text:
            what = "no node fits [swarm] constraints; see `docker node inspect` for the labels that nodes have"
        else:
            what = "no node of the swarm can run it; see `docker node ls`"
        return f"{what} ({text})"
    if "No such image" in text or "pull access denied" in text or "manifest unknown" in text:
        return (
            "a node does not have the image; push it to a registry that all nodes reach and name that in [image] node, "
            f"or copy it to each node with `docker save | docker load` ({text})"
        )
    if "bind source path does not exist" in text:
        return f"a node does not have the model file; put it at the same path on every node ({text})"
    return refusal(text)
