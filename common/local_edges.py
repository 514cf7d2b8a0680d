"""Edges between two processes of one machine: Unix sockets, read and written by the thread that computes.

ZeroMQ hands each frame to a thread of its own on both sides; on the way of a decoded token these wake-ups cost more
than everything else of a hop (0.2 of 0.25 ms). A frame is u32 length | u32 CRC-32 | bytes, little-endian; what does not
fit its sum ends the connection, and the edge resumes on the next one. Nothing is encrypted: the socket lies in the
run's directory, which is its user's alone, and who may produce is decided by the edge's token as everywhere.
"""

from __future__ import annotations

import contextlib
import errno
import os
import select
import socket
import struct
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field

from common.limits import EDGE_CHUNK_BYTES, EDGE_UNSENT_BYTES_MAX

LOCAL = "ipc://"
"""What a candidate that is dialled here begins with."""
_PREFIX = b"unix:"
_FRAME = struct.Struct("<II")
FRAME_HEAD_BYTES = _FRAME.size
_FRAME_BYTES_MAX = EDGE_CHUNK_BYTES + 1024  # a data message around its chunk
_READ_BYTES = 256 * 1024  # more than the kernel holds for a socket
_BACKLOG = 16
_ROUNDS_MAX = 64  # of one `drain`: who never stops sending does not keep the user from its deadlines
_Socket = socket.socket


@dataclass(slots=True, eq=False)
class _Peer:
    """A connection. conn: of a producer that dialled us; edge_id: of an edge that we produce."""

    sock: _Socket
    conn: bytes = b""
    edge_id: int = -1
    unsent: bytearray = field(default_factory=bytearray)
    """What the kernel has no room for."""
    partial: bytes = b""
    """The beginning of a frame."""
    left: tuple[bytes, int] | None = None
    """A frame that a fast path has sent, and how much of it the kernel took (an error number below 0): the next
    `_write` is of this very frame."""


def frame_bytes(frame: bytes) -> bytes:
    """As it goes over a socket."""
    return _FRAME.pack(len(frame), zlib.crc32(frame)) + frame


