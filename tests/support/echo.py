"""Two small actors for bus tests: one counts what it gets in order, one sends a numbered stream."""

from __future__ import annotations

from typing import Any, ClassVar

from common.actors import Actor, Ctx
from common.effects import SendFailed, ViewChanged
from common.messages.prompt import TokensDecoded


class Sink(Actor):
    """Remembers the request ids received, in order."""

    Incoming: ClassVar[tuple[type, ...]] = (TokensDecoded, SendFailed)

    def __init__(self) -> None:
        self.got: list[int] = []

    def receive(self, msg: Any, ctx: Ctx) -> None:
        if isinstance(msg, TokensDecoded):
            self.got.append(msg.request_id)
            if msg.text == "echo":
                ctx.reply(TokensDecoded(request_id=msg.request_id, text="reply"))


class Source(Actor):
    """Sends `count` numbered messages to `dst`, `burst` each `every_ms`; remembers failures and replies."""

    Incoming: ClassVar[tuple[type, ...]] = (TokensDecoded, SendFailed, ViewChanged)

    def __init__(self, dst: bytes, count: int, *, burst: int = 10, every_ms: int = 10, text: str = "x") -> None:
        self.dst, self.count, self.burst, self.every_ms, self.text = dst, count, burst, every_ms, text
        self.sent = 0
        self.failed: list[tuple[int, str]] = []
        self.replies: list[int] = []

    def on_start(self, ctx: Ctx) -> None:
        ctx.timer("send", 0)

    def on_timer(self, key: str, ctx: Ctx) -> None:
        for _ in range(min(self.burst, self.count - self.sent)):
            self.sent += 1
            ctx.send(self.dst, TokensDecoded(request_id=self.sent, text=self.text))
        if self.sent < self.count:
            ctx.timer("send", self.every_ms)

    def receive(self, msg: Any, ctx: Ctx) -> None:
        if isinstance(msg, SendFailed):
            assert isinstance(msg.message, TokensDecoded)
            self.failed.append((msg.message.request_id, msg.reason))
        elif isinstance(msg, TokensDecoded):
            self.replies.append(msg.request_id)
