"""Direct mode: InferPrompt to the one node agent, PromptEvents back at the prompt reply inbox (S1 5.7, 6.9, 9.11)."""

from __future__ import annotations

from typing import Any

import msgspec

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
    """The engine holds the prompt's state. A replay asks for the whole answer again: the client gets what goes beyond
    the text that it has, and a fault where the new text is another one."""

    def __init__(self, run: OpenPromptRpc, reply_to: bytes, records: Records) -> None:
        self._agent = run.decode_actor
        self._reply_to = reply_to
        self._records = records
        self._said: list[str] = []
        self._tokens = 0
        """Of the active prompt, passed on."""
        self._started_ms, self._replayed = 0, False
        self._repeat, self._repeat_tokens = "", 0
        """What a replay has to say once more before anything is new."""

    def _addresses(self) -> dict[str, Any]:
        return {"node_actor": short(self._agent), "reply_to": short(self._reply_to)}

    def foretell(self) -> None:
        """No token comes over an edge."""

    def start(self, work: PromptWork, ctx: Ctx) -> None:
        """One InferPrompt; the bus tells later if it could not be delivered."""
        self._said, self._tokens, self._repeat, self._repeat_tokens = [], 0, "", 0
        self._started_ms, self._replayed = ctx.now_ms, False
        self._infer(work, ctx)

    def _infer(self, work: PromptWork, ctx: Ctx) -> None:
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
                sampling=work.sampling,
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
        if isinstance(msg, Done) and self._replayed:
            # The worker's own time is that of the second part.
            msg = msgspec.structs.replace(msg, elapsed_ms=ctx.now_ms - self._started_ms)
        return self._beyond(msg, ctx) if isinstance(msg, TextDelta) else [msg]

    def _beyond(self, delta: TextDelta, ctx: Ctx) -> list[PromptEvent]:
        """The part of a delta that the client does not have yet."""
        known = min(len(self._repeat), len(delta.text))
        if delta.text[:known] != self._repeat[:known]:
            ctx.send(self._agent, CancelRequest(request_id=delta.request_id))
            error = "the worker was replaced, and the new one gives another answer than the one that was begun"
            return [Fault(request_id=delta.request_id, error=error)]
        known_tokens = min(self._repeat_tokens, delta.tokens)
        text, tokens = delta.text[known:], delta.tokens - known_tokens
        self._repeat, self._repeat_tokens = self._repeat[known:], self._repeat_tokens - known_tokens
        if not text and not tokens:
            return []
        self._said.append(text)
        self._tokens += tokens
        return [TextDelta(request_id=delta.request_id, text=text, tokens=tokens)]

    def rebind(self, run: OpenPromptRpc) -> None:
        """Another worker."""
        self._agent = run.decode_actor

    def replay(self, work: PromptWork, ctx: Ctx) -> int:
        """The same request: greedy, or with the seed that it has, the same answer."""
        self._repeat, self._repeat_tokens, self._replayed = "".join(self._said), self._tokens, True
        self._infer(work, ctx)
        return self._tokens

    def forget(self) -> None:
        """Nothing to forget: the new worker knows nothing of it."""

    def due(self, ctx: Ctx) -> None:
        """No timer is set here: the worker's agent tells text that comes fast together."""

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
