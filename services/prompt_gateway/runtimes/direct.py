"""Direct mode: InferPrompt to the one node agent, PromptEvents back at the prompt reply inbox (S1 5.7, 6.9, 9.11)."""

from __future__ import annotations

from typing import Any

from common.actors import Ctx
from common.addresses import short
from common.codec import Message
from common.messages.node_agent import CancelRequest, InferPrompt
from common.messages.prompt import Done, Fault, PromptEvent, TextDelta
from common.messages.serve import OpenPromptRpc
from services.prompt_gateway.queue import PromptWork
from services.prompt_gateway.records import Records

EVENT_NAMES: dict[type, str] = {TextDelta: "text_delta", Done: "done", Fault: "fault"}


class DirectPromptRuntime:
    """Stateless beyond its addresses: the engine holds the prompt's state."""

    def __init__(self, run: OpenPromptRpc, reply_to: bytes, records: Records) -> None:
        self._agent = run.decode_actor
        self._reply_to = reply_to
        self._records = records

    def _addresses(self) -> dict[str, Any]:
        return {"node_actor": short(self._agent), "reply_to": short(self._reply_to)}

    def start(self, work: PromptWork, ctx: Ctx) -> None:
        """One InferPrompt; the bus tells later if it could not be delivered."""
        self._records.emit(ctx, "node_prompt_send", "started", work, self._addresses())
        request = work.request
        ctx.send(
            self._agent,
            InferPrompt(
                request_id=work.prompt_id,
                prompt=request.prompt_text or "",
                max_tokens=work.max_tokens,
                reply_to=self._reply_to,
                messages=request.chat(),
                raw=bool(request.raw),
                sampling=request.sampler(),
                stop=request.stop or [],
            ),
        )
        self._records.emit(ctx, "node_prompt_send", "ready", work, self._addresses())

    def receive(self, msg: Any, work: PromptWork | None, ctx: Ctx) -> list[PromptEvent]:
        """Pass the active prompt's events on, drop all others."""
        if not isinstance(msg, TextDelta | Done | Fault):
            return []
        name = EVENT_NAMES[type(msg)]
        if work is None or msg.request_id != work.prompt_id:
            reason = "no_active_prompt" if work is None else "request_mismatch"
            self._records.dropped(ctx, msg.request_id, reason, name, work)
            return []
        self._records.emit(ctx, "node_prompt_event", "observed", work, {"event": name, **_facts(msg)})
        return [msg]

    def cancel(self, work: PromptWork, ctx: Ctx) -> None:
        """Answered by RequestCancelled, before or after a terminal event of the race."""
        ctx.send(self._agent, CancelRequest(request_id=work.prompt_id))

    def cancelled(self, src: bytes, work: PromptWork) -> bool:
        """One agent, one confirmation."""
        return True

    def is_work(self, message: Message) -> bool:
        """Only InferPrompt; a lost CancelRequest is the business of the cancel limit."""
        return isinstance(message, InferPrompt)

    def send_failed(self, work: PromptWork, reason: str, ctx: Ctx) -> None:
        """node_prompt_send failed."""
        self._records.emit(ctx, "node_prompt_send", "failed", work, {**self._addresses(), "error": reason})


def _facts(event: PromptEvent) -> dict[str, Any]:
    """What a record says of an event: sizes and counts, never the text (S1 8.5)."""
    match event:
        case TextDelta():
            return {"terminal": False, "text_bytes": len(event.text.encode()), "tokens": event.tokens}
        case Done():
            return {
                "terminal": True,
                "tokens_generated": event.tokens_generated,
                "prompt_tokens": event.prompt_tokens,
                "elapsed_ms": event.elapsed_ms,
                "final_text_bytes": len(event.final_text.encode()),
                "finish_reason": event.finish_reason,
            }
        case Fault():
            return {"terminal": True, "error": event.error}
