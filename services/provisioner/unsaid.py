"""What the bus could not deliver to the orchestrator, which waits for it: said again while its run lasts. Pure."""

from __future__ import annotations

from common.actors import Ctx
from common.codec import Message
from common.effects import Log, SendFailed
from common.messages.service import ServiceReady

UNSAID_TIMER = "unsaid"
UNSAID_MS = 1_000  # a bus that was away for seconds comes back within seconds
PASSING_REASONS = frozenset({"link_down", "unroutable", "queue_full"})


class Unsaid:
    """In the order in which it was said first."""

    def __init__(self) -> None:
        self._messages: list[tuple[bytes, Message]] = []

    def failed(self, msg: SendFailed, owner: bytes, ctx: Ctx) -> None:
        """A message was not delivered. owner: the run's orchestrator."""
        # ServiceReady is every service's, which announces itself again.
        if msg.dst == owner and msg.reason in PASSING_REASONS and not isinstance(msg.message, ServiceReady):
            self._messages.append((msg.dst, msg.message))
            ctx.timer(UNSAID_TIMER, UNSAID_MS)
        else:
            ctx.effect(Log("debug", f"{type(msg.message).__name__} is not delivered: {msg.reason}"))

    def again(self, owner: bytes, ctx: Ctx) -> None:
        """UNSAID_TIMER. What was for the orchestrator of an earlier run is dropped."""
        messages, self._messages = self._messages, []
        for to, message in messages:
            if to == owner:
                ctx.send(to, message)
