"""What the gateway's core asks of TCP and what it hears from it: effects and events, handled in service.py.

A connection is a number that is never used twice in a process. Per connection the shell gives TcpConnected first and
TcpClosed once and last, whoever closed it. Pure.
"""

from __future__ import annotations

from dataclasses import dataclass

from common.effects import Effect


@dataclass(frozen=True, slots=True)
class ListenTcp(Effect):
    """Bind host:port and accept. Answered by Listening or ListenFailed."""

    host: str
    port: int


@dataclass(frozen=True, slots=True)
class StopListening(Effect):
    """Close the listener; connections live on. Nothing happens without one."""


@dataclass(frozen=True, slots=True)
class TcpWrite(Effect):
    """Send bytes; what the kernel does not take at once is kept. Answered by TcpDrained as it leaves."""

    conn: int
    data: bytes


@dataclass(frozen=True, slots=True)
class TcpClose(Effect):
    """Send what is kept, shut the sending side down, throw away what still comes in, close at the peer's end of file.

    Closing at once with unread input would reset the connection and could destroy the last line on its way.
    """

    conn: int


@dataclass(frozen=True, slots=True)
class TcpAbort(Effect):
    """Close at once."""

    conn: int


@dataclass(frozen=True, slots=True)
class Listening:
    """Event: the listener is bound at host:port, the real port where 0 was asked."""

    host: str
    port: int


@dataclass(frozen=True, slots=True)
class ListenFailed:
    """Event: the address could not be bound. reason: the system's words; busy: somebody else has it."""

    reason: str
    busy: bool


@dataclass(frozen=True, slots=True)
class TcpConnected:
    """Event: a client connected. peer: its host:port."""

    conn: int
    peer: str


@dataclass(frozen=True, slots=True)
class TcpData:
    """Event: bytes came in, at most READ_BYTES at once."""

    conn: int
    data: bytes


@dataclass(frozen=True, slots=True)
class TcpEof:
    """Event: the peer will send nothing more; it may still read."""

    conn: int


@dataclass(frozen=True, slots=True)
class TcpDrained:
    """Event: the kernel took `sent` bytes of what TcpWrite asked for."""

    conn: int
    sent: int


@dataclass(frozen=True, slots=True)
class TcpClosed:
    """Event: the connection is gone. error: the system's words, empty after an orderly end."""

    conn: int
    error: str = ""


TCP_EVENTS = (Listening, ListenFailed, TcpConnected, TcpData, TcpEof, TcpDrained, TcpClosed)
