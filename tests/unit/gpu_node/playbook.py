"""An InferenceActor under the harness: what callers and the worker do goes in, replies and writes come out."""

from __future__ import annotations

import json
from typing import Any

from common.actors import Inbox
from common.messages.inference import InferenceReply, InferenceRequest
from tests.support.harness import Harness
from worker.gpu_node.bridges import RequestBridge
from worker.gpu_node.events import (
    Exited,
    InferenceActorStatus,
    Output,
    ProcessExited,
    ProcessNotification,
    ProcessSpec,
    ProcessStarted,
    Started,
    WorkerReady,
    WriteChild,
)
from worker.gpu_node.inference import InferenceActor

SPEC = ProcessSpec(("worker",))
A, B = b"A" * 32, b"B" * 32
"""Two callers' inboxes."""
LAPTOP, OTHER = b"l" * 32, b"m" * 32
"""Their nodes."""
PID = 4711


class Node:
    """gpu-node's actor tree without its shell."""

    def __init__(self) -> None:
        self.observer = Inbox(ProcessStarted, WorkerReady, ProcessExited)
        self.harness = Harness(self.observer)
        self.inference = InferenceActor(SPEC, self.harness.address)
        self.address = self.harness.system.spawn(self.inference)
        self.bridge = self.harness.system.spawn(RequestBridge(self.address))
        self.harness.run()

    def process(self, fact: ProcessNotification) -> None:
        """The shell tells the ProcessActor."""
        self.harness.tell(fact, dst=self.inference.process_addr)

    def out(self, text: str | bytes, stream: Any = "stdout") -> None:
        self.process(Output(stream, text.encode() if isinstance(text, str) else text))

    def boot(self) -> None:
        self.process(Started(PID))
        self.out(json.dumps({"status": "ready", "pid": PID}) + "\n")
        self.statuses()
        self.harness.effects()

    def ask(self, request_id: int, reply_to: bytes = A, *, owner: bytes = LAPTOP, **fields: Any) -> None:
        request = InferenceRequest(request_id=request_id, reply_to=reply_to, **{"prompt": f"p{request_id}", **fields})
        self.harness.tell(request, src=b"q" * 32, src_node=owner, dst=self.bridge)

    def replies(self) -> list[tuple[bytes, InferenceReply]]:
        """(reply_to, reply); each must have gone to a node that asked."""
        out = self.harness.system.outbound[:]
        self.harness.system.outbound.clear()
        assert all(item.node in (LAPTOP, OTHER) for item in out)
        return [(item.dst, item.message) for item in out]  # type: ignore[misc]

    def owners(self) -> list[tuple[bytes, bytes]]:
        """(node, reply_to) of the replies."""
        out = self.harness.system.outbound[:]
        self.harness.system.outbound.clear()
        return [(item.node, item.dst) for item in out]

    def written(self) -> list[dict[str, Any]]:
        """The lines for the worker since the last look."""
        return [json.loads(effect.data) for effect in self.harness.effects() if isinstance(effect, WriteChild)]

    def statuses(self) -> list[InferenceActorStatus]:
        return [message for _, message in self.observer.drain()]

    def die(self, status: int = 1) -> None:
        self.process(Exited(status))
