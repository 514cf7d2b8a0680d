"""`mvp-orchestrator`: the launcher plus the run (design.md 2, embedded).

Resolve the configuration first and alone; only then a run directory, keys, captured stdio and the other services. The
last act is the one error line on the original stderr (S1 10; design.md 6 row 4).
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import struct
import sys
import time
import traceback
from collections.abc import Iterator
from pathlib import Path

from common.addresses import Role
from common.codec import BadEnvelope, decode_body, tag_of
from common.config_args import information
from common.door import DoorError
from common.effects import StopSignal
from common.host import Host
from common.limits import CONFIG_RESOLVE_MS
from common.loop import stop_signals
from common.messages.config import ConfigFailed, ConfigResolved
from common.messages.service import ServiceFailed
from common.security import SecurityError, init
from common.stdio_capture import STDERR, StdioCapture, available
from services.orchestrator.base import Phase, RunOver
from services.orchestrator.children import FATAL, Child, Children, how_it_ended
from services.orchestrator.core import RunActor, ServiceLost, ServiceRestarted, StdioLine
from services.orchestrator.door import choose_door
from services.orchestrator.extras import Extras
from services.orchestrator.run_dir import RunDirectory, remove_stale
from services.orchestrator.service import build, listen_on_stdin

PROGRAM = "mvp-orchestrator"
START_ORDER: tuple[Role, ...] = (Role.ROUTER, Role.MEMBERSHIP, Role.PROVISIONER, Role.GATEWAY, Role.COLLECTOR)

LAST_WORDS_CHARS_MAX = 200


class LaunchError(Exception):
    """The launch cannot go on; one sentence."""


def main(argv: list[str] | None = None) -> int:
    """Run once. Returns the exit status: 0 or 1 (S1 3.1)."""
    args = sys.argv[1:] if argv is None else argv
    if args[:1] == ["plan"]:
        from services.orchestrator import plan_command  # a start needs none of it

        return plan_command.main(args[1:])
    if args[:1] == ["doctor"]:
        from services.orchestrator.doctor import command

        return command.main(args[1:])
    if args[:1] in (["workers"], ["reconcile"]):
        from services.orchestrator import owned_command

        return (owned_command.workers if args[0] == "workers" else owned_command.reconcile)(args[1:])
    if args[:1] == ["cache"]:
        from services.orchestrator import cache_command

        return cache_command.cache(args[1:])
    if (text := information(args)) is not None:
        sys.stdout.write(text)
        return 0
    open_standard_descriptors()
    # In the background of a terminal a read of stdin would stop this process; ignored, the read just fails.
    signal.signal(signal.SIGTTIN, signal.SIG_IGN)
    launch = Launch(args)
    # Until the host's loop takes them over, signals just end the launch.
    for number in stop_signals():
        signal.signal(number, launch.interrupted)
    try:
        status, error = launch.run()
    except (LaunchError, SecurityError, DoorError) as failure:
        status, error = 1, str(failure)
    except KeyboardInterrupt:
        status, error = 1, "shutdown requested while starting"
    except Exception as failure:
        # A defect of ours: the user gets one sentence, the traceback goes where SMQ_TRACEBACK=1 asks for it.
        status, error = 1, f"internal error: {type(failure).__name__}: {failure}"
        if os.environ.get("SMQ_TRACEBACK") == "1":
            error += "\n" + traceback.format_exc()
    finally:
        # The end is bounded; a signal that broke it off would leave services behind.
        for number in stop_signals():
            signal.signal(number, signal.SIG_IGN)
        left = launch.close()
    if error:
        say(f"{PROGRAM}: {error}{f'; {left}' if left else ''}\n")
    return status


def open_standard_descriptors() -> None:
    """Whoever closed 0, 1 or 2 gets /dev/null there: else a socket of ours would take the number, and the stop
    listener and the stdio capture would take that socket."""
    for fd in (0, 1, 2):
        try:
            os.fstat(fd)
        except OSError:
            os.open(os.devnull, os.O_RDWR)


def say(text: str) -> None:
    """To the real stderr, whatever became of it."""
    with contextlib.suppress(OSError):
        os.write(2, text.encode(errors="replace"))


class Launch:
    """Everything that one start owns; `close` gives all of it back."""

    def __init__(self, argv: list[str]) -> None:
        self._argv = argv
        self._early: list[tuple[str | None, str, bytes]] = []
        self._host: Host | None = None
        self._run = b""
        self._digest = ""
        self._files: dict[Role, Path] = {}
        self._directory: RunDirectory | None = None
        self._capture: StdioCapture | None = None
        self._children = Children(lambda role, stream, line: self._line(role, stream, line))
        self._provisioner_died = False
        self._stop_wanted = ""
        """The signal that asked for the end before there was a loop."""
        self._waiting = False
        self._last_words: dict[str, str] = {}
        """The last line that each service printed on stderr: mostly why it ended."""
        self._extras: Extras | None = None

    # --- signals before there is a loop -----------------------------------------------------------------------
    def interrupted(self, number: int, _: object) -> None:
        """The handler. An exception in the middle of a fork would lose the child: it is raised only while waiting."""
        self._stop_wanted = signal.Signals(number).name
        if self._waiting:
            raise KeyboardInterrupt

    @contextlib.contextmanager
    def _interruptible(self) -> Iterator[None]:
        self._waiting = True
        try:
            if self._stop_wanted:
                raise KeyboardInterrupt
            yield
        finally:
            self._waiting = False

    # --- running ----------------------------------------------------------------------------------------------
    def run(self) -> tuple[int, str]:
        """(exit status, error)."""
        resolved = self._resolve()
        self._digest = resolved.digest
        door = choose_door(resolved, os.environ)
        self._directory = RunDirectory(resolved.run_dir, os.environ)
        remove_stale(os.environ)
        self._files = init(self._directory.path, relay=resolved.relay, door=door)
        extras = self._extras = Extras(resolved, self._directory.path)
        if available():
            self._capture = StdioCapture(lambda stream, line: self._line(None, stream, line))
            self._capture.install()
        for role in (*START_ORDER, *((Role.RELAY,) if resolved.relay else ())):
            self._children.start(role, self._files[role])
        self._children.give_resolver_bus(self._files[Role.RESOLVER])
        results: list[RunOver] = []
        host = self._host = Host.from_bus_file(self._files[Role.ORCHESTRATOR])
        self._run = build(host, results.append, self._capture.write_original if self._capture else say)
        listen_on_stdin(host, self._run)
        self._start_extras(host, extras)
        for child in list(self._children.running.values()):
            self._watch(child)
        for role, stream, line in self._early:
            self._deliver_line(role, stream, line)
        self._early.clear()
        if self._stop_wanted:  # the host's loop has the signals now, but this one came before
            host.node.system.broadcast(StopSignal(self._stop_wanted, 1))
        status = host.run()
        self._host = None
        return status, results[0].error if results else "ended without a result"

    def _start_extras(self, host: Host, extras: Extras) -> None:
        """S1 10.3: one that cannot be started is a startup failure, with its record if the collector takes it."""
        if extras.error:
            failed = ServiceFailed(service=Role.ORCHESTRATOR, phase=extras.phase, error=extras.error)
            host.deliver(self._run, failed)
            return
        for extra in extras.wanted:
            self._children.start_extra(extra)

    # --- configuration ----------------------------------------------------------------------------------------
    def _resolve(self) -> ConfigResolved:
        """The resolver's report. EOF without one is a failure, too."""
        fd = self._children.start_resolver(self._argv)
        data = b""
        until = time.monotonic() + CONFIG_RESOLVE_MS / 1000
        with selectors.DefaultSelector() as selector, open(fd, "rb", buffering=0) as pipe:
            selector.register(pipe, selectors.EVENT_READ)
            while not _whole(data):
                with self._interruptible():
                    ready = selector.select(max(0.0, until - time.monotonic()))
                if not ready:
                    raise LaunchError(f"the configuration was not resolved within {CONFIG_RESOLVE_MS // 1000} s")
                chunk = pipe.read(65536)
                if not chunk:
                    raise LaunchError(f"the config resolver failed: {self._resolver_said()}")
                data += chunk
        try:
            message = _decode_report(data[4:])
        except BadEnvelope as error:
            raise LaunchError(f"the config resolver reported nonsense: {error.reason}") from None
        if isinstance(message, ConfigFailed):
            raise LaunchError(message.error)
        return message

    def _resolver_said(self) -> str:
        time.sleep(0.1)  # its last line is still on its way through the reader thread
        return self._last_words.get(Role.RESOLVER, "it ended without a word")

    # --- children ---------------------------------------------------------------------------------------------
    def _watch(self, child: Child) -> None:
        assert self._host is not None
        host = self._host

        def ended(status: int) -> None:
            child.process.returncode = status
            child.ended()
            if self._children.running.get(child.role) is child:
                del self._children.running[child.role]
                self._service_ended(host, child.role, how_it_ended(status))

        host.loop.watch_pid(child.process.pid, ended)

    def _service_ended(self, host: Host, role: str, how: str) -> None:
        if (
            extra := next((extra for extra in self._extras.wanted if extra.name == role), None)
            if self._extras
            else None
        ):
            if self._children.may_restart(role):
                self._watch(self._children.start_extra(extra))
                host.deliver(self._run, ServiceRestarted(role, how))
            else:
                host.deliver(self._run, StdioLine("stderr", f"{how} too often; it stays down, the run goes on", role))
        elif role is Role.RESOLVER and self._is_served(host):
            pass
        elif role in FATAL:
            if role is Role.PROVISIONER:
                self._provisioner_died = True
            host.deliver(self._run, ServiceLost(Role(role), self._explained(role, how)))
        elif self._children.may_restart(role):
            file = self._files[Role(role)]
            if role is Role.RESOLVER:
                self._watch(self._children.start_resolver_again(self._argv, file, self._digest))
            else:
                self._watch(self._children.start(Role(role), file))
            host.deliver(self._run, ServiceRestarted(role, self._explained(role, how)))
        else:
            host.deliver(self._run, ServiceLost(Role(role), self._explained(role, f"{how} too often")))

    def _is_served(self, host: Host) -> bool:
        """Whether every service has its slice: then nobody needs the resolver any more (design.md 2)."""
        run = host.node.system.actor(self._run)
        return isinstance(run, RunActor) and run.phase is not Phase.SERVICES

    def _explained(self, role: str, how: str) -> str:
        said = self._last_words.pop(role, "")
        return f"{how}; its last line was: {said[:LAST_WORDS_CHARS_MAX]}" if said else how

    # --- lines ------------------------------------------------------------------------------------------------
    def _line(self, role: str | None, stream: str, line: bytes) -> None:
        """From a reader thread."""
        if role is not None and stream == STDERR and (text := line.decode(errors="replace").strip()):
            self._last_words[role] = text
        if self._host is None:
            self._early.append((role, stream, line))
        else:
            self._host.call_soon(lambda: self._deliver_line(role, stream, line))

    def _deliver_line(self, role: str | None, stream: str, line: bytes) -> None:
        if self._host is not None:
            text = line.decode(errors="replace").rstrip("\n")
            self._host.deliver(self._run, StdioLine(stream, text, role or ""))

    # --- the end ----------------------------------------------------------------------------------------------
    def close(self) -> str:
        """Stop every service, stop what a dead provisioner left, give the terminal back, remove the directory. Returns
        what could not be stopped, in one sentence."""
        self._host = None
        left = self._children.cleanup_workers() if self._provisioner_died else ""
        self._children.stop_all()
        if self._extras is not None:
            self._extras.close()
        if self._capture is not None:
            self._capture.restore()
        if self._directory is not None:
            self._directory.remove()
        return left


def _whole(data: bytes) -> bool:
    return len(data) >= 4 and len(data) >= 4 + struct.unpack("<I", data[:4])[0]


def _decode_report(body: bytes) -> ConfigResolved | ConfigFailed:
    """The tag stands in the body itself ("t"), so both types are tried."""
    try:
        message = decode_body(tag_of(ConfigResolved), body)
    except BadEnvelope:
        message = decode_body(tag_of(ConfigFailed), body)
    assert isinstance(message, ConfigResolved | ConfigFailed)
    return message
