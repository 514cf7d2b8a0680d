"""Provider `docker`: workers are containers of the engine that the docker command uses (S1 7.5; rust-swactor.md 8.2).

Create, put the launch file in, start; labels say whose they are, and reconciliation goes by nothing else. Containers do
not end with this process: the ledger finds them at the next start, their own lease before that.
"""

from __future__ import annotations

import contextlib
import io
import tarfile
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from common.limits import PROCESS_STOP_GRACE_MS
from common.messages.provision import NodeProvisionSpec
from services.provisioner.docker_container import Container
from services.provisioner.docker_engine import Engine, EngineGone, Missing
from services.provisioner.docker_spec import (
    LABEL,
    LABEL_FLEET,
    LABEL_HANDLE,
    create_arguments,
    device_requests,
    launch_archive,
    user_of,
)
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

NAME = "docker"
PASSWD = "/etc/passwd"
SWARM_TASK_LABEL = "com.docker.swarm.task.id"
PASSWD_BYTES_MAX = 1024 * 1024


class DockerProvider:
    """One instance per provisioner. gpus, pull: [docker]; owner: for the labels; redact: removes known secrets."""

    name = NAME

    def __init__(
        self,
        image: str,
        gpus: str,
        pull: str,
        owner: Owner,
        environment: Mapping[str, str],
        redact: Callable[[bytes], bytes] = bytes,
        grace_ms: int = PROCESS_STOP_GRACE_MS,
    ) -> None:
        self._image, self._gpus, self._pull, self._owner = image, gpus, pull, owner
        self._engine = Engine(environment)
        self._redact = redact
        self._grace_s = max(1, grace_ms // 1000)
        self._lock = threading.Lock()
        self._containers: dict[str, Container] = {}
        self._engine_id = ""

    def prepare(self) -> None:
        """S1 10.5: the engine answers, and what is configured can be asked of it. Images are pulled at the start."""
        device_requests(self._gpus)
        self._engine_id = self._engine.engine_id()
        if self._pull == "never":
            self._engine.ensure_image(self._image, self._pull, lambda _: None)

    def start_node(self, handle_id: str, spec: NodeProvisionSpec, launch_file: Path, sink: Sink) -> PluginNodeHandle:
        """Image, container, launch file, start. On an error the container is removed again."""
        image = self._engine.ensure_image(spec.image, self._pull, lambda text: sink(ProviderLine(text)))
        try:
            container = self._create(handle_id, spec, image, launch_file)
            with self._engine.sentences(f"start a worker of image {spec.image}"):
                self._engine.api().start(container)
        except Exception as error:
            self._undo(handle_id, error)
            raise
        watched = Container(self._engine, container, sink, self._redact)
        with self._lock:
            self._containers[handle_id] = watched
        watched.follow()
        return PluginNodeHandle(handle_id, None, {"container": container, "engine": self._engine_id})

    def _create(self, handle_id: str, spec: NodeProvisionSpec, image: Mapping[str, Any], launch_file: Path) -> str:
        api = self._engine.api()
        run = handle_id.partition("-")[0]
        with self._engine.sentences("create the worker's container"):
            made = api.create_container(**create_arguments(api, handle_id, spec, run, self._owner, self._gpus))
            container = str(made["Id"])
        user = str((image.get("Config") or {}).get("User") or "")
        numbers = user.replace(":", "")
        passwd = None if not user or (":" in user and numbers.isdecimal()) else self._passwd(container)
        archive = launch_archive(launch_file.read_bytes(), *user_of(user, passwd))
        with self._engine.sentences("put the launch file into the container"):
            # Never by env, labels or argv: those are shown to everybody who may use the engine.
            api.put_archive(container, "/", archive)
        return container

    def _passwd(self, container: str) -> bytes | None:
        try:
            with self._engine.sentences("read the image's users"):
                chunks, _ = self._engine.api().get_archive(container, PASSWD)
                data = b"".join(chunks)[:PASSWD_BYTES_MAX]
        except Missing:
            return None
        with tarfile.open(fileobj=io.BytesIO(data)) as tar:
            file = tar.extractfile(tar.getmembers()[0])
            return None if file is None else file.read()

    def _undo(self, handle_id: str, error: Exception) -> None:
        """A start failed somewhere between create and start. Raises MayBeLeft if it cannot be known what is left."""
        try:
            for found in self._engine.find(f"{LABEL_HANDLE}={handle_id}"):
                self._engine.remove(str(found["Id"]))
        except ProviderError as second:
            raise MayBeLeft(f"{error}; its container may be left: {second}") from None
        if isinstance(error, EngineGone):
            # The engine may still carry out what it did not answer.
            raise MayBeLeft(f"{error}; its container may be left") from None

    def complete_bootstrap(self, handle: PluginNodeHandle) -> None:
        """Nothing: what a container needs for its start goes with it."""

    def stop_node(self, handle: PluginNodeHandle, fast: bool) -> None:
        """SIGTERM, the grace, SIGKILL, then the container is removed; unknown or dead ones are fine."""
        with self._lock:
            container = self._containers.get(handle.id)
        if container is None:
            return
        container.stop(0 if fast else self._grace_s)
        self._engine.remove(container.id)
        with self._lock:
            self._containers.pop(handle.id, None)

    def stop_left_behind(self, left: LeftBehind) -> bool:
        """By its label alone, and only on the engine where it was started."""
        engine = self._engine.engine_id()
        known = str(left.handle.facts.get("engine", "")) if left.handle is not None else ""
        if known and known != engine:
            raise ProviderError(
                f"it was started on another Docker engine ({known[:12]}); start once more with the DOCKER_HOST of then"
            )
        stopped = False
        for found in self._engine.find(f"{LABEL_HANDLE}={left.id}"):
            stopped = stopped or found.get("State") in ("running", "paused", "restarting")
            with contextlib.suppress(Missing):
                self._engine.remove(str(found["Id"]))
        return stopped

    def list_owned(self) -> Listing:
        """Containers with the fleet's label, running or not. Raises NotHere without an engine."""
        try:
            # A swarm's tasks bear the same labels; they are provider swarm's.
            found = [
                row for row in self._engine.find(f"{LABEL}=worker") if SWARM_TASK_LABEL not in (row.get("Labels") or {})
            ]
        except EngineGone as error:
            raise NotHere(str(error)) from None
        mine = [row for row in found if (row.get("Labels") or {}).get(LABEL_FLEET) == self._owner.fleet]
        owned = tuple(
            Listed(
                str(row["Labels"].get(LABEL_HANDLE, "")),
                f"container {str(row['Id'])[:12]}",
                str(row.get("State", "unknown")),
                int(row.get("Created") or 0) * 1000,
            )
            for row in mine
        )
        return Listing(owned, len(found) - len(owned))
