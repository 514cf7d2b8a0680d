"""Provider `swarm`: workers are tasks of a Docker Swarm, a service of one task each (S1 7.5; design.md 2).

The launch file is a secret of the swarm, which is a file in the task's memory and nowhere else. Labels say whose
services they are, and reconciliation goes by nothing else.
"""

from __future__ import annotations

import calendar
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from common.limits import PROCESS_STOP_GRACE_MS, provider_start_ms
from common.messages.provision import NodeProvisionSpec
from services.provisioner.docker_engine import EngineGone, Missing
from services.provisioner.docker_spec import LABEL, LABEL_FLEET, LABEL_HANDLE, labels
from services.provisioner.plugin import (
    LeftBehind,
    Listed,
    Listing,
    MayBeLeft,
    NotHere,
    Owner,
    PluginNodeHandle,
    ProviderError,
    ProviderLine,
    Sink,
)
from services.provisioner.swarm_engine import NoManager, SwarmEngine, has_begun, is_over, trouble
from services.provisioner.swarm_spec import (
    gpu_count,
    image_reference,
    launch_secret,
    launch_user,
    service_arguments,
    service_name,
)
from services.provisioner.swarm_task import LOOK_S, Task

NAME = "swarm"
START_MARGIN_S = 30  # below the provisioner's own limit, so that its reason is the one that is reported
NO_NODE_S = 20  # so long a node may be coming back, or leaving the resources that are wanted
GONE_S = 30  # a leftover's task has the grace and the swarm's own time


