"""The gateway's wiring: TCP in the host's loop, as effects of the core ask and events tell it (tcp.py).

Non-blocking sockets only; nothing here decides anything but how bytes get in and out.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from common.addresses import Role
from common.host import Host
from common.run_files import RPC_ADDR_FILE
from services.prompt_gateway.bind import join_addr
from services.prompt_gateway.core import GatewayActor
from services.prompt_gateway.tcp import (
    ListenFailed,
    Listening,
    ListenTcp,
    StopListening,
    TcpAbort,
    TcpClose,
    TcpClosed,
    TcpConnected,
    TcpData,
    TcpDrained,
    TcpEof,
    TcpWrite,
)
from services.prompt_gateway.token_edges import TokenEdgeShell

READ_BYTES = 64 * 1024
ACCEPTS_PER_TURN = 64
LISTEN_BACKLOG = 128
SEND_BUFFER_BYTES = 128 * 1024  # the kernel's share per client: small, so that the 1 MiB of row 35 is what counts
KEEPALIVE_IDLE_S, KEEPALIVE_INTERVAL_S, KEEPALIVE_PROBES = 30, 10, 3  # a client whose machine vanished, within a minute
_TCP_CLOSE = 7  # tcpi_state of a connection that is no more (linux/tcp_states.h)
_NO_DESCRIPTORS = frozenset({errno.EMFILE, errno.ENFILE})


class Readiness(Protocol):
    """What is used of common.loop.Loop."""

    def add_fd(self, fd: int, on_readable: Callable[[], None], on_writable: Callable[[], None] | None = None) -> None:
        """Watch for reading."""

    def modify(self, fd: int, *, readable: bool, writable: bool) -> None:
        """Choose what to wait for; errors always wake on_readable."""

    def remove_fd(self, fd: int) -> None:
        """Stop watching."""


@dataclass(slots=True)
class _Client:
    sock: socket.socket
    out: bytearray = field(default_factory=bytearray)
    eof: bool = False
    """The peer sends nothing more."""
    closing: bool = False
    """TcpClose was asked: send what is left, then end."""
    shut: bool = False
    """Our sending side is shut down."""


class TcpServer:
    """One listener and its connections."""

    def __init__(self, loop: Readiness, deliver: Callable[[Any], None]) -> None:
        self._loop, self._deliver = loop, deliver
        self._listener: socket.socket | None = None
        self._clients: dict[int, _Client] = {}
        self._next = 1
        # Given up for a moment when the process has no descriptor left, so that a client can be taken and turned away;
        # else the loop would be woken for it for ever.
        self._spare = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)

    # --- effects ------------------------------------------------------------------------------------------------
    def listen(self, effect: ListenTcp) -> None:
        """SO_REUSEADDR lets a restart take the port over from old connections, never from another listener."""
        family = socket.AF_INET6 if ":" in effect.host else socket.AF_INET
        try:
            listener = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
        except OSError as error:
            self._deliver(ListenFailed(_words(error), False))
            return
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind((effect.host, effect.port))
            listener.listen(LISTEN_BACKLOG)
            host, port = listener.getsockname()[:2]
        except OSError as error:
            listener.close()
            self._deliver(ListenFailed(_words(error), error.errno == errno.EADDRINUSE))
            return
        self._listener = listener
        self._loop.add_fd(listener.fileno(), self._accept)
        self._deliver(Listening(host, port))

    def stop_listening(self, _: StopListening) -> None:
        """Clients that were not accepted yet are reset by the kernel."""
        if self._listener is not None:
            self._loop.remove_fd(self._listener.fileno())
            self._listener.close()
            self._listener = None

    def write(self, effect: TcpWrite) -> None:
        """Send at once what goes, keep the rest."""
        client = self._clients.get(effect.conn)
        if client is None or client.shut:
            return
        client.out += effect.data
        self._flush(effect.conn, client)

    def close(self, effect: TcpClose) -> None:
        """TcpClose."""
        if client := self._clients.get(effect.conn):
            client.closing = True
            self._flush(effect.conn, client)

    def abort(self, effect: TcpAbort) -> None:
        """TcpAbort."""
        self._drop(effect.conn, "")

    def shutdown(self) -> None:
        """Close everything (the end of the process, tests)."""
        self.stop_listening(StopListening())
        for conn in list(self._clients):
            self._drop(conn, "")
        if self._spare >= 0:
            os.close(self._spare)
            self._spare = -1

    # --- readiness ----------------------------------------------------------------------------------------------
    def _accept(self) -> None:
        for _ in range(ACCEPTS_PER_TURN):
            if self._listener is None:
                return
            try:
                sock, peer = self._listener.accept()
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno in _NO_DESCRIPTORS:
                    self._turn_away()
                    return
                continue  # a client that was gone before it was taken (ECONNABORTED and its like)
            sock.setblocking(False)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, KEEPALIVE_IDLE_S)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, KEEPALIVE_INTERVAL_S)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, KEEPALIVE_PROBES)
            conn, self._next = self._next, self._next + 1
            self._clients[conn] = _Client(sock)
            self._loop.add_fd(sock.fileno(), partial(self._readable, conn), partial(self._push, conn))
            self._deliver(TcpConnected(conn, join_addr(str(peer[0]), int(peer[1]))))

    def _turn_away(self) -> None:
        if self._spare >= 0:
            os.close(self._spare)
            self._spare = -1
        with contextlib.suppress(OSError):
            if self._listener is not None:
                self._listener.accept()[0].close()
        with contextlib.suppress(OSError):
            self._spare = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)

    def _readable(self, conn: int) -> None:
        """Data, end of file, or an error; after the end of file only the latter."""
        client = self._clients.get(conn)
        if client is None:
            return
        if client.eof:
            if error := _dead(client.sock):
                self._drop(conn, error)
            return
        try:
            data = client.sock.recv(READ_BYTES)
        except BlockingIOError:
            return
        except OSError as error:
            self._drop(conn, _words(error))
            return
        if data:
            if not client.closing:
                self._deliver(TcpData(conn, data))
            return
        client.eof = True
        if client.closing:
            self._flush(conn, client)
            return
        self._watch(client)
        self._deliver(TcpEof(conn))

    def _push(self, conn: int) -> None:
        if client := self._clients.get(conn):
            self._flush(conn, client)

    def _flush(self, conn: int, client: _Client) -> None:
        sent = 0
        while client.out:
            try:
                with memoryview(client.out) as view:
                    count = client.sock.send(view)
            except BlockingIOError:
                break
            except OSError as error:
                self._drop(conn, _words(error))
                return
            del client.out[:count]
            sent += count
        if sent:
            self._deliver(TcpDrained(conn, sent))
        if client.closing and not client.out:
            if client.eof:
                self._drop(conn, "")
                return
            if not client.shut:
                client.shut = True
                with contextlib.suppress(OSError):
                    client.sock.shutdown(socket.SHUT_WR)
        self._watch(client)

    def _watch(self, client: _Client) -> None:
        self._loop.modify(client.sock.fileno(), readable=not client.eof, writable=bool(client.out))

    def _drop(self, conn: int, error: str) -> None:
        client = self._clients.pop(conn, None)
        if client is not None:
            self._loop.remove_fd(client.sock.fileno())
            client.sock.close()
            self._deliver(TcpClosed(conn, error))


def _words(error: OSError) -> str:
    return error.strerror or str(error)


def _dead(sock: socket.socket) -> str:
    """After the end of file recv() goes on saying so; a reset shows only here. Empty while the connection lives."""
    if code := sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
        return os.strerror(code)
    if sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] == _TCP_CLOSE:
        return "connection reset"
    return ""


def build(host: Host) -> TcpServer:
    """Spawn the gateway on this host and give it TCP."""
    actor = GatewayActor()
    gateway = host.spawn(actor, name=Role.GATEWAY)
    address_file = host.bus_file.run_dir / RPC_ADDR_FILE

    def deliver(event: Any) -> None:
        if isinstance(event, Listening):
            # For the HTTP front, which may have asked for port 0 as everybody else.
            write_address(address_file, join_addr(event.host, event.port))
        host.deliver(gateway, event)

    server = TcpServer(host.loop, deliver)
    attach(server, host.on_effect)
    TokenEdgeShell(host, gateway, foretell=actor.foretell)
    return server


def write_address(path: Path, addr: str) -> None:
    """Whole or not at all; without it the HTTP front says that it waits, and nothing else fails."""
    with contextlib.suppress(OSError):
        new = path.with_suffix(".new")
        new.write_text(addr, encoding="ascii")
        os.replace(new, path)


def attach(server: TcpServer, on_effect: Callable[[type[Any], Callable[[bytes, Any], None]], None]) -> None:
    """Let the server handle the effects of tcp.py."""
    on_effect(ListenTcp, lambda _, effect: server.listen(effect))
    on_effect(StopListening, lambda _, effect: server.stop_listening(effect))
    on_effect(TcpWrite, lambda _, effect: server.write(effect))
    on_effect(TcpClose, lambda _, effect: server.close(effect))
    on_effect(TcpAbort, lambda _, effect: server.abort(effect))
