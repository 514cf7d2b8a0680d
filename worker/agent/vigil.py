"""Progress that is told and silence that is a fault: how the agent watches its engine (design.md 4, 6 row 14).

The engine's Progress messages and its shared page both count as movement. While the stage loads, the orchestrator
is told the latest fact at most ten times a second; whenever the engine owes an answer, two minutes without movement
end it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from common.actors import Ctx
from common.limits import STAGE_SILENCE_MS
from common.messages.engine import Progress
from common.messages.orchestrator import ObserveStageProgress
from worker.agent.events import PageRead, ReadPage, WorkerIdentity
from worker.agent.records import ENGINE, node_event

PAGE_TIMER = "page"
PROGRESS_TIMER = "progress"
PAGE_READ_MS = 500  # "at most 10 Hz"; a limit of two minutes needs no finer look
PROGRESS_MS = 100  # at most 10 Hz
HEARTBEAT_MS = 1000  # a phase that only bumps the page is told to the orchestrator as often as this


@dataclass(slots=True)
class Vigil:
    """One engine's movement. The owner calls `mind` after every event and hands the two timers over."""

    identity: WorkerIdentity
    watching: bool = False
    loading: bool = False
    limit_ms: int = STAGE_SILENCE_MS
    """How long without movement is a fault; a pipeline stage that serves bumps the page each second."""
    _moved_ms: int = 0
    _page: tuple[str, int] = ("", 0)
    _latest: Progress = field(default_factory=lambda: Progress(phase="load", done=0, total=0))
    _sent_ms: int | None = None
    _waits: bool = False

    @property
    def phase(self) -> str:
        """What the engine was last seen doing."""
        return self._page[0] or "starting"

    def mind(self, owes: bool, loading: bool, ctx: Ctx) -> None:
        """owes: the engine owes an answer, so its silence counts; loading: its progress is told."""
        self.loading = loading
        if not loading and self._waits:
            self._waits = False
            ctx.cancel(PROGRESS_TIMER)
        if owes and not self.watching:
            self._moved_ms = ctx.now_ms
            ctx.timer(PAGE_TIMER, PAGE_READ_MS)
        elif not owes and self.watching:
            ctx.cancel(PAGE_TIMER)
        self.watching = owes

    def moved(self, ctx: Ctx) -> None:
        """The engine said something."""
        self._moved_ms = ctx.now_ms

    def silent_s(self, ctx: Ctx) -> int:
        """The page timer is due: look again, and return 0; or how long the engine has been silent, in seconds, when
        that is too long."""
        if not self.watching:
            return 0
        silent_ms = ctx.now_ms - self._moved_ms
        if silent_ms >= self.limit_ms:
            return silent_ms // 1000
        ctx.effect(ReadPage())
        ctx.timer(PAGE_TIMER, PAGE_READ_MS)
        return 0

    def page_read(self, msg: PageRead, ctx: Ctx) -> None:
        """Compare the page with the last look."""
        seen = (msg.phase, msg.progress)
        if seen == self._page:
            return
        self._page, self._moved_ms = seen, ctx.now_ms
        if self._sent_ms is None or ctx.now_ms - self._sent_ms >= HEARTBEAT_MS:
            self.tell(ctx)

    def progress(self, msg: Progress, ctx: Ctx) -> None:
        """The engine's own words about a phase."""
        self._latest = msg
        self.tell(ctx)

    def timer_due(self, ctx: Ctx) -> None:
        """The progress timer is due."""
        self._waits = False
        self.tell(ctx)

    def tell(self, ctx: Ctx) -> None:
        """The latest fact to the orchestrator, now or when 100 ms are over since the last."""
        if not self.loading or self._waits:
            return
        if self._sent_ms is not None and ctx.now_ms - self._sent_ms < PROGRESS_MS:
            self._waits = True
            ctx.timer(PROGRESS_TIMER, PROGRESS_MS - (ctx.now_ms - self._sent_ms))
            return
        self._sent_ms = ctx.now_ms
        report = ObserveStageProgress(
            run_id=self.identity.run_id,
            node_id=self.identity.node_id,
            stage_index=self.identity.stage_index,
            phase=self._latest.phase,
            done=self._latest.done,
            total=self._latest.total,
        )
        ctx.send(self.identity.orchestrator, report)
        detail = {"phase": report.phase, "done": report.done, "total": report.total, "page": self._page[0]}
        node_event(ctx, self.identity, ENGINE, "progress", "observed", detail)
