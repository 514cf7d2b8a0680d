"""What the processes of a run hold: resident bytes, descriptors, threads, over their lives."""

from __future__ import annotations

import contextlib
import os
import statistics
from dataclasses import dataclass, field
from pathlib import Path

from tests.e2e.stack import Process

PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
SETTLED_S = 120.0  # caches, arenas and rings fill up first; growth is counted from then on
LIFE_S_MIN = 420.0  # a shorter life says nothing about growth


@dataclass(slots=True)
class Life:
    """One process: (seconds, resident bytes, descriptors, threads) at each look."""

    part: str
    looks: list[tuple[float, int, int, int]] = field(default_factory=list)

    def settled(self) -> list[tuple[float, int, int, int]]:
        """Without its beginning."""
        return [look for look in self.looks if look[0] - self.looks[0][0] >= SETTLED_S]

    def growth(self, column: int) -> float:
        """Of a column: the median of the last third less that of the first, once it has settled."""
        looks = self.settled()
        third = max(1, len(looks) // 3)
        return statistics.median(look[column] for look in looks[-third:]) - statistics.median(
            look[column] for look in looks[:third]
        )

    @property
    def tells(self) -> bool:
        """Whether it lived long enough."""
        return bool(self.looks) and self.looks[-1][0] - self.looks[0][0] >= LIFE_S_MIN


class Watch:
    """Look at a run's processes every few seconds."""

    def __init__(self) -> None:
        self.lives: dict[int, Life] = {}

    def look(self, processes: list[Process], now_s: float) -> None:
        """Take one measurement of each."""
        for process in processes:
            with contextlib.suppress(OSError, IndexError):
                folder = Path(f"/proc/{process.pid}")
                resident = int((folder / "statm").read_text().split()[1]) * PAGE_BYTES
                threads = int((folder / "stat").read_text().rpartition(")")[2].split()[17])
                descriptors = len(list((folder / "fd").iterdir()))
                life = self.lives.setdefault(process.pid, Life(process.part))
                life.looks.append((now_s, resident, descriptors, threads))

    def figures(self) -> dict[str, dict[str, float]]:
        """By part: the largest growth of any life that tells, per hour for bytes, and the most that was ever held."""
        found: dict[str, dict[str, float]] = {}
        for life in self.lives.values():
            part = found.setdefault(life.part, {"lives": 0})
            part["lives"] += 1
            for column, name in ((1, "rss_bytes"), (2, "fds"), (3, "threads")):
                part[f"{name}_max"] = max(part.get(f"{name}_max", 0), max(look[column] for look in life.looks))
                if life.tells:
                    part[f"{name}_growth"] = max(part.get(f"{name}_growth", -1e18), life.growth(column))
            if life.tells:
                part["life_s"] = max(part.get("life_s", 0.0), round(life.looks[-1][0] - life.looks[0][0]))
        return found
