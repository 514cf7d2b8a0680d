"""Tokens and listening sockets of the HTTP processes (design.md 6 row 34), for those and for the launcher."""

from __future__ import annotations

import ipaddress
import socket
from pathlib import Path

LISTEN_BACKLOG = 256
PUBLISHED_HELP = "in a container whose port is published on the host's loopback only: no token is needed"


class WebError(Exception):
    """An HTTP server cannot start; one sentence."""


def read_token(path: str) -> str:
    """The bearer token of a file, "" for no path. Raises WebError; an empty file is refused, it would let anyone in."""
    if not path:
        return ""
    try:
        token = Path(path).read_text(encoding="latin-1").strip()
    except OSError as error:
        raise WebError(f"the token file {path} cannot be read: {error.strerror}") from None
    if not token:
        raise WebError(f"the token file {path} is empty: write a bearer token into it")
    return token


def listen(addr: str, *, token: bool, what: str) -> socket.socket:
    """A listening socket at HOST:PORT. Raises WebError: a busy or bad address, or one beyond loopback without token."""
    host, colon, port = addr.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    host = "127.0.0.1" if host == "localhost" else host
    try:
        ip = ipaddress.ip_address(host)
        number = int(port)
    except ValueError:
        raise WebError(f"{what} cannot listen at '{addr}': it is not IP:PORT") from None
    if not colon or not 0 <= number <= 65535:
        raise WebError(f"{what} cannot listen at '{addr}': it has no port number from 0 to 65535")
    if not ip.is_loopback and not token:
        raise WebError(f"{what} at {addr} could be reached from other machines without any password: use a token file")
    sock = socket.socket(socket.AF_INET6 if ip.version == 6 else socket.AF_INET, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((host, number))
        sock.listen(LISTEN_BACKLOG)
    except OSError as error:
        sock.close()
        raise WebError(f"{what} cannot listen at {addr}: {error.strerror or error}") from None
    return sock


def where(sock: socket.socket) -> str:
    """HOST:PORT of a bound socket, as a URL has it."""
    host, port = sock.getsockname()[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def is_loopback(sock: socket.socket) -> bool:
    """Whether only this machine can reach it."""
    return ipaddress.ip_address(sock.getsockname()[0]).is_loopback
