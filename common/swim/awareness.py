"""Lifeguard's local health: how much a member distrusts its own observations (anchors.md C2)."""

from __future__ import annotations


class Awareness:
    """A saturating score from 0 (well) to limit - 1. Bad news about ourselves raises it, answered probes lower it."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self.score = 0

    def apply(self, delta: int) -> None:
        """Move the score by delta, within its bounds."""
        self.score = min(max(self.score + delta, 0), self._limit - 1)

    def scale(self, ms: int) -> int:
        """A duration as a member of this health should use it."""
        return ms * (self.score + 1)
