"""A small engine that speaks the real codec on the inherited socket; its first argument says how it misbehaves."""

from __future__ import annotations

import argparse
import mmap
import os
import socket
import struct
import sys
import time

from common.codec import Message, decode_body, encode_body
from common.messages.engine import (
    Cancel,
    Cancelled,
    ConfigureRole,
    EngineDone,
    EngineEncode,
    EngineEncoded,
    EngineInfer,
    EngineReady,
    Fatal,
    Initialize,
    LoadWeights,
    Progress,
    Released,
    ReleaseRun,
    ResetRole,
    RoleConfigured,
    RoleReset,
    Shutdown,
    TokenDelta,
    WeightsLoaded,
)

TAGS = {
    cls.__struct_config__.tag: cls
    for cls in (
        Initialize,
        ConfigureRole,
        LoadWeights,
        EngineInfer,
        EngineEncode,
        Cancel,
        ReleaseRun,
        ResetRole,
        Shutdown,
    )
}


class Link:
    def __init__(self, descriptor: int) -> None:
        self.socket = socket.socket(fileno=descriptor)

    def send(self, *messages: Message) -> None:
        for message in messages:
            body = encode_body(message)
            self.socket.sendall(struct.pack("<I", len(body)) + body)

    def exactly(self, size: int) -> bytes:
        data = b""
        while len(data) < size:
            piece = self.socket.recv(size - len(data))
            if not piece:
                sys.exit(0)
            data += piece
        return data

    def receive(self) -> Message:
        import msgspec

        body = self.exactly(*struct.unpack("<I", self.exactly(4)))
        return decode_body(int(msgspec.msgpack.decode(body)["t"]), body)


def answer(link: Link, message: Message) -> None:
    match message:
        case Initialize():
            link.send(EngineReady(pid=os.getpid(), backend="fake", elapsed_ms=1))
        case ConfigureRole():
            link.send(RoleConfigured())
        case LoadWeights():
            link.send(Progress(phase="tensors", done=1, total=1))
            link.send(WeightsLoaded(weights_bytes=1, kv_bytes=1, layers=1, max_context=8, elapsed_ms=1))
        case EngineInfer():
            words = message.prompt.split()
            for word in words:
                link.send(TokenDelta(request_id=message.request_id, text=word + " ", tokens=1))
            done = EngineDone(
                request_id=message.request_id,
                final_text=message.prompt,
                tokens_generated=len(words),
                elapsed_ms=1,
                prompt_tokens=1,
                finish_reason="stop",
            )
            link.send(done)
        case EngineEncode():
            link.send(EngineEncoded(request_id=message.request_id, tokens=list(message.prompt.encode())))
        case Cancel():
            link.send(Cancelled(request_id=message.request_id, known=False))
        case ReleaseRun():
            link.send(Released())
        case ResetRole():
            link.send(RoleReset())
        case Shutdown():
            sys.exit(0)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("how", nargs="?", default="well")
    parser.add_argument("--fd", type=int, required=True)
    parser.add_argument("--progress-fd", type=int, required=True)
    arguments = parser.parse_args()
    link = Link(arguments.fd)
    page = mmap.mmap(arguments.progress_fd, 24)
    page[:24] = struct.pack("=QQQ", 2, 41, time.monotonic_ns())
    how = arguments.how
    print(f"fake engine: {how}", file=sys.stderr, flush=True)
    if how == "exit":
        os._exit(7)
    if how == "fatal":
        link.send(Fatal(error="no such device: MOON"))
        os._exit(1)
    if how == "garbage":
        link.socket.sendall(struct.pack("<I", 5) + b"hello")
    if how == "huge":
        link.socket.sendall(b"\xff\xff\xff\xff")
    if how == "foreign":
        link.send(Shutdown())
    if how == "cut":
        link.socket.sendall(struct.pack("<I", 50) + b"half")
        os._exit(0)
    if how == "closes":
        link.socket.close()
    if how == "flood":
        link.send(*(Progress(phase="tensors", done=step, total=20_000) for step in range(20_000)))
        os._exit(0)
    if how in ("garbage", "huge", "foreign", "closes", "deaf"):
        time.sleep(600)
    while True:
        answer(link, link.receive())


if __name__ == "__main__":
    main()
