"""What the port thread hands to the main thread: commands in order, and the requests that it must give up."""

from __future__ import annotations

import threading
from collections import deque


class Mailbox:
    """Commands for the main thread, and the requests that it must give up."""

    def __init__(self) -> None:
        self._commands: deque[object] = deque()
        self._ready = threading.Condition()
        self._cancelled: set[int] = set()
        self.is_waiting = False
        """The main thread has nothing to do."""

    def put(self, message: object) -> None:
        """From the port thread."""
        with self._ready:
            self._commands.append(message)
            self._ready.notify()

    def get(self) -> object:
        """The next command; waits for it."""
        with self._ready:
            self.is_waiting = True
            while not self._commands:
                self._ready.wait()
            self.is_waiting = False
            return self._commands.popleft()

    def cancel(self, request_id: int) -> None:
        """From now on `is_cancelled` says so, until `forget`."""
        self._cancelled.add(request_id)

    def is_cancelled(self, request_id: int) -> bool:
        """Whether the main thread should give the request up."""
        return request_id in self._cancelled

    def forget(self, request_id: int) -> None:
        """The request has its end."""
        self._cancelled.discard(request_id)
