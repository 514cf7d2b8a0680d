"""The transport of a process's edges: Unix sockets for candidates at ipc://, CURVE over ZeroMQ for all others."""

from __future__ import annotations

import select
from collections.abc import Callable

from common.bus import KeyPair
from common.bus_edges import EdgeSocketError, EdgeSockets
from common.local_edges import LOCAL, LocalEdges


class EdgeNetwork:
    """An EdgeTransport. ZeroMQ and its thread are started by the first address that needs them."""

    def __init__(self, keys: KeyPair) -> None:
        self._keys = keys
        self.local = LocalEdges()
        self._far: EdgeSockets | None = None
        self._epoll = select.epoll()
        self._epoll.register(self.local.fd, select.EPOLLIN)

    @property
    def fd(self) -> int:
        """Readable when `drain` has something to do."""
        return self._epoll.fileno()

    def _remote(self) -> EdgeSockets:
        if self._far is None:
            self._far = EdgeSockets(self._keys)
            self._epoll.register(self._far.fd, select.EPOLLIN)
        return self._far

    def bind(self, addresses: list[str], advertise: str) -> list[str]:
        """Take edges at these addresses; returns what others dial. Raises EdgeSocketError."""
        bound = []
        for address in addresses:
            if not address.startswith(LOCAL):
                continue
            try:
                bound.append(self.local.bind(address))
            except OSError as error:
                raise EdgeSocketError(f"the edge endpoint {address} cannot be bound: {error}") from None
        if far := [address for address in addresses if not address.startswith(LOCAL)]:
            bound += self._remote().bind(far, advertise)
        return bound

    def dial(self, edge_id: int, endpoint: str, server_key: bytes) -> None:
        """Connect the edge, in place of the connection before."""
        self.hang_up(edge_id)
        if endpoint.startswith(LOCAL):
            self.local.dial(edge_id, endpoint)
        else:
            self._remote().dial(edge_id, endpoint, server_key)

    def hang_up(self, edge_id: int) -> None:
        """Close the edge's connection, if it has one."""
        self.local.hang_up(edge_id)
        if self._far is not None:
            self._far.hang_up(edge_id)

    def send(self, edge_id: int, frame: bytes) -> bool:
        """To the consumer. False: nothing is taken now."""
        if self.local.has(edge_id):
            return self.local.send(edge_id, frame)
        return self._far is not None and self._far.send(edge_id, frame)

    def reply(self, conn: bytes, frame: bytes) -> bool:
        """To a producer's connection. False: it is gone or full."""
        if self.local.owns(conn):
            return self.local.reply(conn, frame)
        return self._far is not None and self._far.reply(conn, frame)

    def drain(
        self,
        on_inbound: Callable[[bytes, bytes], None],
        on_outbound: Callable[[int, bytes], None],
        on_link: Callable[[int, bool], None],
        enough: Callable[[], bool] = lambda: False,
    ) -> None:
        """Hand over everything that has arrived, or until `enough`."""
        self.local.drain(on_inbound, on_outbound, on_link, enough)
        if self._far is not None and not enough():
            self._far.drain(on_inbound, on_outbound, on_link, enough)

    def close(self) -> None:
        """Close all with linger."""
        self.local.close()
        if self._far is not None:
            self._far.close()

    def term(self) -> None:
        """After close: the end of the process."""
        self._epoll.close()
        self.local.term()
        if self._far is not None:
            self._far.term()
