"""Pipeline mode: tokenizer actors and token edges around one prompt at a time (S1 5.8, 6.10, 7.10, 9.12, 9.13).

encode on the first stage → every stage is told of the sequence → one token-in record for the whole prompt → for each
token-out: sequence, EOS, cap and context are checked, the token is fed back at once, then decoded on the last stage.
Tokens that come fast are decoded together, as direct mode tells its text; Done waits for the last. Sequences count over
prompts and never restart: what an earlier prompt left behind is told by its object id, advances the sequence and is
dropped.

After a worker was replaced the edges are new ones, and the active prompt is replayed: prompt and answer so far go in at
once, record by record as the first time, so that caches and sampler are what they were; the tokens and texts that come
back for what was there already are checked and dropped.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import accumulate
from typing import Any

from common.actors import Ctx
from common.addresses import short
from common.codec import Message
from common.edge_records import Record, decode_tokens, encode_tokens
from common.limits import DECODE_WINDOW_MESSAGES, TEXT_DELTA_COALESCE_MS, TOKENS_TOLD_MS
from common.messages.edge import BeginSequence, SequenceBegun
from common.messages.node_agent import CancelRequest, DecodeTokens, EncodePrompt
from common.messages.orchestrator import ObserveTokenReceived
from common.messages.prompt import (
    Done,
    Fault,
    PromptEncoded,
    PromptEvent,
    TextDelta,
    TokenizerEvent,
    TokenizerFault,
    TokensDecoded,
)
from common.messages.serve import OpenPromptRpc
from common.stopping import StopTracker
from services.prompt_gateway.queue import PromptWork
from services.prompt_gateway.records import Records
from services.prompt_gateway.runtimes.base import DECODE_TIMER, ServingBroken
from services.prompt_gateway.token_echo import Foretold
from services.prompt_gateway.token_edges import TokenRecord, write_token_in

RECENT_TOKENS = 64  # what the sampler's repetition penalty looks back at


class State(StrEnum):
    """Of the active prompt."""

    ENCODING = "encoding"
    BEGINNING = "beginning"
    GENERATING = "generating"
    ENDING = "ending"
    """No more tokens are wanted; decodes are awaited."""
    CANCELLING = "cancelling"


@dataclass(slots=True)
class ActivePipelinePrompt:
    """S1 7.10's prompt state."""

    work: PromptWork
    started_ms: int
    tracker: StopTracker
    state: State = State.ENCODING
    prompt: list[int] = field(default_factory=list)
    first_object: int = 0
    waiting: set[bytes] = field(default_factory=set)
    """Stages that have not confirmed: the begin, or the cancel."""
    answer: list[int] = field(default_factory=list)
    finish: str = ""
    asked: int = 0
    answered: int = 0
    """Tokens that this decoder was asked for, and has answered."""
    awaited: deque[int] = field(default_factory=deque)
    """Tokens of each DecodeTokens that is not answered yet."""
    asked_ms: int = -TEXT_DELTA_COALESCE_MS
    """When the decoder was asked last."""
    emitted: int = 0
    """Tokens whose text is out; more than `answered` after a replay."""
    text: list[str] = field(default_factory=list)
    is_open: bool = False
    """The stages wait for the next object of its sequence."""
    flushed: bool = False
    """The decoder was told that it is over."""

    @property
    def generated(self) -> int:
        """Tokens of the answer."""
        return len(self.answer)


