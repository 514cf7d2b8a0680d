"""The wire does not change under anybody: tags, golden bytes of every message, a second decoder (anchors.md B, D7)."""

from __future__ import annotations

import contextlib
import tomllib
from typing import Any

import msgpack
import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.codec import (
    BadEnvelope,
    Message,
    UnknownTag,
    catalogue,
    decode_body,
    decode_envelope,
    decode_header,
    encode_body,
    encode_envelope,
    tag_of,
)
from common.envelope import ENVELOPE_VERSION, Envelope
from common.limits import ENVELOPE_BYTES_MAX
from common.messages.bus import Delta, Register, Snapshot
from common.messages.member import SwimPing
from common.messages.node_agent import InferPrompt
from common.messages.orchestrator import ObserveNodeRuntimeReady
from common.messages.provision import StartNode
from common.messages.stream import StreamFrames
from tests.golden.samples import TAGS, golden, plain, sample, strategy

MAKE = "run python -m tests.golden.samples to append it"
FUZZED = (Register, Snapshot, Delta, SwimPing, InferPrompt, ObserveNodeRuntimeReady, StartNode, StreamFrames)
GOLDEN = golden()


def unpack(data: bytes) -> Any:
    return msgpack.unpackb(data, raw=False, strict_map_key=False)


def envelope(tag: int = 1, body: bytes = b"\x80", **changes: Any) -> Envelope:
    slots: dict[str, Any] = {
        "v": ENVELOPE_VERSION,
        "tag": tag,
        "id": 2**40,
        "run": b"n" * 16,
        "src_node": b"s" * 32,
        "src_boot": 3,
        "src": b"a" * 32,
        "dst_node": b"d" * 32,
        "dst_boot": 4,
        "dst": b"b" * 32,
        "corr": 5,
        "plane_seq": 6,
        "base": 7,
        "ack": 8,
        "body": msgspec.Raw(body),
    }
    return Envelope(**{**slots, **changes})


def test_tags_are_append_only() -> None:
    recorded = tomllib.loads(TAGS.read_text())
    assert len(set(recorded.values())) == len(recorded)
    current = {cls.__name__: tag for tag, cls in catalogue().items()}
    for name, tag in recorded.items():
        assert current.get(name) == tag, f"{name} was tag {tag}, now {current.get(name)}: tags are never changed"
    for name in current:
        assert name in recorded, f"{name} is new: {MAKE}"
        assert name in GOLDEN, f"{name} has no golden bytes: {MAKE}"


def assert_as_written(old: object, expected: object) -> None:
    """The same at every depth, but for fields of maps that came later."""
    if isinstance(old, dict):
        assert isinstance(expected, dict)
        for name, value in old.items():
            assert_as_written(value, expected[name])
    elif isinstance(old, list):
        assert isinstance(expected, list) and len(old) == len(expected)
        for one, other in zip(old, expected, strict=True):
            assert_as_written(one, other)
    else:
        assert old == expected


@pytest.mark.parametrize("name", sorted(GOLDEN))
def test_golden_bytes_are_read_as_ever(name: str) -> None:
    data = GOLDEN[name]
    tag = tomllib.loads(TAGS.read_text())[name]
    message = decode_body(tag, data)
    assert type(message).__name__ == name and tag_of(type(message)) == tag
    # Map by map, not byte by byte: a field that came later is not in old bytes; it reads as its default, and structs
    # inside of a message write theirs. The rest is as it was written.
    seen = unpack(data)
    assert_as_written(msgpack.unpackb(data), msgpack.unpackb(encode_body(message)))
    assert_as_written(seen, plain(message))
    expected = sample(type(message))
    assert_as_written(seen, plain(expected))


