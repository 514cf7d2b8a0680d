"""The collector's core: observations and worker frames in, positions assigned, sinks fed (S1 2.8, 3.9, 7.12, 8).

Nothing that arrives here changes lifecycle state (S1 9.18): bad frames are counted, a failing archive is said once. The
archive is a lossless cursor over the ring; a dashboard or a remote subscriber is one more, which may miss frames.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass
from typing import Any, ClassVar

from common.actors import Ctx
from common.addresses import Role
from common.config_slices import CollectorSlice
from common.effects import Effect, Exit, StopSignal
from common.limits import EXIT_SETTLE_MS, FLUSH_MS, STREAM_BATCH_MS
from common.messages.service import RunEnded, ServiceFailed
from common.messages.stream import (
    ChannelDeclaration,
    ExpectFlow,
    Flush,
    Flushed,
    Gap,
    Observe,
    StreamFrames,
)
from common.records import CHANNEL_BOOTSTRAP, bootstrap_record
from common.service_actor import ServiceActor
from services.datastream_collector.frames import CollectedFrame, Cursor, FrameRing, Recovered
from services.datastream_collector.streams import Accepted, Flows, OwnStream

PHASE = "datastream_archive"
ENDPOINT_PHASE = "datastream_endpoint"
QUIET_MS = 3 * STREAM_BATCH_MS  # Flush comes on a faster plane than the records before it, which wait for their batch
HELD_MESSAGES_MAX = 4096  # between spawn and the configuration slice, usually some 100 ms
WHOSE_RUN_MS = 5000  # above the time in which all are back at a router that was restarted with this process
OWNER_GONE_LINGER_MS = 2000  # the other services still say how they ended

_SETTLE = "collector:settle"
_SETTLE_LIMIT = "collector:settle-limit"
_EARLY = "collector:early"
_GONE = "collector:owner-gone"
_WHOSE_RUN = "collector:whose-run"


@dataclass(frozen=True, slots=True)
class ArchiveOpen(Effect):
    """Open the frame archive; answered by ArchiveOpened or ArchiveFailed."""

    path: str
    max_bytes: int


@dataclass(frozen=True, slots=True)
class ArchiveAppend(Effect):
    """Write frames in order; answered by ArchiveWritten."""

    frames: tuple[CollectedFrame, ...]


@dataclass(frozen=True, slots=True)
class FramesCollected(Effect):
    """The ring has new frames: whoever has a cursor may read on."""


@dataclass(frozen=True, slots=True)
class EndpointFailed:
    """Event: the stream socket cannot be bound, in one sentence: a startup failure (S1 10.11)."""

    error: str


@dataclass(frozen=True, slots=True)
class ArchiveOpened:
    """Event: the archive is open; what it said of an earlier life of this collector."""

    recovered: Recovered


@dataclass(frozen=True, slots=True)
class ArchiveFailed:
    """Event: the archive cannot be opened, in one sentence: a startup failure (S1 10.11)."""

    error: str


@dataclass(frozen=True, slots=True)
class ArchiveWritten:
    """Event: of an ArchiveAppend, `frames` were written and `failed` were not; error is the first failure's text."""

    frames: int
    failed: int = 0
    error: str = ""


