"""From a plugin's threads to the actor: bounded, in batches, one wake-up of the loop for many lines."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

from services.provisioner.plugin import Exited, Failed, PluginObservation, ProviderLine
from services.provisioner.state import NodeObserved

BATCH_OBSERVATIONS_MAX = 256  # one handler call stays far below HANDLER_MS_MAX
PENDING_OBSERVATIONS_MAX = 4096
ROOM_WAIT_MS = 1000  # so long a worker that floods us waits in its own print; then lines are dropped and counted


class NodeSink:
    """The Sink of one worker. call_soon: runs a function in the loop thread, deliver: hands an event to the actor."""

    def __init__(
        self,
        handle_id: str,
        call_soon: Callable[[Callable[[], None]], None],
        deliver: Callable[[NodeObserved], None],
        pending_max: int = PENDING_OBSERVATIONS_MAX,
        room_wait_ms: int = ROOM_WAIT_MS,
    ) -> None:
        self._handle_id, self._call_soon, self._deliver = handle_id, call_soon, deliver
        self._pending_max, self._room_wait_ms = pending_max, room_wait_ms
        self._room = threading.Condition()
        self._pending: deque[PluginObservation] = deque()
        self._scheduled = False
        self._dropped = 0

    def __call__(self, observation: PluginObservation) -> None:
        """From any thread. Ends are never dropped; what was is said as soon as there is room again."""
        with self._room:
            is_end = isinstance(observation, Exited | Failed)
            if not is_end and not self._room.wait_for(self._has_room, self._room_wait_ms / 1000):
                self._dropped += 1
                return
            if self._dropped:
                self._pending.append(
                    ProviderLine(f"{self._dropped} lines dropped: the worker writes faster than we read")
                )
                self._dropped = 0
            self._pending.append(observation)
            if not self._scheduled:
                self._scheduled = True
                self._call_soon(self._flush)

    def wait_empty(self, limit_ms: int = ROOM_WAIT_MS) -> None:
        """Until everything is on its way to the actor: what a job says afterwards comes after it. Not in the loop."""
        with self._room:
            self._room.wait_for(lambda: not self._pending, limit_ms / 1000)

    def _has_room(self) -> bool:
        return len(self._pending) < self._pending_max

    def _flush(self) -> None:
        with self._room:
            batch = tuple(self._pending.popleft() for _ in range(min(len(self._pending), BATCH_OBSERVATIONS_MAX)))
            self._scheduled = bool(self._pending)
            if self._scheduled:
                # In a later turn: a flood must not keep the loop from everything else.
                self._call_soon(self._flush)
            self._room.notify_all()
        if batch:
            self._deliver(NodeObserved(self._handle_id, batch))
