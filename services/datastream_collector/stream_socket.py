"""The stream socket: subscribers on a Unix socket in the run directory, served from the collector's loop.

Non-blocking both ways. A subscriber that does not read costs one batch of memory and is skipped until it does; its
cursor is overtaken meanwhile, which it is told. What a subscriber sends after its request is thrown away.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from common.loop import Loop
from services.datastream_collector.core import CollectorActor
from services.datastream_collector.subscribe import REQUEST_BYTES_MAX, SOCKET_NAME, Subscriber, parse_request

SUBSCRIBERS_MAX = 64  # dashboards, metrics, people with mvp-archive; each may hold a batch and the kernel's buffer
BATCHES_PER_TURN = 4  # at most 1024 frames of JSON for one subscriber, some 5 ms


class EndpointError(Exception):
    """The socket cannot be bound; one sentence."""


@dataclass(slots=True)
class _Client:
    sock: socket.socket
    request: bytearray = field(default_factory=bytearray)
    subscriber: Subscriber | None = None
    out: memoryview = field(default_factory=lambda: memoryview(b""))
    waits: bool = False
    """The kernel's buffer is full: nothing is taken for it until it is writable."""


class StreamSocket:
    """The listener and its subscribers. Raises EndpointError when it cannot be bound."""

    def __init__(
        self,
        loop: Loop,
        actor: CollectorActor,
        directory: Path,
        boot: int,
        call_soon: Callable[[Callable[[], None]], None],
    ) -> None:
        self._loop, self._actor, self._boot, self._call_soon = loop, actor, boot, call_soon
        self._clients: dict[int, _Client] = {}
        self._scheduled = False
        self.refused = 0
        """Connections and requests that were turned away."""
        path = directory / SOCKET_NAME
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
        try:
            # The directory is this run's alone (flock), so an old socket is a dead collector's.
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
            self._listener.bind(str(path))
            os.chmod(path, 0o600)
            self._listener.listen(SUBSCRIBERS_MAX)
        except OSError as error:
            self._listener.close()
            raise EndpointError(f"cannot bind the stream socket {path}: {error.strerror or error}") from None
        loop.add_fd(self._listener.fileno(), self._accept)

    # --- connections ------------------------------------------------------------------------------------------
    def _accept(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except OSError:
            return
        if len(self._clients) >= SUBSCRIBERS_MAX:
            self.refused += 1
            sock.close()
            return
        sock.setblocking(False)
        fd = sock.fileno()
        self._clients[fd] = _Client(sock)
        self._loop.add_fd(fd, partial(self._readable, fd), partial(self._writable, fd))

    def _readable(self, fd: int) -> None:
        client = self._clients[fd]
        try:
            data = client.sock.recv(REQUEST_BYTES_MAX)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._drop(fd)
        elif client.subscriber is None:
            client.request += data
            self._subscribe(fd, client)

    def _subscribe(self, fd: int, client: _Client) -> None:
        line, newline, _ = client.request.partition(b"\n")
        if not newline and len(client.request) <= REQUEST_BYTES_MAX:
            return
        config = self._actor.config
        try:
            wanted = parse_request(bytes(line))
        except ValueError:
            self.refused += 1
            self._drop(fd)
            return
        run_id = config.run_id if config else 1
        cursor = self._actor.cursor(replay=wanted.replay)
        client.subscriber = Subscriber(wanted, cursor, self._actor.channels, run_id, self._boot)
        client.request.clear()
        self._pump(fd, client)

    def _drop(self, fd: int) -> None:
        client = self._clients.pop(fd)
        self._loop.remove_fd(fd)
        client.sock.close()
        if client.subscriber is not None:
            client.subscriber.cursor.close()

    # --- frames -----------------------------------------------------------------------------------------------
    def frames_collected(self) -> None:
        """New frames are in the ring: serve whoever can take them, once per turn of the loop."""
        if self._clients and not self._scheduled:
            self._scheduled = True
            self._call_soon(self._pump_all)

    def _pump_all(self) -> None:
        self._scheduled = False
        for fd, client in list(self._clients.items()):
            if client.subscriber is not None and not client.waits:
                self._pump(fd, client)

    def _writable(self, fd: int) -> None:
        client = self._clients[fd]
        client.waits = False
        self._loop.modify(fd, readable=True, writable=False)
        self._pump(fd, client)

    def _pump(self, fd: int, client: _Client) -> None:
        subscriber = client.subscriber
        if subscriber is None:
            return
        for _ in range(BATCHES_PER_TURN):
            if not client.out:
                if not subscriber.pending:
                    return
                client.out = memoryview(subscriber.take())
            try:
                while client.out:
                    client.out = client.out[client.sock.send(client.out) :]
            except BlockingIOError:
                client.waits = True
                self._loop.modify(fd, readable=True, writable=True)
                return
            except OSError:
                self._drop(fd)
                return
        # More than one turn's share is waiting: others first.
        self.frames_collected()
