"""The link's framing: whole messages from any split of the bytes, one sentence from anything else."""

from __future__ import annotations

import struct
from itertools import pairwise

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.codec import Message, encode_body
from common.messages.engine import (
    Cancelled,
    EngineDone,
    EngineEncoded,
    EngineInfer,
    Progress,
    Released,
    Shutdown,
    TokenDelta,
)
from common.messages.service import Lease
from worker.agent.engine_link import FRAME_BYTES_MAX, FROM_ENGINE, FrameBuffer, LinkError, frame

MESSAGES = st.one_of(
    st.builds(TokenDelta, request_id=st.integers(0, 2**63), text=st.text(), tokens=st.integers(0, 9)),
    st.builds(Progress, phase=st.text(), done=st.integers(0, 2**40), total=st.integers(0, 2**40)),
    st.builds(EngineEncoded, request_id=st.integers(0, 9), tokens=st.lists(st.integers(0, 2**32 - 1))),
    st.builds(Cancelled, request_id=st.integers(0, 9), known=st.booleans()),
    st.just(Released()),
    st.builds(
        EngineDone,
        request_id=st.integers(0, 9),
        final_text=st.text(),
        tokens_generated=st.integers(0, 9),
        elapsed_ms=st.integers(0, 9),
        prompt_tokens=st.integers(0, 9),
        finish_reason=st.sampled_from(["stop", "length"]),
    ),
)


def pieces(data: bytes, cuts: list[int]) -> list[bytes]:
    marks = [0, *sorted(cut % (len(data) + 1) for cut in cuts), len(data)]
    return [data[start:end] for start, end in pairwise(marks)]


@given(st.lists(MESSAGES, max_size=8), st.lists(st.integers(0, 10_000), max_size=12))
def test_any_split_of_the_bytes_gives_the_same_messages(messages: list[Message], cuts: list[int]) -> None:
    buffer = FrameBuffer()
    found: list[Message] = []
    for piece in pieces(b"".join(frame(message) for message in messages), cuts):
        found += buffer.feed(piece)
    assert found == messages
    assert buffer.held == 0


@given(st.lists(MESSAGES, max_size=3), st.binary(max_size=200), st.lists(st.integers(0, 999), max_size=4))
@settings(max_examples=400)
def test_garbage_is_one_sentence_or_an_unfinished_frame_and_never_another_error(
    messages: list[Message], garbage: bytes, cuts: list[int]
) -> None:
    buffer = FrameBuffer()
    try:
        for piece in pieces(b"".join(frame(message) for message in messages) + garbage, cuts):
            assert all(isinstance(message, FROM_ENGINE) for message in buffer.feed(piece))
    except LinkError as error:
        assert "\n" not in str(error)
        with pytest.raises(LinkError) as again:
            buffer.feed(frame(Released()))
        assert str(again.value) == str(error), "after garbage nothing is believed"
    assert buffer.held <= FRAME_BYTES_MAX


@given(MESSAGES, st.data())
@settings(max_examples=300)
def test_a_flipped_bit_is_a_message_of_the_engine_or_a_sentence(message: Message, data: st.DataObject) -> None:
    body = bytearray(encode_body(message))
    at = data.draw(st.integers(0, len(body) - 1))
    body[at] ^= 1 << data.draw(st.integers(0, 7))
    try:
        (found,) = FrameBuffer().feed(struct.pack("<I", len(body)) + bytes(body))
        assert isinstance(found, FROM_ENGINE)
    except LinkError:
        pass


@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        (b"\xff\xff\xff\xff", "a frame of 4294967295 bytes is larger"),
        (struct.pack("<I", 0), "a frame of 0 bytes holds no message"),
        (struct.pack("<I", 3) + b"abc", "a frame of 3 bytes holds no message"),
        (frame(Shutdown()), "Shutdown does not belong on this side"),
        (frame(Lease(ttl_ms=5)), "Lease does not belong on this side"),
        (
            struct.pack("<I", 8) + msgspec.msgpack.encode({"t": 99_999}),
            "a frame holds a bad message: unknown message tag",
        ),
        (struct.pack("<I", 5) + msgspec.msgpack.encode({"t": 248}), "a frame holds a bad message: TokenDelta"),
        (struct.pack("<I", 1001) + b"\x91" * 1001, "a frame of 1001 bytes holds no message"),
    ],
)
def test_each_kind_of_garbage_has_its_sentence(data: bytes, sentence: str) -> None:
    with pytest.raises(LinkError) as caught:
        FrameBuffer().feed(data)
    assert str(caught.value).startswith(sentence)


def test_a_message_that_is_too_large_is_refused_before_it_is_sent() -> None:
    with pytest.raises(LinkError, match=r"EngineInfer of .* is larger than"):
        frame(EngineInfer(request_id=1, prompt="x" * (FRAME_BYTES_MAX + 1)))
