"""Beside bus_edges.py the one place that imports zmq: sockets, CURVE, ZAP, monitors. It moves bytes, decides nothing.

Socket rules and their reasons: anchors.md A4-A8. One body frame; ROUTER_MANDATORY; linger and explicit close order; the
high-water mark is a fuse; nobody sets ROUTING_ID; one thread owns every socket.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import dataclass
from functools import partial

import zmq
from zmq.utils import z85
from zmq.utils.monitor import recv_monitor_message

from common.addresses import Plane
from common.limits import ENVELOPE_BYTES_MAX, LINGER_MS

if zmq.zmq_version_info() < (4, 3, 5):
    raise RuntimeError(f"libzmq {zmq.zmq_version()} has known defects in CURVE; 4.3.5 or newer is needed")

HWM = {Plane.CONTROL: 1000, Plane.PROMPT: 2000, Plane.EDGE: 2000, Plane.STREAM: 10_000}
HANDSHAKE_MS = 5000
RECONNECT_MS, RECONNECT_MS_MAX = 100, 2000
TAP_RECONNECT_MS = 10  # a tap may be there before its broker, whose first words count
DRAIN_FRAMES_MAX = 200
"""Frames taken from one socket before the next plane has its turn."""
ZAP_ENDPOINT = "inproc://zeromq.zap.01"
TAP_DOMAIN = b"swactor-mq-tap"
"""The ZAP domain of taps: who listens there sees everything, so only the tap's own key may."""

# Refusals arrive as these monitor events; libzmq does not retry after them (anchors.md A5-3).
_REFUSALS = zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL


@dataclass(frozen=True, slots=True)
class KeyPair:
    """A CURVE key pair, 32 raw bytes each."""

    public: bytes
    secret: bytes

    def __repr__(self) -> str:
        return f"KeyPair({self.public[:8].hex()}…)"


def mint_keypair() -> KeyPair:
    """A fresh key pair from libzmq's generator."""
    public, secret = zmq.curve_keypair()
    return KeyPair(z85.decode(public), z85.decode(secret))


def public_of(secret: bytes) -> bytes:
    """The public key of a secret key."""
    return z85.decode(zmq.curve_public(z85.encode(secret)))


Poller = zmq.Poller
POLLIN = int(zmq.POLLIN)


class Bus:
    """The context and poller of one process."""

    def __init__(self) -> None:
        self.context = zmq.Context(1)
        self.poller = zmq.Poller()

    def close(self) -> None:
        """After all sockets are closed: give what was sent its linger, then end."""
        self.context.term()


def _common(socket: zmq.Socket[bytes], plane: Plane, keys: KeyPair) -> None:
    socket.setsockopt(zmq.LINGER, LINGER_MS)
    socket.setsockopt(zmq.SNDHWM, HWM[plane])
    socket.setsockopt(zmq.RCVHWM, HWM[plane])
    socket.setsockopt(zmq.MAXMSGSIZE, ENVELOPE_BYTES_MAX)
    socket.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)
    socket.setsockopt(zmq.CURVE_PUBLICKEY, z85.encode(keys.public))
    socket.setsockopt(zmq.CURVE_SECRETKEY, z85.encode(keys.secret))


def _wan(socket: zmq.Socket[bytes], endpoint: str) -> None:
    """Keepalive for NAT tables, heartbeats for half-open TCP; never a sign that the peer's program is alive."""
    if not endpoint.startswith("tcp:"):
        return
    socket.setsockopt(zmq.TCP_KEEPALIVE, 1)
    socket.setsockopt(zmq.TCP_KEEPALIVE_IDLE, 30)
    socket.setsockopt(zmq.TCP_KEEPALIVE_CNT, 3)
    socket.setsockopt(zmq.TCP_KEEPALIVE_INTVL, 10)
    socket.setsockopt(zmq.HEARTBEAT_IVL, 2000)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, 6000)


