"""A restarted collector: the run that its archive ends with goes on, another one is a stream of its own."""

from __future__ import annotations

import json

import pytest

from common.addresses import Role, short
from common.effects import StopSignal
from common.records import CORE_CHANNELS
from services.datastream_collector.core import WHOSE_RUN_MS
from services.datastream_collector.frames import Recovered, RecoveredStream
from services.datastream_collector.streams import CHANNEL_GAP
from tests.unit.datastream_collector.test_collector_core import (
    OTHER,
    PRODUCER,
    WORKER,
    Bench,
    expect,
    frames,
    observe,
)


def recovered(seqs: list[tuple[int, int]], run_boot: int = 7, unix_ms: int = 0) -> Recovered:
    channels = {**{name: at for at, name in enumerate(CORE_CHANNELS, 1)}, "own": 12}
    stream = RecoveredStream(41, channels, run_boot, unix_ms)
    return Recovered({"mvp-orchestrator/1": stream}, {short(PRODUCER): seqs})


def test_a_restarted_collector_continues_where_its_archive_ends() -> None:
    bench = Bench(recovered=recovered([(30, 40)]))
    bench.tell(observe(25, *(b"%d" % seq for seq in range(25, 43)), channel="own"), PRODUCER)
    assert [(f.position, f.payload, f.channel_id) for f in bench.archived] == [(42, b"41", 12), (43, b"42", 12)]
    bench.tell(observe(43, b"x", channel="new"), PRODUCER)
    assert bench.archived[-1].channel_id == 13


@pytest.mark.spec("S1 8.2")
def test_a_restarted_collector_continues_although_somebody_new_speaks_first() -> None:
    """Positions began again in the middle of a run, also where the orchestrator itself had said nothing before."""
    bench = Bench(recovered=recovered([(1, 40)]))
    bench.route(boot=7)
    bench.tell(observe(1, b"first"), OTHER)
    bench.tell(observe(41, b"then"), PRODUCER)
    assert [(frame.position, frame.payload) for frame in bench.archived] == [(42, b"first"), (43, b"then")]
    assert {frame.run_boot for frame in bench.archived} == {7}


def test_a_restarted_collector_gives_another_orchestrator_a_stream_of_its_own() -> None:
    """Although services speak that the archive knows: they outlive the run."""
    bench = Bench(recovered=recovered([(1, 40)]))
    bench.route(boot=8)
    bench.tell(observe(41, b"next"), PRODUCER)
    assert [(frame.position, frame.run_boot) for frame in bench.archived] == [(0, 8)]


def test_last_words_after_a_restart_belong_to_the_run_that_is_over_and_the_next_one_starts_afresh() -> None:
    """The orchestrator is gone; a service that had said nothing yet speaks first, beside one that the archive knows."""
    bench = Bench(recovered=recovered([(1, 40)]))
    bench.route(boot=3, address=PRODUCER, role=Role.PROVISIONER)
    bench.tell(observe(1, b"late"), OTHER)
    bench.route(boot=8)
    bench.tell(observe(2, b"next"), OTHER)
    assert [(frame.position, frame.payload) for frame in bench.archived] == [(42, b"late"), (0, b"next")]


@pytest.mark.parametrize("speaks_first", [PRODUCER, OTHER])
def test_a_run_whose_orchestrator_had_said_nothing_yet_goes_on_where_its_archive_ends(speaks_first: bytes) -> None:
    """The archive names no orchestrator, but services that are still there."""
    bench = Bench(recovered=recovered([(1, 40)], run_boot=0))
    bench.route(boot=8, beside=[PRODUCER])
    bench.tell(observe(41, b"then"), speaks_first)
    assert [(frame.position, frame.run_boot) for frame in bench.archived if frame.channel != CHANNEL_GAP] == [(42, 8)]


def test_a_run_goes_on_although_everybody_who_had_spoken_was_replaced_with_the_collector() -> None:
    """Its orchestrator, which had said nothing yet, was there before the last record."""
    bench = Bench(recovered=recovered([(1, 40)], run_boot=0, unix_ms=9))
    bench.route(boot=8, beside=[OTHER])
    bench.tell(observe(1, b"first"), OTHER)
    assert [(frame.position, frame.run_boot) for frame in bench.archived] == [(42, 8)]


def test_a_start_that_was_killed_before_its_orchestrator_spoke_is_another_run() -> None:
    """Nobody of it is there: two starts were one run, with the first one's records at its beginning."""
    bench = Bench(recovered=recovered([(1, 40)], run_boot=0))
    bench.route(boot=8, beside=[OTHER])
    bench.tell(observe(1, b"first"), OTHER)
    assert [(frame.position, frame.run_boot) for frame in bench.archived] == [(0, 8)]


def test_what_a_restart_lost_for_good_is_said() -> None:
    bench = Bench(recovered=recovered([(1, 40)]))
    bench.tell(observe(50, b"50"), PRODUCER)
    gap, frame = bench.archived
    said = json.loads(gap.payload)
    assert (said["first"], said["last"], said["reason"]) == (41, 49, "collector_restart")
    assert (gap.position, frame.position, frame.payload) == (42, 43, b"50")


def test_another_run_in_the_same_file_starts_afresh() -> None:
    bench = Bench(recovered=recovered([(1, 40)]))
    bench.tell(observe(1, b"x"), OTHER)
    assert not bench.archived, "nobody is there who could say whose word that is"
    bench.advance(WHOSE_RUN_MS)
    assert [(frame.position, frame.payload) for frame in bench.archived] == [(0, b"x")]


def test_who_speaks_before_the_orchestrator_is_back_at_a_router_that_was_restarted_too_waits_for_it() -> None:
    """Positions began again in the middle of a run."""
    bench = Bench(recovered=recovered([(1, 40)]))
    bench.route(boot=3, address=OTHER, role=Role.MEMBERSHIP)
    bench.tell(observe(1, b"first"), OTHER)
    bench.route(boot=7)
    assert [(frame.position, frame.run_boot) for frame in bench.archived] == [(42, 7)]


def test_what_waits_for_an_orchestrator_is_not_lost_by_a_stop() -> None:
    bench = Bench(recovered=recovered([(1, 40)]))
    bench.tell(observe(1, b"x"), OTHER)
    bench.tell(StopSignal("SIGTERM", 1))
    assert [frame.payload for frame in bench.archived] == [b"x"]


@pytest.mark.spec("S1 8.13")
def test_what_the_collector_before_had_archived_of_a_worker_is_not_taken_again() -> None:
    """It died between the write and the acknowledgement; the publisher sends the batch once more."""
    archived = Recovered(positions={(short(WORKER), "2/1"): [(30, 41)], (short(OTHER), "2/1"): [(0, 99)]})
    bench = Bench(recovered=archived)
    bench.tell(expect())
    bench.tell(frames(*(b"%d" % at for at in range(40, 44)), first=40), WORKER)
    assert [(frame.position, frame.payload) for frame in bench.archived if frame.stream == "2/1"] == [
        (42, b"42"),
        (43, b"43"),
    ]
    assert bench.actor.counters["duplicates"] == 2
