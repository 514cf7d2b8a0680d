"""Between two processes that talk over a Unix socket: passes bytes on, holds them, flips some, cuts connections.

It takes the path of a socket that is bound already and listens there itself; the real socket is moved aside. Whoever
dials the path from then on is connected through here, and neither side can tell.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from pathlib import Path

CHUNK_BYTES = 64 * 1024


class SocketProxy:
    """One path. Use as a context manager; `take` waits in a thread until the path is bound."""

    def __init__(self, path: Path) -> None:
        self.path, self._real = path, path.with_name(path.name + ".real")
        self._state = threading.Condition()
        self._frozen = False
        self._ended = False
        self._flips = {"there": 0, "back": 0}
        self._cut_after = -1
        self._links: list[tuple[socket.socket, socket.socket]] = []
        self._kept: set[socket.socket] = set()
        self._listener: socket.socket | None = None
        self.passed = 0
        """Bytes that went through, both ways."""
        self.flipped = 0
        threading.Thread(target=self._run, daemon=True).start()

    def __enter__(self) -> SocketProxy:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- what it does to the bytes ----------------------------------------------------------------------------------
    def freeze(self) -> None:
        """From now on nothing goes through, and nobody is told."""
        with self._state:
            self._frozen = True

    def thaw(self) -> None:
        """Whatever waited goes on."""
        with self._state:
            self._frozen = False
            self._state.notify_all()

    def cut(self, after_bytes: int = 0) -> None:
        """Close every connection, once after_bytes more went through."""
        with self._state:
            self._cut_after = self.passed + after_bytes
        if not after_bytes:
            self._cut_if_due()

    def abandon(self) -> None:
        """Close every connection for who dialled; who listens keeps its end, and hears nothing more there."""
        links, self._links = self._links, []
        self._kept.update(server for _, server in links)
        for client, _ in links:
            with contextlib.suppress(OSError):
                client.shutdown(socket.SHUT_RDWR)

    @property
    def connections(self) -> int:
        """How many go through now."""
        return len(self._links)

    def flip(self, way: str) -> None:
        """One byte of the next piece that goes "there" (to who listens) or "back" arrives inverted."""
        with self._state:
            self._flips[way] += 1

    def close(self) -> None:
        """End; connections too."""
        with self._state:
            self._ended, self._frozen = True, False
            self._state.notify_all()
        self._close_links()
        if self._listener is not None:
            self._listener.close()

    # --- inner ------------------------------------------------------------------------------------------------
    def _run(self) -> None:
        while not self.path.exists():
            if self._ended:
                return
            time.sleep(0.001)
        self._listener = socket.socket(socket.AF_UNIX)
        with contextlib.suppress(OSError):
            os.rename(self.path, self._real)
            self._listener.bind(str(self.path))
            self._listener.listen(64)
            while not self._ended:
                client, _ = self._listener.accept()
                self._pass_if_thawed()
                server = socket.socket(socket.AF_UNIX)
                try:
                    server.connect(str(self._real))
                except OSError:
                    client.close()
                    continue
                link = (client, server)
                self._links.append(link)
                for way, source, target in (("there", client, server), ("back", server, client)):
                    threading.Thread(target=self._pump, args=(link, way, source, target), daemon=True).start()

    def _pass_if_thawed(self) -> None:
        with self._state:
            while self._frozen:
                self._state.wait()

    def _pump(
        self, link: tuple[socket.socket, socket.socket], way: str, source: socket.socket, target: socket.socket
    ) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(CHUNK_BYTES):
                self._pass_if_thawed()
                target.sendall(self._harmed(way, data))
                with self._state:
                    self.passed += len(data)
                self._cut_if_due()
        with contextlib.suppress(ValueError):
            self._links.remove(link)
        for end in (source, target):
            if end not in self._kept:
                with contextlib.suppress(OSError):
                    end.shutdown(socket.SHUT_RDWR)

    def _harmed(self, way: str, data: bytes) -> bytes:
        with self._state:
            if not self._flips[way]:
                return data
            self._flips[way] -= 1
            self.flipped += 1
        at = len(data) // 2
        return data[:at] + bytes([data[at] ^ 0xFF]) + data[at + 1 :]

    def _cut_if_due(self) -> None:
        with self._state:
            if not 0 <= self._cut_after <= self.passed:
                return
            self._cut_after = -1
        self._close_links()

    def _close_links(self) -> None:
        links, self._links = self._links, []
        for pair in links:
            for end in pair:
                with contextlib.suppress(OSError):
                    end.shutdown(socket.SHUT_RDWR)
