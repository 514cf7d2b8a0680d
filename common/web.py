"""What the two HTTP processes share: binding, the token, and a guard in front of everything (design.md 6 row 34).

Loopback needs no token; any other address does. On loopback the Host header must name this machine, so that a web page
cannot reach us through a name that it points at 127.0.0.1. The token is taken as `Authorization: Bearer TOKEN`, or as
the password of basic authentication, which browsers ask for by themselves. Only imported by those two processes.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import contextlib
import hmac
import os
import signal
import socket
from collections.abc import Awaitable, Callable, Iterator, MutableMapping, Sequence
from typing import Any

import uvicorn

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

LOCAL_NAMES = frozenset({"localhost", "127.0.0.1", "[::1]"})
STOP_GRACE_S = 1  # streams to browsers are open for ever; they are told and then closed
SECURITY_HEADERS = (
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"x-frame-options", b"DENY"),
    (b"content-security-policy", b"default-src 'self'; img-src 'self' data:; base-uri 'none'; form-action 'none'"),
)


Refusal = Callable[[int, str], tuple[bytes, bytes]]
"""(status, sentence) → (content type, body): how the guard says no."""


def plain_refusal(status: int, sentence: str) -> tuple[bytes, bytes]:
    """A line of text."""
    return b"text/plain; charset=utf-8", f"{sentence}\n".encode()


class Guard:
    """ASGI: token and Host checks before the app, security headers on every answer. open_paths need no token."""

    def __init__(
        self,
        app: App,
        *,
        token: str,
        loopback: bool,
        refusal: Refusal = plain_refusal,
        open_paths: frozenset[str] = frozenset(),
    ) -> None:
        self._app, self._token, self._loopback, self._refusal = app, token, loopback, refusal
        self._open = open_paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One connection."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        if self._loopback and not self._token and not _names_this_machine(headers.get(b"host", b"")):
            await self._refuse(send, 421, "this server answers only to names of this machine, as localhost", ())
        elif self._token and scope["path"] not in self._open and not self._allowed(headers.get(b"authorization", b"")):
            ask = (b"www-authenticate", b'Basic realm="swactor-mq (any user, the token as password)", charset="UTF-8"')
            await self._refuse(send, 401, "a bearer token is needed: Authorization: Bearer TOKEN", (ask,))
        else:
            await self._app(scope, receive, _with_headers(send))

    def _allowed(self, header: bytes) -> bool:
        scheme, _, rest = header.partition(b" ")
        given = rest.strip()
        if scheme.lower() == b"basic":
            with contextlib.suppress(binascii.Error, ValueError):
                given = base64.b64decode(given, validate=True).partition(b":")[2]
        elif scheme.lower() != b"bearer":
            return False
        return hmac.compare_digest(given, self._token.encode("latin-1"))

    async def _refuse(self, send: Send, status: int, sentence: str, headers: Sequence[tuple[bytes, bytes]]) -> None:
        content_type, body = self._refusal(status, sentence)
        all_headers = [(b"content-type", content_type), (b"content-length", str(len(body)).encode()), *headers]
        await send({"type": "http.response.start", "status": status, "headers": [*all_headers, *SECURITY_HEADERS]})
        await send({"type": "http.response.body", "body": body})


def _names_this_machine(host: bytes) -> bool:
    name = host.decode("latin-1").strip().lower()
    if name.endswith("]"):
        return name in LOCAL_NAMES
    head, colon, port = name.rpartition(":")
    return (head if colon and port.isdecimal() else name) in LOCAL_NAMES


def _with_headers(send: Send) -> Send:
    async def guarded(message: Message) -> None:
        if message["type"] == "http.response.start":
            message["headers"] = [*message.get("headers", ()), *SECURITY_HEADERS]
        await send(message)

    return guarded


class Server(uvicorn.Server):
    """One of several servers in a process: signals are the process's business."""

    def __init__(self, app: App) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                log_config=None,
                access_log=False,
                lifespan="off",
                server_header=False,
                timeout_graceful_shutdown=STOP_GRACE_S,
                ws="none",
                h11_max_incomplete_event_size=64 * 1024,
            )
        )

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave them alone."""
        yield


async def serve(
    apps: Sequence[tuple[App, socket.socket]], stopping: asyncio.Event, owner_fd: int | None = None
) -> None:
    """Serve until SIGTERM, SIGINT or the end of the owner's pipe. `stopping` is set first: long answers end by it."""
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopping.set)
    if owner_fd is not None:
        os.set_blocking(owner_fd, False)

        def owner() -> None:
            if not os.read(owner_fd, 4096):
                loop.remove_reader(owner_fd)
                stopping.set()

        loop.add_reader(owner_fd, owner)
    servers = [(Server(app), sock) for app, sock in apps]
    tasks = [asyncio.create_task(server.serve([sock])) for server, sock in servers]
    stop = asyncio.create_task(stopping.wait())
    await asyncio.wait([stop, *tasks], return_when=asyncio.FIRST_COMPLETED)
    stopping.set()
    for server, _ in servers:
        server.should_exit = True
    await asyncio.gather(*tasks)
    stop.cancel()