class Dealers:
    """The dialling side: one DEALER per plane towards one broker."""

    def __init__(self, bus: Bus, endpoints: Mapping[Plane, str], broker_key: bytes, keys: KeyPair) -> None:
        self._bus, self._endpoints, self._broker_key, self._keys = bus, dict(endpoints), broker_key, keys
        self._sockets: dict[Plane, zmq.Socket[bytes]] = {}
        self._monitors: dict[Plane, zmq.Socket[bytes]] = {}
        for plane in self._endpoints:
            self._open(plane)

    def _open(self, plane: Plane) -> None:
        socket = self._bus.context.socket(zmq.DEALER)
        _common(socket, plane, self._keys)
        _wan(socket, self._endpoints[plane])
        socket.setsockopt(zmq.IMMEDIATE, 1)
        socket.setsockopt(zmq.RECONNECT_IVL, RECONNECT_MS)
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, RECONNECT_MS_MAX)
        socket.setsockopt(zmq.CURVE_SERVERKEY, z85.encode(self._broker_key))
        monitor = socket.get_monitor_socket(_REFUSALS)
        socket.connect(self._endpoints[plane])
        self._sockets[plane], self._monitors[plane] = socket, monitor
        self._bus.poller.register(socket, zmq.POLLIN)
        self._bus.poller.register(monitor, zmq.POLLIN)

    def _close(self, plane: Plane, linger_ms: int) -> None:
        socket, monitor = self._sockets.pop(plane), self._monitors.pop(plane)
        self._bus.poller.unregister(socket)
        self._bus.poller.unregister(monitor)
        socket.disable_monitor()
        monitor.close(0)
        socket.close(linger_ms)

    def reset(self, plane: Plane) -> None:
        """A new socket: libzmq never retries after a refused handshake."""
        self._close(plane, LINGER_MS)
        self._open(plane)

    def send(self, plane: Plane, frame: bytes) -> bool:
        """False: the socket takes nothing now (not connected, or full); sessions retransmit."""
        try:
            self._sockets[plane].send(frame, zmq.DONTWAIT)
        except zmq.Again:
            return False
        return True

    def receive(self, on_frame: Callable[[Plane, bytes], None], ready: Container[object] | None = None) -> bool:
        """Drain every (ready) plane in order, at most DRAIN_FRAMES_MAX each. True if some plane may hold more."""
        more = False
        for plane, socket in self._sockets.items():
            if ready is not None and socket not in ready:
                continue
            for _ in range(DRAIN_FRAMES_MAX):
                try:
                    on_frame(plane, socket.recv(zmq.DONTWAIT))
                except zmq.Again:
                    break
            else:
                more = True
        return more

    def refused(self, ready: Container[object] | None = None) -> list[Plane]:
        """Planes whose handshake was refused since the last call."""
        found: list[Plane] = []
        for plane, monitor in self._monitors.items():
            if ready is not None and monitor not in ready:
                continue
            while monitor.poll(0):
                recv_monitor_message(monitor)
                if plane not in found:
                    found.append(plane)
        return found

    def close(self) -> None:
        """Close all, with linger."""
        for plane in list(self._sockets):
            self._close(plane, LINGER_MS)


class BindError(ValueError):
    """An address cannot be listened at; one sentence."""


