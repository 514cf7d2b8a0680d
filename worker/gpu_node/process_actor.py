"""ProcessActor: owns one child process and its pipes (S2 3.3). Generic: it knows nothing of inference.

The pipes themselves are the shell's (worker/gpu_node/child.py); this is their state and the rule of the end.
"""

from __future__ import annotations

from collections import deque
from typing import Any, ClassVar

from common.actors import SHELL, Actor, Ctx
from worker.gpu_node.events import (
    Close,
    CloseChild,
    Error,
    Exited,
    Output,
    ProcessNotification,
    ProcessSpec,
    SignalChild,
    SpawnChild,
    Started,
    Stop,
    Subscribe,
    WriteChild,
    WriteStdin,
)
from worker.gpu_node.limits import KILL_TIMEOUT_MS

BUFFERED_MAX = 1000  # notifications before there is a subscriber; then the oldest output goes
_KILL = "kill"


class ProcessActor(Actor):
    """Starts its child with itself and kills it with itself."""

    Incoming: ClassVar[tuple[type, ...]] = (Subscribe, WriteStdin, Close, Stop, Started, Output, Exited, Error)

    def __init__(self, spec: ProcessSpec) -> None:
        self.spec = spec
        self.pid: int | None = None
        self.stdin_open = True
        self.ended = False
        self._subscribers: list[bytes] = []
        self._buffered: deque[ProcessNotification] = deque(maxlen=BUFFERED_MAX)

    def on_start(self, ctx: Ctx) -> None:
        """Fork and exec (S2 4.1 step 4)."""
        ctx.effect(SpawnChild(self.spec))

    def receive(self, msg: Any, ctx: Ctx) -> None:
        """A command of an actor, or a fact of the shell."""
        match msg:
            case Subscribe():
                self._subscribe(msg.address, ctx)
            case WriteStdin() if self.stdin_open and not self.ended:
                ctx.effect(WriteChild(msg.data))
            case Close() if self.stdin_open and not self.ended:
                self.stdin_open = False
                ctx.effect(CloseChild())
            case Stop() if not self.ended:
                self._stop(ctx)
            case Started() | Output() | Exited() | Error() if ctx.sender == SHELL:
                self._fact(msg, ctx)
            case _:
                pass  # to a child that has ended

    def on_timer(self, key: str, ctx: Ctx) -> None:
        """It was asked to end and did not."""
        if not self.ended:
            ctx.effect(SignalChild(kill=True))

    def on_stop(self, ctx: Ctx) -> None:
        """No child outlives its actor."""
        if not self.ended:
            ctx.effect(SignalChild(kill=True))

    def check(self) -> None:
        """Invariants: output is held only while nobody listens."""
        assert not (self._subscribers and self._buffered), "a subscriber is owed notifications"

    def _subscribe(self, address: bytes, ctx: Ctx) -> None:
        if address in self._subscribers:
            return
        self._subscribers.append(address)
        while self._buffered:
            ctx.send(address, self._buffered.popleft())

    def _stop(self, ctx: Ctx) -> None:
        if self.stdin_open:
            self.stdin_open = False
            ctx.effect(CloseChild())
        ctx.effect(SignalChild(kill=False))
        ctx.timer(_KILL, KILL_TIMEOUT_MS)

    def _fact(self, fact: ProcessNotification, ctx: Ctx) -> None:
        if isinstance(fact, Started):
            self.pid = fact.pid
        elif isinstance(fact, Exited) or (isinstance(fact, Error) and self.pid is None):
            self.ended, self.stdin_open = True, False
            ctx.cancel(_KILL)
        if self._subscribers:
            for subscriber in self._subscribers:
                ctx.send(subscriber, fact)
        else:
            self._buffered.append(fact)
