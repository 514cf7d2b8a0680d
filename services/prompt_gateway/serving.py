"""The serving loop (S1 7.9): at most one active prompt, the queue behind it, and one terminal event for each prompt.

Pure; owned and driven by core.GatewayActor. `active` is the slot. A prompt has two ends: its client's (outcome: done,
fault or gone, exactly one, S1 9.10) and the worker's (done, fault or confirmed cancel), which frees the slot; after a
cancel the first comes long before the second, and nothing is dispatched to a worker that may still be busy.

Worker loss (design.md 6 row 22): while the orchestrator has suspended serving, or the member view calls a serving node
dead or left, nothing is dispatched and no limit runs against the worker; the active prompt gets its fault on
SuspendServing or DEAD_WORKER_FAULT_MS after the death was seen, whichever comes first.

Where the run replaces lost workers ([runtime] on_worker_loss = "restart"), a worker's failure holds the active prompt
instead: nothing that comes from the old workers counts any more, and `restore` lets it go on with the new ones.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import msgspec

from common.actors import Ctx
from common.addresses import Role, short
from common.effects import SendFailed
from common.limits import DEAD_WORKER_FAULT_MS, PROMPT_CANCEL_MS
from common.messages.node_agent import CancelRequest
from common.messages.prompt import Done, Fault, PromptEvent, RequestCancelled, TextDelta, TokenizerFault
from common.messages.serve import OpenPromptRpc, PromptActive
from services.prompt_gateway.queue import Outcome, PromptQueue, PromptWork
from services.prompt_gateway.records import Records
from services.prompt_gateway.runtimes import MODES, PromptRuntime
from services.prompt_gateway.runtimes.base import DECODE_TIMER, ServingBroken
from services.prompt_gateway.token_echo import Foretold
from services.prompt_gateway.wire import DoneLine, FaultLine, QueuedLine, Response, SubmitPrompt, TextDeltaLine

CANCEL_TIMER = "prompt:cancel"
DEAD_TIMER = "prompt:dead"

SEND_FAILURES = {
    "unroutable": "nobody on the bus knows it",
    "peer_lost": "it was restarted",
    "queue_full": "it does not take messages",
    "link_down": "the bus is down",
    "refused": "it refused the message",
    "unsupported": "it does not know the message",
}


class Clients(Protocol):
    """What the loop needs of the connections."""

    def answer(self, work: PromptWork, response: Response, ctx: Ctx) -> None:
        """Write to the prompt's client; may end in `leave` when the client does not read."""

    def ended(self, work: PromptWork, ctx: Ctx) -> None:
        """The prompt has its outcome: its connection is free for the next one."""

    def serving_failed(self, error: str, ctx: Ctx) -> None:
        """Serving is broken (S1 10.10): the run has to end."""

    def serving_disturbed(self, error: str, ctx: Ctx) -> None:
        """The active prompt is held: a worker or an edge failed, and the run replaces what is lost."""


@dataclass(slots=True)
class ActivePrompt:
    """The slot. cancelling: the worker was told to stop and has not confirmed it."""

    work: PromptWork
    cancelling: bool = False


