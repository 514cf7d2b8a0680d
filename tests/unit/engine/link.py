"""The agent's end of the engine link, for tests: starts the process and speaks frames."""

from __future__ import annotations

import mmap
import os
import socket
import struct
import subprocess
import sys
from pathlib import Path
from types import TracebackType
from typing import TypeVar

from common.codec import Message, encode_body
from worker.engine.port import decode_frame

_LENGTH = struct.Struct("<I")
M = TypeVar("M", bound=Message)


class EngineLink:
    """`with EngineLink(log) as link`: an engine process, killed at the end if it is still there."""

    def __init__(self, log: Path, env: dict[str, str] | None = None) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        page = os.memfd_create("progress")
        os.ftruncate(page, 24)
        self.log = log
        with log.open("wb") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-m", "worker.engine", "--fd", str(theirs.fileno()), "--progress-fd", str(page)],
                pass_fds=(theirs.fileno(), page),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=env,
            )
        theirs.close()
        self.page = mmap.mmap(page, 24)
        os.close(page)
        self.socket = ours
        self.socket.settimeout(60)
        self._buffer = b""

    def send(self, message: Message) -> None:
        body = encode_body(message)
        self.socket.sendall(_LENGTH.pack(len(body)) + body)

    def receive(self) -> Message:
        """The next message. Raises EOFError when the engine is gone."""
        size = _LENGTH.unpack(self._exactly(4))[0]
        return decode_frame(self._exactly(size))

    def until(self, kind: type[M]) -> tuple[M, list[Message]]:
        """Read up to the first message of a type; gives it and what came before."""
        before: list[Message] = []
        while True:
            message = self.receive()
            if isinstance(message, kind):
                return message, before
            before.append(message)

    def _exactly(self, size: int) -> bytes:
        while len(self._buffer) < size:
            data = self.socket.recv(65_536)
            if not data:
                raise EOFError(self.log.read_text(errors="replace"))
            self._buffer += data
        head, self._buffer = self._buffer[:size], self._buffer[size:]
        return head

    def __enter__(self) -> EngineLink:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.socket.close()
        try:
            self.process.wait(5)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
