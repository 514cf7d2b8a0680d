"""The runs that the dashboard knows, and who is woken when one changes. No I/O."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from services.datastream_collector.reader import Entry
from services.datastream_collector.web.run_view import RunView

RUNS_MAX = 50  # views of older runs of a long archive are dropped; `mvp-archive runs` lists all


class Store:
    """Views by run number. sinks: called with each entry, as the metrics are."""

    def __init__(self, sinks: tuple[Callable[[Entry], None], ...] = ()) -> None:
        self.runs: OrderedDict[int, RunView] = OrderedDict()
        self.source: dict[str, Any] = {"kind": "none", "state": "connecting"}
        """What is read: {kind: "live" | "archive", state: connecting, live, lost, reading, complete, error…}."""
        self.version = 0
        self._sinks = sinks
        self._changed = asyncio.Event()

    def add(self, entry: Entry) -> None:
        """The next frame."""
        view = self.runs.get(entry.run)
        if view is None:
            view = self.runs[entry.run] = RunView(entry.run)
            while len(self.runs) > RUNS_MAX:
                self.runs.popitem(last=False)
        for take in (view.add, *self._sinks):
            try:
                take(entry)
            except Exception as error:
                # One strange record of a worker must not end the page for all others.
                self.source["not_shown"] = self.source.get("not_shown", 0) + 1
                self.source["not_shown_error"] = f"{type(error).__name__}: {error}"[:200]
        self.touch()

    def miss(self, count: int) -> None:
        """Frames that the subscription lost."""
        if self.runs:
            next(reversed(self.runs.values())).miss(count)
        self.touch()

    def say(self, **source: Any) -> None:
        """The state of the source changed."""
        self.source = {**self.source, **source}
        self.touch()

    def touch(self) -> None:
        """Wake whoever waits for a change."""
        self.version += 1
        self._changed.set()

    async def changed(self, timeout_s: float) -> None:
        """Until something changes, at most timeout_s."""
        self._changed.clear()
        try:
            await asyncio.wait_for(self._changed.wait(), timeout_s)
        except TimeoutError:
            return

    def view(self, run: int | None) -> RunView | None:
        """The run of this number, or the last one."""
        if run is not None:
            return self.runs.get(run)
        return next(reversed(self.runs.values()), None)

    def listed(self) -> list[dict[str, Any]]:
        """The runs for the selector, newest first."""
        return [
            {"number": view.number, "state": view.state, "began_ms": view.began_ms}
            for view in reversed(self.runs.values())
        ]
