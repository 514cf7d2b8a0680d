"""The far ends of `./dev bench bus`, each its own process: `python -m bench._bus_peers KIND`, a Setting on stdin.

Raw sockets and ready-made frames, so that what is measured is the router and not the ends.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import dataclass

import msgspec
import zmq
from zmq.utils import z85

from common.addresses import NO_RUN, Plane
from common.bus import HWM, KeyPair
from common.codec import Message, decode_header, encode_body, encode_envelope, tag_of
from common.envelope import ENVELOPE_VERSION, Envelope
from common.messages.bus import Hello, Welcome
from common.messages.node_agent import DecodeTokens
from common.messages.prompt import TokensDecoded

CREDIT_EVERY = 256
WINDOW = 1024
STEP_LIMIT_S = 30.0


@dataclass(frozen=True, slots=True)
class Setting:
    """One end: whom it dials (or binds, `server`), who it is, who is at the other end, and how much to do."""

    endpoint: str
    broker: bytes
    public: bytes
    secret: bytes
    peer: bytes
    count: int = 0

    def dump(self) -> bytes:
        """As JSON."""
        return msgspec.json.encode(self)


def open_socket(context: zmq.Context[zmq.Socket[bytes]], kind: int, keys: KeyPair) -> zmq.Socket[bytes]:
    """A socket set like those of common/bus.py."""
    socket = context.socket(kind)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.SNDHWM, HWM[Plane.PROMPT])
    socket.setsockopt(zmq.RCVHWM, HWM[Plane.PROMPT])
    socket.setsockopt(zmq.CURVE_PUBLICKEY, z85.encode(keys.public))
    socket.setsockopt(zmq.CURVE_SECRETKEY, z85.encode(keys.secret))
    return socket


def frame(source: bytes, dst: bytes, message: Message, id: int = 1) -> bytes:
    """A datagram from node to node."""
    return encode_envelope(
        Envelope(
            ENVELOPE_VERSION,
            tag_of(type(message)),
            id,
            NO_RUN,
            source,
            1,
            source,
            dst,
            1,
            dst,
            0,
            0,
            0,
            0,
            msgspec.Raw(encode_body(message)),
        )
    )


def request(source: bytes, dst: bytes) -> bytes:
    """What a gateway asks a worker for each token: about 250 bytes."""
    return frame(source, dst, DecodeTokens(request_id=1, tokens=[1234], reply_to=source))


def answer(source: bytes, dst: bytes) -> bytes:
    """And what comes back."""
    return frame(source, dst, TokensDecoded(request_id=1, text="token"))


def dial(setting: Setting, *, hello: bool) -> zmq.Socket[bytes]:
    """A DEALER; with hello: bound at the router when this returns."""
    socket = open_socket(zmq.Context(), zmq.DEALER, KeyPair(setting.public, setting.secret))
    socket.setsockopt(zmq.CURVE_SERVERKEY, z85.encode(setting.broker))
    socket.connect(setting.endpoint)
    until = time.monotonic() + STEP_LIMIT_S
    while hello and time.monotonic() < until:
        socket.send(frame(setting.public, setting.broker, Hello(boot=1, logical_id="bench")))
        while socket.poll(250):
            if decode_header(socket.recv()).tag == tag_of(Welcome):
                return socket
    return socket


def echo(setting: Setting) -> None:
    """Answer each request; a ROUTER for a direct pair, else a node behind the router."""
    if setting.broker:
        socket = dial(setting, hello=True)
        reply = answer(setting.public, setting.peer)
        print("ready", flush=True)
        while True:
            socket.recv()
            socket.send(reply)
    socket = open_socket(zmq.Context(), zmq.ROUTER, KeyPair(setting.public, setting.secret))
    socket.setsockopt(zmq.CURVE_SERVER, 1)
    socket.bind(setting.endpoint)
    reply = answer(setting.public, setting.peer)
    print("ready", flush=True)
    while True:
        conn, _ = socket.recv_multipart()
        socket.send_multipart([conn, reply])


def sink(setting: Setting) -> None:
    """Take a flood, grant credit; says {"got", "seconds"} at the end."""
    socket = dial(setting, hello=True)
    grant = answer(setting.public, setting.peer)
    print("ready", flush=True)
    got, started = 0, 0.0
    while got < setting.count and socket.poll(STEP_LIMIT_S * 1000):
        socket.recv()
        if not got:
            started = time.monotonic()
        got += 1
        if got % CREDIT_EVERY == 0:
            socket.send(grant)
    print(json.dumps({"got": got, "seconds": time.monotonic() - started}), flush=True)


def flood(setting: Setting) -> None:
    """Send `count` requests, never more than WINDOW ahead of the sink."""
    socket = dial(setting, hello=True)
    data = request(setting.public, setting.peer)
    print("ready", flush=True)
    sent, granted = 0, WINDOW
    while sent < setting.count:
        if sent < granted:
            socket.send(data)
            sent += 1
        if sent >= granted or sent % CREDIT_EVERY == 0:
            while socket.poll(0 if sent < granted else int(STEP_LIMIT_S * 1000)):
                if decode_header(socket.recv()).tag == tag_of(TokensDecoded):
                    granted += CREDIT_EVERY
    while True:
        # Until it is stopped: leaving would drop what is still in its queue.
        socket.recv()


def main() -> int:
    """Run one end."""
    kinds = {"echo": echo, "sink": sink, "flood": flood}
    kinds[sys.argv[1]](msgspec.json.decode(sys.stdin.buffer.readline(), type=Setting))
    return 0


if __name__ == "__main__":
    sys.exit(main())
