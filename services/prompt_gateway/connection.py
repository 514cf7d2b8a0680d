"""One client connection as a state machine: lines in, lines out, one prompt in flight, bounded memory both ways.

Pure. The core feeds it bytes and asks it what is allowed; it never acts by itself (S1 2.5; design.md 6 rows 7-9, 35).
"""

from __future__ import annotations

from collections.abc import Iterator

from common.limits import CLIENT_BUFFER_BYTES_MAX, PROMPT_LINE_BYTES_MAX
from services.prompt_gateway.queue import PromptWork
from services.prompt_gateway.wire import ProtocolError, Request, SubmitPrompt, parse_request


class LineSplitter:
    """Bytes in any pieces → whole lines. Holds less than one line of limit bytes, each byte searched once."""

    def __init__(self, limit: int = PROMPT_LINE_BYTES_MAX) -> None:
        self.limit = limit
        self._buffer = bytearray()
        self._searched = 0

    def __len__(self) -> int:
        return len(self._buffer)

    def feed(self, data: bytes) -> None:
        """Take what came in; call `lines` after it."""
        self._buffer += data

    def lines(self) -> Iterator[bytes]:
        """Each whole line without its newline, lazily. Raises ProtocolError once a line is longer than the limit."""
        while (end := self._buffer.find(b"\n", self._searched)) >= 0:
            self._searched = 0
            if end > self.limit:
                raise self._too_long()
            line = bytes(self._buffer[:end])
            del self._buffer[: end + 1]
            yield line
        self._searched = len(self._buffer)
        if len(self._buffer) > self.limit:
            raise self._too_long()

    def rest(self) -> bytes:
        """What came after the last newline; the splitter is empty then."""
        rest = bytes(self._buffer)
        self.clear()
        return rest

    def clear(self) -> None:
        """Forget everything."""
        self._buffer.clear()
        self._searched = 0

    def _too_long(self) -> ProtocolError:
        return ProtocolError(f"malformed request: the line is longer than {self.limit} bytes")


class Connection:
    """State: open → closing. in_flight: the prompt without a terminal event yet, None while there is none."""

    def __init__(self, conn: int, peer: str) -> None:
        self.conn, self.peer = conn, peer
        self.in_flight: PromptWork | None = None
        self.closing = False
        """No line in or out any more but what is already on its way."""
        self.read_closed = False
        """The client sends nothing more; it still gets its answer."""
        self.unsent = 0
        """Bytes asked to be written that the kernel has not taken."""
        self._lines = LineSplitter()

    @property
    def held_bytes(self) -> int:
        """Bytes of an unfinished line."""
        return len(self._lines)

    def requests(self, data: bytes) -> Iterator[Request]:
        """What `data` completes, lazily: the caller acts on one before the next is read, so that in_flight is right.

        Raises ProtocolError at the first line that is no request or is a second prompt; the caller closes then.
        """
        if self.closing:
            return
        self._lines.feed(data)
        for line in self._lines.lines():
            yield self._allowed(parse_request(line))
            if self.closing:
                return

    def last_request(self) -> Request | None:
        """At the client's end of file: a last line without newline counts as a line. Raises ProtocolError."""
        rest = b"" if self.closing else self._lines.rest()
        return self._allowed(parse_request(rest)) if rest.strip() else None

    def _allowed(self, request: Request) -> Request:
        if isinstance(request, SubmitPrompt) and self.in_flight is not None:
            raise ProtocolError(
                f"request {request.request_id} came before request {self.in_flight.client_id} had its done or fault; "
                "a connection has one prompt at a time, open another connection for more"
            )
        return request

    def may_write(self, size: int, *, is_last: bool = False) -> bool:
        """False when `size` more bytes would hold too much for a client that does not read (row 35). A prompt's last
        line repeats its whole answer: only what waits before it says whether the client reads."""
        return self.unsent == 0 or self.unsent + (0 if is_last else size) <= CLIENT_BUFFER_BYTES_MAX

    def wrote(self, size: int) -> None:
        """`size` bytes were handed to the shell."""
        self.unsent += size

    def drained(self, size: int) -> None:
        """The kernel took `size` bytes."""
        self.unsent = max(0, self.unsent - size)

    def close(self) -> None:
        """From now on nothing is read and nothing new is written; what was held is forgotten."""
        self.closing = True
        self._lines.clear()
