"""The generation loop as an object that is stepped: one prefill chunk or one decode step at a time (S1 2.5, 7.8).

Between two steps the caller may cancel, so a cancel takes effect within one chunk or one token. The loop knows
nothing of processes and sockets.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from common.stopping import FinishReason, StopTracker
from worker.engine.errors import EngineError
from worker.engine.sampler import Sampler, Sampling
from worker.engine.tokenizer import EngineTokenizer

F32 = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class TokenText:
    """New tokens and the text they completed; the text is empty while a character or a stop string is open."""

    text: str
    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Finished:
    """The one end of a generation. tokens_generated does not count EOS; elapsed_s runs from the first step."""

    finish_reason: FinishReason
    tokens_generated: int
    final_text: str
    prompt_tokens: int
    elapsed_s: float


Event: TypeAlias = TokenText | Finished


class Decoder(Protocol):
    """What the loop needs of a model: rows in, logits of the last row out."""

    max_context: int
    chunk: int

    def logits(self, ids: Sequence[int], start: int, tick: Callable[[], None] | None) -> F32: ...

    def reusable(self, ids: Sequence[int]) -> int:
        """How many of the first tokens need not be computed again: the cache holds them from the last prompt."""


class Generation:
    """One request. Call `step()` until it returns a Finished, or iterate over `events()`."""

    def __init__(
        self,
        decoder: Decoder,
        tokenizer: EngineTokenizer,
        prompt_ids: Sequence[int],
        max_tokens: int | None = None,
        sampling: Sampling | None = None,
        stop: Sequence[str] = (),
        tick: Callable[[], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Raises EngineError for a prompt that is empty or leaves no room for one token."""
        if not prompt_ids:
            raise EngineError("the prompt is empty")
        if len(prompt_ids) >= decoder.max_context:
            raise EngineError(
                f"the prompt has {len(prompt_ids)} tokens, but the context holds {decoder.max_context} "
                "and needs room for an answer"
            )
        size = len(tokenizer.vocabulary.tokens)
        bad = next((index for index in prompt_ids if not 0 <= index < size), None)
        if bad is not None:
            raise EngineError(f"prompt token {bad} is outside the vocabulary of {size}")
        try:
            self._stops = StopTracker(max_tokens, stop)
        except ValueError as error:
            raise EngineError(str(error)) from error
        self._decoder, self._tokenizer, self._tick, self._clock = decoder, tokenizer, tick, clock
        self._prompt = list(prompt_ids)
        self._sampler = Sampler(sampling or Sampling(), prompt_ids)
        self._stream = tokenizer.stream()
        self._position = 0
        self._next: int | None = None
        self._text: list[str] = []
        self._started: float | None = None
        self._cancelled = False
        self._finished = False

    @property
    def finished(self) -> bool:
        return self._finished

    def cancel(self) -> None:
        """End with finish_reason "cancelled" at the next step. Safe from another thread."""
        self._cancelled = True

    def events(self) -> Iterator[Event]:
        while not self._finished:
            yield from self.step()

    def step(self) -> list[Event]:
        """One prefill chunk or one decode step; the events it produced, none for a chunk before the last."""
        if self._finished:
            return []
        if self._started is None:
            self._started = self._clock()
            self._position = min(self._decoder.reusable(self._prompt), len(self._prompt) - 1)
        if self._cancelled:
            return [self._end("cancelled")]
        if self._position < len(self._prompt):
            batch = self._prompt[self._position : self._position + self._decoder.chunk]
        else:
            assert self._next is not None
            batch = [self._next]
        logits = self._decoder.logits(batch, self._position, self._tick)
        self._position += len(batch)
        if self._position < len(self._prompt):
            return []
        return self._take(self._sampler.next(logits))

    def _take(self, token: int) -> list[Event]:
        if token in self._tokenizer.vocabulary.end_ids:
            held = self._emit(self._stops.flush(), ())
            return [*held, self._end("stop")]
        outcome = self._stops.feed(self._stream.feed(token))
        text, finish = outcome.text, outcome.finish
        if finish is None and self._position + 1 >= self._decoder.max_context:
            text, finish = text + self._stops.flush(), "context"
        self._next = token
        events = self._emit(text, (token,))
        return events if finish is None else [*events, self._end(finish)]

    def _emit(self, text: str, tokens: tuple[int, ...]) -> list[Event]:
        if not text and not tokens:
            return []
        self._text.append(text)
        return [TokenText(text, tokens)]

    def _end(self, reason: FinishReason) -> Finished:
        self._finished = True
        started = self._started if self._started is not None else self._clock()
        return Finished(reason, self._stops.tokens, "".join(self._text), len(self._prompt), self._clock() - started)
