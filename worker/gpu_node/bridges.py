"""The two type adapters in front of the InferenceActor (S2 3.1, 3.4): an actor has one Incoming, it has two sources."""

from __future__ import annotations

from typing import Any, ClassVar

from common.actors import Actor, Ctx
from common.messages.inference import InferenceRequest
from worker.gpu_node.events import Error, Exited, Output, Process, Request, Started

SERVICE_NAME = "inference"
"""The cluster name under which the RequestBridge is registered."""


class RequestBridge(Actor):
    """Requests of the network → InferenceActorMsg.Request, with the node that the broker verified as their sender."""

    Incoming: ClassVar[tuple[type, ...]] = (InferenceRequest,)

    def __init__(self, target: bytes) -> None:
        self.target = target

    def receive(self, msg: Any, ctx: Ctx) -> None:
        """Forward (S2 4.2 step 4). A local sender is this node itself."""
        ctx.send(self.target, Request(msg, ctx.sender_node or ctx.node))


class ProcessBridge(Actor):
    """ProcessNotification → InferenceActorMsg.Process."""

    Incoming: ClassVar[tuple[type, ...]] = (Started, Output, Exited, Error)

    def __init__(self, target: bytes) -> None:
        self.target = target

    def receive(self, msg: Any, ctx: Ctx) -> None:
        """Wrap and forward (S2 4.1 steps 6 and 10)."""
        ctx.send(self.target, Process(msg))
