"""Two followers of a worker's log at an engine: bytes of timestamped frames to lines, nothing twice after a gap.

Shared by the providers docker and swarm. SDK traps: providers.md B1.
"""

from __future__ import annotations

import calendar
import contextlib
import re
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import docker.errors
import requests.exceptions

from services.provisioner.lines import LineSplitter, bridge_frame
from services.provisioner.plugin import (
    PluginObservation,
    ProviderError,
    ProviderLine,
    Sink,
    StderrLine,
    StdoutLine,
)

RETRY_S = 0.5
STAMP = re.compile(rb"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{9}Z ")
"""Frames without one are the engine's own words about the log, not the worker's."""

Read = Callable[[str, int, bool], Iterator[bytes]]
"""(stream, since in Unix seconds or 0, follow) → frames. May raise, end early or hang up at any time."""


@dataclass(slots=True)
class Seen:
    """How far a log was read: the newest timestamp, and how many frames bore it (the pieces of one long line do)."""

    stamp: bytes = b""
    count: int = 0


class LogFollowers:
    """One thread for stdout, one for stderr, until `over` is set or ended() says so; then once more for the rest."""

    def __init__(
        self,
        name: str,
        read: Read,
        over: threading.Event,
        ended: Callable[[], bool],
        sink: Sink,
        redact: Callable[[bytes], bytes],
    ) -> None:
        self._read, self._over, self._ended, self._sink, self._redact = read, over, ended, sink, redact
        # Daemons: they may not keep a dying provisioner alive.
        self._threads = [
            threading.Thread(target=self._follow, args=(stream,), name=f"{stream}-{name[:12]}", daemon=True)
            for stream in ("stdout", "stderr")
        ]

    def start(self) -> None:
        """Begin."""
        for thread in self._threads:
            thread.start()

    def join(self, limit_s: float) -> None:
        """Until the last lines are out, at most limit_s for each."""
        for thread in self._threads:
            thread.join(limit_s)

    def emit(self, observation: PluginObservation) -> None:
        """Tell the sink; a follower lives on whatever the sink does."""
        try:
            self._sink(observation)
        except Exception as error:
            with contextlib.suppress(Exception):
                self._sink(ProviderLine(f"an observation was lost: {error}"))

    def _follow(self, stream: str) -> None:
        splitter = LineSplitter(self._redact)
        make = _out if stream == "stdout" else StderrLine
        seen = Seen()
        last = False
        while True:
            with contextlib.suppress(
                ProviderError, docker.errors.DockerException, requests.exceptions.RequestException, OSError, ValueError
            ):
                for data in self._frames(stream, seen, follow=not last):
                    for line in splitter.feed(data):
                        self.emit(make(line))
            if last:
                break
            # Once more after the end: a followed stream may end before the last words.
            last = self._over.is_set() or self._ended() or self._over.wait(RETRY_S)
        for line in splitter.flush():
            self.emit(make(line))

    def _frames(self, stream: str, seen: Seen, follow: bool) -> Iterator[bytes]:
        """Every frame that was not seen yet: after a gap nothing comes twice."""
        skip = replace(seen)
        for frame in self._read(stream, _seconds(seen.stamp) if seen.stamp else 0, follow):
            if (matched := STAMP.match(frame)) is None:
                continue
            stamp, data = matched[0], frame[matched.end() :]
            if stamp < skip.stamp:
                continue
            if stamp == skip.stamp and skip.count:
                skip.count -= 1
                continue
            seen.count = seen.count + 1 if stamp == seen.stamp else 1
            seen.stamp = stamp
            yield data


def _out(line: str) -> PluginObservation:
    return bridge_frame(line) or StdoutLine(line)


def _seconds(stamp: bytes) -> int:
    """Whole Unix seconds of a log timestamp, which is always UTC with nine decimals."""
    return calendar.timegm(time.strptime(stamp[:19].decode(), "%Y-%m-%dT%H:%M:%S"))
