"""Prompt work and its queue: first in, first out across all connections (S1 5.7, 9.9; design.md 6 row 7). Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from common.limits import PROMPT_QUEUE_LEN_MAX
from common.messages.node_agent import Sampling
from services.prompt_gateway.wire import SubmitPrompt


class Outcome(StrEnum):
    """How a prompt ended for its client: exactly one of these, once (S1 9.10)."""

    DONE = "done"
    FAULT = "fault"
    GONE = "gone"
    """The client left or was cut off before its terminal event: there is nobody to tell."""


@dataclass(eq=False, slots=True)
class PromptWork:
    """One accepted request, from its line to its end.

    prompt_id: run-unique, the request_id of actor messages (row 24), another one after a replay; max_tokens: 0 = no
    cap; sampling: None = greedy; text_bytes, deltas and tokens: what came so far; told_position: the last one that the
    client was told, 0 = none.
    """

    prompt_id: int
    conn: int
    request: SubmitPrompt
    max_tokens: int
    sampling: Sampling | None = None
    outcome: Outcome | None = None
    deltas: int = 0
    tokens: int = 0
    text_bytes: int = 0
    told_position: int = 0

    @property
    def client_id(self) -> int:
        """The request id that the client knows."""
        return self.request.request_id

    @property
    def wants_queued(self) -> bool:
        """Whether the client asked for queue positions."""
        return "queued" in (self.request.events or ())


class PromptQueue:
    """What waits for the one active prompt."""

    def __init__(self, limit: int = PROMPT_QUEUE_LEN_MAX) -> None:
        self.limit = limit
        self._waiting: deque[PromptWork] = deque()

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[PromptWork]:
        return iter(tuple(self._waiting))

    def __contains__(self, work: object) -> bool:
        return any(work is waiting for waiting in self._waiting)

    @property
    def is_full(self) -> bool:
        """Whether the next prompt gets a fault instead of a place."""
        return len(self._waiting) >= self.limit

    def push(self, work: PromptWork) -> bool:
        """Append; False where there is no place."""
        if self.is_full:
            return False
        self._waiting.append(work)
        return True

    def pop(self) -> PromptWork | None:
        """The next one, or None."""
        return self._waiting.popleft() if self._waiting else None

    def remove(self, work: PromptWork) -> bool:
        """Take out one whose client left; False if it does not wait here."""
        if work not in self:
            return False
        self._waiting.remove(work)
        return True

    def news(self) -> list[tuple[PromptWork, int]]:
        """(prompt, position) of those who asked for positions and were not told this one; now they count as told."""
        told = []
        for position, work in enumerate(self._waiting, 1):
            if work.wants_queued and work.told_position != position:
                work.told_position = position
                told.append((work, position))
        return told
