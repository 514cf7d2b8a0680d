"""InferenceActor: the brain of gpu-node (S2 3.2). Supervises the worker, queues the replies, owns their way back.

The worker answers in order, one line a prompt (S2 6.4). Each line is paired with the front of the queue, or with the
request that its `id` names, which our own worker echoes; whatever the line says, it settles one request.
"""

from __future__ import annotations

import json
from collections import deque
from dataclasses import dataclass
from typing import Any, ClassVar

from common.actors import Actor, Ctx
from common.effects import Log, SendFailed
from common.messages.inference import (
    InferenceFault,
    InferenceNotReady,
    InferenceReply,
    InferenceRequest,
    InferenceResponse,
)
from worker.gpu_node.bridges import ProcessBridge
from worker.gpu_node.events import (
    Error,
    Exited,
    InferenceActorStatus,
    Output,
    Process,
    ProcessExited,
    ProcessNotification,
    ProcessSpec,
    ProcessStarted,
    Request,
    Started,
    Subscribe,
    WorkerReady,
    WriteStdin,
)
from worker.gpu_node.limits import PENDING_REPLIES_MAX, WORKER_LINE_BYTES_MAX, WORKER_LOG_LINE_CHARS_MAX
from worker.gpu_node.lines import LineBuffer, printable
from worker.gpu_node.process_actor import ProcessActor


@dataclass(frozen=True, slots=True)
class PendingReply:
    """One request that the worker has and the caller waits for. id: ours, unique in this process, on the pipe."""

    id: int
    request_id: int
    reply_to: bytes
    owner: bytes