class PipelinePromptRuntime:
    """Sequences live as long as the run; everything else is the active prompt's."""

    def __init__(self, run: OpenPromptRpc, reply_to: bytes, records: Records) -> None:
        self._reply_to, self._records = reply_to, records
        self._untold, self._told_ms = 0, 0
        self._active: ActivePipelinePrompt | None = None
        self.rebind(run)

    def rebind(self, run: OpenPromptRpc) -> None:
        """New edges: their sequences begin with 0."""
        self._stages = tuple(run.stage_actors)
        self._encode_actor, self._decode_actor = run.encode_actor, run.decode_actor
        self._max_context, self._feedback = run.max_context, run.feedback
        self._token_in, self._token_out = 1, len(run.stage_actors) + 1
        self._next_in = 0
        self._expected_out = 0
        self._orchestrator, self._untold = run.orchestrator, 0

    # --- start ------------------------------------------------------------------------------------------------
    def start(self, work: PromptWork, ctx: Ctx) -> None:
        """Ask for the prompt's tokens."""
        request = work.request
        self._active = ActivePipelinePrompt(work, ctx.now_ms, StopTracker(work.max_tokens, request.stop or []))
        self._encode(work, ctx)

    def _encode(self, work: PromptWork, ctx: Ctx) -> None:
        request = work.request
        detail = {"node_actor": short(self._encode_actor), "reply_to": short(self._reply_to)}
        self._records.emit(ctx, "pipeline_tokenizer_encode", "started", work, detail)
        encode = EncodePrompt(
            request_id=work.prompt_id,
            prompt=request.prompt_text or "",
            reply_to=self._reply_to,
            messages=request.chat(),
            raw=bool(request.raw),
        )
        ctx.send(self._encode_actor, encode)

    def _encoded(self, active: ActivePipelinePrompt, tokens: list[int], ctx: Ctx) -> list[PromptEvent]:
        detail = {"node_actor": short(self._encode_actor), "tokens": len(tokens)}
        self._records.emit(ctx, "pipeline_tokenizer_encode", "ready", active.work, detail)
        if not tokens:
            return self._fault(active, "the prompt is empty", ctx)
        if len(tokens) >= self._max_context:
            error = (
                f"the prompt has {len(tokens)} tokens, but the context holds {self._max_context} "
                "and needs room for an answer"
            )
            return self._fault(active, error, ctx)
        active.prompt = tokens
        self._begin(active, ctx)
        return []

    def _begin(self, active: ActivePipelinePrompt, ctx: Ctx) -> None:
        active.state = State.BEGINNING
        active.first_object, active.waiting = self._next_in, set(self._stages)
        for stage in self._stages:
            begin = BeginSequence(
                request_id=active.work.prompt_id,
                first_object_id=active.first_object,
                reply_to=self._reply_to,
                sampling=active.work.sampling,
                recent=active.prompt[-RECENT_TOKENS:],
            )
            ctx.send(stage, begin)

    def _begun(self, active: ActivePipelinePrompt, msg: SequenceBegun, ctx: Ctx) -> list[PromptEvent]:
        if msg.stage_index < len(self._stages):
            active.waiting.discard(self._stages[msg.stage_index])
        if active.waiting:
            return []
        active.state = State.GENERATING
        self._inject(active, active.prompt, ctx, begin=True)
        for token in active.answer:
            self._inject(active, [token], ctx, begin=False)
        return []

    def _close_sequence(self, active: ActivePipelinePrompt, ctx: Ctx) -> None:
        """Where the last stage feeds tokens back by itself, the stages may have run one object ahead: an empty one in
        its place says that no more is wanted. What comes out for it is dropped."""
        if active.is_open and self._feedback:
            sequence, self._next_in = self._next_in, self._next_in + 1
            write_token_in(self._token_in, Record(sequence, sequence, b"", end=True), ctx)
        active.is_open = False

    def _inject(self, active: ActivePipelinePrompt, tokens: list[int], ctx: Ctx, *, begin: bool) -> None:
        sequence, self._next_in = self._next_in, self._next_in + 1
        if begin:
            detail = {"edge_id": self._token_in, "sequence": sequence, "tokens": len(tokens), "begin_sequence": True}
            self._records.emit(ctx, "pipeline_token_in", "started", active.work, detail)
        active.is_open = True
        record = Record(sequence, sequence, encode_tokens(tokens), begin=begin, end=True)
        write_token_in(self._token_in, record, ctx)

    def foretell(self) -> Foretold | None:
        """The token that comes next, if it does not end the sequence, and what is fed back for it."""
        active = self._active
        if active is None or active.state is not State.GENERATING:
            return None
        out, count, cap = self._expected_out, active.generated + 1, active.work.max_tokens
        is_next = out == self._next_in - 1 == active.first_object + active.generated
        if not is_next or (cap and count >= cap) or len(active.prompt) + count >= self._max_context:
            return None
        received, fed = Record(out, out, bytes(4)), Record(self._next_in, self._next_in, bytes(4), end=True)
        return Foretold(self._token_out, received, self._token_in, fed)

    # --- events -----------------------------------------------------------------------------------------------
    def receive(self, msg: Any, work: PromptWork | None, ctx: Ctx) -> list[PromptEvent]:
        """Tokenizer events, begun stages and token-out records. Raises ServingBroken."""
        if isinstance(msg, TokenRecord):
            return self._token(msg.record, ctx)
        if not isinstance(msg, TokenizerEvent | SequenceBegun):
            return []
        active = self._active
        if active is None or msg.request_id != active.work.prompt_id or active.state is State.CANCELLING:
            self._drop(msg, work, ctx)
            return []
        match msg:
            case TokenizerFault():
                return self._fault(active, f"tokenizer request failed: {msg.error}", ctx)
            case PromptEncoded() if active.state is State.ENCODING:
                return self._encoded(active, msg.tokens, ctx)
            case SequenceBegun() if active.state is State.BEGINNING:
                return self._begun(active, msg, ctx)
            case TokensDecoded() if active.awaited:
                return self._decoded(active, msg, ctx)
            case _:
                self._drop(msg, work, ctx)
                return []

    def _drop(self, msg: Message, work: PromptWork | None, ctx: Ctx) -> None:
        if isinstance(msg, TokensDecoded) and not msg.text:
            return  # the answer to a decoder's end
        reason = "no_active_prompt" if self._active is None else "request_mismatch"
        request_id = getattr(msg, "request_id", 0)
        self._records.dropped(ctx, request_id, reason, type(msg).__name__, work)

    def _token(self, record: Record, ctx: Ctx) -> list[PromptEvent]:
        if record.sequence != self._expected_out or record.object_id != record.sequence:
            got = record.sequence if record.object_id == record.sequence else f"object {record.object_id}"
            raise ServingBroken(f"pipeline token sequence violation: expected {self._expected_out}, got {got}")
        self._expected_out += 1
        if len(record.payload) not in (0, 4):
            raise ServingBroken(f"invalid token-out record: {len(record.payload)} bytes instead of one u32")
        self._tell_received(record, ctx)
        active = self._active
        wanted = active is not None and active.state is State.GENERATING and record.sequence >= active.first_object
        if active is None or not wanted:
            return []
        at = record.sequence - active.first_object
        if record.sequence >= self._next_in or at > active.generated:
            raise ServingBroken(f"invalid token-out record: sequence {record.sequence} was not injected yet")
        if not record.payload:
            return self._fault(active, f"the pipeline gave up object {record.object_id}", ctx)
        (token,) = decode_tokens(record.payload)
        is_new = at == active.generated
        if is_new and not record.end:
            self._feed_back(active, token, ctx)
        detail = {
            "edge_id": self._token_out,
            "object_id": record.object_id,
            "sequence": record.sequence,
            "eos": record.end,
            "generated_index": at + (not record.end),
            "replayed": not is_new,
        }
        self._records.emit(ctx, "pipeline_token_out", "observed", active.work, detail)
        if not is_new:
            return self._repeated(active, at, token, ctx)
        if record.end:
            active.is_open = False
            self._end(active, "stop")
        self._send_decodes(active, ctx)
        return []

    def _feed_back(self, active: ActivePipelinePrompt, token: int, ctx: Ctx) -> None:
        """First of all: the stages wait for it, and for nothing else that is done with a token here."""
        active.answer.append(token)
        cap = active.work.max_tokens
        if cap and active.generated >= cap:
            self._end(active, "length")
        elif len(active.prompt) + active.generated >= self._max_context:
            self._end(active, "context")
        else:
            self._inject(active, [token], ctx, begin=False)
        if active.finish:
            self._close_sequence(active, ctx)

    def _repeated(self, active: ActivePipelinePrompt, at: int, token: int, ctx: Ctx) -> list[PromptEvent]:
        """A token of a replay: the stages went on from the one that the client has, whatever they would say now."""
        if token != active.answer[at]:
            error = (
                f"a worker was replaced, and the pipeline now gives token {token} as number {at + 1} of the answer, "
                f"it was {active.answer[at]}"
            )
            return self._fault(active, error, ctx)
        return []

    def _tell_received(self, record: Record, ctx: Ctx) -> None:
        """The run's machine follows the tokens (S1 6.4): at 10 Hz, and with the end of an answer."""
        self._untold += 1
        cap = self._active.work.max_tokens if self._active else 0
        is_last = record.end or (self._active is not None and self._active.generated + 1 == cap)
        if is_last or ctx.now_ms - self._told_ms >= TOKENS_TOLD_MS:
            token = decode_tokens(record.payload)[0] if record.payload else 0
            told = ObserveTokenReceived(sequence=record.sequence, token_id=token, eos=record.end, count=self._untold)
            ctx.send(self._orchestrator, told)
            self._untold, self._told_ms = 0, ctx.now_ms

    def _end(self, active: ActivePipelinePrompt, finish: str) -> None:
        active.state, active.finish = State.ENDING, finish

    # --- decoding ---------------------------------------------------------------------------------------------
    def due(self, ctx: Ctx) -> None:
        """DECODE_TIMER."""
        if self._active is not None and self._active.state in (State.GENERATING, State.ENDING):
            self._send_decodes(self._active, ctx)

    def _send_decodes(self, active: ActivePipelinePrompt, ctx: Ctx) -> None:
        """What came within TEXT_DELTA_COALESCE_MS goes together: each message wakes four processes, on the cores that
        compute the next token."""
        tokens, last = active.answer[active.asked :], bool(active.finish)
        if active.flushed or not (tokens or last) or len(active.awaited) >= DECODE_WINDOW_MESSAGES:
            return
        if not last and (rest_ms := active.asked_ms + TEXT_DELTA_COALESCE_MS - ctx.now_ms) > 0:
            ctx.timer(DECODE_TIMER, rest_ms)
            return
        active.asked, active.asked_ms, active.flushed = active.generated, ctx.now_ms, last
        active.awaited.append(len(tokens))
        decode = DecodeTokens(request_id=active.work.prompt_id, tokens=tokens, reply_to=self._reply_to, last=last)
        ctx.send(self._decode_actor, decode)

    def _decoded(self, active: ActivePipelinePrompt, msg: TokensDecoded, ctx: Ctx) -> list[PromptEvent]:
        asked = active.awaited.popleft()
        lengths = msg.lengths
        if len(lengths) != asked or sum(lengths) != len(msg.text):
            error = (
                f"the decoder's answer does not fit its question: {len(msg.text)} characters, lengths {lengths} "
                f"for {asked} tokens"
            )
            return self._fault(active, error, ctx)
        ends = list(accumulate(lengths))
        texts = [msg.text[end - length : end] for end, length in zip(ends, lengths, strict=True)]
        delta, tokens = "", 0
        for text in texts:
            active.answered += 1
            if active.answered <= active.emitted:
                continue
            active.emitted += 1
            step = active.tracker.feed(text)
            delta, tokens = delta + step.text, tokens + 1
            if step.finish is not None:
                return self._finish(active, delta, tokens, step.finish, ctx)
        if active.flushed and not active.awaited:
            return self._finish(active, delta + active.tracker.flush(), tokens, active.finish, ctx)
        self._send_decodes(active, ctx)
        if not tokens:
            return []
        active.text.append(delta)
        return [TextDelta(request_id=active.work.prompt_id, text=delta, tokens=tokens)]

    def _finish(self, active: ActivePipelinePrompt, text: str, tokens: int, reason: str, ctx: Ctx) -> list[PromptEvent]:
        prompt_id = active.work.prompt_id
        active.text.append(text)
        done = Done(
            request_id=prompt_id,
            final_text="".join(active.text),
            tokens_generated=active.tracker.tokens,
            elapsed_ms=max(0, ctx.now_ms - active.started_ms),
            prompt_tokens=len(active.prompt),
            finish_reason=reason,
        )
        self._leave_decoder(active, ctx)
        self._close_sequence(active, ctx)
        self._active = None
        delta: list[PromptEvent] = [TextDelta(request_id=prompt_id, text=text, tokens=tokens)] if text or tokens else []
        return [*delta, done]

    def _leave_decoder(self, active: ActivePipelinePrompt, ctx: Ctx) -> None:
        """The decoder of the last stage forgets this request."""
        if active.generated and not active.flushed:
            active.flushed = True
            end = DecodeTokens(request_id=active.work.prompt_id, tokens=[], reply_to=self._reply_to, last=True)
            ctx.send(self._decode_actor, end)

    # --- the end ----------------------------------------------------------------------------------------------
    def _fault(self, active: ActivePipelinePrompt, error: str, ctx: Ctx) -> list[PromptEvent]:
        """The prompt fails; the stages are told, and what is on its way is dropped by its sequence."""
        self._cancel_stages(active, self._stages, ctx)
        self._active = None
        return [Fault(request_id=active.work.prompt_id, error=error)]

    def _cancel_stages(self, active: ActivePipelinePrompt, stages: tuple[bytes, ...], ctx: Ctx) -> None:
        self._leave_decoder(active, ctx)
        self._close_sequence(active, ctx)
        for stage in stages:
            ctx.send(stage, CancelRequest(request_id=active.work.prompt_id))

    def cancel(self, work: PromptWork, ctx: Ctx) -> None:
        """To every stage (design.md 6 row 21); again to those that have not confirmed."""
        active = self._active
        if active is None or active.work is not work:
            # It faulted a moment ago; its stages have been told, and confirm this once more.
            active = self._active = ActivePipelinePrompt(work, ctx.now_ms, StopTracker())
        if active.state is not State.CANCELLING:
            active.state, active.waiting = State.CANCELLING, set(self._stages)
        self._cancel_stages(active, tuple(stage for stage in self._stages if stage in active.waiting), ctx)

    def cancelled(self, src: bytes, work: PromptWork) -> bool:
        """True when the last stage has confirmed."""
        active = self._active
        if active is None or active.work is not work or active.state is not State.CANCELLING:
            return False
        active.waiting.discard(src)
        if active.waiting:
            return False
        self._active = None
        return True

    # --- worker loss ------------------------------------------------------------------------------------------
    def replay(self, work: PromptWork, ctx: Ctx) -> int:
        """From where the prompt stood: its tokens are known or asked for once more, as are all texts."""
        active = self._active
        assert active is not None and active.work is work
        active.asked = active.answered = 0
        active.awaited.clear()
        active.flushed = active.is_open = False
        if active.state is State.ENCODING:
            self._encode(work, ctx)
        elif active.state is not State.ENDING:
            self._begin(active, ctx)
        self._send_decodes(active, ctx)
        return active.generated

    def forget(self) -> None:
        """The new edges carry nothing of it."""
        self._active = None

    def is_work(self, message: Message) -> bool:
        """What a prompt cannot do without. An end without tokens is awaited only where it ends the present answer."""
        is_ending = self._active is not None and self._active.state is State.ENDING
        return isinstance(message, EncodePrompt | BeginSequence) or (
            isinstance(message, DecodeTokens) and (bool(message.tokens) or is_ending)
        )

    def send_failed(self, work: PromptWork, reason: str, ctx: Ctx) -> None:
        """S1 10.10: actor send failure for tokenizer encode or decode."""
        detail = {"node_actor": short(self._encode_actor), "reply_to": short(self._reply_to), "error": reason}
        self._records.emit(ctx, "pipeline_tokenizer_encode", "failed", work, detail)
