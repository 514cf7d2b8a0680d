"""The real gateway with real sockets in the real loop, on a thread, with a scripted worker in place of the bus.

What the worker does is in the prompt: "echo WORDS", "fault SENTENCE", "hang" (nothing until cancelled), "drip" (a word
each turn until cancelled), "flood" (64 KiB each turn until cancelled). A chat is answered by its last turn.
"""

from __future__ import annotations

import random
import secrets
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any

import zmq

from common.actors import ActorSystem
from common.addresses import Role
from common.config_slices import GatewaySlice, encode_slice
from common.effects import Effect, Log
from common.loop import Loop
from common.messages.config import ConfigSlice
from common.messages.node_agent import CancelRequest, InferPrompt
from common.messages.prompt import Done, Fault, RequestCancelled, TextDelta
from common.messages.serve import PromptRpcFailed, PromptRpcReady
from common.views import Views
from services.prompt_gateway.core import GatewayActor
from services.prompt_gateway.service import TcpServer, attach
from tests.unit.prompt_gateway.rig import AGENT, OPEN, ORCHESTRATOR

TURN_MS = 5


class Stack:
    """`addr` is bound when the context is entered; `error` says why not."""

    def __init__(self, rpc_bind: str = "127.0.0.1:0", max_tokens: int = 0) -> None:
        self.addr = self.error = ""
        self.infers: list[InferPrompt] = []
        self.cancels: list[int] = []
        self.reports: list[Any] = []
        self.handlers: dict[type[Effect], Callable[[bytes, Any], None]] = {Log: lambda _, effect: None}
        self.loop = Loop(zmq.Poller())
        self.system = ActorSystem(
            node=b"n" * 32,
            boot=1,
            rng=random.Random(1),
            views=Views(link_up=True, prompt_link_up=True),
            new_address=lambda: secrets.token_bytes(32),
            validate=True,
        )
        self.gateway = GatewayActor()
        self.address = self.system.spawn(self.gateway, Role.GATEWAY)
        self.server = TcpServer(self.loop, lambda event: self.deliver(event))
        attach(self.server, lambda kind, handler: self.handlers.__setitem__(kind, handler))
        config = GatewaySlice(rpc_bind=rpc_bind, max_tokens=max_tokens)
        self.deliver(ConfigSlice(part=Role.GATEWAY, digest="d", slice_json=encode_slice(config)))
        self.deliver(OPEN, src=ORCHESTRATOR)
        self.busy: InferPrompt | None = None
        self.stopping = False
        self.failure: BaseException | None = None
        self.thread = threading.Thread(target=self.run, daemon=True)

    def deliver(self, event: Any, src: bytes = b"", dst: bytes = b"") -> None:
        self.system.deliver(dst or self.address, event, src=src)

    # --- the thread ---------------------------------------------------------------------------------------------
    def run(self) -> None:
        try:
            while not self.stopping:
                self.loop.turn(TURN_MS)
                self.pump()
                self.work()
                self.pump()
        except BaseException as error:
            self.failure = error
        self.server.shutdown()

    def pump(self) -> None:
        self.system.run(self.loop.now_ms(), self.loop.wall_ms())
        while self.system.effects or self.system.outbound:
            effects, self.system.effects = self.system.effects, []
            for address, effect in effects:
                if type(effect) in self.handlers:
                    self.handlers[type(effect)](address, effect)
            sent, self.system.outbound = self.system.outbound, []
            for item in sent:
                self.take(item.dst, item.message)
            self.system.run(self.loop.now_ms(), self.loop.wall_ms())

    def take(self, dst: bytes, message: Any) -> None:
        match message:
            case InferPrompt():
                assert self.busy is None, "two prompts at the worker"
                self.infers.append(message)
                self.busy = message
            case CancelRequest():
                self.cancels.append(message.request_id)
                known = self.busy is not None and self.busy.request_id == message.request_id
                self.busy = None if known else self.busy
                self.deliver(RequestCancelled(request_id=message.request_id, known=known), src=AGENT)
            case PromptRpcReady():
                self.addr = message.addr
            case PromptRpcFailed():
                self.error = message.error
            case _ if dst == ORCHESTRATOR:
                self.reports.append(message)

    def work(self) -> None:
        infer = self.busy
        if infer is None:
            return
        verb, _, rest = (infer.messages[-1].content if infer.messages else infer.prompt).partition(" ")
        match verb:
            case "echo":
                for word in rest.split(" "):
                    self.event(TextDelta(request_id=infer.request_id, text=word))
                self.busy = None
                self.event(
                    Done(
                        request_id=infer.request_id,
                        final_text=rest.replace(" ", ""),
                        tokens_generated=rest.count(" ") + 1,
                        elapsed_ms=1,
                        prompt_tokens=1,
                        finish_reason="stop",
                    ),
                    infer.reply_to,
                )
            case "fault":
                self.busy = None
                self.event(Fault(request_id=infer.request_id, error=rest), infer.reply_to)
            case "drip":
                self.event(TextDelta(request_id=infer.request_id, text="drip "))
            case "flood":
                self.event(TextDelta(request_id=infer.request_id, text="x" * 65_536))

    def event(self, message: Any, reply_to: bytes = b"") -> None:
        self.deliver(message, src=AGENT, dst=reply_to or (self.busy.reply_to if self.busy else b""))

    # --- the test's thread --------------------------------------------------------------------------------------
    def tell(self, message: Any) -> None:
        """As the orchestrator."""
        self.loop.call_soon(lambda: self.deliver(message, src=ORCHESTRATOR))

    def until(self, fact: Callable[[], object], limit_s: float = 60.0) -> None:
        end = time.monotonic() + limit_s
        while not fact():
            if self.failure is not None:
                raise self.failure
            assert time.monotonic() < end, "it did not come to be so"
            time.sleep(0.002)

    def __enter__(self) -> Stack:
        self.thread.start()
        self.until(lambda: self.addr or self.error)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stopping = True
        self.thread.join(60)
        self.loop.close()
        if self.failure is not None and kind is None:
            raise self.failure
