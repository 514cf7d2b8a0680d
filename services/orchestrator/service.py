"""Wiring of the run: the stop listener on stdin, the result, and the hosted entry (S1 7.16; design.md 2)."""

from __future__ import annotations

import contextlib
import os
import secrets
import sys
from collections.abc import Callable
from pathlib import Path

from common.addresses import NONCE_BYTES, Role
from common.effects import Exit
from common.host import Host
from common.limits import STDIN_LINE_BYTES_MAX
from common.security import SecurityError
from services.orchestrator.base import Console, RunOver
from services.orchestrator.core import RunActor, StopLine
from services.orchestrator.planner_facts import PLAN_JOB, plan_job

STOP_WORDS = frozenset({"stop", "shutdown", "quit"})


class StopListener:
    """S1 7.16: lines of standard input, trimmed and compared case-insensitively; one notification.
    EOF is never a stop (design.md 2)."""

    def __init__(self, on_stop: Callable[[str], None]) -> None:
        self._on_stop = on_stop
        self._partial = b""
        self._notified = False

    def feed(self, data: bytes) -> None:
        """Bytes as they come; a line that is too long is no stop word and is thrown away."""
        *lines, self._partial = (self._partial + data).split(b"\n")
        if len(self._partial) > STDIN_LINE_BYTES_MAX:
            self._partial = b"\0"
        for line in lines:
            word = line.decode(errors="replace").strip().lower()
            if word in STOP_WORDS and not self._notified:
                self._notified = True
                self._on_stop(word)

    def end(self) -> None:
        """End of input: what came last is a line, too."""
        self.feed(b"\n")


def listen_on_stdin(host: Host, address: bytes, fd: int = 0) -> None:
    """Deliver StopLine events for stop words on stdin, if there is a stdin that can be waited for."""
    listener = StopListener(lambda word: host.deliver(address, StopLine(word)))

    def readable() -> None:
        try:
            data = os.read(fd, 4096)
        except OSError:
            data = b""
        if data:
            listener.feed(data)
        else:
            host.loop.remove_fd(fd)
            listener.end()

    try:
        host.loop.add_fd(fd, readable)
    except OSError:
        # A regular file or a closed descriptor cannot be waited for; a file is read at once, it has an end.
        try:
            listener.feed(os.read(fd, 4096))
        except OSError:
            return
        listener.end()


def to_stderr(text: str) -> None:
    """A line for the user where nothing is captured."""
    with contextlib.suppress(OSError):
        sys.stderr.write(text)
        sys.stderr.flush()


def build(host: Host, on_result: Callable[[RunOver], None], console: Callable[[str], None] = to_stderr) -> bytes:
    """Spawn the run; on_result gets its result once, console what the user has to know meanwhile. Returns the address
    of the run's main actor."""
    nonce = secrets.token_bytes(NONCE_BYTES)
    host.node.run = nonce
    host.jobs[PLAN_JOB] = plan_job
    run = host.spawn(RunActor(nonce), name=Role.ORCHESTRATOR)

    def over(address: bytes, effect: RunOver) -> None:
        on_result(effect)
        host.node.system.effects.append((address, Exit(effect.status)))

    host.on_effect(RunOver, over)
    host.on_effect(Console, lambda _, effect: console(f"mvp-orchestrator: {effect.text}\n"))
    return run


def hosted(bus: Path) -> int:
    """`python -m services.orchestrator --bus FILE`: the run alone, its services are hosted by somebody else."""
    try:
        host = Host.from_bus_file(bus.absolute())
        if host.identity.role is not Role.ORCHESTRATOR:
            raise SecurityError(f"{bus} is the bus file of {host.identity.role}, not of {Role.ORCHESTRATOR}")
    except SecurityError as error:
        sys.stderr.write(f"mvp-orchestrator: {error}\n")
        return 1
    results: list[RunOver] = []
    listen_on_stdin(host, build(host, results.append))
    status = host.run()
    if results and results[0].error:
        sys.stderr.write(f"mvp-orchestrator: {results[0].error}\n")
    return status
