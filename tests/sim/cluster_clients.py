"""Clients of the prompt RPC and the gateway's TCP on virtual time; each client checks every byte that it gets.

A client knows what the engine answers to its prompt. Whatever happens it gets a prefix of that text, in order and once,
and at most one terminal, which is the last line of its request (S1 2.5, 9.10).
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from services.prompt_gateway.tcp import (
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
from tests.sim.cluster_engine import answer, prompt_text
from tests.sim.cluster_world import FORGED, ClusterWorld, SimHost, Violation

PORT = 19777
KERNEL_BYTES = 128 * 1024
RETRY_MS = 250
SECOND_ID = 99


@dataclass(slots=True)
class Script:
    """What a client does. habit: "normal", "disconnect", "abort", "second", "half_close", "slow", "stuck", "shutdown",
    "linger", "garbage"; after_ms: when it does that, from its submit on."""

    at_ms: int
    prompts: int
    tokens: int
    size: int
    habit: str
    after_ms: int
    max_tokens: int = 0
    """0: no cap."""


@dataclass(slots=True)
class Asked:
    """One request of a client."""

    request_id: int
    text: str
    got: str = ""
    terminal: str = ""
    error: str = ""
    conn: int = 0


@dataclass(slots=True)
class _Socket:
    """One connection as the kernel has it. out: bytes the gateway wrote that the client has not read."""

    client: Client
    last_ms: int = 0
    out: bytearray = field(default_factory=bytearray)
    undrained: int = 0
    closing: bool = False
    client_closed: bool = False
    broken: bool = False


class SimTcp:
    """The gateway's listener. Bytes take 0-2 ms; what a client does not read is kept up to KERNEL_BYTES."""

    def __init__(self, world: ClusterWorld) -> None:
        self.world = world
        self.host: SimHost | None = None
        self.actor = b""
        self.listening = False
        self.sockets: dict[int, _Socket] = {}
        self.on_open: Callable[[], None] = lambda: None
        """Called when the RPC is bound."""
        self._next = 1

    def attach(self, host: SimHost, actor: bytes) -> None:
        """A new gateway process."""
        self.host, self.actor, self.listening = host, actor, False
        host.perform(ListenTcp, self._listen)
        host.perform(StopListening, self._stop)
        host.perform(TcpWrite, lambda _, effect: self._write(effect))
        host.perform(TcpClose, lambda _, effect: self._close(effect.conn))
        host.perform(TcpAbort, lambda _, effect: self._drop(effect.conn, ""))
        host.on_exit.append(self._gone)

    def _tell(self, event: object) -> None:
        assert self.host is not None
        self.host.deliver(self.actor, event)

    def _gone(self, _: SimHost) -> None:
        self.listening = False
        for conn in list(self.sockets):
            self._hang_up(conn)

    # --- the gateway's effects ------------------------------------------------------------------------------------
    def _listen(self, _: bytes, effect: ListenTcp) -> None:
        self.listening = True
        self.world.note("rpc listens")
        self.on_open()
        self._tell(Listening(effect.host, effect.port or PORT))

    def _stop(self, _: bytes, __: StopListening) -> None:
        self.listening = False
        self.world.note("rpc does not listen")

    def _write(self, effect: TcpWrite) -> None:
        socket = self.sockets.get(effect.conn)
        if socket is None:
            return
        self.world.note_bytes(f"tcp {effect.conn}", effect.data)
        if socket.client_closed:
            self._drop(effect.conn, "connection reset by peer")
            return
        socket.out += effect.data
        socket.undrained += len(effect.data)
        self._drain(effect.conn, socket)
        self._deliver_soon(effect.conn)

    def _drain(self, conn: int, socket: _Socket) -> None:
        room = KERNEL_BYTES - (len(socket.out) - socket.undrained)
        sent = min(socket.undrained, room)
        if sent > 0:
            socket.undrained -= sent
            self._tell(TcpDrained(conn, sent))

    def _deliver_soon(self, conn: int) -> None:
        self.world.at(self.world.now + self.world.rng.randint(0, 2), lambda: self.deliver(conn))

    def deliver(self, conn: int) -> None:
        """The client reads what is there, if it reads."""
        socket = self.sockets.get(conn)
        if socket is None or socket.client_closed or not socket.client.reads:
            return
        ready = len(socket.out) - socket.undrained
        data = bytes(socket.out[:ready])
        del socket.out[:ready]
        if data:
            socket.client.receive(conn, data)
        if self.host is not None and self.host.alive:
            self._drain(conn, socket)
        if socket.out:
            self._deliver_soon(conn)
        elif socket.closing and not socket.broken:
            socket.broken = True
            socket.client.ended(conn)

    def _close(self, conn: int) -> None:
        socket = self.sockets.get(conn)
        if socket is not None:
            socket.closing = True
            if socket.client_closed and not socket.out:
                self._drop(conn, "")
            else:
                self._deliver_soon(conn)

    def _drop(self, conn: int, error: str) -> None:
        if self._hang_up(conn):
            self._tell(TcpClosed(conn, error))

    def _hang_up(self, conn: int) -> bool:
        """The connection is no more; the kernel still hands over what it took."""
        socket = self.sockets.pop(conn, None)
        if socket is None:
            return False
        if not socket.client_closed and not socket.broken:
            ready = len(socket.out) - socket.undrained
            if ready and socket.client.reads:
                socket.client.receive(conn, bytes(socket.out[:ready]))
            self.world.at(self.world.now + 1, lambda: socket.client.ended(conn))
        return True

    # --- the clients' side ----------------------------------------------------------------------------------------
    def connect(self, client: Client) -> int:
        """The number of the connection; 0: refused."""
        if not self.listening or self.host is None or not self.host.alive:
            return 0
        conn, self._next = self._next, self._next + 1
        self.sockets[conn] = _Socket(client)
        self._tell(TcpConnected(conn, f"127.0.0.1:{conn}"))
        return conn

    def send(self, conn: int, data: bytes) -> None:
        self._send(conn, TcpData(conn, data))

    def _send(self, conn: int, event: object) -> None:
        if (socket := self.sockets.get(conn)) is not None:
            socket.last_ms = max(socket.last_ms, self.world.now + self.world.rng.randint(0, 2))
            self.world.at(socket.last_ms, lambda: self._arrived(conn, event))

    def shut(self, conn: int) -> None:
        """The client sends nothing more."""
        self._send(conn, TcpEof(conn))

    def leave(self, conn: int, *, abort: bool = False) -> None:
        """The client is gone: a reset, or an end of file after which only a write tells the difference."""
        socket = self.sockets.get(conn)
        if socket is None:
            return
        socket.client_closed = True
        if abort or socket.closing:
            self.world.at(self.world.now + 1, lambda: self._drop(conn, "connection reset by peer" if abort else ""))
        else:
            self.shut(conn)

    def _arrived(self, conn: int, event: object) -> None:
        socket = self.sockets.get(conn)
        if socket is not None and not (socket.closing and isinstance(event, TcpData)):
            self._tell(event)