class LocalEdges:
    """What EdgeNetwork uses for candidates at ipc://, by one thread at a time. What is not read now wakes its user
    again."""

    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._listeners: dict[int, _Socket] = {}
        self._names: dict[str, tuple[int, int]] = {}
        """Paths that are bound, with device and inode: a successor may have taken the name."""
        self._peers: dict[int, _Peer] = {}
        self._inbound: dict[bytes, _Peer] = {}
        self._outbound: dict[int, _Peer] = {}
        self._dialled: dict[int, str] = {}
        self._links: list[tuple[int, bool]] = []
        """What became of connections since the last `drain`."""
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._epoll.register(self._wake, select.EPOLLIN)
        self._spare = os.dup(self._wake)
        """Given up for a moment where no descriptor is left: who dials must be taken to be turned away."""
        self._count = 0

    @property
    def fd(self) -> int:
        """Readable when `drain` has something to do."""
        return self._epoll.fileno()

    def owns(self, conn: bytes) -> bool:
        """Whether it is a connection of this transport."""
        return conn.startswith(_PREFIX)

    def bind(self, address: str) -> str:
        """Take edges at an ipc:// address; what others dial. Raises OSError."""
        path = address.removeprefix(LOCAL)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
        try:
            # Of a process that was killed: nobody else uses a name in this run's directory.
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
            listener.bind(path)
            os.chmod(path, 0o600)
            found = os.stat(path)
            listener.listen(_BACKLOG)
        except OSError:
            listener.close()
            raise
        self._listeners[listener.fileno()] = listener
        self._names[path] = (found.st_dev, found.st_ino)
        self._epoll.register(listener.fileno(), select.EPOLLIN)
        return address

    # --- the edges that are produced here ---------------------------------------------------------------------
    def dial(self, edge_id: int, endpoint: str) -> None:
        """Connect the edge, in place of the connection before; each `send` tries again while nobody listens."""
        self.hang_up(edge_id)
        self._dialled[edge_id] = endpoint.removeprefix(LOCAL)
        self._connect(edge_id)

    def _connect(self, edge_id: int) -> _Peer | None:
        try:
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
        except OSError:  # no descriptor is left
            return None
        try:
            sock.connect(self._dialled[edge_id])
        except OSError:  # nobody is there yet, or any more; a name that can never be dialled stays unanswered as well
            sock.close()
            return None
        peer = self._outbound[edge_id] = _Peer(sock, edge_id=edge_id)
        self._watch(peer)
        self._tell(edge_id, True)
        return peer

    def has(self, edge_id: int) -> bool:
        """Whether the edge was dialled here."""
        return edge_id in self._dialled

    def hang_up(self, edge_id: int) -> None:
        """Close the edge's connection, if it has one."""
        self._dialled.pop(edge_id, None)
        if (peer := self._outbound.get(edge_id)) is not None:
            self._close(peer)

    def send(self, edge_id: int, frame: bytes) -> bool:
        """To the consumer. False: nothing is taken now."""
        peer = self._outbound.get(edge_id) or self._connect(edge_id)
        return peer is not None and self._write(peer, frame)

    def reply(self, conn: bytes, frame: bytes) -> bool:
        """To a producer's connection. False: it is gone or full."""
        peer = self._inbound.get(conn)
        return peer is not None and self._write(peer, frame)

    # --- connections ------------------------------------------------------------------------------------------
    def _tell(self, edge_id: int, up: bool) -> None:
        self._links.append((edge_id, up))
        os.eventfd_write(self._wake, 1)

    def _watch(self, peer: _Peer) -> None:
        self._peers[peer.sock.fileno()] = peer
        self._epoll.register(peer.sock.fileno(), select.EPOLLIN)

    def _write(self, peer: _Peer, frame: bytes) -> bool:
        if len(peer.unsent) > EDGE_UNSENT_BYTES_MAX:
            return False
        data = frame_bytes(frame)
        if peer.left is not None:
            foretold, sent = peer.left
            peer.left = None
            if data != foretold:
                raise RuntimeError(f"the fast path sent another frame of {len(foretold)} bytes than this edge wanted")
            return self._keep(peer, data, sent)
        if peer.unsent:
            peer.unsent += data
            return True
        return self._push(peer, data)

    def _push(self, peer: _Peer, data: bytes | bytearray) -> bool:
        """Send what goes, keep the rest. False: the connection is broken; its end is read, behind what came last."""
        try:
            sent = peer.sock.send(data)
        except OSError as error:
            sent = -(error.errno or errno.EIO)
        return self._keep(peer, data, sent)

    def _keep(self, peer: _Peer, data: bytes | bytearray, sent: int) -> bool:
        """sent: bytes that the kernel took, or an error number below 0."""
        is_up = sent >= 0 or -sent in (errno.EAGAIN, errno.EINTR)
        sent = max(0, sent) if is_up else len(data)
        was_full = bool(peer.unsent)
        peer.unsent = bytearray(memoryview(data)[sent:])
        if bool(peer.unsent) != was_full:
            self._epoll.modify(peer.sock.fileno(), select.EPOLLIN | (select.EPOLLOUT if peer.unsent else 0))
        return is_up

    def _lost(self, peer: _Peer) -> None:
        self._close(peer)
        if peer.edge_id >= 0:
            self._tell(peer.edge_id, False)

    def _close(self, peer: _Peer) -> None:
        self._epoll.unregister(peer.sock.fileno())
        del self._peers[peer.sock.fileno()]
        peer.sock.close()
        if peer.edge_id >= 0:
            self._outbound.pop(peer.edge_id, None)
        else:
            self._inbound.pop(peer.conn, None)

    # --- what has arrived -------------------------------------------------------------------------------------
    def drain(
        self,
        on_inbound: Callable[[bytes, bytes], None],
        on_outbound: Callable[[int, bytes], None],
        on_link: Callable[[int, bool], None],
        enough: Callable[[], bool] = lambda: False,
    ) -> None:
        """Hand over what has arrived, or until `enough`; what is left wakes the user again."""
        for _ in range(_ROUNDS_MAX):
            ready = self._epoll.poll(0)
            if not ready:
                return
            for fd, events in ready:
                if fd in self._peers:
                    self._turn(self._peers[fd], events, on_inbound, on_outbound)
                elif fd in self._listeners:
                    self._accept(self._listeners[fd])
                elif fd == self._wake:
                    os.eventfd_read(self._wake)
                    links, self._links = self._links, []
                    for link in links:
                        on_link(*link)
                if enough():
                    return

    def _turn(
        self,
        peer: _Peer,
        events: int,
        on_inbound: Callable[[bytes, bytes], None],
        on_outbound: Callable[[int, bytes], None],
    ) -> None:
        if events & select.EPOLLOUT:
            self._push(peer, peer.unsent)
        if not events & ~select.EPOLLOUT:
            return
        try:
            data = peer.sock.recv(_READ_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        for frame in self._frames(peer, data):
            if peer.edge_id >= 0:
                on_outbound(peer.edge_id, frame)
            else:
                on_inbound(peer.conn, frame)

    def _frames(self, peer: _Peer, data: bytes) -> list[bytes]:
        """The whole frames with what was read; the connection is lost at its end, and behind a damaged one."""
        whole = bool(data)
        data, frames, at = peer.partial + data, [], 0
        while whole and len(data) - at >= _FRAME.size:
            size, checksum = _FRAME.unpack_from(data, at)
            end = at + _FRAME.size + size
            if size <= _FRAME_BYTES_MAX and end > len(data):
                break
            frame = data[at + _FRAME.size : end]
            whole = size <= _FRAME_BYTES_MAX and zlib.crc32(frame) == checksum
            if whole:
                frames.append(frame)
                at = end
        peer.partial = data[at:]
        if not whole:
            self._lost(peer)
        return frames

    # --- a fast path ------------------------------------------------------------------------------------------
    # It reads and writes the descriptors of two connections itself, once; both sides hear of it before anything else.

    def reading(self, conn: bytes) -> int | None:
        """The descriptor where the connection's next frame begins; None in the middle of one."""
        peer = self._inbound.get(conn)
        return peer.sock.fileno() if peer is not None and not peer.partial else None

    def writing(self, edge_id: int) -> int | None:
        """The descriptor where the edge's next frame leaves at once; None while an earlier one waits."""
        peer = self._outbound.get(edge_id)
        return peer.sock.fileno() if peer is not None and not peer.unsent else None

    def was_read(self, conn: bytes, data: bytes, on_inbound: Callable[[bytes, bytes], None]) -> None:
        """These bytes were read from the connection."""
        for frame in self._frames(self._inbound[conn], data):
            on_inbound(conn, frame)

    def was_written(self, edge_id: int, data: bytes, sent: int) -> None:
        """This frame (`frame_bytes`), which `send` is going to get, was written: `sent` bytes of it, or an error number
        below 0."""
        self._outbound[edge_id].left = data, sent

    def _accept(self, listener: _Socket) -> None:
        try:
            sock, _ = listener.accept()
        except OSError as error:  # else who dialled is gone again
            if error.errno in (errno.EMFILE, errno.ENFILE):
                self._turn_away(listener)
            return
        sock.setblocking(False)
        self._count += 1
        peer = _Peer(sock, conn=_PREFIX + str(self._count).encode())
        self._inbound[peer.conn] = peer
        self._watch(peer)

    def _turn_away(self, listener: _Socket) -> None:
        """It dials once more. Left waiting, it would wake us all the time."""
        self._drop_spare()
        with contextlib.suppress(OSError):
            listener.accept()[0].close()
        with contextlib.suppress(OSError):
            self._spare = os.dup(self._wake)

    def _drop_spare(self) -> None:
        if self._spare >= 0:
            os.close(self._spare)
            self._spare = -1

    def close(self) -> None:
        """Close all and remove the names; idempotent."""
        for peer in list(self._peers.values()):
            if peer.unsent:
                self._push(peer, peer.unsent)
            self._close(peer)
        self._dialled.clear()
        for path, inode in self._names.items():
            with contextlib.suppress(OSError):
                found = os.stat(path)
                if (found.st_dev, found.st_ino) == inode:
                    os.unlink(path)
        self._names.clear()
        for fd, listener in self._listeners.items():  # behind its name: until then nobody else has its inode
            self._epoll.unregister(fd)
            listener.close()
        self._listeners.clear()

    def term(self) -> None:
        """After close: the end of the process."""
        self._epoll.close()
        os.close(self._wake)
        self._drop_spare()
