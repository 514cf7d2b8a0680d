"""The live feed over restarts of the collector: what it shows is there once, and what is missing is said."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.datastream_collector.reader import Entry
from services.datastream_collector.web.feed import Live, live_line
from services.datastream_collector.web.store import Store


class Feed:
    """Lines of the stream socket in, payloads that the dashboard gets out."""

    def __init__(self) -> None:
        self.shown: list[str] = []
        self.store = Store((self.take,))
        self.live = Live()
        self.seq = 0

    def take(self, entry: Entry) -> None:
        self.shown.append(entry.text)

    def collector(self, boot: int) -> Feed:
        """This collector answers a subscription."""
        self.seq = 0
        self.line({"header": {"version": 1, "run_id": 1, "boot": boot}})
        return self

    def line(self, said: dict[str, Any]) -> None:
        live_line(json.dumps(said).encode() + b"\n", self.store, self.live)

    def records(self, *numbers: int, producer: str = "aa", seq: int | None = None) -> None:
        """Of the orchestrator's stream: positions are this collector's, numbers the producer's."""
        for number in numbers:
            self.frame(self.seq, {"producer": producer, "producer_seq": number}, f"{producer}{number}")

    def frames(self, *positions: int, producer: str = "ww", stream: str = "2/1") -> None:
        """Of a worker's stream, which has positions of its own."""
        for position in positions:
            self.frame(position, {"producer": producer}, f"{stream}:{position}", stream)

    def frame(self, position: int, collected: dict[str, Any], text: str, stream: str = "mvp-orchestrator/1") -> None:
        record: dict[str, Any] = {"arrival_seq": self.seq, "source": "orchestrator", "stream": stream, "channel": "c"}
        record |= {"channel_id": 1, "position": position, "payload": {"encoding": "utf8", "value": text}}
        self.line({**record, "collected": collected})
        self.seq += 1

    @property
    def missed(self) -> int:
        return sum(view.missed for view in self.store.runs.values())


def test_a_collector_that_begins_again_without_an_archive_doubles_nothing() -> None:
    """Its positions begin at 0, and producers send what they still hold once more, in another order among them."""
    feed = Feed().collector(1)
    feed.records(1, 2)
    feed.records(1, producer="bb")
    feed.frames(0, 1, 2)
    feed.collector(2)
    feed.frames(1, 2, 3)
    feed.records(1, 2, producer="bb")
    feed.records(2, 3)
    assert feed.shown == ["aa1", "aa2", "bb1", "2/1:0", "2/1:1", "2/1:2", "2/1:3", "bb2", "aa3"]
    assert feed.missed == 0


def test_what_a_restart_lost_is_said_once() -> None:
    feed = Feed().collector(1)
    feed.records(1, 2)
    feed.frames(0, 1)
    feed.collector(2)
    feed.records(6, 7, 9)
    feed.frames(4)
    assert feed.shown[4:] == ["aa6", "aa7", "aa9", "2/1:4"]
    assert feed.missed == 3 + 2, "the hole before 9 is one that the collector tells of"


def test_a_replay_of_the_same_collector_doubles_nothing() -> None:
    feed = Feed().collector(1)
    feed.records(1, 2)
    feed.collector(1)
    feed.records(1, 2, 3)
    assert feed.shown == ["aa1", "aa2", "aa3"]


def test_a_new_publisher_of_a_worker_has_positions_of_its_own() -> None:
    feed = Feed().collector(1)
    feed.frames(0, 1)
    feed.frames(0, 1, producer="xx")
    assert len(feed.shown) == 4


@pytest.mark.parametrize("collected", [None, [], {"producer": 7}, {"producer": "aa", "producer_seq": "x"}])
def test_a_record_that_does_not_say_whose_it_is_is_shown(collected: Any) -> None:
    feed = Feed().collector(1)
    feed.frame(0, collected, "strange")
    feed.line({"arrival_seq": 9})
    assert feed.shown[:1] == ["strange"]


@given(st.lists(st.tuples(st.integers(0, 8), st.integers(0, 8)), max_size=6))
def test_whatever_tails_come_again_each_record_is_shown_or_said_to_be_missed(lives: list[tuple[int, int]]) -> None:
    """lives: of each collector, how many records come again, and how many new ones go; some die with it unseen."""
    feed, sent = Feed(), 0
    for boot, (again, new) in enumerate(lives, 1):
        feed.collector(boot)
        first = max(1, sent - again + 1)
        feed.records(*range(first, sent + new + 1))
        sent += new
    assert feed.shown == [f"aa{number}" for number in range(1, sent + 1)]
    assert feed.missed == 0
