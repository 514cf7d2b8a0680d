"""How the engine shows that it is alive: a shared page for the agent's probe, and coalesced Progress messages.

The page (memfd, 24 bytes: u64 phase, u64 progress, u64 monotonic ns) is bumped per tensor, kernel and step, so that
the agent can tell a stuck engine from a compiling one without asking it (design.md 4).
"""

from __future__ import annotations

import enum
import mmap
import os
import struct
import time
from collections.abc import Callable

PAGE_BYTES = 24
_FIELDS = struct.Struct("=QQQ")
MESSAGE_INTERVAL_S = 0.1  # the agent reports at most 10 times a second


class Phase(enum.IntEnum):
    """What the engine does; the numbers are read by the agent."""

    STARTING = 0
    IMPORTING = 1
    LOADING = 2
    WARMING_UP = 3
    IDLE = 4
    PREFILL_OR_DECODE = 5
    RELEASING = 6


class ProgressPage:
    """The writer's side of the page; without a descriptor every bump is a no-op."""

    def __init__(self, descriptor: int | None) -> None:
        self._map: mmap.mmap | None = None
        self._phase, self._progress = Phase.STARTING, 0
        if descriptor is not None:
            if os.fstat(descriptor).st_size < PAGE_BYTES:
                os.ftruncate(descriptor, PAGE_BYTES)
            self._map = mmap.mmap(descriptor, PAGE_BYTES)

    def bump(self) -> None:
        """One more tensor, kernel or step."""
        self._progress += 1
        if self._map is not None:
            _FIELDS.pack_into(self._map, 0, self._phase, self._progress, time.monotonic_ns())

    def enter(self, phase: Phase) -> None:
        self._phase = phase
        self.bump()


def read_page(page: mmap.mmap | memoryview) -> tuple[Phase, int, int]:
    """(phase, progress, monotonic ns) for the agent. A torn read is harmless: the next one differs again."""
    phase, progress, stamp = _FIELDS.unpack_from(page, 0)
    return Phase(phase), progress, stamp


class CoalescedProgress:
    """Calls `send(phase, done, total)` at once for a phase's first and last report, else at most 10 times a second."""

    def __init__(
        self, send: Callable[[str, int, int], None], page: ProgressPage, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._send, self._page, self._clock = send, page, clock
        self._phase, self._sent_at = "", 0.0

    def __call__(self, phase: str, done: int, total: int) -> None:
        self._page.bump()
        now = self._clock()
        if phase != self._phase or done >= total or now - self._sent_at >= MESSAGE_INTERVAL_S:
            self._phase, self._sent_at = phase, now
            self._send(phase, done, total)
