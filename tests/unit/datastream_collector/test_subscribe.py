"""What a subscriber gets: the channel list first, what it asked for, and a word for each frame that it missed."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.messages.stream import ChannelDeclaration
from services.datastream_collector.frames import CollectedFrame, FrameRing
from services.datastream_collector.subscribe import (
    BATCH_BYTES_MAX,
    BATCH_FRAMES_MAX,
    FrameFilter,
    Subscriber,
    parse_request,
)

OWN, WORKER = "mvp-orchestrator/1", "2/1"


class Source:
    """A ring with two streams and their channel lists."""

    def __init__(self, frames: int = 100) -> None:
        self.ring = FrameRing(frames)
        self.lists: dict[str, list[ChannelDeclaration]] = {OWN: [], WORKER: []}
        self.declare(OWN, "mvp.orch.bootstrap")
        self.declare(OWN, "mvp.orch.prompt")
        self.declare(WORKER, "mvp.worker.raw", "bytes")

    def declare(self, stream: str, name: str, content: str = "json") -> None:
        declared = self.lists[stream]
        declared.append(ChannelDeclaration(channel_id=len(declared) + 1, name=name, content=content))

    def add(self, stream: str, channel_id: int, payload: bytes = b"{}") -> None:
        name = self.lists[stream][channel_id - 1].name
        source = "orchestrator" if stream == OWN else "node_cluster"
        self.ring.append(CollectedFrame(source, stream, name, channel_id, self.ring.end, payload, 5, "p", 1))

    def subscribe(self, **wanted: Any) -> Subscriber:
        asked = parse_request(json.dumps(wanted).encode())
        return Subscriber(asked, self.ring.cursor(replay=asked.replay), lambda: list(self.lists.items()), 1, 77)


def lines(subscriber: Subscriber) -> list[dict[str, Any]]:
    out = b""
    while subscriber.pending:
        out += subscriber.take()
    return [json.loads(line) for line in out.splitlines()]


@pytest.mark.spec("S1 8.10", "S1 3.9")
def test_a_late_subscriber_gets_the_channel_list_first() -> None:
    source = Source()
    source.add(OWN, 1)
    subscriber = source.subscribe()
    source.add(WORKER, 1, b"\xff\x00")
    header, own, worker, frame = lines(subscriber)
    assert header == {"header": {"version": 1, "run_id": 1, "boot": 77}}
    assert (own["stream"], [item["name"] for item in own["channels"]]) == (
        OWN,
        ["mvp.orch.bootstrap", "mvp.orch.prompt"],
    )
    assert worker["channels"] == [{"channel_id": 1, "name": "mvp.worker.raw", "content": "bytes"}]
    assert (frame["stream"], frame["channel"], frame["position"], frame["source"]) == (
        WORKER,
        "mvp.worker.raw",
        1,
        "node_cluster",
    )
    assert frame["payload"] == {"encoding": "bytes", "value": [255, 0]}


def test_replay_gives_what_the_ring_still_holds() -> None:
    source = Source(frames=3)
    for _ in range(5):
        source.add(OWN, 1)
    replayed = lines(source.subscribe(replay=True))[3:]
    assert [line["arrival_seq"] for line in replayed] == [2, 3, 4]
    assert lines(source.subscribe())[3:] == []


@pytest.mark.spec("S1 8.10")
def test_a_new_channel_is_declared_before_its_first_frame_and_once() -> None:
    source = Source()
    subscriber = source.subscribe()
    lines(subscriber)
    source.declare(WORKER, "mvp.host.cpu")
    source.add(WORKER, 2)
    source.add(WORKER, 2)
    declared, *frames = lines(subscriber)
    assert declared == {
        "stream": WORKER,
        "channels": [{"channel_id": 2, "name": "mvp.host.cpu", "content": "json"}],
    }
    assert [frame["channel_id"] for frame in frames] == [2, 2]


@pytest.mark.parametrize(
    ("wanted", "expected"),
    [
        ({}, [0, 1, 2, 3]),
        ({"streams": [WORKER]}, [2, 3]),
        ({"nodes": ["2"]}, [2, 3]),
        ({"nodes": ["mvp-orchestrator"]}, [0, 1]),
        ({"sources": ["orchestrator"]}, [0, 1]),
        ({"channels": ["mvp.orch.prompt"]}, [1]),
        ({"prefixes": ["mvp.orch."]}, [0, 1]),
        ({"channels": ["mvp.host.cpu"], "prefixes": ["mvp.orch.p"]}, [1, 3]),
        ({"nodes": ["2"], "prefixes": ["mvp.orch."]}, []),
        ({"streams": ["9/1"]}, []),
    ],
)
def test_filters(wanted: dict[str, Any], expected: list[int]) -> None:
    source = Source()
    source.declare(WORKER, "mvp.host.cpu")
    subscriber = source.subscribe(**wanted)
    for stream, channel in ((OWN, 1), (OWN, 2), (WORKER, 1), (WORKER, 2)):
        source.add(stream, channel)
    got = lines(subscriber)
    assert [line["arrival_seq"] for line in got if "arrival_seq" in line] == expected
    filter = FrameFilter(**wanted)
    for line in got:
        for channel in line.get("channels", []):
            assert filter.wants_stream(line["stream"]) and filter.wants_channel(channel["name"])


@pytest.mark.parametrize("line", [b"", b"{", b"[]", b'{"replay":1}', b'{"prefix":["x"]}', b"\xff\xfe", b"[" * 5000])
def test_what_is_no_request_is_refused(line: bytes) -> None:
    with pytest.raises(ValueError, match="no subscription"):
        parse_request(line)


def test_batches_are_bounded() -> None:
    source = Source(frames=2000)
    subscriber = source.subscribe()
    subscriber.take()
    for _ in range(BATCH_FRAMES_MAX + 1):
        source.add(OWN, 1)
    assert subscriber.take().count(b"\n") == BATCH_FRAMES_MAX
    assert subscriber.take().count(b"\n") == 1
    for _ in range(8):
        source.add(OWN, 1, b"x" * (BATCH_BYTES_MAX // 2))
    assert subscriber.take().count(b"\n") == 2


@given(st.lists(st.one_of(st.just("take"), st.integers(1, 30)), max_size=30))
@settings(max_examples=100)
def test_every_frame_is_given_or_said_to_be_missed(steps: list[Any]) -> None:
    source = Source(frames=16)
    subscriber = source.subscribe()
    seen = missed = 0
    for step in [*steps, "take"]:
        if step == "take":
            for line in lines(subscriber):
                if "gap" in line:
                    missed += line["gap"]["missed"]
                elif "arrival_seq" in line:
                    assert line["arrival_seq"] == seen + missed
                    seen += 1
        else:
            for _ in range(step):
                source.add(OWN, 1)
    assert seen + missed == source.ring.end
