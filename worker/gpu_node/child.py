"""The OS side of a ProcessActor: fork and exec, the three pipes, the death (S2 3.3, 4.1 step 4).

Shell code of the loop: every call returns at once; what happens is told as the events of worker/gpu_node/events.py.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Callable

from common.loop import Loop
from worker.gpu_node.events import Error, Exited, Output, ProcessNotification, ProcessSpec, Started
from worker.gpu_node.limits import UNSENT_BYTES_MAX

READ_BYTES = 64 * 1024
READS_MAX = 16  # then the loop gets its turn; what is left wakes it again at once
DRAIN_BYTES_MAX = 4 * 1024 * 1024  # after the death: a grandchild that holds the pipe must not keep us reading


class ChildProcess:
    """One child in a session of its own, so that a terminal's Ctrl-C is gpu-node's alone."""

    def __init__(self, loop: Loop, tell: Callable[[ProcessNotification], None]) -> None:
        self._loop, self._tell = loop, tell
        self._child: subprocess.Popen[bytes] | None = None
        self._outputs: dict[int, tuple[str, int]] = {}
        self._stdin = -1
        self._unsent = bytearray()
        self._closing = False

    @property
    def pid(self) -> int:
        """The child's process id, 0 while there is none."""
        return self._child.pid if self._child else 0

    def start(self, spec: ProcessSpec) -> None:
        """Started, or Error with its sentence."""
        assert self._child is None, "the child runs already"
        try:
            child = subprocess.Popen(
                spec.command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env={**os.environ, **spec.environ},
                start_new_session=True,
            )
        except OSError as error:
            self._tell(Error(f"{error.filename or spec.command[0]}: {error.strerror}"))
            return
        assert child.stdin and child.stdout and child.stderr
        self._child = child
        # The descriptors are ours; Popen's file objects would close them a second time.
        self._stdin = _take(child.stdin.fileno())
        for stream, pipe in (("stdout", child.stdout), ("stderr", child.stderr)):
            fd = _take(pipe.fileno())
            pipe.close()
            self._outputs[fd] = (stream, fd)
            self._loop.add_fd(fd, lambda fd=fd: self._read(fd, READ_BYTES * READS_MAX))  # type: ignore[misc]
        child.stdin.close()
        self._loop.add_fd(self._stdin, self._hung_up, self._flush)
        self._loop.modify(self._stdin, readable=False, writable=False)
        self._loop.watch_pid(child.pid, self._exited)
        self._tell(Started(child.pid))

    def write(self, data: bytes) -> None:
        """Whole and in order; a child that never reads is ended rather than our memory filled."""
        if self._stdin < 0 or self._closing:
            return
        if len(self._unsent) + len(data) > UNSENT_BYTES_MAX:
            self._tell(Error(f"it has not read {len(self._unsent)} bytes that were sent to it"))
            self.signal(kill=True)
            return
        self._unsent += data
        self._flush()

    def close_stdin(self) -> None:
        """After what is still unwritten."""
        self._closing = True
        self._flush()

    def signal(self, *, kill: bool) -> None:
        """To the child's whole session."""
        if self._child:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._child.pid, signal.SIGKILL if kill else signal.SIGTERM)

    def close(self) -> None:
        """gpu-node leaves (its loop may be closed) and no child may outlive it."""
        if self._child:
            self.signal(kill=True)
            self._child.wait()
            self._child = None
        for fd in (*self._outputs, *([self._stdin] if self._stdin >= 0 else [])):
            os.close(fd)
        self._outputs.clear()
        self._stdin = -1

    # --- pipes ------------------------------------------------------------------------------------------------
    def _read(self, fd: int, limit: int) -> None:
        while limit > 0:
            try:
                data = os.read(fd, READ_BYTES)
            except (BlockingIOError, InterruptedError):
                return
            except OSError:
                data = b""
            if not data:
                self._loop.remove_fd(fd)
                os.close(fd)
                del self._outputs[fd]
                return
            limit -= len(data)
            stream = self._outputs[fd][0]
            self._tell(Output("stdout" if stream == "stdout" else "stderr", data))

    def _flush(self) -> None:
        if self._stdin < 0:
            return
        while self._unsent:
            try:
                del self._unsent[: os.write(self._stdin, self._unsent)]
            except (BlockingIOError, InterruptedError):
                break
            except OSError:
                self._unsent.clear()  # it reads no more; its end, which is told, says the rest
                self._closing = True
        if self._closing and not self._unsent:
            self._close_stdin()
        else:
            self._loop.modify(self._stdin, readable=False, writable=bool(self._unsent))

    def _hung_up(self) -> None:
        """The child closed its end."""
        self._unsent.clear()
        self._close_stdin()

    def _close_stdin(self) -> None:
        if self._stdin >= 0:
            self._loop.remove_fd(self._stdin)
            os.close(self._stdin)
            self._stdin = -1

    # --- the end ------------------------------------------------------------------------------------------------
    def _exited(self, status: int) -> None:
        assert self._child
        self._child.returncode = status  # reaped by the loop; Popen must not wait for it again
        pid, self._child = self._child.pid, None
        for fd in list(self._outputs):
            self._read(fd, DRAIN_BYTES_MAX)
            if fd in self._outputs:
                self._loop.remove_fd(fd)
                os.close(fd)
                del self._outputs[fd]
        self._close_stdin()
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, signal.SIGKILL)  # what it left behind in its session
        self._tell(Exited(status))


def _take(fd: int) -> int:
    """A non-blocking duplicate."""
    mine = os.dup(fd)
    os.set_blocking(mine, False)
    return mine