class ServingLoop:
    """serve_prompts of S1 7.9 for the time between one OpenPromptRpc and its end."""

    def __init__(self, run: OpenPromptRpc, reply_to: bytes, first_id: int, clients: Clients) -> None:
        self.queue = PromptQueue()
        self.active: ActivePrompt | None = None
        self.next_id = first_id
        """Internal ids go on over runs, so that a late event of an earlier run matches nothing."""
        self.failed = ""
        """Why serving is over, or empty."""
        self._nodes = run.nodes
        self._records = Records(run.run_id, run.node_id)
        self._runtime: PromptRuntime = MODES[run.mode](run, reply_to, self._records)
        self._clients = clients
        self._restarts = run.restart
        self._suspended = False
        self._dead = ""
        self.held = ""
        """Why the active prompt waits for another worker, or empty."""
        self._stopped = ""

    # --- prompts in ---------------------------------------------------------------------------------------------
    def accept(self, conn: int, request: SubmitPrompt, default_max_tokens: int, ctx: Ctx) -> PromptWork:
        """Give a request its internal id. The caller links it to its connection, then calls `enqueue`."""
        sampling = request.sampler()
        if self._restarts and sampling is not None and sampling.seed is None:
            # A replay has to draw the same tokens once more.
            seed = int.from_bytes(ctx.rng.randbytes(8), "little")
            sampling = msgspec.structs.replace(sampling, seed=seed)
        work = PromptWork(self.next_id, conn, request, request.max_tokens or default_max_tokens, sampling)
        self.next_id += 1
        detail = {"prompt_bytes": request.prompt_bytes, "max_tokens": work.max_tokens}
        self._records.emit(ctx, "prompt_work", "observed", work, detail)
        return work

    def enqueue(self, work: PromptWork, ctx: Ctx) -> None:
        """Queue it and dispatch what can be; a full queue or broken serving faults it at once."""
        if over := self._stopped or self.failed:
            self.fail(work, over, ctx)
        elif not self.queue.push(work):
            self.fail(work, f"queue full: {len(self.queue)} prompts are waiting already; try again later", ctx)
        else:
            self._pump(ctx)

    def leave(self, work: PromptWork, reason: str, ctx: Ctx) -> None:
        """The client is gone (rows 9, 35): cancel the prompt wherever it is; nobody is told."""
        if work.outcome is None:
            self._end(work, Outcome.GONE, None, "cancelled", {"reason": reason}, ctx)
            self._take_out(work, ctx)

    def fail(self, work: PromptWork, error: str, ctx: Ctx) -> None:
        """The prompt's one fault, from this side; the worker is told to stop if it works on it."""
        if work.outcome is None:
            self._fault(work, error, ctx)
            self._take_out(work, ctx)

    # --- events of the worker -----------------------------------------------------------------------------------
    def receive(self, msg: Any, ctx: Ctx) -> None:
        """A message of a reply inbox."""
        if self.held:
            return
        active = self.active
        if self._restarts and active and isinstance(msg, Fault | TokenizerFault) and msg.lost:
            if msg.request_id == active.work.prompt_id:
                self.disturbed(msg.error, ctx)
            return
        try:
            events = self._runtime.receive(msg, self.active.work if self.active else None, ctx)
        except ServingBroken as broken:
            self.broken(str(broken), ctx)
            return
        for event in events:
            self._on_event(event, ctx)

    def foretell(self) -> Foretold | None:
        """What `receive` is going to do with the next token, as things stand."""
        return None if self.held else self._runtime.foretell()

    def broken(self, error: str, ctx: Ctx) -> None:
        """The way of prompts is broken: the active prompt's fault says so, then serving ends."""
        if self.failed or self._stopped or self.held:
            return
        if self.active and self.active.work.outcome is None:
            self._fault(self.active.work, error, ctx)
        self._break(error, ctx)

    def _on_event(self, event: PromptEvent, ctx: Ctx) -> None:
        active = self.active
        if active is None or event.request_id != active.work.prompt_id:
            return
        work = active.work
        match event:
            case TextDelta():
                work.deltas += 1
                work.tokens += event.tokens
                work.text_bytes += len(event.text.encode())
                if event.text and work.outcome is None:
                    self._clients.answer(work, TextDeltaLine(request_id=work.client_id, text=event.text), ctx)
            case Done():
                if work.outcome is None:
                    self._done(work, event, ctx)
                self._free(ctx)
            case Fault():
                if work.outcome is None:
                    self._fault(work, event.error or "the worker gave no reason", ctx)
                self._free(ctx)

    def confirm_cancel(self, msg: RequestCancelled, src: bytes, ctx: Ctx) -> None:
        """A worker will send nothing more for a request (row 21)."""
        if self.held:
            return
        active = self.active
        if active is None or msg.request_id != active.work.prompt_id:
            reason = "request_mismatch" if active else "no_active_prompt"
            name = "request_cancelled"
            self._records.dropped(ctx, msg.request_id, reason, name, active.work if active else None)
            return
        detail = {"event": "request_cancelled", "terminal": True, "known": msg.known}
        self._records.emit(ctx, "node_prompt_event", "observed", active.work, detail)
        if self._runtime.cancelled(src, active.work):
            if active.work.outcome is None:
                self._fault(active.work, "the worker cancelled the request", ctx)
            self._free(ctx)

    def send_failed(self, failed: SendFailed, ctx: Ctx) -> None:
        """A message of the active prompt was not delivered: a serving failure (S1 10.10), but not of a worker that is
        known to be lost, whose fate the orchestrator decides (row 22)."""
        active = self.active
        if self.held or active is None or getattr(failed.message, "request_id", None) != active.work.prompt_id:
            return
        work = active.work
        if self._runtime.is_work(failed.message):
            why = SEND_FAILURES.get(failed.reason, failed.reason)
            error = f"the prompt could not be sent to the worker {short(failed.dst)}: {why}"
            if self._restarts:
                self.disturbed(error, ctx)
                return
            self._runtime.send_failed(work, failed.reason, ctx)
            if work.outcome is None:
                self._fault(work, error, ctx)
            if self.is_blocked:
                self._free(ctx)
            else:
                self._break(error, ctx)
        elif isinstance(failed.message, CancelRequest) and failed.reason == "peer_lost":
            # The incarnation that worked on it is no more; whatever came in its place knows nothing of it.
            self._free(ctx)

    # --- worker loss --------------------------------------------------------------------------------------------
    @property
    def is_blocked(self) -> bool:
        """Nothing is dispatched and no limit runs."""
        return self._suspended or bool(self._dead) or bool(self.held)

    def suspend(self, error: str, ctx: Ctx) -> None:
        """SuspendServing."""
        self._suspended = True
        self._block(ctx)
        if self.active:
            self.fail(self.active.work, error, ctx)

    def resume(self, ctx: Ctx) -> None:
        """ResumeServing."""
        self._suspended = False
        self._unblock(ctx)

    def members_changed(self, ctx: Ctx) -> None:
        """The member view changed. Unknown (membership restarts) is no loss."""
        lost = [node for node in self._nodes if ctx.views.members.state(node) in ("dead", "left")]
        was, self._dead = self._dead, short(lost[0]) if lost else ""
        if self._dead and not was:
            self._block(ctx)
            if not self._restarts:
                ctx.timer(DEAD_TIMER, DEAD_WORKER_FAULT_MS)
        elif was and not self._dead:
            ctx.cancel(DEAD_TIMER)
            self._unblock(ctx)

    def link_changed(self, ctx: Ctx) -> None:
        """The bus is here again: what has been asked meanwhile goes out."""
        self._pump(ctx)

    def _block(self, ctx: Ctx) -> None:
        ctx.cancel(CANCEL_TIMER)

    def _unblock(self, ctx: Ctx) -> None:
        if self.is_blocked:
            return
        if self.active and self.active.cancelling:
            # The first CancelRequest may have died on the way to the lost worker.
            self._send_cancel(self.active.work, ctx)
        self._pump(ctx)

    # --- lost workers are replaced ------------------------------------------------------------------------------
    def disturbed(self, error: str, ctx: Ctx) -> None:
        """Hold the active prompt and say so; what is lost, and what is done about it, is the orchestrator's to find."""
        if not (self.held or self.failed or self._stopped):
            self.hold(error, ctx)
            self._clients.serving_disturbed(error, ctx)

    def hold(self, error: str, ctx: Ctx) -> None:
        """HoldServing: nobody works on the active prompt, and nothing more of its work counts."""
        if not self.held and self.active:
            self._records.emit(ctx, "prompt_replay", "waiting", self.active.work, {"error": error})
        self.held = error
        self._block(ctx)

    def restore(self, run: OpenPromptRpc, ctx: Ctx) -> int:
        """RestoreServing: the active prompt goes on with the run's present workers, under a new internal id by which
        their answers are told from old ones. Returns how many tokens of its answer are replayed."""
        self._nodes, self.held, self._dead = run.nodes, "", ""
        ctx.cancel(DEAD_TIMER)
        self._runtime.rebind(run)
        replayed = 0
        if self.active and self.active.work.outcome is not None:
            self._runtime.forget()
            self.active = None
        elif self.active:
            work = self.active.work
            before, work.prompt_id = work.prompt_id, self.next_id
            self.next_id += 1
            self._tell_orchestrator(work, ctx)
            replayed = self._runtime.replay(work, ctx)
            detail = {"replaces_prompt_id": before, "tokens": replayed}
            self._records.emit(ctx, "prompt_replay", "started", work, detail)
        self.members_changed(ctx)
        self._pump(ctx)
        return replayed

    def on_timer(self, key: str, ctx: Ctx) -> None:
        """CANCEL_TIMER, DEAD_TIMER and DECODE_TIMER."""
        if self.active is None:
            return
        if key == DECODE_TIMER and not self.held:
            self._runtime.due(ctx)
        if key == DEAD_TIMER and self._dead:
            self.fail(self.active.work, f"the worker {self._dead} was lost while it worked on this prompt", ctx)
        elif key == CANCEL_TIMER and self.active.cancelling and not self.is_blocked:
            self._break(
                f"the worker did not confirm the end of cancelled prompt {self.active.work.prompt_id} "
                f"within {PROMPT_CANCEL_MS // 1000} s; it is taken for stuck",
                ctx,
            )

    # --- the end ------------------------------------------------------------------------------------------------
    def stop(self, reason: str, ctx: Ctx) -> int:
        """No more work: the active and all queued prompts get their one fault. Returns how many were ended."""
        self._stopped = self._stopped or reason
        settled = self._settle(reason, ctx)
        self._vacate(ctx)
        return settled

    def _break(self, error: str, ctx: Ctx) -> None:
        """S1 10.10: the orchestration path itself failed."""
        self.failed = error
        self._vacate(ctx)
        self._settle(error, ctx)
        self._clients.serving_failed(error, ctx)

    def _settle(self, error: str, ctx: Ctx) -> int:
        works = ([self.active.work] if self.active else []) + list(self.queue)
        pending = [work for work in works if work.outcome is None]
        for work in pending:
            self.fail(work, error, ctx)
        return len(pending)

    # --- inner ----------------------------------------------------------------------------------------------------
    def _pump(self, ctx: Ctx) -> None:
        """Dispatch the next prompt if the slot is free, then tell those who wait where they stand. While this node is
        cut off from the bus, prompts wait: a send that fails would end the run (S1 10.10)."""
        may = ctx.views.prompt_link_up and not (self.is_blocked or self.failed or self._stopped)
        if self.active is None and may and (work := self.queue.pop()):
            self.active = ActivePrompt(work)
            self._tell_orchestrator(work, ctx)
            self._runtime.start(work, ctx)
        for work, position in self.queue.news():
            # An answer may cut a slow client off, which moves the others up and tells them: then this is old news.
            if work.outcome is None and work.told_position == position:
                self._clients.answer(work, QueuedLine(request_id=work.client_id, position=position), ctx)

    def _take_out(self, work: PromptWork, ctx: Ctx) -> None:
        """The client's end came first: stop the worker's."""
        if self.active and self.active.work is work:
            self.active.cancelling = True
            self._send_cancel(work, ctx)
        elif self.queue.remove(work):
            self._pump(ctx)

    def _send_cancel(self, work: PromptWork, ctx: Ctx) -> None:
        self._runtime.cancel(work, ctx)
        if not self.is_blocked:
            ctx.timer(CANCEL_TIMER, PROMPT_CANCEL_MS)

    def _vacate(self, ctx: Ctx) -> None:
        self.active = None
        ctx.cancel(CANCEL_TIMER)
        ctx.cancel(DEAD_TIMER)

    def _free(self, ctx: Ctx) -> None:
        self.active = None
        ctx.cancel(CANCEL_TIMER)
        self._pump(ctx)

    def _done(self, work: PromptWork, event: Done, ctx: Ctx) -> None:
        line = DoneLine(
            request_id=work.client_id,
            final_text=event.final_text,
            tokens_generated=event.tokens_generated,
            elapsed_ms=event.elapsed_ms,
            prompt_tokens=event.prompt_tokens,
            finish_reason=event.finish_reason,
        )
        detail = {
            "tokens_generated": event.tokens_generated,
            "prompt_tokens": event.prompt_tokens,
            "elapsed_ms": event.elapsed_ms,
            "finish_reason": event.finish_reason,
        }
        self._end(work, Outcome.DONE, line, "ready", detail, ctx)

    def _fault(self, work: PromptWork, error: str, ctx: Ctx) -> None:
        line = FaultLine(request_id=work.client_id, error=error)
        self._end(work, Outcome.FAULT, line, "failed", {"error": error}, ctx)

    def _end(
        self, work: PromptWork, outcome: Outcome, line: Response | None, status: str, detail: dict[str, Any], ctx: Ctx
    ) -> None:
        """The one place where a prompt gets its outcome."""
        assert work.outcome is None, f"prompt {work.prompt_id} ended twice"
        work.outcome = outcome
        counts = {"deltas": work.deltas, "tokens": work.tokens, "text_bytes": work.text_bytes}
        self._records.emit(ctx, "prompt_complete", status, work, {**detail, **counts})
        if line is not None:
            self._clients.answer(work, line, ctx)
        self._clients.ended(work, ctx)
        if self.active and self.active.work is work:
            self._tell_orchestrator(work, ctx)

    def _tell_orchestrator(self, work: PromptWork, ctx: Ctx) -> None:
        """Which prompt has the slot: the orchestrator records its fault should this process die."""
        if route := ctx.views.routes.named(Role.ORCHESTRATOR):
            ended = work.outcome is not None
            message = PromptActive(request_id=work.client_id, prompt_id=work.prompt_id, ended=ended)
            ctx.send(route.address, message)

    def check(self) -> None:
        """Invariants of the loop."""
        assert len(self.queue) <= self.queue.limit, "the queue is longer than its limit"
        for work in self.queue:
            assert work.outcome is None, f"prompt {work.prompt_id} has ended and still waits"
        if self.active:
            assert self.active.work not in self.queue, "the active prompt also waits"
            assert self.active.cancelling or self.active.work.outcome is None, "an ended prompt holds the slot"
            assert not (self.failed or self._stopped), "a prompt is active after the end of serving"
