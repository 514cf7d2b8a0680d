"""One container that is being followed: its lines, its end, and which of all ends it was.

Three threads: two log followers and one that waits. An ended stream proves nothing (the engine may have died), so each
end is followed by a look at the container. SDK traps: providers.md B1.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import docker.errors

from services.provisioner import processes
from services.provisioner.docker_engine import Engine, EngineGone, Missing
from services.provisioner.docker_logs import RETRY_S, LogFollowers
from services.provisioner.docker_spec import WORKER_PROGRAM
from services.provisioner.plugin import (
    Exited,
    Failed,
    ProviderError,
    ProviderLine,
    Sink,
)

ENGINE_GONE_LIMIT_S = 30  # an engine that is upgraded is back within seconds; then its containers are looked at again
DRAIN_S = 5  # the last lines, after the container ended
STOP_MARGIN_S = 10  # the engine's own time beside the grace


def reason_of(status: int) -> str:
    """How a program with this exit status ended; 126 and 127: the container's init could not execute it."""
    if status in (126, 127):
        return (
            f"exited with status {status}: its image has no program {WORKER_PROGRAM} that can run; build it from "
            "compose/Dockerfile.worker"
        )
    return processes.describe_status(status)


class Container:
    """Follows a started container until its end, which it tells once, as the last observation."""

    def __init__(self, engine: Engine, container: str, sink: Sink, redact: Callable[[bytes], bytes]) -> None:
        self.id = container
        self._engine = engine
        self._stopping = False
        self._over = threading.Event()
        self._gone = threading.Event()
        self._logs = LogFollowers(container, self._read, self._over, self._ended_already, sink, redact)

    def follow(self) -> None:
        """Start. Daemons: they may not keep a dying provisioner alive."""
        self._logs.start()
        threading.Thread(target=self._watch, name=f"wait-{self.id[:12]}", daemon=True).start()

    # --- stopping -------------------------------------------------------------------------------------------------
    def stop(self, grace_s: int) -> None:
        """SIGTERM, the grace, SIGKILL; grace 0 kills at once. Returns when it has ended and its lines are out."""
        self._stopping = True
        until = time.monotonic() + grace_s + STOP_MARGIN_S
        while not self._gone.is_set():
            try:
                self._signal(grace_s)
                break
            except Missing:
                break
            except EngineGone:
                if time.monotonic() > until:
                    raise
                time.sleep(RETRY_S)
        if not self._gone.wait(max(0.0, until - time.monotonic()) + DRAIN_S):
            raise ProviderError(f"container {self.id[:12]} does not end; look at it with docker inspect")

    def _signal(self, grace_s: int) -> None:
        with self._engine.sentences(f"stop container {self.id[:12]}"):
            try:
                if grace_s:
                    self._engine.api().stop(self.id, timeout=grace_s)
                else:
                    self._engine.api().kill(self.id)
            except docker.errors.APIError as error:
                # 409: it has ended already.
                if error.status_code != 409:
                    raise

    # --- the end --------------------------------------------------------------------------------------------------
    def _watch(self) -> None:
        try:
            end = self._end()
        except Exception as error:  # unwatched is as good as lost: the run must hear of it
            end = Failed(f"container {self.id[:12]} can no longer be watched: {error}")
        self._over.set()
        self._logs.join(DRAIN_S)
        self._logs.emit(end)
        self._gone.set()

    def _end(self) -> Exited | Failed:
        """Blocks until the container has ended or the engine is lost."""
        lost_at = 0.0
        while True:
            try:
                if not lost_at:
                    with self._engine.sentences("wait for the worker"):
                        self._engine.stream().wait(self.id, timeout=None)
                state = self._engine.inspect(self.id)["State"]
            except Missing:
                return Exited(None, "stopped") if self._stopping else Failed("its container was removed by somebody")
            except EngineGone as error:
                lost_at = lost_at or time.monotonic()
                if time.monotonic() - lost_at > ENGINE_GONE_LIMIT_S:
                    return Failed(f"the Docker engine is gone for {ENGINE_GONE_LIMIT_S} s: {error}")
                time.sleep(RETRY_S)
                continue
            if state.get("Status") not in ("running", "paused", "restarting", "created"):
                return self._ended(state, engine_died=bool(lost_at))
            if lost_at:
                self._logs.emit(ProviderLine("the Docker engine is back and the worker still runs"))
            lost_at = 0.0

    def _ended(self, state: dict[str, Any], engine_died: bool) -> Exited:
        status = processes.exit_status(int(state.get("ExitCode", 0)))
        if state.get("OOMKilled"):
            reason = (
                "was killed because its container ran out of memory; use a smaller model, more stages or a machine "
                "with more memory"
            )
        elif self._stopping and status < 0:
            reason = "stopped"
        elif engine_died and status < 0:
            reason = "was killed while the Docker engine stopped"
        else:
            reason = reason_of(status)
        if state.get("Error"):
            reason += f" ({state['Error']})"
        return Exited(status, reason)

    # --- lines ----------------------------------------------------------------------------------------------------
    def _read(self, stream: str, since: int, follow: bool) -> Iterator[bytes]:
        more: dict[str, Any] = {"stdout": stream == "stdout", "stderr": stream == "stderr"}
        if since:
            more["since"] = since
        frames: Iterator[bytes] = self._engine.stream().logs(
            self.id, stream=True, follow=follow, timestamps=True, **more
        )
        return frames

    def _ended_already(self) -> bool:
        try:
            return not self._engine.inspect(self.id)["State"].get("Running")
        except Missing:
            return True
        except ProviderError:
            return False
