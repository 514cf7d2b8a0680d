"""What the port thread hands to the main thread: commands in order, and the requests that it must give up."""

from __future__ import annotations

import contextlib
import os
import select
from collections import deque
from collections.abc import Callable


class Mailbox:
    """Commands for the main thread, and the requests that it must give up."""

    def __init__(self) -> None:
        self._commands: deque[object] = deque()
        self._event = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._poll = select.poll()
        self._poll.register(self._event, select.POLLIN)
        self._watched: int | None = None
        self._cancelled: set[int] = set()
        self.is_waiting = False
        """The main thread has nothing to do."""
        self.before_wait: Callable[[], int | None] = lambda: None
        """Called by the main thread each time before it sleeps: may put commands, and names a descriptor that shall
        wake it, too."""
        self.fast_wait: Callable[[int], bool] = lambda _wake: False
        """Called in place of sleeping, with the descriptor that tells of commands: True: it has slept."""

    def put(self, message: object) -> None:
        """From either thread."""
        self._commands.append(message)
        if self.is_waiting:
            self.nudge()

    def get(self) -> object:
        """The next command; waits for it."""
        while not self._commands:
            self._watch(self.before_wait())
            # Whoever puts something from here on also wakes the poll.
            self.is_waiting = True
            if not self._commands and not self.fast_wait(self._event):
                self._poll.poll()
            self.is_waiting = False
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(self._event)
        return self._commands.popleft()

    def nudge(self) -> None:
        """Whoever waits in `get` looks again."""
        os.eventfd_write(self._event, 1)

    def _watch(self, descriptor: int | None) -> None:
        if descriptor == self._watched:
            return
        if self._watched is not None:
            self._poll.unregister(self._watched)
        if descriptor is not None:
            self._poll.register(descriptor, select.POLLIN)
        self._watched = descriptor

    def cancel(self, request_id: int) -> None:
        """From now on `is_cancelled` says so, until `forget`."""
        self._cancelled.add(request_id)

    def is_cancelled(self, request_id: int) -> bool:
        """Whether the main thread should give the request up."""
        return request_id in self._cancelled

    def forget(self, request_id: int) -> None:
        """The request has its end."""
        self._cancelled.discard(request_id)
