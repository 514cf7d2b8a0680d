"""The worker's standard input: the line `shutdown`, or its end, stops the worker (rust-swactor.md 6.1; design.md 2).

A provisioner holds the other end of the pipe, so that process workers end with it however it ends. Where standard input
is no pipe, socket or terminal (/dev/null of a container, a file), it says nothing and is not watched.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable

LINE_BYTES_MAX = 256  # a word is expected; a line that never ends must not fill memory
WORD = b"shutdown"


class StdinLines:
    """Pure: bytes in, "why to stop" out. None: go on; b"" is the end of input."""

    def __init__(self) -> None:
        self._line = b""

    def feed(self, data: bytes) -> str | None:
        """A reason to stop, or None."""
        if not data:
            return "standard input is closed"
        *lines, rest = (self._line + data).split(b"\n")
        self._line = rest[:LINE_BYTES_MAX]
        for line in lines:
            if line.strip().lower() == WORD:
                return "standard input said shutdown"
        return None


def is_watched(fd: int) -> bool:
    """Whether somebody can be at the other end of this descriptor."""
    try:
        mode = os.fstat(fd).st_mode
    except OSError:
        return False
    return stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode) or os.isatty(fd)


def on_readable(fd: int, lines: StdinLines, stop: Callable[[str, bool], None]) -> Callable[[], None]:
    """The loop's handler: stop(why, is_over); is_over: nothing can follow, watch no longer."""

    def readable() -> None:
        # One read per readiness never blocks, so the descriptor, which a terminal shares, keeps its flags.
        try:
            data = os.read(fd, 4096)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            data = b""  # a terminal that was hung up
        if why := lines.feed(data):
            stop(why, not data)

    return readable