class BrokerSockets:
    """The binding side: a ROUTER per plane, the tap and the ZAP handler."""

    def __init__(
        self,
        bus: Bus,
        endpoints: Mapping[Plane, Iterable[str]],
        tap: str,
        keys: KeyPair,
        admits: Callable[[bytes], bool],
        admits_tap: Callable[[bytes], bool],
    ) -> None:
        self._bus, self._admits = bus, {b"swactor-mq": admits, TAP_DOMAIN: admits_tap}
        self._topics: set[bytes] = set()
        self._zap = bus.context.socket(zmq.REP)
        self._zap.setsockopt(zmq.LINGER, 0)
        self._zap.bind(ZAP_ENDPOINT)
        bus.poller.register(self._zap, zmq.POLLIN)
        self._routers: dict[Plane, zmq.Socket[bytes]] = {}
        self.bound: dict[Plane, list[str]] = {}
        for plane, addresses in endpoints.items():
            socket = bus.context.socket(zmq.ROUTER)
            _common(socket, plane, keys)
            socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
            socket.setsockopt(zmq.CURVE_SERVER, 1)
            socket.setsockopt(zmq.ZAP_DOMAIN, b"swactor-mq")
            self.bound[plane] = []
            for address in addresses:
                _wan(socket, address)
                try:
                    socket.bind(address)
                except zmq.ZMQError as error:
                    raise BindError(f"cannot listen at {address}: {error.strerror}; choose another address") from None
                self.bound[plane].append(_last_endpoint(socket))
            self._routers[plane] = socket
            bus.poller.register(socket, zmq.POLLIN)
        self._tap = bus.context.socket(zmq.XPUB)
        self._tap.setsockopt(zmq.LINGER, 0)
        self._tap.setsockopt(zmq.SNDHWM, 10_000)
        self._tap.setsockopt(zmq.CURVE_PUBLICKEY, z85.encode(keys.public))
        self._tap.setsockopt(zmq.CURVE_SECRETKEY, z85.encode(keys.secret))
        self._tap.setsockopt(zmq.CURVE_SERVER, 1)
        self._tap.setsockopt(zmq.ZAP_DOMAIN, TAP_DOMAIN)
        self._tap.bind(tap)
        self.tap_endpoint = _last_endpoint(self._tap)
        self.tapped = False
        """Whether anybody listens at the tap: mirroring costs nothing otherwise."""

    @property
    def zap(self) -> zmq.Socket[bytes]:
        """Readable when a handshake waits for its answer."""
        return self._zap

    def answer_zap(self) -> None:
        """Answer every pending handshake: the key is admitted or not (RFC 27)."""
        while True:
            try:
                version, request, domain, _address, _identity, mechanism, *credentials = self._zap.recv_multipart(
                    zmq.DONTWAIT
                )
            except zmq.Again:
                return
            key = credentials[0] if credentials and mechanism == b"CURVE" else b""
            ok = len(key) == 32 and domain in self._admits and self._admits[domain](key)
            status, text, user = (b"200", b"OK", key.hex().encode()) if ok else (b"400", b"not admitted", b"")
            self._zap.send_multipart([version, request, status, text, user, b""])

    def receive(
        self,
        ready: Container[object],
        is_bound: Callable[[Plane, bytes], bool],
        on_frame: Callable[[Plane, bytes, bytes, Callable[[], bytes]], None],
        limit: int = DRAIN_FRAMES_MAX,
    ) -> bool:
        """Drain every ready plane in order: on_frame(plane, conn, data, key) with key() reading the handshake's key.

        Only frames of unbound connections are taken as zmq.Frame, which costs twice as much and knows the key.
        True if some plane may hold more.
        """
        more = False
        for plane, socket in self._routers.items():
            if socket not in ready:
                continue
            for _ in range(limit):
                try:
                    conn = socket.recv(zmq.DONTWAIT)
                except zmq.Again:
                    break
                if not socket.getsockopt(zmq.RCVMORE):
                    continue
                if is_bound(plane, conn):
                    data, key = socket.recv(zmq.DONTWAIT), _no_key
                else:
                    frame = socket.recv(zmq.DONTWAIT, copy=False)
                    data, key = frame.bytes, partial(_user_key, frame)
                if socket.getsockopt(zmq.RCVMORE):
                    # One body frame is the rule (anchors.md A8); the rest of the message must go all the same.
                    while socket.getsockopt(zmq.RCVMORE):
                        socket.recv(zmq.DONTWAIT)
                    continue
                on_frame(plane, conn, data, key)
            else:
                more = True
        return more

    def send(self, plane: Plane, conn: bytes, frame: bytes) -> str:
        """ "" when accepted, "full" when the peer does not read, "gone" when the connection is no more."""
        try:
            socket = self._routers[plane]
            socket.send(conn, zmq.DONTWAIT | zmq.SNDMORE)
            socket.send(frame, zmq.DONTWAIT)
        except zmq.Again:
            return "full"
        except zmq.ZMQError as error:
            if error.errno == zmq.EHOSTUNREACH:
                return "gone"
            raise
        return ""

    def mirror(self, record: bytes) -> None:
        """Publish to the tap; a slow tap loses, nobody waits."""
        self._tap.send(record, zmq.DONTWAIT)

    def drain_tap(self) -> None:
        """Read subscriptions: the tap is on while there is at least one."""
        while True:
            try:
                message = self._tap.recv(zmq.DONTWAIT)
            except zmq.Again:
                return
            (self._topics.add if message[:1] == b"\1" else self._topics.discard)(message[1:])
            self.tapped = bool(self._topics)

    def close(self) -> None:
        """Routers first with linger, then tap, then ZAP."""
        for socket in (*self._routers.values(), self._zap):
            self._bus.poller.unregister(socket)
        for socket in (*self._routers.values(), self._tap, self._zap):
            socket.close()


