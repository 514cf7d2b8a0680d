"""The seam between the serving loop and the ways to execute a prompt (S1 7.9, 7.10). Pure."""

from __future__ import annotations

from typing import Any, Protocol

from common.actors import Ctx
from common.codec import Message
from common.messages.prompt import PromptEvent
from common.messages.serve import OpenPromptRpc
from services.prompt_gateway.queue import PromptWork
from services.prompt_gateway.token_echo import Foretold

DECODE_TIMER = "prompt:decode"


class ServingBroken(Exception):
    """The way of prompts itself is broken (S1 10.10): the active prompt gets this sentence, and the run ends."""


class PromptRuntime(Protocol):
    """Executes one prompt at a time; the serving loop calls it and owns the client, the terminal event and the slot.

    Records of its own progress (S1 8.5) go out through ctx, with detail.prompt_id.
    """

    def start(self, work: PromptWork, ctx: Ctx) -> None:
        """Send the prompt's work to the actors that execute it."""

    def receive(self, msg: Any, work: PromptWork | None, ctx: Ctx) -> list[PromptEvent]:
        """What a message of the reply inboxes means for the active prompt `work`: events with its prompt_id, in order.

        Messages of other prompts are dropped here with a record (S1 6.12); work is None while no prompt is active.
        Raises ServingBroken.
        """

    def foretell(self) -> Foretold | None:
        """What is going to be done with the next token, as things stand."""

    def due(self, ctx: Ctx) -> None:
        """DECODE_TIMER, which the runtime has set."""

    def cancel(self, work: PromptWork, ctx: Ctx) -> None:
        """Ask every actor that works on the prompt to stop it. May be called again when a lost worker is back."""

    def cancelled(self, src: bytes, work: PromptWork) -> bool:
        """`src` confirmed the cancel; True when no actor works on the prompt any more."""

    def rebind(self, run: OpenPromptRpc) -> None:
        """The run serves with other actors from now on, whose edges begin anew; `replay` or `forget` follows."""

    def replay(self, work: PromptWork, ctx: Ctx) -> int:
        """Go on with the active prompt, whose prompt_id is a new one, as if nothing had happened: what the client has
        already comes no second time. Returns how many tokens of the answer were there."""

    def forget(self) -> None:
        """The active prompt had its end while nobody worked on it."""

    def is_work(self, message: Message) -> bool:
        """Whether a message that could not be delivered carried a prompt's work, so that the prompt is broken."""

    def send_failed(self, work: PromptWork, reason: str, ctx: Ctx) -> None:
        """Record that the active prompt's work could not be delivered (S1 10.10)."""
