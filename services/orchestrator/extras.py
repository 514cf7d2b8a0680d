"""The two optional processes of a run, HTTP front and dashboard with metrics (design.md 4; S1 7.15, 10.3).

The launcher binds their listening sockets before it starts anything that costs money, so that a busy address fails the
run at once and a restart of the process keeps its address. They own no state: their death is a record and a restart,
never the end of a run.
"""

from __future__ import annotations

import socket
from dataclasses import dataclass, field
from pathlib import Path

from common.messages.config import ConfigResolved
from common.run_files import RPC_ADDR_FILE
from common.web_socket import WebError, listen, where

HTTP, WEB = "prompt_gateway.http", "datastream_collector.web"


@dataclass(slots=True)
class Extra:
    """One of them: module below `services`, its arguments, the descriptors that it inherits."""

    name: str
    args: list[str]
    sockets: list[socket.socket] = field(default_factory=list)

    @property
    def fds(self) -> tuple[int, ...]:
        """The listening sockets."""
        return tuple(sock.fileno() for sock in self.sockets)


class Extras:
    """What this run's configuration asks for. error: why one of them cannot be, in one sentence; phase: which."""

    def __init__(self, resolved: ConfigResolved, directory: Path) -> None:
        self.wanted: list[Extra] = []
        self.error = ""
        self.phase = ""
        self.where: dict[str, str] = {}
        """What listens where: "dashboard" → host:port."""
        token = ["--token-file", resolved.http_token_file] if resolved.http_token_file else []
        web = Extra(WEB, ["--run-dir", str(directory), *token])
        for what, addr in (("dashboard", resolved.dashboard_addr), ("metrics", resolved.metrics_addr)):
            self._bind(web, what, f"--{what}-fd", addr, bool(token), f"[observability].{what}_addr")
        front = Extra(HTTP, ["--rpc-file", str(directory / RPC_ADDR_FILE), "--model", resolved.model_id, *token])
        self._bind(front, "http", "--http-fd", resolved.http_addr, bool(token), "[prompt].http_addr")
        self.wanted = [extra for extra in (front, web) if extra.sockets]

    def _bind(self, extra: Extra, what: str, option: str, addr: str, token: bool, key: str) -> None:
        if not addr or self.error:
            return
        name = {"http": "the HTTP front"}.get(what, f"the {what}")
        try:
            sock = listen(addr, token=token, what=name)
        except WebError as error:
            self.error, self.phase = f"{error}; set {key} to another address", what
            return
        extra.sockets.append(sock)
        extra.args += [option, str(sock.fileno())]
        self.where[what] = where(sock)

    def close(self) -> None:
        """Give the sockets back."""
        for extra in self.wanted:
            for sock in extra.sockets:
                sock.close()
