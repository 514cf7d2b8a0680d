"""Capture of stdout and stderr (S1 3.2, 7.14, 8.8): what a process prints becomes log records, line by line.

Linux only; elsewhere the component is absent (`available()` is False). The callbacks run on reader threads and must not
block: a full pipe would block whoever prints.
"""

from __future__ import annotations

import contextlib
import os
import select
import sys
import threading
from collections.abc import Callable

from common.limits import LOG_LINE_BYTES_MAX

READ_BYTES = 64 * 1024  # a pipe's whole buffer
STOP_MS = 1000  # a reader that is still busy after this is left behind; it is a daemon thread

STDOUT = "stdout"
STDERR = "stderr"

OnLine = Callable[[bytes], None]
OnStdioLine = Callable[[str, bytes], None]


def available() -> bool:
    """Whether this system has the capture."""
    return sys.platform == "linux"


class LineSplitter:
    """Bytes in, lines out, without their newline; a line longer than 16 KiB comes in pieces of which one is held."""

    def __init__(self, on_line: OnLine) -> None:
        self._on_line = on_line
        self._rest = b""

    def feed(self, data: bytes) -> None:
        """Take what was read."""
        *lines, rest = (self._rest + data).split(b"\n")
        for line in lines:
            self._emit(line)
        while len(rest) > LOG_LINE_BYTES_MAX:
            self._on_line(rest[:LOG_LINE_BYTES_MAX])
            rest = rest[LOG_LINE_BYTES_MAX:]
        self._rest = rest

    def close(self) -> None:
        """The last line had no newline."""
        if self._rest:
            self._emit(self._rest)
        self._rest = b""

    def _emit(self, line: bytes) -> None:
        line = line.removesuffix(b"\r")
        for start in range(0, max(len(line), 1), LOG_LINE_BYTES_MAX):
            self._on_line(line[start : start + LOG_LINE_BYTES_MAX])


class LineReader:
    """A thread that reads lines from `fd` until EOF or stop(); it owns the fd and closes it.

    Also the launcher's reader of an embedded service's stderr pipe. callback: thread-safe; what it raises is counted in
    `errors` and the reading goes on, because a pipe that nobody reads stops the process behind it.
    """

    def __init__(self, fd: int, callback: OnLine, *, name: str = "lines") -> None:
        self.errors = 0
        self._fd = fd
        self._callback = callback
        self._stop_read, self._stop_write = os.pipe()
        self._thread = threading.Thread(target=self._run, name=f"smq-{name}", daemon=True)
        self._thread.start()

    def stop(self, timeout_ms: int = STOP_MS) -> bool:
        """Read what is in the pipe now, flush a partial last line, end. False: the thread is still in a callback."""
        with contextlib.suppress(OSError):
            os.write(self._stop_write, b".")
        self._thread.join(timeout_ms / 1000)
        if self._thread.is_alive():
            return False
        self._close_stop()
        return True

    def join(self, timeout_ms: int) -> bool:
        """Wait for EOF. False: there was none in time."""
        self._thread.join(timeout_ms / 1000)
        return not self._thread.is_alive()

    def _close_stop(self) -> None:
        for fd in (self._stop_write, self._stop_read):
            if fd >= 0:
                os.close(fd)
        self._stop_write = self._stop_read = -1

    def _run(self) -> None:
        splitter = LineSplitter(self._line)
        os.set_blocking(self._fd, False)
        poll = select.poll()
        poll.register(self._fd, select.POLLIN)
        poll.register(self._stop_read, select.POLLIN)
        stopping = False
        while not stopping:
            stopping = any(fd == self._stop_read for fd, _ in poll.poll())
            # A stop still reads what was written before it; a pipe holds at most 1 MiB, so this ends.
            for _ in range(1024 * 1024 // READ_BYTES + 1):
                try:
                    data = os.read(self._fd, READ_BYTES)
                except BlockingIOError:
                    break
                except OSError:
                    data = b""
                if not data:
                    stopping = True
                    break
                splitter.feed(data)
        splitter.close()
        os.close(self._fd)

    def _line(self, line: bytes) -> None:
        try:
            self._callback(line)
        except Exception:
            self.errors += 1


class StdioCapture:
    """Redirects fd 1 and 2 into two pipes from install() to restore(). The original stderr stays reachable."""

    def __init__(self, on_line: OnStdioLine) -> None:
        self._on_line = on_line
        self._originals: dict[int, int] = {}
        self._readers: list[LineReader] = []

    @property
    def installed(self) -> bool:
        """Between install() and restore()."""
        return bool(self._originals)

    def install(self) -> None:
        """Start capturing. Raises OSError when the process is out of descriptors, with nothing changed; RuntimeError
        where the capture does not exist."""
        if not available():
            raise RuntimeError("stdio capture exists on Linux only")
        if self._originals:
            return
        _flush_python()
        opened: list[int] = []
        pipes: list[tuple[int, str, int, int]] = []
        try:
            for target, name in ((1, STDOUT), (2, STDERR)):
                opened += os.pipe()
                pipes.append((target, name, opened[-2], opened[-1]))
            for target in (1, 2):
                opened.append(os.dup(target))
        except OSError:
            for fd in opened:
                os.close(fd)
            raise
        self._originals = {1: opened[-2], 2: opened[-1]}
        for target, name, read, write in pipes:
            os.dup2(write, target)
            os.close(write)
            self._readers.append(LineReader(read, self._named(name), name=name))
        _line_buffered()

    def write_original(self, text: str) -> None:
        """Write to the stderr that was there before: the orchestrator's last error line. Errors are ignored."""
        data = text.encode("utf-8", "replace")
        with contextlib.suppress(OSError):
            while data:
                data = data[os.write(self._originals.get(2, 2), data) :]

    def restore(self) -> None:
        """Give stdout and stderr back; returns after every captured line, also a partial last one, was handed over."""
        if not self._originals:
            return
        _flush_python()
        for target, original in self._originals.items():
            os.dup2(original, target)
            os.close(original)
        self._originals = {}
        # Children may still hold the pipes' other ends, so there may be no EOF: stop() does not wait for one.
        for reader in self._readers:
            reader.stop()
        self._readers = []

    def _named(self, name: str) -> OnLine:
        return lambda line: self._on_line(name, line)


def _flush_python() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()


def _line_buffered() -> None:
    """A pipe is fully buffered by default: lines would come in lumps of 8 KiB, or never."""
    for stream in (sys.stdout, sys.stderr):
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is not None:
            with contextlib.suppress(OSError, ValueError):
                reconfigure(line_buffering=True)