@settings(max_examples=200)
@given(st.data())
def test_two_decoders_read_the_same(data: st.DataObject) -> None:
    message: Message = data.draw(st.sampled_from(FUZZED).flatmap(strategy))
    encoded = encode_body(message)
    assert unpack(encoded) == plain(message)
    assert decode_body(tag_of(type(message)), encoded) == message
    # And what the second encoder writes of it is read here.
    assert decode_body(tag_of(type(message)), msgpack.packb(plain(message), use_bin_type=True)) == message


@settings(max_examples=400)
@given(st.data())
def test_spoilt_bytes_are_a_message_or_a_bad_envelope(data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(sorted(GOLDEN)))
    tag = tomllib.loads(TAGS.read_text())[name]
    frame = bytearray(encode_envelope(envelope(tag, GOLDEN[name])))
    for _ in range(data.draw(st.integers(1, 5))):
        frame[data.draw(st.integers(0, len(frame) - 1))] = data.draw(st.integers(0, 255))
    spoilt = bytes(frame[: data.draw(st.integers(0, len(frame)))]) if data.draw(st.booleans()) else bytes(frame)
    for read in (decode_header, decode_envelope):
        try:
            read(spoilt)
        except BadEnvelope as bad:
            assert bad.size == len(spoilt) and bad.reason
    with contextlib.suppress(BadEnvelope):
        whole = decode_envelope(spoilt)
        decode_body(whole.tag, whole.body)


@settings(max_examples=300)
@given(st.binary(max_size=300), st.sampled_from(sorted(catalogue())))
def test_any_bytes_are_a_message_or_a_bad_envelope(junk: bytes, tag: int) -> None:
    for read in (decode_header, decode_envelope, lambda data: decode_body(tag, data)):
        with contextlib.suppress(BadEnvelope):
            read(junk)


def test_the_header_alone_and_the_whole_agree() -> None:
    whole = envelope(body=b"\xc0")
    header = decode_header(encode_envelope(whole))
    for name in header.__struct_fields__:
        assert getattr(header, name) == getattr(whole, name)
    # Slots that a later version appends do not disturb.
    longer = msgpack.packb([*unpack(encode_envelope(whole)), "more"])
    assert decode_header(longer) == header and decode_envelope(longer).id == whole.id


@pytest.mark.parametrize(
    "changes",
    [
        {"src_node": b"short"},
        {"src": b""},
        {"dst_node": b"d" * 33},
        {"dst": b"d" * 5000},
        {"run": b"n"},
        {"id": -1},
        {"plane_seq": -1},
        {"base": -2},
        {"tag": 2**33},
        {"src_boot": -5},
    ],
    ids=str,
)
def test_header_slots_have_their_sizes(changes: dict[str, Any]) -> None:
    """A key of another length would live on as a key of some table."""
    frame = encode_envelope(envelope(**changes))
    for read in (decode_header, decode_envelope):
        with pytest.raises(BadEnvelope, match="no envelope"):
            read(frame)


def test_what_a_peer_must_not_get_away_with() -> None:
    with pytest.raises(UnknownTag, match="unknown message tag 64999"):
        decode_body(64_999, b"\x80")
    with pytest.raises(BadEnvelope, match="larger than"):
        decode_envelope(bytes(ENVELOPE_BYTES_MAX + 1))
    with pytest.raises(BadEnvelope, match="larger than"):
        decode_header(bytes(ENVELOPE_BYTES_MAX + 1))
    with pytest.raises(BadEnvelope, match="version 9"):
        decode_envelope(encode_envelope(envelope(v=9)))
    tag = tag_of(InferPrompt)
    for poison in (float("nan"), float("inf"), float("-inf")):
        asked = {**plain(sample(InferPrompt)), "sampling": {"temperature": poison}}
        with pytest.raises(BadEnvelope):
            decode_body(tag, msgpack.packb(asked))
    with pytest.raises(BadEnvelope):
        decode_body(tag_of(Delta), b"\x81" * 6000)
    with pytest.raises(BadEnvelope):
        decode_body(tag_of(Delta), b"\xdf\xff\xff\xff\xff")