def _last_endpoint(socket: zmq.Socket[bytes]) -> str:
    endpoint = socket.getsockopt(zmq.LAST_ENDPOINT)
    assert isinstance(endpoint, bytes)
    return endpoint.decode().rstrip("\0")


def _no_key() -> bytes:
    return b""


def _user_key(frame: zmq.Frame) -> bytes:
    """The key that ZAP admitted this connection with."""
    try:
        user = frame.get("User-Id")
        return bytes.fromhex(user if isinstance(user, str) else str(user))
    except (zmq.ZMQError, ValueError):
        return b""


class TapReader:
    """The listening side of taps, for `tools/tap`: one SUB a broker with the tap's own key, merged."""

    def __init__(self, taps: Mapping[str, tuple[str, bytes]], keys: KeyPair) -> None:
        """taps: name of the broker → (endpoint, key of the broker)."""
        self._context = zmq.Context(1)
        self._poller = zmq.Poller()
        self._sockets: dict[str, zmq.Socket[bytes]] = {}
        for name, (endpoint, broker_key) in taps.items():
            socket = self._context.socket(zmq.SUB)
            socket.setsockopt(zmq.LINGER, 0)
            socket.setsockopt(zmq.RCVHWM, 100_000)
            socket.setsockopt(zmq.CURVE_SERVERKEY, z85.encode(broker_key))
            socket.setsockopt(zmq.CURVE_PUBLICKEY, z85.encode(keys.public))
            socket.setsockopt(zmq.CURVE_SECRETKEY, z85.encode(keys.secret))
            socket.setsockopt(zmq.SUBSCRIBE, b"")
            socket.setsockopt(zmq.RECONNECT_IVL, TAP_RECONNECT_MS)
            socket.connect(endpoint)
            self._sockets[name] = socket
            self._poller.register(socket, zmq.POLLIN)

    def read(self, timeout_ms: int) -> list[tuple[str, bytes]]:
        """(broker, record) of what has come, at most DRAIN_FRAMES_MAX each; empty after timeout_ms."""
        records: list[tuple[str, bytes]] = []
        ready = dict(self._poller.poll(timeout_ms))
        for name, socket in self._sockets.items():
            for _ in range(DRAIN_FRAMES_MAX if socket in ready else 0):
                try:
                    records.append((name, socket.recv(zmq.DONTWAIT)))
                except zmq.Again:
                    break
        return records

    def close(self) -> None:
        """End."""
        for socket in self._sockets.values():
            socket.close(0)
        self._context.term()
