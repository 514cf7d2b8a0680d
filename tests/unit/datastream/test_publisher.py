"""A worker's stream: channels, positions, gaps, and the publisher actor of S1 6.7."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.codec import encode_body
from common.datastream import Emit, worker_stream
from common.datastream_publisher import DatastreamPublisherActor, StreamProducer, Subscription
from common.effects import SendFailed, StopSignal
from common.limits import STREAM_BATCH_BYTES_MAX, STREAM_BATCH_MS
from common.messages.stream import DatastreamSubscribe, StreamFrames, SubscribeRequest
from common.redact import Redactor
from tests.support.harness import Harness

COLLECTOR = b"c" * 32
STREAM = worker_stream(2, 1)


def subscribe(flow: bytes = b"f1", prefixes: list[str] | None = None) -> DatastreamSubscribe:
    return DatastreamSubscribe(
        collector=COLLECTOR, flow_id=flow, token=b"t" * 16, request=SubscribeRequest(channel_prefixes=prefixes or [])
    )


def publisher(**options: int) -> tuple[Harness, DatastreamPublisherActor]:
    actor = DatastreamPublisherActor(StreamProducer(STREAM, **options))
    return Harness(actor), actor


def messages(harness: Harness) -> list[StreamFrames]:
    return [message for _, message in harness.sent() if isinstance(message, StreamFrames)]


@pytest.mark.spec("S1 6.7")
def test_waits_then_streams_to_the_collector_of_the_subscription() -> None:
    accepted: list[Subscription] = []
    actor = DatastreamPublisherActor(StreamProducer(STREAM), accepted.append)
    harness = Harness(actor)
    assert actor.state == "waiting for subscription"
    actor.endpoint.channel("mvp.node.runtime")
    harness.tell(subscribe())
    assert actor.state == "subscription accepted"
    assert [item.flow_id for item in accepted] == [b"f1"]
    ((dst, first),) = harness.sent()
    assert dst == COLLECTOR
    assert (first.flow_id, first.token, first.stream) == (b"f1", b"t" * 16, STREAM)
    assert [(c.channel_id, c.name) for c in first.channels] == [(1, "mvp.node.runtime")]
    harness.tell(Emit("mvp.worker.log", b"\xff\x00", ""))
    harness.advance(STREAM_BATCH_MS)
    (second,) = messages(harness)
    assert second.stream is None
    assert [(c.channel_id, c.name) for c in second.channels] == [(2, "mvp.worker.log")]
    assert [(f.channel_id, f.position, f.payload) for f in second.frames] == [(2, 0, b"\xff\x00")]


@pytest.mark.spec("S1 6.7")
def test_a_repeat_changes_nothing_and_a_new_flow_replaces() -> None:
    harness, actor = publisher()
    harness.tell(subscribe())
    harness.sent()
    harness.tell(subscribe())
    assert harness.sent() == []
    harness.tell(Emit("a", b"1"))
    harness.advance(STREAM_BATCH_MS)
    assert len(messages(harness)) == 1
    harness.tell(subscribe(b"f2"))
    (header,) = messages(harness)
    assert (header.flow_id, header.stream, len(header.channels), header.frames) == (b"f2", STREAM, 1, [])
    harness.tell(Emit("a", b"2"))
    harness.advance(STREAM_BATCH_MS)
    assert [(m.flow_id, m.frames[0].position) for m in messages(harness)] == [(b"f2", 1)]
    assert actor.endpoint.subscription is not None


def test_what_was_produced_before_the_subscription_is_not_lost() -> None:
    harness, _ = publisher()
    for number in range(10):
        harness.tell(Emit("a", b"%d" % number))
    harness.advance(1000)
    assert harness.sent() == []
    harness.tell(subscribe())
    (message,) = messages(harness)
    assert [frame.position for frame in message.frames] == list(range(10))


def test_an_overrun_ring_says_what_is_missing() -> None:
    harness, _ = publisher(ring_frames=4)
    for number in range(10):
        harness.tell(Emit("a", b"%d" % number))
    harness.tell(subscribe())
    (message,) = messages(harness)
    assert message.gap == (0, 5)
    assert [frame.position for frame in message.frames] == [6, 7, 8, 9]


def test_bytes_bound_the_ring_and_the_batches() -> None:
    harness, actor = publisher(ring_bytes=300_000)
    for _ in range(100):
        harness.tell(Emit("a", bytes(10_000)))
    assert actor.endpoint.pending_bytes <= 300_000
    harness.tell(subscribe())
    sent = messages(harness)
    assert len(sent) > 1
    assert all(len(encode_body(message)) <= STREAM_BATCH_BYTES_MAX + 1000 for message in sent)


def test_only_subscribed_channels_are_declared_and_sent() -> None:
    harness, _ = publisher()
    harness.tell(subscribe(prefixes=["mvp.worker."]))
    harness.sent()
    harness.tell(Emit("host.cpu", b"1"))
    harness.tell(Emit("mvp.worker.stderr", b"2"))
    harness.advance(STREAM_BATCH_MS)
    (message,) = messages(harness)
    assert [channel.name for channel in message.channels] == ["mvp.worker.stderr"]
    assert [(frame.position, frame.payload) for frame in message.frames] == [(1, b"2")]


def test_the_end_of_the_actor_is_the_end_of_the_stream() -> None:
    harness, _ = publisher()
    harness.tell(subscribe())
    harness.tell(Emit("a", b"last"))
    harness.sent()
    harness.system.stop(harness.address)
    harness.run()
    (message,) = messages(harness)
    assert message.end and message.frames[0].payload == b"last"


def test_a_stop_signal_does_not_wait_for_the_batch() -> None:
    harness, _ = publisher()
    harness.tell(subscribe())
    harness.sent()
    harness.tell(Emit("a", b"last"))
    harness.tell(StopSignal("SIGTERM", 1))
    assert len(messages(harness)) == 1


def test_one_name_has_one_content() -> None:
    producer = StreamProducer(STREAM)
    assert producer.channel("log", "text") == producer.channel("log", "text") == 1
    with pytest.raises(ValueError, match="channel log carries text, not bytes"):
        producer.channel("log", "bytes")


@pytest.mark.spec("S1 8.14")
def test_a_worker_redacts_its_own_stream() -> None:
    producer = StreamProducer(STREAM, redact=Redactor(["hf_topsecret"]).redact)
    producer.emit("a", b"token hf_topsecret")
    producer.subscribe(subscribe())
    message = producer.take()
    assert message is not None
    assert message.frames[0].payload == b"token <redacted>"


@pytest.mark.spec("S1 6.7", "S1 2.8")
def test_what_comes_back_from_a_collector_that_is_no_more_waits_for_its_successor() -> None:
    """Routes may name it for long: sent there again, the frames waited for a way until this process had ended, and what
    its successor had got by then had a silent hole."""
    harness, _ = publisher()
    harness.tell(subscribe())
    harness.tell(Emit("a", b"1"))
    harness.advance(STREAM_BATCH_MS)
    for dst, message in harness.sent():
        harness.tell(SendFailed(dst, message, "peer_lost"))
    harness.tell(Emit("a", b"2"))
    harness.advance(10_000)
    assert harness.sent() == []
    harness.tell(subscribe(b"f2"))
    (all_of_it,) = messages(harness)
    assert [(frame.position, frame.payload) for frame in all_of_it.frames] == [(0, b"1"), (1, b"2")]


@pytest.mark.spec("S1 2.8", "S1 8.1", "S1 8.13")
@given(st.lists(st.one_of(st.binary(max_size=8), st.sampled_from(["new flow", "wait"])), max_size=40), st.data())
@settings(max_examples=100)
def test_positions_and_payloads_survive_failures(steps: list[bytes | str], data: st.DataObject) -> None:
    """Each frame arrives at least once, with its position and its very bytes, under a channel declared before it."""
    harness, _ = publisher()
    harness.tell(subscribe(b"0"))
    produced: list[bytes] = []
    got: dict[int, bytes] = {}
    declared: dict[int, str] = {}

    def settle(fail: bool) -> None:
        for dst, message in harness.sent():
            if fail:
                harness.tell(SendFailed(dst, message, data.draw(st.sampled_from(["peer_lost", "unroutable"]))))
                continue
            declared.update((channel.channel_id, channel.name) for channel in message.channels)
            for frame in message.frames:
                assert declared[frame.channel_id] == f"ch{frame.position % 3}"
                got[frame.position] = frame.payload

    for at, step in enumerate(steps):
        if isinstance(step, bytes):
            harness.tell(Emit(f"ch{len(produced) % 3}", step))
            produced.append(step)
        elif step == "new flow":
            harness.tell(subscribe(b"%d" % (at + 1)))
        else:
            harness.advance(300)
        settle(data.draw(st.booleans()))
    harness.advance(6000)
    settle(False)
    harness.tell(subscribe(b"last"))
    settle(False)
    assert got == dict(enumerate(produced))
