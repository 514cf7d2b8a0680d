"""From logits to a token id: greedy by default; temperature, top-k, top-p, min-p, repetition penalty, seed.

The order of the filters is llama.cpp's: penalty, top-k, top-p, min-p, temperature. The generator is numpy's PCG64
from the seed alone, so a seed gives the same tokens for the same logits on every machine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from worker.engine.errors import EngineError

PENALTY_WINDOW = 64  # tokens that the repetition penalty looks back at


@dataclass(frozen=True, slots=True)
class Sampling:
    """The sampling fields of a prompt (design.md 6 row 21). temperature 0 is greedy; top_k 0 is no limit."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None

    def __post_init__(self) -> None:
        for name, value, lowest, highest in (
            ("temperature", self.temperature, 0.0, 100.0),
            ("top_k", self.top_k, 0, 1 << 31),
            ("top_p", self.top_p, 0.0, 1.0),
            ("min_p", self.min_p, 0.0, 1.0),
            ("repetition_penalty", self.repetition_penalty, 0.01, 100.0),
        ):
            if not lowest <= value <= highest:  # false for NaN too
                raise EngineError(f"{name} is {value}, it must be between {lowest} and {highest}")
        if self.seed is not None and self.seed < 0:
            raise EngineError(f"seed is {self.seed}, it must not be negative")


class Sampler:
    """One generation's sampler; it remembers the tokens it has seen for the repetition penalty."""

    def __init__(self, sampling: Sampling, prompt_ids: Sequence[int] = ()) -> None:
        self._sampling = sampling
        self._recent = list(prompt_ids)[-PENALTY_WINDOW:]
        self._random = np.random.Generator(np.random.PCG64(sampling.seed))

    @property
    def is_greedy(self) -> bool:
        """The next token is the most likely one, whatever came before."""
        return self._sampling.temperature == 0.0 and self._sampling.repetition_penalty == 1.0

    def next(self, logits: npt.NDArray[np.float32]) -> int:
        """The next token's id from the logits (vocabulary,)."""
        s = self._sampling
        if s.repetition_penalty != 1.0 and self._recent:
            logits = logits.copy()
            seen = np.unique(np.asarray(self._recent))
            values = logits[seen]
            logits[seen] = np.where(values > 0, values / s.repetition_penalty, values * s.repetition_penalty)
        chosen = int(np.argmax(logits)) if s.temperature == 0.0 else self._draw(logits)
        self._recent = [*self._recent, chosen][-PENALTY_WINDOW:]
        return chosen

    def _draw(self, logits: npt.NDArray[np.float32]) -> int:
        s = self._sampling
        # Stable order: equal logits keep their ids' order, so that the draw does not depend on the sort.
        order = np.argsort(-logits, kind="stable")
        if s.top_k:
            order = order[: s.top_k]
        ranked = logits[order].astype(np.float64)
        weights = np.exp(ranked - ranked[0])
        weights /= weights.sum()
        if s.top_p < 1.0:
            keep = int(np.searchsorted(np.cumsum(weights), s.top_p)) + 1
            order, ranked, weights = order[:keep], ranked[:keep], weights[:keep]
        if s.min_p > 0.0:
            keep = max(1, int(np.count_nonzero(weights >= s.min_p * weights[0])))
            order, ranked = order[:keep], ranked[:keep]
        final = np.exp((ranked - ranked[0]) / s.temperature)
        cumulative = np.cumsum(final)
        at = int(np.searchsorted(cumulative, self._random.random() * cumulative[-1], side="right"))
        return int(order[min(at, len(order) - 1)])
