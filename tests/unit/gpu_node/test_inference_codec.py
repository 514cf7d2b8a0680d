"""The messages of S2 6.1 on the wire: round trip, and garbage is one error (rust-swactor.md 10.3, t_codec)."""

from __future__ import annotations

import os

import pytest

from common.addresses import Plane, Role
from common.codec import BadEnvelope, Message, decode_body, encode_body, tag_of
from common.messages.inference import (
    PROMPT_CHARS_MAX,
    InferenceFault,
    InferenceNotReady,
    InferenceRequest,
    InferenceResponse,
)

REQUEST = InferenceRequest(request_id=1, prompt="p", max_tokens=3, temperature=0.5, reply_to=b"r" * 32)
ALL: list[Message] = [
    REQUEST,
    InferenceResponse(request_id=2**63, text="t\n"),
    InferenceNotReady(request_id=3),
    InferenceFault(request_id=4, error="e"),
]


@pytest.mark.spec("S2 6.1")
@pytest.mark.parametrize("message", ALL, ids=lambda message: type(message).__name__)
def test_round_trip(message: Message) -> None:
    assert decode_body(tag_of(type(message)), encode_body(message)) == message
    assert type(message).PLANE is Plane.PROMPT
    assert {Role.AGENT, Role.ROUTER} == type(message).FROM


@pytest.mark.spec("S2 6.1")
def test_the_fields_are_those_of_the_specification_beside_the_id() -> None:
    assert InferenceRequest.__struct_fields__ == ("request_id", "prompt", "max_tokens", "temperature", "reply_to")
    assert InferenceResponse.__struct_fields__ == ("request_id", "text")
    assert InferenceNotReady(request_id=1).text == InferenceFault(request_id=1, error="e").text == ""


@pytest.mark.spec("S2 6.1")
@pytest.mark.parametrize("message", ALL, ids=lambda message: type(message).__name__)
def test_garbage_truncated_empty_and_wrong_types_are_one_error(message: Message) -> None:
    tag, good = tag_of(type(message)), encode_body(message)
    bad = [b"", b"\xc1", os.urandom(40), *(good[:end] for end in range(len(good)))]
    bad += [encode_body(other) for other in ALL if other is not message]
    for body in bad:
        with pytest.raises(BadEnvelope):
            decode_body(tag, body)


@pytest.mark.parametrize("fields", [{"reply_to": b"short"}, {"max_tokens": -1}, {"temperature": float("nan")}])
def test_values_out_of_range_are_refused(fields: dict[str, object]) -> None:
    made = {"request_id": 1, "prompt": "p", "reply_to": b"r" * 32, **fields}
    with pytest.raises(BadEnvelope):
        decode_body(300, encode_body(InferenceRequest(**made)))  # type: ignore[arg-type]
    long = InferenceRequest(request_id=1, prompt="p" * (PROMPT_CHARS_MAX + 1), reply_to=b"r" * 32)
    with pytest.raises(BadEnvelope):
        decode_body(300, encode_body(long))
