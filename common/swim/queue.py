"""Rumours waiting to be passed on, each a bounded number of times, the freshest first (memberlist's broadcasts)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclass(slots=True)
class _Rumour(Generic[T]):
    item: T
    size: int
    number: int
    sent: int = 0


class Rumours(Generic[T]):
    """Keyed by subject: a newer rumour about it replaces the older, so the queue is never longer than the table."""

    def __init__(self) -> None:
        self._rumours: dict[bytes, _Rumour[T]] = {}
        self._number = 0

    def __len__(self) -> int:
        return len(self._rumours)

    def __contains__(self, key: bytes) -> bool:
        return key in self._rumours

    def put(self, key: bytes, item: T, size: int) -> None:
        """Replace whatever is queued about this subject; its budget starts anew."""
        self._number += 1
        self._rumours[key] = _Rumour(item, size, self._number)

    def drop(self, key: bytes) -> None:
        """Forget the rumour; an absent one is fine."""
        self._rumours.pop(key, None)

    def take(self, budget: int, limit: int) -> tuple[list[T], int]:
        """What fits into `budget` bytes: fewest sent first, then largest, then newest. Returns it and the bytes used.

        limit: how often a rumour is passed on (formulas.retransmit_limit); it leaves the queue with its last time.
        """
        if not self._rumours:
            return [], 0
        taken, used = [], 0
        order = sorted(self._rumours.items(), key=lambda pair: (pair[1].sent, -pair[1].size, -pair[1].number))
        for key, rumour in order:
            if used + rumour.size > budget:
                continue
            used += rumour.size
            taken.append(rumour.item)
            rumour.sent += 1
            if rumour.sent >= limit:
                del self._rumours[key]
        return taken, used
