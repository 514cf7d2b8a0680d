"""The bus on the whole screen: the busiest types and links, and the newest envelopes. `mvp-tap --live`."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator

from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from tools.tap_records import Line, Names, pieces, printable
from tools.tap_stats import HEAD, Stats

REDRAW_S = 0.5
WINDOW_S = 10.0  # rates are of the last one to two windows
LINES_KEPT = 100
TEXT_CHARS_MAX = 80


class Screen:
    """What is drawn: rates of the running window, or of the one before while it is young."""

    def __init__(self, names: Names) -> None:
        self._names = names
        self._stats = Stats()
        self._lines: deque[str] = deque(maxlen=LINES_KEPT)
        self._began = time.monotonic()
        self._before: tuple[list[tuple[str, ...]], str] | None = None

    def add(self, line: Line) -> None:
        """The next envelope that is wanted."""
        self._stats.add(line)
        self._lines.append(printable(" ".join(pieces(line, self._names, TEXT_CHARS_MAX))))

    def drawn(self, height: int) -> Group:
        """For `height` lines of terminal."""
        now = time.monotonic()
        rows, total = self._stats.table(self._names, height), self._stats.total()
        if now - self._began >= WINDOW_S:
            self._before, self._began = (rows, total), now
            self._stats.reset()
        elif self._before is not None:
            rows, total = self._before
        share = max(4, height * 3 // 5)
        table = Table(expand=True, box=None, pad_edge=False)
        for at, name in enumerate(HEAD):
            table.add_column(name, justify="right" if 3 < at < 9 else "left", no_wrap=True, overflow="ellipsis")
        for row in rows[: share - 4]:
            table.add_row(*(Text(cell) for cell in row))
        newest = list(self._lines)[-max(1, height - share - 3) :]
        tail = Text("\n".join(newest), no_wrap=True, overflow="ellipsis")
        return Group(
            Panel(table, title=Text(total), border_style="dim"), Panel(tail, title="newest", border_style="dim")
        )


def watch(heard: Iterator[Line | None], names: Names, console: Console | None = None) -> None:
    """Draw until the source ends. heard: None where nothing came for a while."""
    console = console or Console()
    screen = Screen(names)
    due = 0.0
    with Live(console=console, screen=True, auto_refresh=False) as live:
        for line in heard:
            if line is not None:
                screen.add(line)
            if (now := time.monotonic()) >= due:
                due = now + REDRAW_S
                live.update(screen.drawn(console.size.height), refresh=True)
