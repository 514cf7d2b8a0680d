"""The sockets of direct edges: one ROUTER that takes them, one DEALER per edge that is produced (design.md 3 "Edges").

Beside common/bus.py the only place that imports zmq; it moves bytes and decides nothing. CURVE pins the consumer's key;
who may produce is decided by the edge token inside, so that no ZAP handler is needed. All sockets wake one epoll
descriptor, which any loop can watch: a ZeroMQ descriptor is readable whenever its socket may have something to say.
"""

from __future__ import annotations

import select
from collections.abc import Callable

import zmq
from zmq.utils import z85
from zmq.utils.monitor import recv_monitor_message

from common.bus import HANDSHAKE_MS, RECONNECT_MS, KeyPair
from common.limits import ENVELOPE_BYTES_MAX, LINGER_MS

EDGE_HWM = 4096  # a fuse: the credit window is the limit
RECONNECT_MS_MAX = 1000  # well below the 5 s within which a broken edge must be welcomed again
_UP, _DOWN = zmq.EVENT_HANDSHAKE_SUCCEEDED, zmq.EVENT_DISCONNECTED


class EdgeSocketError(OSError):
    """The edge endpoint cannot be bound; one sentence."""


class EdgeSockets:
    """The edge sockets of one process; used by one thread."""

    def __init__(self, keys: KeyPair) -> None:
        self._keys = keys
        self._context = zmq.Context(1)
        self._epoll = select.epoll()
        self._router: zmq.Socket[bytes] | None = None
        self._dealers: dict[int, tuple[zmq.Socket[bytes], zmq.Socket[bytes]]] = {}

    @property
    def fd(self) -> int:
        """Readable when `drain` has something to do."""
        return self._epoll.fileno()

    def _common(self, socket: zmq.Socket[bytes]) -> None:
        socket.setsockopt(zmq.LINGER, LINGER_MS)
        socket.setsockopt(zmq.SNDHWM, EDGE_HWM)
        socket.setsockopt(zmq.RCVHWM, EDGE_HWM)
        socket.setsockopt(zmq.MAXMSGSIZE, ENVELOPE_BYTES_MAX)
        socket.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)
        socket.setsockopt(zmq.CURVE_PUBLICKEY, z85.encode(self._keys.public))
        socket.setsockopt(zmq.CURVE_SECRETKEY, z85.encode(self._keys.secret))
        socket.setsockopt(zmq.TCP_KEEPALIVE, 1)
        socket.setsockopt(zmq.TCP_KEEPALIVE_IDLE, 30)

    def _watch(self, socket: zmq.Socket[bytes]) -> None:
        self._epoll.register(socket.getsockopt(zmq.FD), select.EPOLLIN)  # type: ignore[arg-type]

    def _forget(self, socket: zmq.Socket[bytes], linger_ms: int) -> None:
        self._epoll.unregister(socket.getsockopt(zmq.FD))  # type: ignore[arg-type]
        socket.close(linger_ms)

    def bind(self, addresses: list[str], advertise: str) -> list[str]:
        """Take edges at these addresses; returns what others dial. Raises EdgeSocketError."""
        router = self._router = self._context.socket(zmq.ROUTER)
        self._common(router)
        router.setsockopt(zmq.ROUTER_MANDATORY, 1)
        router.setsockopt(zmq.CURVE_SERVER, 1)
        self._watch(router)
        bound = []
        for address in addresses:
            try:
                router.bind(address)
            except (zmq.ZMQError, OSError) as error:
                raise EdgeSocketError(f"the edge endpoint {address} cannot be bound: {error}") from None
            endpoint = router.getsockopt(zmq.LAST_ENDPOINT)
            assert isinstance(endpoint, bytes)
            bound.append(endpoint.decode().rstrip("\0").replace("://0.0.0.0:", f"://{advertise}:"))
        return bound

    def dial(self, edge_id: int, endpoint: str, server_key: bytes) -> None:
        """Connect the edge's DEALER, in place of the one before. What it sends waits for the connection."""
        self.hang_up(edge_id)
        dealer = self._context.socket(zmq.DEALER)
        self._common(dealer)
        dealer.setsockopt(zmq.RECONNECT_IVL, RECONNECT_MS)
        dealer.setsockopt(zmq.RECONNECT_IVL_MAX, RECONNECT_MS_MAX)
        dealer.setsockopt(zmq.CURVE_SERVERKEY, z85.encode(server_key))
        monitor = dealer.get_monitor_socket(_UP | _DOWN)
        dealer.connect(endpoint)
        self._dealers[edge_id] = (dealer, monitor)
        self._watch(dealer)
        self._watch(monitor)

    def hang_up(self, edge_id: int) -> None:
        """Close the edge's DEALER, if it has one."""
        pair = self._dealers.pop(edge_id, None)
        if pair is not None:
            dealer, monitor = pair
            dealer.disable_monitor()
            self._forget(monitor, 0)
            self._forget(dealer, 0)

    def send(self, edge_id: int, frame: bytes) -> bool:
        """To the consumer. False: nothing is taken now; the stream resumes from the consumer's offset."""
        pair = self._dealers.get(edge_id)
        return pair is not None and _try_send(pair[0], [frame])

    def reply(self, conn: bytes, frame: bytes) -> bool:
        """To a producer's connection. False: it is gone or full."""
        return self._router is not None and _try_send(self._router, [conn, frame])

    def drain(
        self,
        on_inbound: Callable[[bytes, bytes], None],
        on_outbound: Callable[[int, bytes], None],
        on_link: Callable[[int, bool], None],
        enough: Callable[[], bool] = lambda: False,
    ) -> None:
        """Hand over everything that has arrived, inbound frames first. Ends only when no socket has an event left:
        their descriptors are edge-triggered, and a send inside of a callback may also have taken in what came. Or as
        soon as `enough`: then the caller comes back before it sleeps."""
        busy = True
        while busy:
            busy = False
            router = self._router
            while router is not None and _readable(router):
                busy = True
                conn, *frames = router.recv_multipart(zmq.DONTWAIT)
                # A name that the peer chose itself could be that of a peer on the bus or on a Unix socket.
                if len(frames) == 1 and conn[:1] == b"\0":
                    on_inbound(conn, frames[0])
                if enough():
                    return
            for edge_id, (dealer, monitor) in list(self._dealers.items()):
                while _readable(monitor):
                    busy = True
                    on_link(edge_id, recv_monitor_message(monitor)["event"] == _UP)
                while _readable(dealer):
                    busy = True
                    on_outbound(edge_id, dealer.recv(zmq.DONTWAIT))

    def close(self) -> None:
        """Close all with linger."""
        for edge_id in list(self._dealers):
            dealer, monitor = self._dealers.pop(edge_id)
            dealer.disable_monitor()
            self._forget(monitor, 0)
            self._forget(dealer, LINGER_MS)
        if self._router is not None:
            self._forget(self._router, LINGER_MS)
            self._router = None

    def term(self) -> None:
        """After close: end the context."""
        self._context.term()
        self._epoll.close()


def _readable(socket: zmq.Socket[bytes]) -> bool:
    """Reading EVENTS also takes in what woke the descriptor. A callback may have closed the socket."""
    if socket.closed:
        return False
    events = socket.getsockopt(zmq.EVENTS)
    return isinstance(events, int) and bool(events & zmq.POLLIN)


def _try_send(socket: zmq.Socket[bytes], parts: list[bytes]) -> bool:
    try:
        socket.send_multipart(parts, zmq.DONTWAIT)
    except zmq.Again:
        return False
    except zmq.ZMQError as error:
        if error.errno == zmq.EHOSTUNREACH:
            return False
        raise
    return True
