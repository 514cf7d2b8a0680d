"""When a generation ends: max_tokens and stop strings (S1 2.5, 10.10; design.md 6 rows 1 and 21).

One pure class, used by the engine in direct mode and by the gateway in planned mode, so that both cut at the same
character. It counts tokens and looks at text; EOS and the context's end are the caller's business.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

FinishReason = Literal["stop", "length", "context", "cancelled"]


@dataclass(frozen=True, slots=True)
class StopStep:
    """`text` may be emitted now; `finish` is set when the generation ends with this step."""

    text: str
    finish: FinishReason | None


class StopTracker:
    """Feeds on new text, gives back the text that can no longer become part of a stop string.

    A stop string itself is never emitted. max_tokens None or 0 is no cap. A stop string wins over the cap when
    both happen in the same step.
    """

    def __init__(self, max_tokens: int | None = None, stop: Sequence[str] = ()) -> None:
        if max_tokens is not None and max_tokens < 0:
            raise ValueError(f"max_tokens is {max_tokens}, it must not be negative")
        self._cap = max_tokens or None
        self._stop = tuple(dict.fromkeys(text for text in stop if text))
        self._held = ""
        self._tokens = 0
        self._finished = False

    @property
    def tokens(self) -> int:
        """Tokens fed so far: `tokens_generated` of S1 2.5."""
        return self._tokens

    def feed(self, text: str, tokens: int = 1) -> StopStep:
        """Account for `tokens` new tokens whose decoded text is `text` (empty while a character is incomplete)."""
        if self._finished:
            return StopStep("", None)
        self._tokens += tokens
        pending = self._held + text
        cut = min((at for at in (pending.find(word) for word in self._stop) if at >= 0), default=-1)
        if cut >= 0:
            self._finished, self._held = True, ""
            return StopStep(pending[:cut], "stop")
        if self._cap is not None and self._tokens >= self._cap:
            self._finished, self._held = True, ""
            return StopStep(pending, "length")
        keep = self._possible_start(pending)
        self._held = pending[len(pending) - keep :]
        return StopStep(pending[: len(pending) - keep], None)

    def flush(self) -> str:
        """The text held back, when the generation ends for another reason (EOS, context)."""
        held, self._held, self._finished = self._held, "", True
        return held

    def _possible_start(self, text: str) -> int:
        """Length of the longest end of `text` with which some stop string begins."""
        longest = 0
        for word in self._stop:
            for size in range(min(len(word) - 1, len(text)), longest, -1):
                if text.endswith(word[:size]):
                    longest = size
                    break
        return longest
