"""Direct edge connections on virtual time: what common/bus_edges.py is on ZeroMQ, under the real EdgePort.

A DEALER per edge, a ROUTER per endpoint. First in, first out per connection; what is sent before the connection stands
waits for it; a cut loses what is under way, the dialler notices after a while and libzmq dials again by itself. A
process that dies closes its connections at once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

from common.bus import KeyPair
from common.bus_edges import EDGE_HWM

if TYPE_CHECKING:
    from tests.sim.cluster_world import ClusterWorld


class EdgeLink:
    """One connection of one edge's dialler."""

    def __init__(self, dialler: SimEdgeSockets, edge_id: int, endpoint: str) -> None:
        self.dialler, self.edge_id, self.endpoint = dialler, edge_id, endpoint
        self.conn = b""
        self.taker: SimEdgeSockets | None = None
        self.waiting: list[bytes] = []
        self.closed = False
        self.stalled_until = 0
        self.last_ms = [0, 0]

    @property
    def is_up(self) -> bool:
        """As this end sees it."""
        return self.taker is not None


class SimEdgeSockets:
    """The edge sockets of one process (EdgeTransport). on_ready: called when `drain` has something to do."""

    local = None

    def __init__(self, net: EdgeNet, name: str) -> None:
        self.net, self.name = net, name
        self.fd = net.new_fd(self)
        self.on_ready: Callable[[], None] = lambda: None
        self.inbox: deque[tuple[str, bytes, int, bytes, bool]] = deque()
        self.links: dict[int, EdgeLink] = {}
        self.endpoints: list[str] = []
        self.is_open = True

    def bind(self, addresses: list[str], advertise: str) -> list[str]:
        for address in addresses:
            self.net.takers[address] = self
        self.endpoints = list(addresses)
        return self.endpoints

    def dial(self, edge_id: int, endpoint: str, server_key: bytes) -> None:
        self.hang_up(edge_id)
        self.links[edge_id] = EdgeLink(self, edge_id, endpoint)
        self.net.connect(self.links[edge_id])

    def hang_up(self, edge_id: int) -> None:
        if (link := self.links.pop(edge_id, None)) is not None:
            link.closed = True
            self.net.by_conn.pop(link.conn, None)

    def send(self, edge_id: int, frame: bytes) -> bool:
        link = self.links.get(edge_id)
        if link is None or len(link.waiting) >= EDGE_HWM:
            return False
        if link.is_up:
            self.net.carry(link, 0, frame)
        else:
            link.waiting.append(frame)
        return True

    def reply(self, conn: bytes, frame: bytes) -> bool:
        link = self.net.by_conn.get(conn)
        if link is None or link.taker is not self:
            return False
        self.net.carry(link, 1, frame)
        return True

    def drain(
        self,
        on_inbound: Callable[[bytes, bytes], None],
        on_outbound: Callable[[int, bytes], None],
        on_link: Callable[[int, bool], None],
        enough: Callable[[], bool] = lambda: False,
    ) -> None:
        while self.inbox and not enough():
            kind, conn, edge_id, frame, up = self.inbox.popleft()
            if kind == "in":
                on_inbound(conn, frame)
            elif kind == "out":
                on_outbound(edge_id, frame)
            else:
                on_link(edge_id, up)

    def close(self) -> None:
        """Also what becomes of them when the process dies."""
        if not self.is_open:
            return
        self.is_open = False
        for edge_id in list(self.links):
            self.hang_up(edge_id)
        for endpoint in self.endpoints:
            if self.net.takers.get(endpoint) is self:
                del self.net.takers[endpoint]
        for link in [link for link in self.net.by_conn.values() if link.taker is self]:
            self.net.cut(link)

    def term(self) -> None:
        """Nothing is left."""


class EdgeNet:
    """All edge connections of a world."""

    def __init__(self, world: ClusterWorld) -> None:
        self.world = world
        self.takers: dict[str, SimEdgeSockets] = {}
        self.by_conn: dict[bytes, EdgeLink] = {}
        self.sockets: dict[int, SimEdgeSockets] = {}
        self.blocked_until = 0
        """Until then no direct connection comes about: a firewall between all of them."""
        self._conns = 0

    def new_fd(self, sockets: SimEdgeSockets) -> int:
        fd = len(self.sockets) + 1000
        self.sockets[fd] = sockets
        return fd

    def transport(self, name: str) -> Callable[[KeyPair], SimEdgeSockets]:
        """For an EdgePort of the process `name`."""
        return lambda _: SimEdgeSockets(self, name)

    def links(self) -> list[EdgeLink]:
        """Those that stand, in a fixed order."""
        return [link for _, link in sorted(self.by_conn.items())]

    # --- connections ----------------------------------------------------------------------------------------------
    def connect(self, link: EdgeLink) -> None:
        """As often as it takes."""
        self.world.at(self.world.now + self.world.handshake_ms(), lambda: self._try(link))

    def _try(self, link: EdgeLink) -> None:
        world = self.world
        if link.closed or link.is_up:
            return
        taker = self.takers.get(link.endpoint)
        if taker is None or world.now < self.blocked_until or world.is_apart(taker.name, link.dialler.name):
            world.at(world.now + world.rng.randint(100, 1000), lambda: self._try(link))
            return
        self._conns += 1
        link.conn, link.taker, link.last_ms = b"edge%d" % self._conns, taker, [0, 0]
        self.by_conn[link.conn] = link
        self._tell(link.dialler, ("link", b"", link.edge_id, b"", True))
        waiting, link.waiting = link.waiting, []
        for frame in waiting:
            self.carry(link, 0, frame)

    def cut(self, link: EdgeLink) -> None:
        """All that is under way is lost; the dialler notices and dials again, the ROUTER's end just goes."""
        if self.by_conn.pop(link.conn, None) is None:
            return
        fresh = EdgeLink(link.dialler, link.edge_id, link.endpoint)

        def noticed() -> None:
            dialler = link.dialler
            if not link.closed and dialler.links.get(link.edge_id) is link:
                link.closed = True
                dialler.links[link.edge_id] = fresh
                self._tell(dialler, ("link", b"", link.edge_id, b"", False))
                self.world.at(self.world.now + self.world.rng.randint(100, 1000), lambda: self._try(fresh))

        self.world.at(self.world.now + self.world.rng.randint(5, 1500), noticed)

    def carry(self, link: EdgeLink, direction: int, frame: bytes) -> None:
        """direction 0: to the taker, 1: to the dialler."""
        world, conn = self.world, link.conn
        world.emitted(frame, "an edge frame")
        at = max(world.now + world.rng.randint(*world.delay_ms), link.last_ms[direction], link.stalled_until)
        link.last_ms[direction] = at

        def arrived() -> None:
            if self.by_conn.get(conn) is not link or link.taker is None:
                return
            world.note_frame(f"edge {conn.decode()} {direction}", frame)
            if direction == 0:
                self._tell(link.taker, ("in", conn, 0, frame, False))
            else:
                self._tell(link.dialler, ("out", b"", link.edge_id, frame, False))

        world.at(at, arrived)

    @staticmethod
    def _tell(sockets: SimEdgeSockets, item: tuple[str, bytes, int, bytes, bool]) -> None:
        if sockets.is_open:
            sockets.inbox.append(item)
            sockets.on_ready()


__all__ = ["EdgeLink", "EdgeNet", "SimEdgeSockets"]
