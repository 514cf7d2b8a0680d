"""Nodes around a router (and a relay) on the simulated network without faults, told what to do step by step."""

from __future__ import annotations

from typing import Any

from common.actors import Actor, Ctx
from common.addresses import Plane, Role
from common.codec import Message, decode_body, decode_envelope, encode_body, encode_envelope, tag_of
from common.effects import SendFailed, ViewChanged
from common.envelope import Envelope
from common.link import Link, LinkUp
from common.messages.bus import Welcome
from common.node import Identity, Node
from tests.sim.bus_world import BusWorld, Member, key_of

ROUTER = key_of(Role.ROUTER)


class Taker(Actor):
    """Takes the given types, and remembers them with their senders, and what failed."""

    def __init__(self, *types: type, views: tuple[str, ...] = ()) -> None:
        self.Incoming = (*types, SendFailed, ViewChanged)  # type: ignore[misc]
        self.got: list[Any] = []
        self.failed: list[tuple[Message, str]] = []
        self.changed: list[str] = []
        self._views = views
        self.address = b""

    def on_start(self, ctx: Ctx) -> None:
        self.address = ctx.address
        for view in self._views:
            ctx.watch(view)

    def receive(self, msg: Any, ctx: Ctx) -> None:
        match msg:
            case SendFailed():
                self.failed.append((msg.message, msg.reason))
            case ViewChanged():
                self.changed.append(msg.view)
            case _:
                self.got.append(msg)


class Rig(BusWorld):
    """A world that is up: everybody connected and admitted."""

    def __init__(self, *, relay: bool = False, agents: int = 1) -> None:
        super().__init__(1, relay=relay, agents=agents)
        assert self.run(10_000, lambda: all(self.member(name).node.link.up for name in self.agents))
        self.run(100)

    def member(self, name: str) -> Member:
        return self.members[name]

    def spawn(self, name: str, taker: Actor, actor_name: str = "") -> bytes:
        member = self.member(name)
        member.node.at(self.now, 0)
        address = member.node.spawn(taker, actor_name)
        member.wake(self.now)
        return address

    def say(self, name: str, src: bytes, dst: bytes, message: Message) -> None:
        """As the actor `src` of that member."""
        self.member(name).node.system.post(dst, message, src=src)
        self.member(name).wake(self.now)


class Lone:
    """One node whose broker is the test: frames out are decoded, what comes in is built here."""

    def __init__(self, role: Role = Role.GATEWAY) -> None:
        import random

        self.key, self.broker = b"n" * 32, b"b" * 32
        self.count = 0
        self.node = Node(
            Identity(self.key, role, 100, "lone"),
            rng=random.Random(1),
            new_address=self._address,
            broker_key=self.broker,
            validate=True,
        )
        self.now = 1000
        self.router_boot = 5

    def _address(self) -> bytes:
        self.count += 1
        return b"actor" + self.count.to_bytes(27, "big")

    def tick(self, ms: int = 0) -> list[tuple[Plane, Envelope]]:
        self.now += ms
        self.node.tick(self.now, 0)
        return self.out()

    def out(self) -> list[tuple[Plane, Envelope]]:
        return [(plane, decode_envelope(frame)) for plane, frame in self.node.take_frames()]

    def welcome(self, *planes: Plane, broker_boot: int = 1) -> None:
        for plane in planes or (Plane.CONTROL, Plane.PROMPT, Plane.STREAM):
            message = Welcome(
                broker_key=self.broker, broker_boot=broker_boot, router_key=ROUTER, router_boot=self.router_boot
            )
            self.give(plane, message, src_node=self.broker, src_boot=0)

    def give(
        self,
        plane: Plane,
        message: Message | bytes,
        *,
        src_node: bytes = ROUTER,
        src_boot: int | None = None,
        src: bytes = b"",
        dst: bytes = b"",
        dst_node: bytes = b"",
        dst_boot: int = 100,
        seq: int = 0,
        corr: int = 0,
        ack: int = 0,
        tag: int = 0,
        base: int = 1,
    ) -> None:
        """A frame from `src_node`."""
        from msgspec import Raw

        body = message if isinstance(message, bytes) else encode_body(message)
        boot = src_boot if src_boot is not None else self.router_boot
        frame = encode_envelope(
            Envelope(
                1,
                tag or tag_of(type(message)),  # type: ignore[arg-type]
                9000 + seq,
                bytes(16),
                src_node,
                boot,
                src or src_node,
                dst_node or self.key,
                dst_boot if boot else 0,
                dst or self.key,
                corr,
                seq,
                base,
                ack,
                Raw(body),
            )
        )
        self.node.on_frame(plane, frame, self.now, 0)


def messages(frames: list[tuple[Plane, Envelope]], *types: type) -> list[Any]:
    """The decoded messages of these types among frames."""
    found = [decode_body(envelope.tag, envelope.body) for _, envelope in frames]
    return [one for one in found if not types or isinstance(one, types)]


__all__ = ["ROUTER", "Link", "LinkUp", "Lone", "Rig", "Taker", "messages"]
