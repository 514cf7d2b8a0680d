"""The collector's core: positions, identity, flows, cursors, flushes; what arrives can change nothing else."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.addresses import Role, short
from common.config_slices import CollectorSlice, encode_slice
from common.datastream import orchestrator_stream, worker_stream
from common.effects import Exit, OwnerGone, StopSignal, ViewChanged
from common.limits import COLLECTOR_RING_FRAMES_MAX, EXIT_DRAIN_MS, EXIT_SETTLE_MS, FLUSH_MS, SERVICE_STOP_MS
from common.messages.bus import RouteEntry, Snapshot, ViewItem
from common.messages.config import ConfigSlice
from common.messages.service import RunEnded, ServiceFailed, ServiceReady
from common.messages.stream import (
    ChannelDeclaration,
    ExpectFlow,
    Flush,
    Flushed,
    Frame,
    Gap,
    Observation,
    Observe,
    StreamFrames,
)
from common.records import CORE_CHANNELS
from services.datastream_collector.core import (
    QUIET_MS,
    ArchiveAppend,
    ArchiveFailed,
    ArchiveOpen,
    ArchiveOpened,
    ArchiveWritten,
    CollectorActor,
    EndpointFailed,
    FramesCollected,
)
from services.datastream_collector.frames import CollectedFrame, CursorGap, FrameRing, Recovered
from services.datastream_collector.streams import CHANNEL_GAP, EARLY_BYTES_MAX, EARLY_MS
from tests.support.harness import Harness

ORCHESTRATOR = b"o" * 32
PRODUCER = b"p" * 32
OTHER = b"q" * 32
WORKER = b"w" * 32


class Bench:
    """The collector with a sink that takes what the archive would get."""

    def __init__(self, frame_log: str = "/tmp/a.jsonl", recovered: Recovered | None = None, *, start: bool = True):
        self.actor = CollectorActor()
        self.harness = Harness(self.actor, name=Role.COLLECTOR)
        self.archived: list[CollectedFrame] = []
        self.left: list[Any] = []
        self.write = True
        if start:
            self.configure(frame_log)
            if frame_log:
                self.tell(ArchiveOpened(recovered or Recovered()))

    def configure(self, frame_log: str) -> None:
        config = encode_slice(CollectorSlice(frame_log=frame_log, run_id=1))
        self.tell(ConfigSlice(part=Role.COLLECTOR, digest="d", slice_json=config))

    def tell(self, msg: Any, src: bytes = b"") -> None:
        self.harness.tell(msg, src=src, src_node=src)
        self.perform()

    def advance(self, ms: int) -> None:
        self.harness.advance(ms)
        self.perform()

    def perform(self) -> None:
        for effect in self.harness.effects():
            if isinstance(effect, ArchiveAppend):
                self.archived.extend(effect.frames)
                if self.write:
                    self.harness.tell(ArchiveWritten(len(effect.frames)))
            elif not isinstance(effect, FramesCollected):
                self.left.append(effect)

    def route(
        self,
        boot: int,
        address: bytes = ORCHESTRATOR,
        role: Role = Role.ORCHESTRATOR,
        beside: Sequence[bytes] = (),
    ) -> None:
        """The only route from now on, but for observers of services beside it."""
        items: list[ViewItem] = [
            RouteEntry(address=address, node=b"O" * 32, boot=boot, generation=1, role=role, name=role),
            *(RouteEntry(address=b, node=b"S" * 32, boot=1, generation=1, role=Role.ROUTER, name="") for b in beside),
        ]
        self.harness.views.routes.apply(Snapshot(view="routes", version=1, items=items))
        self.tell(ViewChanged("routes"))

    def sent(self) -> list[Any]:
        return [message for _, message in self.harness.sent()]


def observe(first: int, *payloads: bytes, channel: str = "mvp.orch.bootstrap", source: str = "") -> Observe:
    return Observe(
        records=[
            Observation(producer_seq=first + at, channel=channel, payload=payload, source=source)
            for at, payload in enumerate(payloads)
        ]
    )


def expect(flow: bytes = b"f", token: bytes = b"t", node_id: int = 2) -> ExpectFlow:
    return ExpectFlow(flow_id=flow, token=token, node_id=node_id, run_id=1)


def frames(*payloads: bytes, first: int = 0, flow: bytes = b"f", token: bytes = b"t", **more: Any) -> StreamFrames:
    items = [Frame(channel_id=1, position=first + at, payload=payload) for at, payload in enumerate(payloads)]
    return StreamFrames(flow_id=flow, token=token, frames=items, **more)


HEADER: dict[str, Any] = {
    "stream": worker_stream(2, 1),
    "channels": [ChannelDeclaration(channel_id=1, name="mvp.worker.stderr")],
}


# --- the orchestrator's stream ---------------------------------------------------------------------------------
@pytest.mark.spec("S1 7.12", "S1 8.2", "S1 8.3")
def test_the_stream_has_the_core_channels_first_and_others_on_first_use() -> None:
    bench = Bench()
    ((stream, declared),) = bench.actor.channels()
    assert stream == "mvp-orchestrator/1"
    assert [(item.channel_id, item.name) for item in declared] == list(enumerate(CORE_CHANNELS, 1))
    bench.tell(observe(1, b"x", channel="mvp.provisioning.logs.node.1.stdout"), PRODUCER)
    bench.tell(observe(2, b"y", channel="provider.own"), PRODUCER)
    new = len(CORE_CHANNELS) + 1
    assert [(frame.channel_id, frame.channel) for frame in bench.archived] == [
        (new, "mvp.provisioning.logs.node.1.stdout"),
        (new + 1, "provider.own"),
    ]


@pytest.mark.spec("S1 3.9", "S1 8.1", "S1 8.13")
def test_positions_are_assigned_on_arrival_across_producers() -> None:
    bench = Bench()
    bench.tell(observe(1, b"a", b"b"), PRODUCER)
    bench.tell(observe(1, b"c", source="node_bootstrap_stdio"), OTHER)
    bench.tell(observe(3, b"d", source="made up"), PRODUCER)
    assert [(f.position, f.payload, f.source, f.stream) for f in bench.archived] == [
        (0, b"a", "orchestrator", "mvp-orchestrator/1"),
        (1, b"b", "orchestrator", "mvp-orchestrator/1"),
        (2, b"c", "node_bootstrap_stdio", "mvp-orchestrator/1"),
        (3, b"d", "orchestrator", "mvp-orchestrator/1"),
    ]


def test_what_was_seen_is_not_taken_twice() -> None:
    bench = Bench()
    bench.tell(observe(1, b"a", b"b"), PRODUCER)
    bench.tell(observe(5, b"e"), PRODUCER)
    bench.tell(observe(1, b"a", b"b", b"c", b"d", b"e", b"f"), PRODUCER)
    assert [frame.payload for frame in bench.archived] == [b"a", b"b", b"e", b"c", b"d", b"f"]
    assert bench.actor.counters["duplicates"] == 3
    bench.tell(observe(1, b"other"), OTHER)
    assert bench.archived[-1].payload == b"other"


def test_a_gap_is_a_frame_once_and_only_for_what_is_missing() -> None:
    bench = Bench()
    bench.tell(observe(1, b"a"), PRODUCER)
    bench.tell(observe(4, b"d"), PRODUCER)
    bench.tell(Gap(first=1, last=9), PRODUCER)
    bench.tell(Gap(first=1, last=9), PRODUCER)
    gaps = [json.loads(frame.payload) for frame in bench.archived if frame.channel == CHANNEL_GAP]
    assert [(gap["first"], gap["last"], gap["lost"], gap["reason"]) for gap in gaps] == [
        (2, 3, 2, "overrun"),
        (5, 9, 5, "overrun"),
    ]
    assert {(gap["type"], gap["stream"], gap["producer"]) for gap in gaps} == {
        ("DatastreamGap", "mvp-orchestrator/1", short(PRODUCER))
    }
    assert [frame.position for frame in bench.archived] == [0, 1, 2, 3]


BATCHES = st.tuples(st.sampled_from([PRODUCER, OTHER]), st.integers(1, 30), st.lists(st.binary(max_size=5)))


@pytest.mark.spec("S1 8.13", "S1 2.8")
@given(
    st.lists(
        st.tuples(st.sampled_from([PRODUCER, OTHER]), st.integers(1, 30), st.lists(st.binary(max_size=5))), max_size=30
    )
)
@settings(max_examples=80)
def test_positions_have_no_hole_and_payloads_no_change(batches: list[tuple[bytes, int, list[bytes]]]) -> None:
    bench = Bench()
    plain: dict[tuple[str, int], bytes] = {}
    for sender, first, payloads in batches:
        bench.tell(observe(first, *payloads), sender)
        for at, payload in enumerate(payloads):
            plain.setdefault((short(sender), first + at), payload)
    assert [frame.position for frame in bench.archived] == list(range(len(plain)))
    assert {(frame.producer, frame.producer_seq): frame.payload for frame in bench.archived} == plain


# --- life ------------------------------------------------------------------------------------------------------
def test_what_comes_before_the_archive_is_open_is_held() -> None:
    bench = Bench(start=False)
    bench.tell(observe(1, b"early"), PRODUCER)
    bench.configure("/x/a.jsonl")
    assert bench.left == [ArchiveOpen("/x/a.jsonl", 0)]
    bench.route(1)
    assert ServiceReady(service=Role.COLLECTOR, boot=7) not in bench.sent()
    bench.tell(ArchiveOpened(Recovered()))
    assert [frame.payload for frame in bench.archived] == [b"early"]
    assert ServiceReady(service=Role.COLLECTOR, boot=7) in bench.sent()


@pytest.mark.spec("S1 3.11", "S1 7.13", "S1 8.12")
def test_without_frame_logging_there_is_no_archive() -> None:
    bench = Bench("")
    bench.route(1)
    bench.tell(observe(1, b"a"), PRODUCER)
    assert bench.archived == [] and bench.left == []
    assert ServiceReady(service=Role.COLLECTOR, boot=7) in bench.sent()


@pytest.mark.spec("S1 10.11")
def test_an_archive_that_cannot_be_opened_is_a_startup_failure() -> None:
    bench = Bench(start=False)
    bench.configure("/x/a.jsonl")
    bench.tell(ArchiveFailed("cannot open the frame archive /x/a.jsonl: Permission denied"))
    assert bench.sent() == []
    bench.route(1)
    failed = ServiceFailed(
        service=Role.COLLECTOR,
        phase="datastream_archive",
        error="cannot open the frame archive /x/a.jsonl: Permission denied",
    )
    assert bench.sent() == [failed]
    bench.tell(ViewChanged("routes"))
    assert bench.sent() == []
    bench.route(2)
    assert bench.sent() == [failed]


@pytest.mark.spec("S1 10.11")
def test_a_stream_socket_that_cannot_be_bound_is_a_startup_failure() -> None:
    bench = Bench()
    bench.route(1)
    bench.sent()
    bench.tell(EndpointFailed("cannot bind the stream socket /x: No space left on device"))
    (failed,) = bench.sent()
    assert isinstance(failed, ServiceFailed)
    assert (failed.phase, failed.error[:11]) == ("datastream_endpoint", "cannot bind")


@pytest.mark.spec("S1 10.11", "S1 9.18", "S1 10.15")
def test_a_write_that_fails_later_is_said_once_and_changes_nothing_else() -> None:
    bench = Bench()
    bench.route(1)
    bench.sent()
    bench.left.clear()
    for _ in range(3):
        bench.harness.actor._unwritten += 1  # type: ignore[attr-defined]
        bench.tell(ArchiveWritten(0, 1, "cannot write the frame archive: No space left on device"))
    (record,) = bench.harness.observed()
    said = json.loads(record.payload)
    assert (said["phase"], said["status"], said["run_id"]) == ("datastream_archive", "failed", 1)
    assert said["detail"]["error"] == "cannot write the frame archive: No space left on device"
    assert bench.sent() == [] and bench.left == []
    assert bench.actor.counters["archive_errors"] == 3
    bench.tell(observe(1, b"goes on"), PRODUCER)
    assert bench.archived[-1].payload == b"goes on"


def test_a_flush_is_answered_when_it_is_quiet_and_written() -> None:
    bench = Bench()
    bench.tell(observe(1, b"a"), PRODUCER)
    bench.tell(Flush(), ORCHESTRATOR)
    bench.advance(QUIET_MS - 1)
    bench.write = False
    bench.tell(observe(2, b"the exit record was still on its way"), PRODUCER)
    bench.advance(QUIET_MS - 1)
    assert bench.sent() == []
    bench.advance(200)
    assert bench.sent() == []
    bench.tell(ArchiveWritten(1))
    bench.advance(QUIET_MS)
    assert bench.sent() == [Flushed(archived=2)]
    bench.advance(5000)
    assert bench.sent() == []


def test_a_chatty_stream_does_not_put_a_flush_off_for_ever() -> None:
    bench = Bench()
    bench.tell(Flush(), ORCHESTRATOR)
    for number in range(1, FLUSH_MS // 20):
        bench.tell(observe(number, b"x"), PRODUCER)
        bench.advance(20)
    assert [type(message) for message in bench.sent()] == [Flushed]


def test_a_stop_signal_lets_what_is_on_its_way_in_and_a_second_one_does_not_wait() -> None:
    bench = Bench()
    bench.tell(StopSignal("SIGTERM", 1))
    bench.advance(QUIET_MS // 2)
    bench.tell(observe(1, b"late"), PRODUCER)
    bench.advance(QUIET_MS)
    assert bench.archived[-1].payload == b"late"
    assert bench.left[-1] == Exit(0)
    hasty = Bench()
    hasty.tell(StopSignal("SIGTERM", 1))
    hasty.tell(StopSignal("SIGTERM", 2))
    assert hasty.left[-1] == Exit(0)


def test_a_dead_disk_does_not_keep_a_stopped_collector() -> None:
    bench = Bench()
    bench.write = False
    bench.tell(observe(1, b"x"), PRODUCER)
    bench.tell(StopSignal("SIGTERM", 1))
    bench.advance(EXIT_SETTLE_MS)
    assert bench.left[-1] == Exit(0)


@pytest.mark.spec("S1 10.13")
def test_a_collector_without_configuration_ends_early_enough_to_say_goodbye() -> None:
    """The resolver is stopped before it, so its slice never comes; it waited so long that its drain was cut off."""
    bench = Bench(start=False)
    bench.tell(observe(1, b"x"), PRODUCER)
    bench.tell(StopSignal("SIGTERM", 1))
    bench.tell(Flush(), ORCHESTRATOR)
    bench.advance(SERVICE_STOP_MS - EXIT_DRAIN_MS)
    assert bench.left[-1] == Exit(0)


def test_after_the_launcher_died_the_others_last_words_are_collected() -> None:
    bench = Bench()
    bench.tell(OwnerGone())
    bench.tell(observe(1, b"stopping my workers"), PRODUCER)
    assert bench.archived and Exit(0) not in bench.left
    bench.advance(3000)
    assert bench.left[-1] == Exit(0)


def test_the_next_orchestrator_gets_a_stream_of_its_own() -> None:
    bench = Bench()
    bench.route(1)
    bench.tell(observe(1, b"run 1"), PRODUCER)
    bench.tell(RunEnded(status=0))
    bench.tell(observe(2, b"last words"), PRODUCER)
    bench.route(2)
    bench.tell(observe(3, b"run 2"), PRODUCER)
    assert [(frame.position, frame.payload) for frame in bench.archived] == [
        (0, b"run 1"),
        (1, b"last words"),
        (0, b"run 2"),
    ]


# --- worker streams --------------------------------------------------------------------------------------------
@pytest.mark.spec("S1 2.8", "S1 3.9", "S1 5.9", "S1 8.10")
def test_worker_frames_keep_identity_ids_positions_and_bytes() -> None:
    bench = Bench()
    bench.tell(expect())
    bench.tell(frames(b"\xff\x00\xfe", b"text", first=17, **HEADER), WORKER)
    assert bench.archived == [
        CollectedFrame(
            "node_cluster", "2/1", "mvp.worker.stderr", 1, 17 + at, payload, bench.archived[0].unix_ms, short(WORKER)
        )
        for at, payload in enumerate([b"\xff\x00\xfe", b"text"])
    ]
    assert bench.actor.channels()[1] == ("2/1", [ChannelDeclaration(channel_id=1, name="mvp.worker.stderr")])
    assert bench.sent() == []


def test_a_channel_that_was_not_declared_still_has_a_name() -> None:
    bench = Bench()
    bench.tell(expect())
    bench.tell(frames(b"x", stream=worker_stream(2, 1)), WORKER)
    assert bench.archived[0].channel == "channel#1"


@pytest.mark.spec("S1 2.8", "S1 10.11", "S1 9.18")
@pytest.mark.parametrize(
    ("message", "sender", "reason"),
    [
        (frames(b"x", token=b"guess"), WORKER, "wrong token"),
        (frames(b"x"), OTHER, "another publisher"),
        (frames(b"x", stream=worker_stream(3, 1)), WORKER, "another stream"),
        (frames(b"x", stream=orchestrator_stream(1)), WORKER, "another stream"),
    ],
)
def test_frames_that_are_not_what_was_announced_are_refused(message: StreamFrames, sender: bytes, reason: str) -> None:
    bench = Bench()
    bench.tell(expect())
    bench.tell(frames(b"first", **HEADER), WORKER)
    bench.harness.observed()
    for _ in range(3):
        bench.tell(message, sender)
    assert [frame.payload for frame in bench.archived] == [b"first"]
    assert bench.actor.counters[f"refused: {reason}"] == 3
    (said,) = bench.harness.observed()
    assert json.loads(said.payload)["detail"]["error"] == reason
    assert bench.sent() == []


def test_frames_may_overtake_their_announcement_for_five_seconds() -> None:
    bench = Bench()
    bench.tell(frames(b"a", **HEADER), WORKER)
    bench.tell(frames(b"b", first=1), WORKER)
    bench.tell(frames(b"spam", flow=b"other"), OTHER)
    bench.advance(EARLY_MS - 1)
    bench.tell(expect())
    assert [(frame.payload, frame.channel) for frame in bench.archived] == [
        (b"a", "mvp.worker.stderr"),
        (b"b", "mvp.worker.stderr"),
    ]
    assert not bench.actor.counters["refused: unknown flow"]
    bench.advance(10)
    assert bench.actor.counters["refused: unknown flow"] == 1
    bench.tell(expect(b"other"))
    assert len(bench.archived) == 2


def test_unannounced_frames_are_held_within_bounds() -> None:
    bench = Bench()
    for _ in range(10):
        bench.tell(frames(bytes(EARLY_BYTES_MAX // 4)), WORKER)
    assert bench.actor.counters["refused: unknown flow"] == 7


def test_resent_frames_are_dropped_also_under_a_new_flow() -> None:
    bench = Bench()
    bench.tell(expect())
    bench.tell(frames(b"a", b"b", **HEADER), WORKER)
    bench.tell(frames(b"a", b"b", b"c"), WORKER)
    bench.tell(expect(b"g", b"u"))
    bench.tell(frames(b"b", b"c", b"d", first=1, flow=b"g", token=b"u", **HEADER), WORKER)
    assert [frame.payload for frame in bench.archived] == [b"a", b"b", b"c", b"d"]
    assert bench.actor.counters["duplicates"] == 4


def test_a_worker_gap_is_explicit_and_the_end_is_the_end() -> None:
    bench = Bench()
    bench.tell(expect())
    bench.tell(frames(b"x", first=5, gap=(0, 4), **HEADER), WORKER)
    assert json.loads(bench.archived[0].payload) == {
        "type": "DatastreamGap",
        "stream": "2/1",
        "producer": short(WORKER),
        "first": 0,
        "last": 4,
        "lost": 5,
        "reason": "overrun",
    }
    bench.tell(frames(end=True), WORKER)
    bench.tell(frames(b"zombie", first=6), WORKER)
    assert [frame.payload for frame in bench.archived[1:]] == [b"x"]
    assert bench.actor.counters["refused: the stream has ended"] == 1
    said = [json.loads(record.payload) for record in bench.harness.observed()]
    assert [(record["status"], record["detail"].get("event")) for record in said] == [
        ("ready", None),
        ("observed", "end"),
        ("failed", None),
    ]


def test_contradictory_declarations_are_counted_and_the_first_stays() -> None:
    bench = Bench()
    bench.tell(expect())
    bench.tell(frames(b"x", **HEADER), WORKER)
    bench.tell(frames(b"y", first=1, channels=[ChannelDeclaration(channel_id=1, name="else")]), WORKER)
    assert [frame.channel for frame in bench.archived] == ["mvp.worker.stderr"] * 2
    assert bench.actor.counters["malformed"] == 1


# --- cursors ---------------------------------------------------------------------------------------------------
@pytest.mark.spec("S1 9.18")
def test_a_slow_cursor_misses_frames_and_knows_it_while_the_archive_misses_none() -> None:
    bench = Bench()
    bench.harness.system._validate = False
    slow, late = bench.actor.cursor(), bench.actor.cursor(replay=True)
    total = COLLECTOR_RING_FRAMES_MAX + 500
    for first in range(1, total + 1, 500):
        bench.tell(observe(first, *[b"x"] * 500), PRODUCER)
    assert [frame.position for frame in bench.archived] == list(range(len(bench.archived)))
    gap, *rest = slow.take()
    assert isinstance(gap, CursorGap)
    assert gap.missed + len(rest) == len(bench.archived)
    assert slow.take() == []
    assert isinstance(late.take(10)[0], CursorGap)
    bench.tell(observe(100_000, b"news"), PRODUCER)
    (news,) = slow.take()
    assert isinstance(news, CollectedFrame) and news.payload == b"news"


def test_a_lossless_cursor_holds_the_ring_until_it_is_closed() -> None:
    ring = FrameRing(frames=4)
    cursor = ring.cursor(lossless=True)
    for position in range(10):
        ring.append(CollectedFrame("s", "t", "c", 1, position, b""))
    assert [frame.position for frame in cursor.take(3) if isinstance(frame, CollectedFrame)] == [0, 1, 2]
    assert [frame.position for frame in cursor.take() if isinstance(frame, CollectedFrame)] == list(range(3, 10))
    cursor.close()
    ring.append(CollectedFrame("s", "t", "c", 1, 10, b""))
    assert ring.end - ring.first == 4


def test_the_ring_is_bounded_by_bytes_too() -> None:
    ring = FrameRing(frames=100, size=1000)
    for position in range(50):
        ring.append(CollectedFrame("s", "t", "c", 1, position, bytes(100)))
    assert ring.end - ring.first == 10