class Client:
    """One connection and its script."""

    def __init__(self, tcp: SimTcp, name: str, script: Script) -> None:
        self.tcp, self.world, self.name, self.script = tcp, tcp.world, name, script
        self.asked: list[Asked] = []
        self.conn = 0
        self.reads = True
        self.is_over = False
        self.left = False
        """It went of its own, or broke the protocol, or does not read: nobody owes it a terminal."""
        self.protocol_error = ""
        self._buffer = bytearray()
        self.world.at(max(script.at_ms, self.world.now), self._connect)

    def _connect(self) -> None:
        if self.is_over:
            return
        self.conn = self.tcp.connect(self)
        if self.conn:
            self._submit()
        else:
            self.world.at(self.world.now + RETRY_MS, self._connect)

    def _submit(self) -> None:
        first = not self.asked
        number = len(self.asked) + 1
        asked = Asked(
            number, prompt_text(f"{self.name}r{number}", self.script.tokens, self.script.size), conn=self.conn
        )
        self.asked.append(asked)
        line: dict[str, Any] = {"request_id": number, "prompt_text": asked.text}
        if number % 2:
            line["events"] = ["queued"]
        if self.script.max_tokens:
            line["max_tokens"] = self.script.max_tokens
        self.tcp.send(self.conn, json.dumps(line).encode() + b"\n")
        if first and self.script.habit not in ("normal", "linger"):
            self.world.at(self.world.now + self.script.after_ms, self._misbehave)

    def _misbehave(self) -> None:
        if self.is_over:
            return
        match self.script.habit:
            case "disconnect" | "abort":
                self.left = self.is_over = True
                self.tcp.leave(self.conn, abort=self.script.habit == "abort")
            case "second":
                if self.asked[-1].terminal:
                    return
                self.left = True
                line = {"request_id": SECOND_ID, "prompt_text": prompt_text("second", 1)}
                self.tcp.send(self.conn, json.dumps(line).encode() + b"\n")
            case "garbage":
                self.left = True
                self.tcp.send(self.conn, b'{"request_id": "x"\n')
            case "half_close":
                self.left = self.left or bool(self.asked[-1].terminal)
                self.script.prompts = len(self.asked)
                self.tcp.shut(self.conn)
            case "slow" | "stuck":
                self.reads = False
                if self.script.habit == "slow":
                    self.world.at(self.world.now + 3000, self._read_on)
                self.left = True  # more than its buffer holds may come meanwhile
            case "shutdown":
                self.tcp.send(self.conn, b'{"type":"shutdown"}\n')

    def _read_on(self) -> None:
        self.reads = True
        self.tcp.deliver(self.conn)

    # --- what comes -----------------------------------------------------------------------------------------------
    def receive(self, conn: int, data: bytes) -> None:
        if self.is_over or conn != self.conn:
            return
        self._buffer += data
        *lines, rest = bytes(self._buffer).split(b"\n")
        self._buffer = bytearray(rest)
        for line in lines:
            self._line(json.loads(line))

    def _line(self, line: dict[str, Any]) -> None:
        kind = line["type"]
        if kind == "error":
            self.protocol_error = line["error"]
            if not self.left:
                raise Violation(f"{self.name} is told {line['error']!r} without a reason")
            return
        if kind == "shutdown_accepted":
            return
        if line["request_id"] == SECOND_ID and self.script.habit == "second":
            return  # the first had just ended: then it is an ordinary prompt
        asked = next((one for one in self.asked if one.request_id == line["request_id"]), None)
        if asked is None:
            raise Violation(f"{self.name} hears of request {line['request_id']}, which it did not make: {line}")
        if asked.terminal:
            raise Violation(f"{self.name}: {kind} after the {asked.terminal} of request {asked.request_id}")
        if kind == "queued":
            if asked.got:
                raise Violation(f"{self.name}: queued after text")
            return
        expected = "".join(answer(asked.text)[: self.script.max_tokens or None])
        if kind == "text_delta":
            asked.got += line["text"]
            if not expected.startswith(asked.got):
                raise Violation(f"{self.name}: text lost, doubled or out of order: {asked.got[-80:]!r}")
            return
        asked.terminal = kind
        if kind == "done":
            if line["final_text"] != expected or asked.got != expected:
                raise Violation(f"{self.name}: done, but {len(asked.got)} of {len(expected)} characters came")
        else:
            asked.error = line["error"]
            if not asked.error.strip() or FORGED in asked.error:
                raise Violation(f"{self.name}: a fault without a reason: {asked.error!r}")
        if len(self.asked) < self.script.prompts and not self.left:
            self._submit()
        elif self.script.habit != "linger" and len(self.asked) >= self.script.prompts:
            self._leave()

    def _leave(self) -> None:
        self.is_over = True
        self.tcp.leave(self.conn)

    def ended(self, conn: int) -> None:
        """The gateway closed the connection."""
        if conn != self.conn or self.is_over:
            return
        if self.script.habit == "linger":
            return  # keeps its end open: the gateway's own limit has to end it
        self._leave()


__all__ = ["Asked", "Client", "Script", "SimTcp"]
