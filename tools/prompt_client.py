"""A blocking client of the prompt RPC: connect, submit, iterate over typed events (S1 2.5).

Used by mvp-chat, the demo, benches and tests. One connection, one prompt at a time; closing it stops an answer. The
lines are those of services/prompt_gateway/wire.py.
"""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any

import msgspec

from services.prompt_gateway.bind import split_addr
from services.prompt_gateway.wire import (
    DoneLine,
    ErrorLine,
    FaultLine,
    ProtocolError,
    QueuedLine,
    Response,
    ShutdownAcceptedLine,
    TextDeltaLine,
    decode_response,
)

CONNECT_POLL_S = 0.1  # the original's figure (rust-swactor.md 9)
CONNECT_TRY_S = 5.0  # one attempt; a host that drops packets would hold it for minutes
READ_BYTES = 64 * 1024

PromptClientEvent = TextDeltaLine | DoneLine | FaultLine | QueuedLine


class PromptClientError(Exception):
    """The connection or the protocol failed; the text is one sentence for people."""


class PromptClient:
    """Use as a context manager, or call close()."""

    def __init__(self, sock: socket.socket, addr: str) -> None:
        self.addr = addr
        self._sock = sock
        self._buffer = bytearray()
        self._next_id = 1
        self._streaming = False

    @classmethod
    def connect(
        cls,
        addr: str,
        *,
        wait_s: float = 0.0,
        alive_check: Callable[[], str] | None = None,
        read_timeout_s: float | None = None,
    ) -> PromptClient:
        """Connect to HOST:PORT, trying each 100 ms for up to wait_s.

        alive_check: called between tries; a sentence why waiting is over, empty to go on. read_timeout_s: the longest
        silence while an answer streams, None = no limit. Raises PromptClientError.
        """
        try:
            host, port = split_addr(addr)
        except ValueError as error:
            raise PromptClientError(f"{error}") from None
        until = time.monotonic() + wait_s
        while True:
            try:
                sock = socket.create_connection((host, port), timeout=CONNECT_TRY_S)
                break
            except OSError as error:
                if alive_check and (dead := alive_check()):
                    raise PromptClientError(dead) from None
                if time.monotonic() >= until:
                    why = error.strerror or str(error) or "no answer"
                    raise PromptClientError(f"no prompt RPC at {addr}: {why}") from None
            time.sleep(CONNECT_POLL_S)
        sock.settimeout(read_timeout_s)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return cls(sock, addr)

    def submit(
        self,
        prompt_text: str | None = None,
        *,
        messages: Sequence[Mapping[str, str]] | None = None,
        raw: bool = False,
        max_tokens: int = 0,
        sampling: Mapping[str, Any] | None = None,
        stop: Sequence[str] = (),
        queued_events: bool = False,
        request_id: int | None = None,
    ) -> Iterator[PromptClientEvent]:
        """Send one prompt at once; the iterator yields its events as they come and ends after done or fault.

        Raises PromptClientError for a broken connection, an `error` line and a foreign request id.
        """
        if self._streaming:
            raise PromptClientError("the answer before is not complete; read it to its end or close the client")
        if request_id is None:
            request_id, self._next_id = self._next_id, self._next_id + 1
        request: dict[str, Any] = {"request_id": request_id}
        if prompt_text is not None:
            request["prompt_text"] = prompt_text
        optional = {"messages": messages, "raw": raw, "max_tokens": max_tokens, "sampling": sampling, "stop": stop}
        request |= {key: value for key, value in optional.items() if value}
        if queued_events:
            request["events"] = ["queued"]
        self._send(request)
        self._streaming = True
        return self._events(request_id)

    def complete(self, prompt_text: str | None = None, **options: Any) -> DoneLine:
        """Submit and wait for the end. Raises PromptClientError, also with a fault's sentence."""
        for event in self.submit(prompt_text, **options):
            if isinstance(event, FaultLine):
                raise PromptClientError(event.error)
            if isinstance(event, DoneLine):
                return event
        raise PromptClientError("the answer ended without done or fault")

    def shutdown_run(self) -> None:
        """Ask for the end of the whole run; returns when the gateway has accepted it. Raises PromptClientError."""
        if self._streaming:
            raise PromptClientError("an answer is streaming; use another connection to ask for shutdown")
        self._send({"type": "shutdown"})
        response = self._read()
        if not isinstance(response, ShutdownAcceptedLine):
            raise PromptClientError(f"the prompt RPC answered a shutdown request with {_kind(response)}")

    def close(self) -> None:
        """Close the connection; a streaming answer is cancelled by that."""
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        self._sock.close()

    def __enter__(self) -> PromptClient:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # --- inner --------------------------------------------------------------------------------------------------
    def _events(self, request_id: int) -> Iterator[PromptClientEvent]:
        while True:
            event = self._read()
            if isinstance(event, ShutdownAcceptedLine):
                raise PromptClientError("protocol error: shutdown_accepted came while an answer was streaming")
            if event.request_id != request_id:
                raise PromptClientError(
                    f"protocol error: {_kind(event)} of request {event.request_id} came for request {request_id}"
                )
            if isinstance(event, DoneLine | FaultLine):
                self._streaming = False
                yield event
                return
            yield event

    def _send(self, request: Mapping[str, Any]) -> None:
        try:
            line = msgspec.json.encode(request) + b"\n"
        except UnicodeEncodeError:
            raise PromptClientError("the prompt holds characters that are no valid Unicode text") from None
        try:
            self._sock.sendall(line)
        except OSError as error:
            # The gateway may have said why before it closed.
            with contextlib.suppress(OSError):
                self._read()
            raise PromptClientError(f"the connection to {self.addr} broke: {_words(error)}") from None

    def _read(self) -> PromptClientEvent | ShutdownAcceptedLine:
        """The next response; an `error` line is raised."""
        while not (line := self._read_line().strip()):
            pass
        try:
            response = decode_response(line)
        except ProtocolError as error:
            raise PromptClientError(f"protocol error: {error}") from None
        if isinstance(response, ErrorLine):
            raise PromptClientError(response.error)
        return response

    def _read_line(self) -> bytes:
        searched = 0
        while (end := self._buffer.find(b"\n", searched)) < 0:
            searched = len(self._buffer)
            try:
                data = self._sock.recv(READ_BYTES)
            except TimeoutError:
                raise PromptClientError(f"{self.addr} sent nothing for {self._sock.gettimeout():g} s") from None
            except OSError as error:
                raise PromptClientError(f"the connection to {self.addr} broke: {_words(error)}") from None
            if not data:
                raise PromptClientError(f"{self.addr} closed the connection")
            self._buffer += data
        line = bytes(self._buffer[:end])
        del self._buffer[: end + 1]
        return line


def _kind(response: Response) -> str:
    return str(response.__struct_config__.tag)


def _words(error: OSError) -> str:
    return error.strerror or str(error)