class CollectorActor(ServiceActor):
    """Main actor of the datastream collector. States: opening (records are held), collecting, stopping."""

    ROLE: ClassVar[Role] = Role.COLLECTOR
    SLICE = CollectorSlice
    Incoming = (
        *ServiceActor.SERVICE_INCOMING,
        Observe,
        Gap,
        ExpectFlow,
        StreamFrames,
        Flush,
        ArchiveOpened,
        ArchiveFailed,
        ArchiveWritten,
        EndpointFailed,
    )

    def __init__(self) -> None:
        super().__init__()
        self.ring = FrameRing()
        self.counters: Counter[str] = Counter()
        """refused: <reason>, malformed, duplicates, gaps, archive_errors, held_overflow."""
        self.archived = 0
        self._stream: OwnStream | None = None
        self._flows = Flows()
        self._held: deque[tuple[Observe | Gap | StreamFrames, bytes]] = deque()
        self._archive: Cursor | None = None
        self._unwritten = 0
        self._archive_error = ""
        self._open_error = ""
        self._open_error_phase = PHASE
        self._open_error_told = 0
        self._flush_to: list[bytes] = []
        self._stopping = False
        self._recovered: Recovered | None = None
        """What the archive says, until it is known whose run the first records are of: somebody is there whom it knows,
        or an orchestrator."""

    # --- life -------------------------------------------------------------------------------------------------
    def on_config(self, config: CollectorSlice, ctx: Ctx) -> None:
        """Open the archive if there is one (S1 7.13: else it is absent), then collect."""
        if config.frame_log:
            ctx.effect(ArchiveOpen(config.frame_log, config.archive_max_bytes))
        else:
            self._start(Recovered(), ctx)
            self.ready(ctx)

    def receive(self, msg: Any, ctx: Ctx) -> None:
        """Streams in; flushes; what the archive says."""
        match msg:
            case Observe() | Gap() | StreamFrames() if self._stream is None:
                self._held.append((msg, ctx.sender))
                if len(self._held) > HELD_MESSAGES_MAX:
                    self._held.popleft()
                    self.counters["held_overflow"] += 1
                self._start_if_told([ctx.sender], ctx)
            case Observe() | Gap() | StreamFrames():
                self._take(msg, ctx.sender, ctx)
                self._settle_later(ctx)
            case ExpectFlow():
                for message, sender in self._flows.expect(msg):
                    self._accept(message, sender, ctx)
            case Flush():
                self._start_if_open(ctx)
                self._flush_to.append(ctx.sender)
                ctx.timer(_SETTLE, QUIET_MS)
                if not self._stopping:
                    ctx.timer(_SETTLE_LIMIT, FLUSH_MS // 2)
            case ArchiveOpened():
                self._recovered = msg.recovered
                self._start_if_told([sender for _, sender in self._held], ctx)
                if self._recovered is not None:
                    ctx.timer(_WHOSE_RUN, WHOSE_RUN_MS)
                self.ready(ctx)
            case EndpointFailed():
                self._open_error, self._open_error_phase = msg.error, ENDPOINT_PHASE
                self._tell_open_error(ctx)
            case ArchiveFailed():
                self._open_error, self._open_error_phase = msg.error, PHASE
                self._start(Recovered(), ctx)
                self._tell_open_error(ctx)
            case ArchiveWritten():
                self._written(msg, ctx)
            case _:
                super().receive(msg, ctx)

    def on_timer(self, key: str, ctx: Ctx) -> None:
        """Settled after a Flush or a stop signal; unknown flows that nobody announced; the launcher's linger."""
        if key in (_SETTLE, _SETTLE_LIMIT):
            self._settled(ctx, force=key == _SETTLE_LIMIT and self._stopping)
        elif key == _EARLY:
            self._count("refused: unknown flow", self._flows.expired(ctx.now_ms))
            self._watch_early(ctx)
        elif key == _WHOSE_RUN:
            self._start_if_open(ctx)
        elif key == _GONE:
            self._exit(ctx)
        else:
            super().on_timer(key, ctx)

    def on_view(self, view: str, ctx: Ctx) -> None:
        """A new orchestrator: it is told why there is no archive, and after the end of a run its run is a new one."""
        if view == "routes":
            self._tell_open_error(ctx)
            self._new_run(ctx)
            self._start_if_told([], ctx)

    def on_run_ended(self, msg: RunEnded, ctx: Ctx) -> None:
        """Nothing yet: last words still belong to this run's stream; it ends when the next orchestrator appears."""

    def on_stop_signal(self, signal: StopSignal, ctx: Ctx) -> None:
        """SIGTERM: write what was received and what is on its way, then exit; a second signal does not wait."""
        if signal.count > 1:
            self._exit(ctx)
        elif not self._stopping:
            self._start_if_open(ctx)
            self._stopping = True
            ctx.timer(_SETTLE, QUIET_MS)
            ctx.timer(_SETTLE_LIMIT, EXIT_SETTLE_MS)

    def on_owner_gone(self, ctx: Ctx) -> None:
        """The launcher is dead: the others end too, and the archive should show how."""
        ctx.timer(_GONE, OWNER_GONE_LINGER_MS)

    def check(self) -> None:
        """The archive cursor has everything that is in the ring, and counts never run ahead."""
        assert self._unwritten >= 0
        if self._archive is not None:
            assert self._archive.at == self.ring.end
        if self._stream is not None:
            assert not self._held

    # --- for sinks --------------------------------------------------------------------------------------------
    def channels(self) -> list[tuple[str, list[ChannelDeclaration]]]:
        """(stream, channel list) of all streams: what a late subscriber gets first."""
        own = [] if self._stream is None else [(self._stream.name, self._stream.declarations())]
        return own + self._flows.declarations()

    def cursor(self, *, replay: bool = False) -> Cursor:
        """A sink that may miss frames, and is told so: future frames, or also those still in the ring."""
        return self.ring.cursor(replay=replay)

    # --- streams ----------------------------------------------------------------------------------------------
    def _start_if_told(self, senders: list[bytes], ctx: Ctx) -> None:
        routes, recovered = ctx.views.routes, self._recovered
        if recovered is None:
            return
        is_told = not recovered.streams or routes.named(Role.ORCHESTRATOR) is not None
        if is_told or recovered.knows_one([*senders, *(route.address for route in routes.entries())]):
            self._start_if_open(ctx)

    def _start_if_open(self, ctx: Ctx) -> None:
        recovered, self._recovered = self._recovered, None
        if recovered is not None:
            self._start(recovered, ctx, archive=True)

    def _start(self, recovered: Recovered, ctx: Ctx, *, archive: bool = False) -> None:
        self._stream = OwnStream(self.config.run_id, recovered)
        self._flows.recover(recovered)
        if archive:
            self._archive = self.ring.cursor(lossless=True)
        while self._held:
            message, sender = self._held.popleft()
            self._take(message, sender, ctx)

    def _take(self, msg: Observe | Gap | StreamFrames, sender: bytes, ctx: Ctx) -> None:
        self._new_run(ctx)
        if isinstance(msg, StreamFrames):
            self._accept(msg, sender, ctx)
            return
        stream = self._own(ctx)
        if isinstance(msg, Gap):
            frames = stream.lost(msg.first, msg.last, sender, ctx.wall_ms)
            self.counters["gaps"] += len(frames)
        else:
            frames = stream.ingest(msg.records, sender, ctx.wall_ms)
            self._count("duplicates", len(msg.records) - sum(frame.producer_seq > 0 for frame in frames))
        self._publish(frames, ctx)

    def _accept(self, msg: StreamFrames, sender: bytes, ctx: Ctx) -> None:
        if not self._flows.knows(msg.flow_id):
            self._count("refused: unknown flow", self._flows.hold(msg, sender, ctx.now_ms))
            self._watch_early(ctx)
            return
        accepted = self._flows.accept(msg, sender, ctx.wall_ms)
        self._count("malformed", accepted.malformed)
        self._count("duplicates", accepted.duplicates)
        if accepted.refused:
            self._count(f"refused: {accepted.refused}", 1)
        self._say(accepted, ctx)
        stream = self._own(ctx)
        gaps = [
            stream.gap(accepted.stream, sender[:8].hex(), first, last, "overrun", ctx.wall_ms)
            for first, last in accepted.gaps
        ]
        self.counters["gaps"] += len(gaps)
        self._publish([*gaps, *accepted.frames], ctx)

    def _say(self, accepted: Accepted, ctx: Ctx) -> None:
        """Openings, ends and the first refusal of a kind are records; frames of a flood of refusals are not."""
        if accepted.opened:
            self._record("worker_datastream", "ready", {"stream": accepted.stream}, ctx)
        if accepted.ended:
            self._record("worker_datastream", "observed", {"stream": accepted.stream, "event": "end"}, ctx)
        if accepted.refused and self.counters[f"refused: {accepted.refused}"] == 1:
            detail = {"stream": accepted.stream, "error": accepted.refused}
            self._record("worker_datastream", "failed", detail, ctx)

    def _own(self, ctx: Ctx) -> OwnStream:
        stream = self._stream
        if stream is None:
            raise RuntimeError("frames before the stream was started")  # a bug here: _start comes first
        if not stream.started and ctx.views.routes.named(Role.ORCHESTRATOR) is None:
            # Last words of the archived run, if somebody of it is still there; the first to speak may be a new one.
            stream.resume_if_archived(route.address for route in ctx.views.routes.entries())
        return stream

    def _publish(self, frames: list[CollectedFrame], ctx: Ctx) -> None:
        for frame in frames:
            self.ring.append(frame)
        if self._archive is not None and frames:
            unread = tuple(item for item in self._archive.take() if isinstance(item, CollectedFrame))
            self._unwritten += len(unread)
            ctx.effect(ArchiveAppend(unread))
        if frames:
            # Behind the archive: what a reader has seen, a collector after this one knows of.
            ctx.effect(FramesCollected())

    def _new_run(self, ctx: Ctx) -> None:
        route = ctx.views.routes.named(Role.ORCHESTRATOR)
        if self._stream is None or route is None:
            return
        if self._stream.begin(route.boot, (entry.address for entry in ctx.views.routes.entries())):
            # One orchestrator process is one run (design.md 2).
            self._flows = Flows()

    def _watch_early(self, ctx: Ctx) -> None:
        if (deadline := self._flows.next_deadline()) is not None:
            ctx.timer(_EARLY, deadline - ctx.now_ms)

    # --- the archive ------------------------------------------------------------------------------------------
    def _tell_open_error(self, ctx: Ctx) -> None:
        route = ctx.views.routes.named(Role.ORCHESTRATOR)
        if self._open_error and route and route.boot != self._open_error_told:
            self._open_error_told = route.boot
            ctx.send(
                route.address, ServiceFailed(service=self.ROLE, phase=self._open_error_phase, error=self._open_error)
            )

    def _written(self, msg: ArchiveWritten, ctx: Ctx) -> None:
        self._unwritten -= msg.frames + msg.failed
        self.archived += msg.frames
        if msg.failed:
            self._count("archive_errors", msg.failed)
            if not self._archive_error:
                # Best effort after open (S1 10.11): said once, then only counted.
                self._archive_error = msg.error
                self._record(PHASE, "failed", {"path": self.config.frame_log, "error": msg.error}, ctx)

    def _settle_later(self, ctx: Ctx) -> None:
        if self._flush_to or self._stopping:
            ctx.timer(_SETTLE, QUIET_MS)

    def _settled(self, ctx: Ctx, *, force: bool) -> None:
        """Quiet for three batches: answer the flushes; end if we are to end."""
        if not self._flush_to and not self._stopping:
            return
        if (self._unwritten or self._stream is None) and not force:
            ctx.timer(_SETTLE, STREAM_BATCH_MS)
            return
        for to in self._flush_to:
            ctx.send(to, Flushed(archived=self.archived, error=self._archive_error or self._open_error))
        self._flush_to = []
        if self._stopping:
            self._exit(ctx)
        else:
            ctx.cancel(_SETTLE)
            ctx.cancel(_SETTLE_LIMIT)

    def _exit(self, ctx: Ctx) -> None:
        # The archive stays open: what the bus still brings while the host says goodbye is written too.
        ctx.effect(Exit(0))

    def _record(self, phase: str, status: str, detail: dict[str, Any], ctx: Ctx) -> None:
        """The collector's own words go the way of everybody's: through the observer and its redaction."""
        ctx.observe(CHANNEL_BOOTSTRAP, bootstrap_record(phase, status, self.config.run_id, 0, detail))

    def _count(self, what: str, count: int) -> None:
        if count:
            self.counters[what] += count
