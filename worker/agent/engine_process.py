"""The engine as a child process: spawn, link, progress page, death (design.md 4 "Agent and engine").

Shell code of the agent's loop: every call returns at once. What happens is told through `tell(event)`, with the events
of worker/agent/core.py; exactly one EngineExited ends the story of each start. The child stays in the agent's process
group, so that a provisioner that kills the group gets both, and inherits stdout and stderr, so that the provider's
capture is the only source of log lines.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from common.codec import Message
from common.messages.engine import EngineFault
from worker.agent.engine_link import FrameBuffer, LinkError, frame
from worker.agent.events import EngineEvent, EngineExited, EngineHungUp, PageRead
from worker.engine.progress import PAGE_BYTES, read_page

ENGINE_COMMAND = (sys.executable, "-P", "-m", "worker.engine")
READ_BYTES = 256 * 1024
READS_MAX = 16  # then the loop gets its turn; what is left wakes it again at once
UNSENT_BYTES_MAX = 16 * 1024 * 1024  # four of the largest prompts; an engine that reads nothing must not fill memory


class Loop(Protocol):
    """What of common/loop.py this needs."""

    def add_fd(self, fd: int, on_readable: Callable[[], None], on_writable: Callable[[], None] | None = None) -> None:
        """Call on_readable whenever fd is readable."""

    def modify(self, fd: int, *, readable: bool, writable: bool) -> None:
        """Choose what fd is watched for."""

    def remove_fd(self, fd: int) -> None:
        """Forget fd; it is about to be closed."""

    def watch_pid(self, pid: int, on_exit: Callable[[int], None]) -> None:
        """Call on_exit(status) once, when the child is gone; negative: killed by that signal."""


class EngineProcess:
    """One engine child. start, send, read_page and kill are the effects of the agent's core."""

    def __init__(
        self,
        loop: Loop,
        tell: Callable[[object], None],
        *,
        command: Sequence[str] = ENGINE_COMMAND,
        environ: Mapping[str, str] | None = None,
    ) -> None:
        self._loop, self._tell = loop, tell
        self._command, self._environ = tuple(command), dict(environ) if environ is not None else None
        self._buffer = FrameBuffer()
        self._unsent = bytearray()
        self._child: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        self._page: mmap.mmap | None = None
        self._trouble = ""

    @property
    def pid(self) -> int:
        """The child's process id, 0 while there is none."""
        return self._child.pid if self._child else 0

    @property
    def running(self) -> bool:
        """Whether EngineExited is still to come."""
        return self._child is not None

    def start(self) -> None:
        """Start the child. A failure is told as EngineExited with its sentence."""
        assert self._child is None, "the engine runs already"
        self._buffer, self._trouble = FrameBuffer(), ""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        page = os.memfd_create("smq-engine-progress", os.MFD_CLOEXEC)
        try:
            os.ftruncate(page, PAGE_BYTES)
            self._page = mmap.mmap(page, PAGE_BYTES)
            arguments = ("--fd", str(theirs.fileno()), "--progress-fd", str(page))
            self._child = subprocess.Popen(
                [*self._command, *arguments],
                stdin=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(), page),
                env=self._environ,
            )
        except OSError as error:
            ours.close()
            self._close()
            name = error.filename or self._command[0]
            self._tell(EngineExited(f"the engine could not be started: {name}: {error.strerror}", None))
            return
        finally:
            theirs.close()
            os.close(page)
        ours.setblocking(False)
        self._socket = ours
        self._loop.add_fd(ours.fileno(), self._readable, self._write)
        self._loop.watch_pid(self._child.pid, self._exited)

    def send(self, message: Message) -> None:
        """Hand a message to the engine; one that is too large is answered with an EngineFault.

        After the engine's death it is dropped: EngineExited says the rest.
        """
        if self._socket is None:
            return
        try:
            data = frame(message)
        except LinkError as error:
            self._refuse(message, str(error))
            return
        if len(self._unsent) + len(data) > UNSENT_BYTES_MAX:
            self._break(f"the engine has not read {len(self._unsent)} bytes that were sent to it")
            return
        self._unsent += data
        self._write()

    def kill(self) -> None:
        """SIGKILL; EngineExited follows."""
        if self._child:
            # Not Popen.kill: it would reap the child, and its status is the loop's to collect.
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._child.pid, signal.SIGKILL)

    def read_page(self) -> None:
        """Tell what the shared page shows."""
        if self._page is None:
            return
        try:
            phase, progress, stamp_ns = read_page(self._page)
        except ValueError:
            return  # a phase that this build does not know; the next messages tell more
        self._tell(PageRead(phase.name.lower(), progress, stamp_ns))

    def close(self) -> None:
        """The agent leaves (its loop may be closed) and no engine may outlive it: kill the child, wait for its end."""
        if self._child:
            self.kill()
            self._child.wait()
        if self._socket is not None:
            self._socket.close()
            self._socket = None
        self._close()

    # --- the link -----------------------------------------------------------------------------------------------
    def _readable(self) -> None:
        self._read()

    def _read(self) -> bool:
        """Take what is there, up to READS_MAX pieces. False: there is nothing more, or the link is over."""
        for _ in range(READS_MAX):
            if self._socket is None:
                return False
            try:
                data = self._socket.recv(READ_BYTES)
            except (BlockingIOError, InterruptedError):
                return False
            except ConnectionResetError:
                self._hung_up()  # it ended with messages of ours unread
                return False
            except OSError as error:
                self._break(f"the link to the engine broke: {error.strerror}")
                return False
            if not data:
                self._hung_up()
                return False
            try:
                messages = self._buffer.feed(data)
            except LinkError as error:
                self._break(f"the engine sent garbage: {error}")
                return False
            for message in messages:
                self._tell(EngineEvent(message))
        return True

    def _write(self) -> None:
        while self._unsent and self._socket is not None:
            try:
                sent = self._socket.send(self._unsent)
            except (BlockingIOError, InterruptedError):
                break
            except OSError:
                # The engine is gone; its last words may still be unread, so the end is noticed while reading.
                self._unsent.clear()
                break
            del self._unsent[:sent]
        if self._socket is not None:
            self._loop.modify(self._socket.fileno(), readable=True, writable=bool(self._unsent))

    def _refuse(self, message: Message, error: str) -> None:
        """A request that cannot be said to the engine fails alone."""
        request_id = getattr(message, "request_id", None)
        if isinstance(request_id, int):
            self._tell(EngineEvent(EngineFault(request_id=request_id, error=error)))
        else:
            self._break(error)

    def _break(self, trouble: str) -> None:
        """The engine broke the protocol: nothing that it says can be believed any more."""
        self._trouble = trouble
        self._close_link()
        self.kill()

    def _hung_up(self) -> None:
        """EOF is what an ending engine looks like, and its exit status says more; a moment later it must be gone."""
        if self._buffer.held:
            self._trouble = f"the engine closed its link in the middle of a message ({self._buffer.held} bytes)"
        self._close_link()
        if self._child:
            self._tell(EngineHungUp())

    def _exited(self, status: int) -> None:
        if self._child:
            self._child.returncode = status  # reaped by the loop; Popen must not wait for it again
        self._child = None
        # The last words, Fatal above all, may have come together with the death.
        while self._socket is not None and self._read():
            pass
        self._close()
        self._tell(EngineExited(self._trouble or _ending(status), status))

    def _close_link(self) -> None:
        if self._socket is not None:
            self._loop.remove_fd(self._socket.fileno())
            self._socket.close()
            self._socket = None
        self._unsent.clear()

    def _close(self) -> None:
        self._close_link()
        if self._page is not None:
            self._page.close()
            self._page = None


def _ending(status: int) -> str:
    if status < 0:
        try:
            name = signal.Signals(-status).name
        except ValueError:
            name = f"signal {-status}"
        hint = " (out of memory?)" if name == "SIGKILL" else ""
        return f"the engine was killed by {name}{hint}"
    return f"the engine exited with status {status}"
