"""The launcher's child services: start, restart, stop in order (table of design.md 2)."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from common.addresses import Role
from common.limits import SERVICE_RESTART_WINDOW_MS, SERVICE_RESTARTS_MAX, SERVICE_STOP_MS
from common.stdio_capture import LineReader
from services.orchestrator.extras import HTTP, WEB, Extra

STOP_ORDER: tuple[tuple[str, ...], ...] = (
    (HTTP, WEB, Role.GATEWAY, Role.PROVISIONER, Role.MEMBERSHIP, Role.RESOLVER),
    (Role.COLLECTOR,),
    (Role.RELAY,),
    (Role.ROUTER,),
)
"""Who is told first; the router goes last because everybody talks over it (design.md 4)."""

FATAL: frozenset[Role] = frozenset({Role.GATEWAY, Role.PROVISIONER})
"""Services whose run state dies with them; the others are restarted and ask their peers again."""

WAIT_SLICE_S = 0.1
STOP_MS: Mapping[str, int] = {Role.PROVISIONER: 10_000}
"""Longer than SERVICE_STOP_MS: after a run that broke off it still has workers to stop. Killed, it would leave them."""
CLEANUP_LIMIT_S = 30

OnLine = Callable[[str, str, bytes], None]


@dataclass(slots=True)
class Child:
    """One running service."""

    role: str
    process: subprocess.Popen[bytes]
    readers: list[LineReader]
    started: float = field(default_factory=time.monotonic)

    def ended(self) -> None:
        """It is no more: its last lines are read, its descriptors given back."""
        for reader in self.readers:
            reader.stop()


class Children:
    """All services of an embedded run. Each is in its own session: a terminal's Ctrl-C reaches only the launcher."""

    def __init__(self, on_line: OnLine) -> None:
        self._on_line = on_line
        self._owner_read, self._owner_write = os.pipe2(os.O_CLOEXEC)
        self._resolver_read, self._resolver_write = os.pipe2(os.O_CLOEXEC)
        self.running: dict[str, Child] = {}
        self._ends: dict[str, deque[float]] = {}

    # --- starting ---------------------------------------------------------------------------------------------
    def _spawn(self, role: str, args: list[str], fds: tuple[int, ...], *, environ: Mapping[str, str]) -> Child:
        # Without -P a folder services/ in the user's working directory would be imported (design.md 2).
        command = [sys.executable, "-P", "-m", f"services.{role}", *args]
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            pass_fds=fds,
            start_new_session=True,
            env=dict(environ),
        )
        assert process.stdout is not None and process.stderr is not None
        readers = [
            LineReader(os.dup(pipe.fileno()), partial(self._on_line, role, name))
            for name, pipe in (("stdout", process.stdout), ("stderr", process.stderr))
        ]
        process.stdout.close()
        process.stderr.close()
        child = self.running[role] = Child(role, process, readers)
        return child

    def start_resolver(self, argv: list[str]) -> int:
        """The resolver comes first and alone; returns the read end of its report pipe."""
        report_read, report_write = os.pipe2(os.O_CLOEXEC)
        own = ["--report-fd", str(report_write), "--owner-fd", str(self._resolver_read), "--", *argv]
        self._spawn(Role.RESOLVER, own, (report_write, self._resolver_read), environ=os.environ)
        os.close(report_write)
        return report_read

    def give_resolver_bus(self, bus: Path) -> None:
        """The configuration was right: the resolver joins the bus."""
        os.write(self._resolver_write, os.fsencode(bus) + b"\n")

    def start_resolver_again(self, argv: list[str], bus: Path, digest: str) -> Child:
        """It died before every slice was served. What it resolves now must be what the run began with."""
        own = ["--bus", str(bus), "--owner-fd", str(self._owner_read), "--expect-digest", digest, "--", *argv]
        return self._spawn(Role.RESOLVER, own, (self._owner_read,), environ=os.environ)

    def start(self, role: Role, bus: Path) -> Child:
        """Start (or restart) a service. The API key never leaves the resolver: others do not inherit it."""
        environ = {key: value for key, value in os.environ.items() if key not in ("VASTAI_API_KEY", "HF_TOKEN")}
        args = ["--bus", str(bus), "--owner-fd", str(self._owner_read)]
        return self._spawn(role, args, (self._owner_read,), environ=environ)

    def start_extra(self, extra: Extra) -> Child:
        """Start (or restart) one of the optional processes on the sockets that the launcher has bound."""
        environ = {key: value for key, value in os.environ.items() if key not in ("VASTAI_API_KEY", "HF_TOKEN")}
        args = [*extra.args, "--owner-fd", str(self._owner_read)]
        return self._spawn(extra.name, args, (self._owner_read, *extra.fds), environ=environ)

    def may_restart(self, role: str) -> bool:
        """At most SERVICE_RESTARTS_MAX ends within the window."""
        ends = self._ends.setdefault(role, deque())
        now = time.monotonic()
        ends.append(now)
        while now - ends[0] > SERVICE_RESTART_WINDOW_MS / 1000:
            ends.popleft()
        return len(ends) <= SERVICE_RESTARTS_MAX

    # --- stopping ---------------------------------------------------------------------------------------------
    def stop_all(self) -> None:
        """TERM in STOP_ORDER, each gets SERVICE_STOP_MS (STOP_MS), then KILL. Nothing is left when this returns."""
        for group in STOP_ORDER:
            children = [self.running.pop(role) for role in group if role in self.running]
            for child in children:
                child.process.terminate()
            waited_s = 0.0
            for child in children:
                # In slices: while the machine stands still nobody can end, and nobody is killed for that.
                while child.process.poll() is None and waited_s * 1000 < STOP_MS.get(child.role, SERVICE_STOP_MS):
                    try:
                        child.process.wait(WAIT_SLICE_S)
                    except subprocess.TimeoutExpired:
                        waited_s += WAIT_SLICE_S
                if child.process.poll() is None:
                    child.process.kill()
                    child.process.wait()
                child.ended()
        for fd in (self._owner_write, self._owner_read, self._resolver_write, self._resolver_read):
            os.close(fd)

    def cleanup_workers(self) -> str:
        """The provisioner died: once more with --cleanup, which stops by the ledger what it left (design.md 2).

        Returns what is wrong, empty when nothing is left."""
        command = [sys.executable, "-P", "-m", f"services.{Role.PROVISIONER}", "--cleanup"]
        try:
            done = subprocess.run(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                start_new_session=True,
                timeout=CLEANUP_LIMIT_S,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return f"the clean-up of its workers did not end within {CLEANUP_LIMIT_S} s"
        except OSError as error:
            return f"the clean-up of its workers cannot be started: {error.strerror}"
        if done.returncode == 0:
            return ""
        lines = [line for line in done.stderr.decode(errors="replace").splitlines() if line.strip()]
        return f"the clean-up of its workers failed: {lines[0] if lines else f'status {done.returncode}'}"


def how_it_ended(status: int) -> str:
    """ "ended with status 1" or "was killed by SIGKILL"."""
    if status >= 0:
        return f"ended with status {status}"
    try:
        return f"was killed by {signal.Signals(-status).name}"
    except ValueError:
        return f"was killed by signal {-status}"
