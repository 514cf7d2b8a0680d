"""One SWIM core on a stage: peers are names, time moves only by `advance`, what comes out is sorted by kind."""

from __future__ import annotations

import random
from typing import Any, TypeVar

import msgspec

from common.codec import Message
from common.messages.member import MemberId, MemberUpdate, SwimGossip, SwimPing, SwimPushPull
from common.swim.config import LAN, SwimConfig
from common.swim.core import SwimCore
from common.swim.outputs import Output, Send, Transition

BOOT = 100
M = TypeVar("M", bound=Message)
Out = TypeVar("Out")


def key(name: str) -> bytes:
    return name.encode().ljust(32, b"-")


def actor(name: str) -> bytes:
    return key("actor " + name)


def facts(name: str, state: str = "alive", incarnation: int = 0, *, boot: int = BOOT, by: str = "") -> MemberUpdate:
    return MemberUpdate(
        member=MemberId(node=key(name), boot=boot),
        state=state,
        incarnation=incarnation,
        swim_actor=actor(name),
        logical_id=name,
        role="agent",
        by=key(by) if by else b"",
    )


class Stage:
    """`me` is the core under test. Peers join by one message without waking its timers."""

    def __init__(self, *peers: str, config: SwimConfig = LAN, seed: int = 1, now: int = 10_000) -> None:
        self.now = now
        self.config = config
        self.core = SwimCore(facts("me"), config, random.Random(seed), now)
        self.out: list[Output] = []
        self._do(self.core.tick(now))
        self.hear(*(facts(peer) for peer in peers))
        self.clear()

    def _do(self, outputs: list[Output]) -> None:
        self.core.check()
        self.out += outputs

    # --- events -----------------------------------------------------------------------------------------------
    def tell(self, message: Message, sender: str) -> None:
        self._do(self.core.on_message(message, actor(sender), self.now))

    def hear(self, *updates: MemberUpdate, sender: str = "peer") -> None:
        self.tell(SwimGossip(updates=list(updates)), sender)

    def ping(self, sender: str, *updates: MemberUpdate, incarnation: int = 0, target: MemberId | None = None) -> None:
        ping = SwimPing(
            sequence=77,
            sender=facts(sender, incarnation=incarnation),
            target=target or self.core.own.member,
            updates=list(updates),
        )
        self.tell(ping, sender)

    def offer(self, sender: str, *table: MemberUpdate, reply: bool = False, **more: Any) -> None:
        self.tell(SwimPushPull(sender=facts(sender, **more), updates=list(table), reply=reply), sender)

    def do(self, outputs: list[Output]) -> None:
        """Record what a direct call of a core's method gave out."""
        self._do(outputs)

    def advance(self, ms: int) -> None:
        """Move time, with a tick at every deadline on the way."""
        end = self.now + ms
        while (due := self.core.next_deadline()) is not None and due <= end:
            self.now = max(due, self.now)
            self._do(self.core.tick(self.now))
        self.now = end

    # --- what came out ----------------------------------------------------------------------------------------
    def clear(self) -> None:
        self.out.clear()

    def sent(self, kind: type[M], to: str | None = None) -> list[M]:
        """Messages of a kind, to one peer or all."""
        return [
            output.message
            for output in self.out
            if isinstance(output, Send) and isinstance(output.message, kind) and (to is None or output.dst == actor(to))
        ]

    def given(self, kind: type[Out]) -> list[Out]:
        return [output for output in self.out if isinstance(output, kind)]

    def transitions(self) -> list[tuple[str, str, str]]:
        """(peer, from, to)."""
        return [
            (given.peer.node.rstrip(b"-").decode(), given.from_state, given.to_state)
            for given in self.given(Transition)
        ]

    def state(self, name: str) -> str:
        member = self.core.member(key(name))
        return member.state if member else "unknown"

    def until_ping(self) -> tuple[SwimPing, str]:
        """Let time pass to the next probe; (the ping, whom)."""
        self.clear()
        while not self.sent(SwimPing):
            due = self.core.next_deadline()
            assert due is not None
            self.advance(due - self.now)
        output = next(out for out in self.out if isinstance(out, Send) and isinstance(out.message, SwimPing))
        assert isinstance(output.message, SwimPing)
        return output.message, output.dst.removeprefix(b"actor ").rstrip(b"-").decode()


def silent(config: SwimConfig = LAN, **changes: Any) -> SwimConfig:
    """A configuration in which some of the machinery never runs, so that a test sees only its own subject."""
    fields = {field: getattr(config, field) for field in config.__dataclass_fields__}
    return SwimConfig(**{**fields, **changes})


def replaced(update: MemberUpdate, **changes: Any) -> MemberUpdate:
    return msgspec.structs.replace(update, **changes)
