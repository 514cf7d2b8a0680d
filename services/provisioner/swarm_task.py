"""One task that is being followed: its lines, its end, and whether it or its node is what ended.

The swarm offers no wait and no events for tasks, so they are looked at twice a second. A node that is lost keeps
running its containers: such a worker's key is revoked at its end, and the swarm removes it when the node is back.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from services.provisioner import processes
from services.provisioner.docker_container import (
    DRAIN_S,
    ENGINE_GONE_LIMIT_S,
    STOP_MARGIN_S,
    reason_of,
)
from services.provisioner.docker_engine import Missing, refusal
from services.provisioner.docker_logs import LogFollowers
from services.provisioner.plugin import Exited, Failed, ProviderError, ProviderLine, Sink
from services.provisioner.swarm_engine import SwarmEngine, TaskLog, is_over

LOOK_S = 0.5
LAST_WORDS_S = 0.5  # from a node's engine over the manager to us; of a service that is gone no log can be asked for


class Task:
    """Follows a task that has begun until its end, which it tells once, as the last observation."""

    def __init__(
        self, engine: SwarmEngine, service: str, task: str, node: str, sink: Sink, redact: Callable[[bytes], bytes]
    ) -> None:
        self.service, self._task, self._node = service, task, node
        self._engine = engine
        self._stopping = False
        self._over = threading.Event()
        self._gone = threading.Event()
        self._lock = threading.Lock()
        self._followed: dict[str, TaskLog] = {}
        """By stream: the one that is read at the moment, or was last."""
        self._logs = LogFollowers(task, self._read, self._over, self._over.is_set, sink, redact)

    def follow(self) -> None:
        """Start. Daemons: they may not keep a dying provisioner alive."""
        self._logs.start()
        threading.Thread(target=self._watch, name=f"task-{self._task[:12]}", daemon=True).start()

    def stop(self, grace_s: int) -> None:
        """SIGTERM, the grace, SIGKILL, by removing the service. Returns when the task is gone and its lines are out."""
        self._stopping = True
        until = time.monotonic() + grace_s + STOP_MARGIN_S
        while True:
            try:
                self._engine.remove_service(self.service)
                break
            except ProviderError:
                if time.monotonic() > until:
                    raise
                time.sleep(LOOK_S)
        if not self._gone.wait(max(0.0, until - time.monotonic()) + 2 * DRAIN_S):
            raise ProviderError(f"task {self._task[:12]} does not end; look at it with docker inspect")

    # --- the end --------------------------------------------------------------------------------------------------
    def _watch(self) -> None:
        try:
            end = self._end()
        except Exception as error:  # unwatched is as good as lost: the run must hear of it
            end = Failed(f"task {self._task[:12]} can no longer be watched: {error}")
        self._over.set()
        if isinstance(end, Exited):  # else nobody is there who could say any last words
            time.sleep(LAST_WORDS_S)
        self._hang_up()
        if isinstance(end, Exited):
            self._logs.join(DRAIN_S)
        self._logs.emit(end)
        self._gone.set()

    def _end(self) -> Exited | Failed:
        """Blocks until the task has ended, its node or the manager is lost."""
        lost_at = 0.0
        while True:
            try:
                task = self._engine.task(self._task)
                if is_over(task):
                    return self._ended(task)
                name, node_lost = self._engine.node(self._node)
                if node_lost:
                    return Failed(f"its swarm node {name} is down")
                if lost_at:
                    self._logs.emit(ProviderLine("the swarm's manager is back and the worker still runs"))
                lost_at = 0.0
            except Missing:
                return Exited(None, "stopped") if self._stopping else Failed("its service was removed by somebody")
            except ProviderError as error:
                # Gone, or a swarm that has no leader at the moment.
                lost_at = lost_at or time.monotonic()
                if time.monotonic() - lost_at > ENGINE_GONE_LIMIT_S:
                    return Failed(f"the swarm's manager is gone for {ENGINE_GONE_LIMIT_S} s: {error}")
            time.sleep(LOOK_S)

    def _ended(self, task: dict[str, Any]) -> Exited | Failed:
        status, code = task["Status"], int((task["Status"].get("ContainerStatus") or {}).get("ExitCode") or 0)
        words = str(status.get("Err") or "")
        if status["State"] in ("rejected", "orphaned") or (words and not code and not self._stopping):
            return Failed(f"the swarm gave its task up: {refusal(words) or status['State']}")
        ended = processes.exit_status(code)
        if self._stopping and ended < 0:
            return Exited(ended, "stopped")
        reason = reason_of(ended)
        if ended == -9:
            reason += "; if nobody did that, its node ran out of memory"
        return Exited(ended, reason)

    # --- lines ----------------------------------------------------------------------------------------------------
    def _read(self, stream: str, since: int, follow: bool) -> Iterator[bytes]:
        log = self._engine.task_logs(self._task, stream, since, follow)
        if follow:
            with self._lock:
                self._followed[stream] = log
            if self._over.is_set():
                # It was opened while the others were hung up.
                log.hang_up()
        return iter(log)

    def _hang_up(self) -> None:
        with self._lock:
            followed = list(self._followed.values())
        for log in followed:
            log.hang_up()
