"""The requests that this worker's engine owes an answer: one generation, tokenizer jobs, cancels (S1 6.9, 6.10, 9.11).

Pure bookkeeping of NodeAgentActor. Each generation gets exactly one terminal at its reply_to, or, when it was
cancelled, exactly one RequestCancelled at whoever cancelled it (design.md 6 row 21).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from common.actors import Ctx
from common.codec import Message
from common.effects import SendFailed
from common.messages.engine import (
    Cancel,
    Cancelled,
    EngineDecode,
    EngineDecoded,
    EngineDone,
    EngineEncode,
    EngineEncoded,
    EngineFault,
    EngineInfer,
    TokenDelta,
)
from common.messages.node_agent import CancelRequest, DecodeTokens, EncodePrompt, InferPrompt
from common.messages.prompt import (
    Done,
    Fault,
    PromptEncoded,
    RequestCancelled,
    TextDelta,
    TokenizerFault,
    TokensDecoded,
)
from worker.agent.events import EngineSend

TOKENIZER_JOBS_MAX = 256  # the gateway keeps at most 32 decodes of its one prompt under way (design.md 4)

UNHEARD_MAX = 2 * TOKENIZER_JOBS_MAX
ANSWER_TRIES_MAX = 30  # each two seconds: a listener that is out of reach for a minute has given up long before
NOBODY_LISTENS = frozenset({"peer_lost", "refused", "unsupported"})
Answer = TextDelta | Done | Fault | RequestCancelled | PromptEncoded | TokensDecoded | TokenizerFault

Record = Callable[[Ctx, str, str, dict[str, Any]], None]
"""(ctx, phase, status, detail): a NodeEvent of the prompt channel. Never the prompt's text."""


@dataclass(slots=True)
class _Generation:
    """The one that runs. A cancelled one is kept until the engine has let go of it."""

    request_id: int
    reply_to: bytes
    is_cancelled: bool = False


@dataclass(slots=True)
class _TokenizerJob:
    request_id: int
    reply_to: bytes