class SwarmProvider:
    """One instance per provisioner. gpus, pull: [docker]; constraints: [swarm]; owner: for the labels."""

    name = NAME

    def __init__(
        self,
        image: str,
        gpus: str,
        pull: str,
        constraints: Sequence[str],
        owner: Owner,
        environment: Mapping[str, str],
        redact: Callable[[bytes], bytes] = bytes,
        grace_ms: int = PROCESS_STOP_GRACE_MS,
    ) -> None:
        self._image, self._gpus, self._pull, self._constraints = image, gpus, pull, tuple(constraints)
        self._owner, self._redact = owner, redact
        self._engine = SwarmEngine(environment)
        self._grace_s = max(1, grace_ms // 1000)
        self._lock = threading.Lock()
        self._tasks: dict[str, Task] = {}
        self._swarm = ""

    def prepare(self) -> None:
        """S1 10.5: a manager answers, and what is configured can be asked of a swarm."""
        gpu_count(self._gpus)
        self._swarm = self._engine.swarm_id()
        if self._pull == "never":
            self._engine.ensure_image(self._image, self._pull, lambda _: None)

    def start_node(self, handle_id: str, spec: NodeProvisionSpec, launch_file: Path, sink: Sink) -> PluginNodeHandle:
        """Image here, secret, service, and its task up. On an error service and secret are removed again."""
        found = self._engine.ensure_image(spec.image, self._pull, lambda text: sink(ProviderLine(text)))
        try:
            service = self._create(handle_id, spec, found, launch_file)
            task = self._await_task(service, sink)
        except Exception as error:
            self._undo(handle_id, error)
            raise
        name, _ = self._engine.node(task["NodeID"])
        sink(ProviderLine(f"node {spec.node_id} runs on swarm node {name}"))
        watched = Task(self._engine, service, task["ID"], task["NodeID"], sink, self._redact)
        with self._lock:
            self._tasks[handle_id] = watched
        watched.follow()
        return PluginNodeHandle(handle_id, None, {"service": service, "swarm": self._swarm})

    def _create(self, handle_id: str, spec: NodeProvisionSpec, image: Mapping[str, Any], launch_file: Path) -> str:
        api = self._engine.api()
        marks = labels(handle_id, spec, handle_id.partition("-")[0], self._owner)
        name = service_name(handle_id)
        user = launch_user(image)
        with self._engine.sentences("hand the launch file to the swarm"):
            secret = api.create_secret(name, launch_file.read_bytes(), labels=marks)["ID"]
        arguments = service_arguments(
            handle_id,
            spec,
            image_reference(spec.image, image),
            launch_secret(secret, name, user),
            marks,
            self._gpus,
            self._constraints,
            self._grace_s,
        )
        with self._engine.sentences("create the worker's service"):
            return str(api.create_service(**arguments)["ID"])

    def _await_task(self, service: str, sink: Sink) -> dict[str, Any]:
        """Until its program runs (or has run: then the follower tells how that ended)."""
        began = time.monotonic()
        until = began + provider_start_ms(NAME) / 1000 - START_MARGIN_S
        said, homeless_since = "", 0.0
        while True:
            task = next(iter(self._engine.tasks(service)), None)
            now = time.monotonic()
            problem = trouble(task) if task is not None else ""
            if task is not None and has_begun(task):
                return task
            if task is not None and is_over(task):
                raise ProviderError(f"cannot start the worker's task: {problem or task['Status']['State']}")
            homeless = task is not None and task["Status"]["State"] == "pending" and bool(problem)
            homeless_since = (homeless_since or now) if homeless else 0.0
            if homeless_since and now - homeless_since > NO_NODE_S:
                raise ProviderError(f"cannot start the worker's task: {problem}")
            if problem and problem != said:
                said = problem
                sink(ProviderLine(problem))
            if now > until:
                state = task["Status"]["State"] if task is not None else "not there"
                raise ProviderError(
                    f"the worker's task is {state} after {now - began:.0f} s; {problem or 'see docker ps'}"
                )
            time.sleep(LOOK_S / 2)

    def _undo(self, handle_id: str, error: Exception) -> None:
        """A start failed somewhere. Raises MayBeLeft if it cannot be known what is left."""
        try:
            self._remove(handle_id)
        except ProviderError as second:
            raise MayBeLeft(f"{error}; its service may be left: {second}") from None
        if isinstance(error, EngineGone):
            # The manager may still carry out what it did not answer.
            raise MayBeLeft(f"{error}; its service may be left") from None

    def _remove(self, handle_id: str) -> bool:
        """Every service and secret of a handle, and wait for its tasks. True if some task was still running."""
        label = f"{LABEL_HANDLE}={handle_id}"
        running = []
        for service in (str(found["ID"]) for found in self._engine.services(label)):
            running += [task for task in self._engine.tasks(service) if has_begun(task) and not is_over(task)]
            self._engine.remove_service(service)
        until = time.monotonic() + GONE_S
        for task in running:
            while self._still_there(task):
                if time.monotonic() > until:
                    raise ProviderError(f"task {str(task['ID'])[:12]} does not end; look at it with docker inspect")
                time.sleep(LOOK_S)
        for secret in self._engine.secrets(label):
            self._engine.remove_secret(str(secret["ID"]))
        return bool(running)

    def _still_there(self, task: Mapping[str, Any]) -> bool:
        """Not on a lost node: that one removes it when it is back, and its key is worthless by then. A manager that
        does not say counts as yes."""
        try:
            now = self._engine.task(str(task["ID"]))
            return not is_over(now) and not self._engine.node(str(task["NodeID"]))[1]
        except Missing:
            return False
        except ProviderError:
            return True

    def complete_bootstrap(self, handle: PluginNodeHandle) -> None:
        """Nothing: the secret goes with the service."""

    def stop_node(self, handle: PluginNodeHandle, fast: bool) -> None:
        """The service is removed: SIGTERM, the grace, SIGKILL; then its secret. Unknown or dead ones are fine."""
        with self._lock:
            task = self._tasks.get(handle.id)
        if task is None:
            return
        task.stop(self._grace_s)
        self._remove(handle.id)
        with self._lock:
            self._tasks.pop(handle.id, None)

    def stop_left_behind(self, left: LeftBehind) -> bool:
        """By its label alone, and only in the swarm where it was started."""
        swarm = self._engine.swarm_id()
        known = str(left.handle.facts.get("swarm", "")) if left.handle is not None else ""
        if known and known != swarm:
            raise ProviderError(
                f"it was started in another swarm ({known[:12]}); start once more with the DOCKER_HOST of then"
            )
        return self._remove(left.id)

    def list_owned(self) -> Listing:
        """Services and secrets with the fleet's label. Raises NotHere without an engine that manages a swarm."""
        try:
            self._engine.swarm_id()
        except (EngineGone, NoManager) as error:
            raise NotHere(str(error)) from None
        # A worker is a secret and, from then on, a service that bears the same handle: that one tells more.
        kinds = {
            "secret": self._engine.secrets(f"{LABEL}=worker"),
            "service": self._engine.services(f"{LABEL}=worker"),
        }
        owned: dict[str, Listed] = {}
        others = set()
        for kind, found in kinds.items():
            for item in found:
                marks = item["Spec"].get("Labels") or {}
                handle = str(marks.get(LABEL_HANDLE, ""))
                if marks.get(LABEL_FLEET) != self._owner.fleet:
                    others.add(handle)
                    continue
                state = "made" if kind == "secret" else self._state(str(item["ID"]))
                owned[handle] = Listed(handle, f"{kind} {item['Spec']['Name']}", state, _unix_ms(item["CreatedAt"]))
        return Listing(tuple(owned.values()), len(others))

    def _state(self, service: str) -> str:
        try:
            task = next(iter(self._engine.tasks(service)), None)
        except ProviderError:
            return "unknown"
        return "no task" if task is None else str(task["Status"]["State"])


def _unix_ms(stamp: str) -> int:
    """Of the swarm's timestamps, which are UTC."""
    return calendar.timegm(time.strptime(stamp[:19], "%Y-%m-%dT%H:%M:%S")) * 1000
