"""The protocol clock: real time without the time in which this member was cut off (anchors.md C6.3).

All deadlines of the core are in protocol time, so that a pause shifts every one of them, also those set during it.
"""

from __future__ import annotations


class ProtocolClock:
    """Milliseconds that stand while paused. Never runs backwards."""

    def __init__(self) -> None:
        self._lost_ms = 0
        self._paused_at: int | None = None

    @property
    def paused(self) -> bool:
        """Whether the clock stands."""
        return self._paused_at is not None

    def at(self, now_ms: int) -> int:
        """Protocol time at a real time."""
        return (now_ms if self._paused_at is None else self._paused_at) - self._lost_ms

    def real(self, protocol_ms: int) -> int:
        """The real time of a protocol time, if no further pause comes."""
        return protocol_ms + self._lost_ms

    def pause(self, now_ms: int) -> None:
        """Stand from now on; a second pause changes nothing."""
        if self._paused_at is None:
            self._paused_at = now_ms

    def resume(self, now_ms: int) -> None:
        """Run again; the pause never happened."""
        if self._paused_at is not None:
            self._lost_ms += max(0, now_ms - self._paused_at)
            self._paused_at = None

    def skip(self, ms: int) -> None:
        """Take out time in which this process did not run."""
        self._lost_ms += ms