class InferenceActor(Actor):
    """S2 3.2. status: the address of the observer that gets every InferenceActorStatus."""

    Incoming: ClassVar[tuple[type, ...]] = (Request, Process, SendFailed)

    def __init__(self, spec: ProcessSpec, status: bytes) -> None:
        self.spec = spec
        self.status = status
        self.process_addr = b""
        self.bridge_addr = b""
        self.ready = False
        self.process_alive = False
        self.pending_replies: deque[PendingReply] = deque()
        self.output_buffer = LineBuffer(WORKER_LINE_BYTES_MAX)
        self.worker_pid: int | None = None
        self.gone = ""
        """Why there is no worker any more; empty while there is one, or one is being started."""
        self._log_buffer = LineBuffer(WORKER_LINE_BYTES_MAX)
        self._last_words = ""
        self._next_id = 0

    # --- life -------------------------------------------------------------------------------------------------
    def on_start(self, ctx: Ctx) -> None:
        """S2 4.1 step 2: the process, its bridge, and the one subscribed to the other."""
        self.process_addr = ctx.spawn(ProcessActor(self.spec))
        self.bridge_addr = ctx.spawn(ProcessBridge(ctx.address))
        ctx.send(self.process_addr, Subscribe(self.bridge_addr))

    def on_stop(self, ctx: Ctx) -> None:
        """The process actor kills its child; nobody waits for an answer that cannot come."""
        self._drain("gpu-node is being stopped", ctx)
        ctx.stop(self.process_addr)
        ctx.stop(self.bridge_addr)

    def receive(self, msg: Any, ctx: Ctx) -> None:
        """InferenceActorMsg; a reply that could not be delivered is nobody's business any more."""
        match msg:
            case Request():
                self._request(msg.request, msg.owner, ctx)
            case Process():
                self._process(msg.notification, ctx)
            case SendFailed():
                ctx.effect(Log("info", f"a reply was not delivered: {msg.reason}"))

    def check(self) -> None:
        """Invariants of S2 3.2 and 7.5."""
        assert self.process_alive or not self.ready, "a worker that is gone is ready"
        assert self.ready or not self.pending_replies, "a request waits for a worker that is not ready"
        assert len(self.pending_replies) <= PENDING_REPLIES_MAX
        ids = [pending.id for pending in self.pending_replies]
        assert ids == sorted(set(ids)), "the queue is not in the order of the requests"

    # --- requests (S2 4.2, 4.3, 4.5) ----------------------------------------------------------------------------
    def _request(self, request: InferenceRequest, owner: bytes, ctx: Ctx) -> None:
        pending = PendingReply(self._next_id + 1, request.request_id, request.reply_to, owner)
        if self.gone:
            self._reply(pending, InferenceFault(request_id=request.request_id, error=self.gone), ctx)
        elif not (self.ready and self.process_alive):
            self._reply(pending, InferenceNotReady(request_id=request.request_id), ctx)
        elif any(self._same(pending, other) for other in self.pending_replies):
            return  # asked twice, answered once
        elif len(self.pending_replies) >= PENDING_REPLIES_MAX:
            error = f"{PENDING_REPLIES_MAX} requests wait already"
            self._reply(pending, InferenceFault(request_id=request.request_id, error=error), ctx)
        else:
            self._next_id = pending.id
            self.pending_replies.append(pending)
            line = {
                "id": pending.id,
                "prompt": request.prompt,
                "max_tokens": request.max_tokens,
                "temperature": request.temperature,
            }
            ctx.send(self.process_addr, WriteStdin(json.dumps(line, ensure_ascii=False).encode() + b"\n"))

    @staticmethod
    def _same(one: PendingReply, other: PendingReply) -> bool:
        return (one.owner, one.reply_to, one.request_id) == (other.owner, other.reply_to, other.request_id)

    def _reply(self, pending: PendingReply, reply: InferenceReply, ctx: Ctx) -> None:
        """To reply_to, on the node that asked: the route of S2 4.2 step 6, for this one request."""
        ctx.send(pending.reply_to, reply, node=pending.owner)

    # --- the worker (S2 4.1, 4.4, 6.4) ----------------------------------------------------------------------------
    def _process(self, fact: ProcessNotification, ctx: Ctx) -> None:
        match fact:
            case Started():
                self.process_alive = True
                self._tell(ProcessStarted(fact.pid), ctx)
            case Output(stream="stdout"):
                for line in self.output_buffer.feed(fact.data):
                    self._output_line(line, ctx)
            case Output():
                for line in self._log_buffer.feed(fact.data):
                    self._log(line or b"(a line that is too long)", ctx)
            case Error():
                self._lost(None, f"the worker failed: {fact.reason}", ctx)
            case Exited():
                if rest := self._log_buffer.take_rest():
                    self._log(rest, ctx)
                how = f"was killed by signal {-fact.status}" if fact.status < 0 else f"exited with status {fact.status}"
                last = f"; its last words: {self._last_words}" if self._last_words else ""
                self._lost(fact.status, f"the worker {how}{last}", ctx)

    def _lost(self, status: int | None, reason: str, ctx: Ctx) -> None:
        """S2 4.4 step 4, and the same for a worker that could not be started. Told once."""
        if self.gone:
            return
        self.gone = reason
        self.process_alive = self.ready = False
        self._drain(reason, ctx)
        self._tell(ProcessExited(status, reason), ctx)

    def _drain(self, reason: str, ctx: Ctx) -> None:
        while self.pending_replies:
            pending = self.pending_replies.popleft()
            self._reply(pending, InferenceFault(request_id=pending.request_id, error=reason), ctx)

    def _output_line(self, line: bytes | None, ctx: Ctx) -> None:
        """process_output_line: one line of the worker's stdout. What is none of S2 6.4's shapes is noise."""
        if line is None:
            self._settle(None, "", f"the worker's answer is longer than {WORKER_LINE_BYTES_MAX} bytes", ctx)
            return
        if not line.strip():
            return
        try:
            said = json.loads(line)
        except (ValueError, RecursionError):
            said = None
        match said:
            case {"status": "ready"}:
                self._worker_ready(said.get("pid"), ctx)
            case {"response": str(text)}:
                self._settle(said.get("id"), text, "", ctx)
            case {"error": error}:
                sentence = printable(str(error).encode("utf-8", "replace"), WORKER_LOG_LINE_CHARS_MAX)
                ctx.effect(Log("error", f"worker error: {sentence}"))
                self._settle(said.get("id"), "", sentence or "the worker failed without a reason", ctx)
            case _:
                self._log(line, ctx)

    def _worker_ready(self, pid: Any, ctx: Ctx) -> None:
        if self.ready or not self.process_alive:
            return
        self.ready = True
        self.worker_pid = pid if isinstance(pid, int) and not isinstance(pid, bool) and pid > 0 else None
        self._tell(WorkerReady(self.worker_pid or 0), ctx)

    def _settle(self, id: Any, text: str, error: str, ctx: Ctx) -> None:
        """One line, one request: the one that it names, else the front of the queue."""
        named = isinstance(id, int) and not isinstance(id, bool)
        found = next((pending for pending in self.pending_replies if not named or pending.id == id), None)
        if found is None:
            ctx.effect(Log("warning", "the worker answered a request that nobody waits for"))
            return
        self.pending_replies.remove(found)
        request_id = found.request_id
        reply: InferenceReply
        if error:
            reply = InferenceFault(request_id=request_id, error=error)
        else:
            reply = InferenceResponse(request_id=request_id, text=text.encode("utf-8", "replace").decode())
        self._reply(found, reply, ctx)

    def _log(self, line: bytes, ctx: Ctx) -> None:
        text = printable(line, WORKER_LOG_LINE_CHARS_MAX)
        if text.strip():
            self._last_words = text
            ctx.effect(Log("info", f"worker: {text}"))

    def _tell(self, status: InferenceActorStatus, ctx: Ctx) -> None:
        ctx.send(self.status, status)