@dataclass(slots=True)
class RequestDesk:
    """What is owed. Sends go out through the ctx of the handler at hand."""

    record: Record
    active: _Generation | None = None
    tokenizer: deque[_TokenizerJob] = field(default_factory=deque)
    cancellers: dict[int, list[bytes]] = field(default_factory=dict)
    """Per request: who waits for RequestCancelled."""
    _unheard: dict[tuple[bytes, int], Message] = field(default_factory=dict)
    """Terminals that the bus could not deliver, by listener and request."""
    _said: dict[tuple[bytes, int], int] = field(default_factory=dict)
    """How often those of the last round were said again."""
    _cut: tuple[bytes, int] | None = None
    """The last generation of whose text a part was not delivered: no Done may follow."""

    @property
    def owed(self) -> bool:
        """Whether the engine has anything left to say."""
        return self.active is not None or bool(self.tokenizer) or bool(self.cancellers)

    # --- asked ------------------------------------------------------------------------------------------------
    def infer(self, msg: InferPrompt, refusal: str, ctx: Ctx) -> None:
        """Start a generation. refusal: why the stage cannot take one, or empty."""
        if self.active and self.active.request_id == msg.request_id:
            return  # a repeat: its one terminal is on its way, a Fault would be a second
        is_lost = bool(refusal)
        if not refusal and self.active:
            refusal = f"busy: request {self.active.request_id} is still being answered"
        if refusal:
            self.record(ctx, "infer", "refused", {"request_id": msg.request_id, "error": refusal})
            ctx.send(msg.reply_to, Fault(request_id=msg.request_id, error=refusal, lost=is_lost))
            return
        self.active = _Generation(msg.request_id, msg.reply_to)
        self.record(ctx, "infer", "started", {"request_id": msg.request_id, "max_tokens": msg.max_tokens})
        infer = EngineInfer(
            request_id=msg.request_id,
            prompt=msg.prompt,
            max_tokens=msg.max_tokens,
            messages=msg.messages,
            raw=msg.raw,
            sampling=msg.sampling,
            stop=msg.stop,
        )
        ctx.effect(EngineSend(infer))

    def tokenize(self, msg: EncodePrompt | DecodeTokens, refusal: str, ctx: Ctx) -> None:
        """Start a tokenizer job; jobs are answered in order."""
        is_lost = bool(refusal)
        if not refusal and len(self.tokenizer) >= TOKENIZER_JOBS_MAX:
            refusal = f"busy: {len(self.tokenizer)} tokenizer requests are under way"
        if refusal:
            ctx.send(msg.reply_to, TokenizerFault(request_id=msg.request_id, error=refusal, lost=is_lost))
            return
        self.tokenizer.append(_TokenizerJob(msg.request_id, msg.reply_to))
        job: Message
        if isinstance(msg, EncodePrompt):
            job = EngineEncode(request_id=msg.request_id, prompt=msg.prompt, messages=msg.messages, raw=msg.raw)
        else:
            job = EngineDecode(request_id=msg.request_id, tokens=msg.tokens, last=msg.last)
        ctx.effect(EngineSend(job))

    def cancel(self, msg: CancelRequest, engine_serves: bool, ctx: Ctx) -> None:
        """End a request; the engine confirms, and then nothing more of it comes."""
        if not engine_serves:
            ctx.reply(RequestCancelled(request_id=msg.request_id, known=False))
            return
        if self.active and self.active.request_id == msg.request_id:
            self.active.is_cancelled = True
        waiting = self.cancellers.setdefault(msg.request_id, [])
        if ctx.sender not in waiting:
            waiting.append(ctx.sender)
        self.record(ctx, "cancel", "started", {"request_id": msg.request_id})
        ctx.effect(EngineSend(Cancel(request_id=msg.request_id)))

    # --- answered ---------------------------------------------------------------------------------------------
    def engine_said(self, msg: Message, ctx: Ctx) -> None:
        """An answer of the engine. What belongs to no request, or to a cancelled one, is dropped."""
        match msg:
            case TokenDelta():
                if running := self._running(msg.request_id):
                    delta = TextDelta(request_id=msg.request_id, text=msg.text, tokens=msg.tokens)
                    ctx.send(running.reply_to, delta)
            case EngineDone():
                done = Done(
                    request_id=msg.request_id,
                    final_text=msg.final_text,
                    tokens_generated=msg.tokens_generated,
                    elapsed_ms=msg.elapsed_ms,
                    prompt_tokens=msg.prompt_tokens,
                    finish_reason=msg.finish_reason,
                )
                detail = {
                    "tokens_generated": msg.tokens_generated,
                    "prompt_tokens": msg.prompt_tokens,
                    "elapsed_ms": msg.elapsed_ms,
                    "finish_reason": msg.finish_reason,
                }
                self._end(msg.request_id, done, "done", detail, ctx)
            case EngineFault() if self.active and self.active.request_id == msg.request_id:
                fault = Fault(request_id=msg.request_id, error=msg.error)
                self._end(msg.request_id, fault, "failed", {"error": msg.error}, ctx)
            case EngineFault():
                if job := self._job(msg.request_id):
                    ctx.send(job.reply_to, TokenizerFault(request_id=msg.request_id, error=msg.error))
            case EngineEncoded():
                if job := self._job(msg.request_id):
                    ctx.send(job.reply_to, PromptEncoded(request_id=msg.request_id, tokens=msg.tokens))
            case EngineDecoded():
                if job := self._job(msg.request_id):
                    ctx.send(job.reply_to, TokensDecoded(request_id=msg.request_id, text=msg.text, lengths=msg.lengths))
            case Cancelled():
                self._cancelled(msg, ctx)
            case _:
                pass

    def send_failed(self, failed: SendFailed, ctx: Ctx) -> bool:
        """An answer did not arrive, so the engine need not go on (S1 6.11). Who asked may only be out of reach for a
        while: without a terminal he would wait for ever. True: `say_again` has something to say."""
        message = failed.message
        if not isinstance(message, Answer):
            return False
        key = (failed.dst, message.request_id)
        error = f"the answer was not delivered: {failed.reason}"
        running = self.active if self.active and key == (self.active.reply_to, self.active.request_id) else None
        if running and not running.is_cancelled:
            running.is_cancelled = True
            self.record(ctx, "cancel", "started", {"request_id": running.request_id, "error": error})
            ctx.effect(EngineSend(Cancel(request_id=running.request_id)))
        if failed.reason in NOBODY_LISTENS:
            self._unheard.pop(key, None)
            return False
        again: Message = message
        if isinstance(message, TextDelta):
            self._cut = key
            if running is None:
                return False  # its terminal is behind it, and failed with it
            again = Fault(request_id=message.request_id, error=error)
        elif isinstance(message, Done) and self._cut == key:
            again = Fault(request_id=message.request_id, error=error)
        elif isinstance(message, PromptEncoded | TokensDecoded):
            again = TokenizerFault(request_id=message.request_id, error=error)
        if self._said.get(key, 0) >= ANSWER_TRIES_MAX or len(self._unheard) >= UNHEARD_MAX:
            return False
        self._unheard[key] = again
        return True

    def say_again(self, ctx: Ctx) -> None:
        """What was not delivered; a failure comes back through `send_failed`."""
        unheard, self._unheard = self._unheard, {}
        self._said = {key: self._said.get(key, 0) + 1 for key in unheard}
        for (dst, _), message in unheard.items():
            ctx.send(dst, message)

    def fail_all(self, error: str, ctx: Ctx, *, engine_gone: bool) -> None:
        """Settle everything at once. engine_gone False: the generation is also cancelled, and awaited as such.
        The worker is to blame, not the requests."""
        if running := self.active:
            if not running.is_cancelled:
                self.record(ctx, "infer", "failed", {"request_id": running.request_id, "error": error})
                ctx.send(running.reply_to, Fault(request_id=running.request_id, error=error, lost=True))
                running.is_cancelled = True
                if not engine_gone:
                    ctx.effect(EngineSend(Cancel(request_id=running.request_id)))
            if engine_gone:
                self.active = None
        while self.tokenizer:
            job = self.tokenizer.popleft()
            ctx.send(job.reply_to, TokenizerFault(request_id=job.request_id, error=error, lost=True))
        if engine_gone:
            for request_id, waiting in self.cancellers.items():
                for sender in waiting:
                    ctx.send(sender, RequestCancelled(request_id=request_id))
            self.cancellers.clear()

    # --- bookkeeping ------------------------------------------------------------------------------------------
    def _running(self, request_id: int) -> _Generation | None:
        found = self.active
        return found if found and found.request_id == request_id and not found.is_cancelled else None

    def _end(self, request_id: int, terminal: Message, status: str, detail: dict[str, Any], ctx: Ctx) -> None:
        if not self.active or self.active.request_id != request_id:
            return
        ended, self.active = self.active, None
        if not ended.is_cancelled:
            self.record(ctx, "infer", status, {"request_id": request_id, **detail})
            ctx.send(ended.reply_to, terminal)

    def _job(self, request_id: int) -> _TokenizerJob | None:
        """The oldest job of this request: the engine answers in order."""
        for job in self.tokenizer:
            if job.request_id == request_id:
                self.tokenizer.remove(job)
                return job
        return None

    def _cancelled(self, msg: Cancelled, ctx: Ctx) -> None:
        """The engine answers each Cancel once; the first answer settles the request for all who asked."""
        known = msg.known
        if self.active and self.active.request_id == msg.request_id:
            self.active, known = None, True
            self.record(ctx, "infer", "cancelled", {"request_id": msg.request_id})
        for sender in self.cancellers.pop(msg.request_id, []):
            ctx.send(sender, RequestCancelled(request_id=msg.request_id, known=known))

    def check(self) -> None:
        """Invariants for validation."""
        assert len(self.tokenizer) <= TOKENIZER_JOBS_MAX
        assert all(self.cancellers.values()), "a cancel that nobody waits for"
        assert len(self._unheard) <= UNHEARD_MAX and len(self._said) <= UNHEARD_MAX
