"""The lines of the prompt RPC: what is a request, what is refused and how, what responses look like."""

from __future__ import annotations

import contextlib
import json

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.messages.node_agent import ChatMessage, Sampling
from services.prompt_gateway import wire
from services.prompt_gateway.wire import ProtocolError, Shutdown, SubmitPrompt, parse_request

U64_MAX = 2**64 - 1


@pytest.mark.spec("S1 2.5")
@pytest.mark.parametrize(
    ("line", "request_id", "max_tokens"),
    [
        (b'{"request_id":1,"prompt_text":"hi"}', 1, None),
        (b'{"request_id":0,"prompt_text":"","max_tokens":0}', 0, 0),
        (b'{"request_id":18446744073709551615,"prompt_text":"x","max_tokens":4294967295}', U64_MAX, 2**32 - 1),
        (b' {"request_id":1,"prompt_text":"x","max_tokens":null} \r', 1, None),
    ],
)
def test_submit_prompt(line: bytes, request_id: int, max_tokens: int | None) -> None:
    request = parse_request(line)
    assert isinstance(request, SubmitPrompt)
    assert (request.request_id, request.max_tokens) == (request_id, max_tokens)


def test_everything_optional() -> None:
    request = parse_request(
        b'{"request_id":7,"messages":[{"role":"system","content":"be brief"},{"role":"user","content":"h\xc3\xa9"}],'
        b'"sampling":{"temperature":0.7,"top_k":40,"top_p":0.9,"min_p":0.1,"repetition_penalty":1.1,"seed":3},'
        b'"stop":["\\n\\n"],"events":["queued"]}'
    )
    assert isinstance(request, SubmitPrompt)
    assert request.chat() == [ChatMessage(role="system", content="be brief"), ChatMessage(role="user", content="hé")]
    assert request.sampler() == Sampling(
        temperature=0.7, top_k=40, top_p=0.9, min_p=0.1, repetition_penalty=1.1, seed=3
    )
    assert (request.stop, request.events, request.prompt_bytes) == (["\n\n"], ["queued"], 11)
    raw = parse_request(b'{"request_id":7,"prompt_text":"x","raw":true}')
    assert isinstance(raw, SubmitPrompt)
    assert (raw.raw, raw.sampler(), raw.chat(), raw.prompt_bytes) == (True, None, [], 1)


@pytest.mark.spec("S1 2.5")
def test_shutdown_request() -> None:
    assert parse_request(b'{"type":"shutdown"}') == Shutdown()


BAD = [
    (b"", "the line is empty"),
    (b"  \r", "the line is empty"),
    (b"hello", "JSON"),
    (b"[1]", "Expected `object`, got `array`"),
    (b'"x"', "Expected `object`"),
    (b"null", "Expected `object`"),
    (b'{"request_id":1,"prompt_text":"x"', "truncated"),
    (b'{"request_id":1,"prompt_text":"x"} {}', "trailing"),
    (b'{"prompt_text":"x"}', "request_id"),
    (b'{"request_id":1}', "needs prompt_text"),
    (b'{"request_id":1,"messages":[]}', "needs prompt_text"),
    (b'{"request_id":-1,"prompt_text":"x"}', "request_id"),
    (b'{"request_id":18446744073709551616,"prompt_text":"x"}', "request_id is larger"),
    (b'{"request_id":1' + b"0" * 5000 + b',"prompt_text":"x"}', "request_id"),
    (b'{"request_id":1.0,"prompt_text":"x"}', "request_id"),
    (b'{"request_id":true,"prompt_text":"x"}', "request_id"),
    (b'{"request_id":"1","prompt_text":"x"}', "request_id"),
    (b'{"request_id":1,"prompt_text":5}', "prompt_text"),
    (b'{"request_id":1,"prompt_text":"\xff"}', "UTF-8"),
    (b'{"request_id":1,"prompt_text":"\\ud800"}', "malformed"),
    (b'{"request_id":1,"prompt_text":"x","max_tokens":-1}', "max_tokens"),
    (b'{"request_id":1,"prompt_text":"x","max_tokens":4294967296}', "max_tokens"),
    (b'{"request_id":1,"prompt_text":"x","max_tokens":1.5}', "max_tokens"),
    (b'{"request_id":1,"prompt_text":"x","max_token":5}', "max_token"),
    (b'{"request_id":1,"prompt_text":"x","raw":1}', "raw"),
    (b'{"request_id":1,"prompt_text":"x","messages":[{"role":"user","content":"y"}]}', "exclude each other"),
    (b'{"request_id":1,"raw":true,"messages":[{"role":"user","content":"y"}]}', "raw goes with prompt_text"),
    (b'{"request_id":1,"messages":[{"role":"root","content":"y"}]}', "root"),
    (b'{"request_id":1,"messages":[{"role":"user"}]}', "content"),
    (b'{"request_id":1,"messages":[{"role":"user","content":"y","name":"z"}]}', "name"),
    (b'{"request_id":1,"prompt_text":"x","sampling":{"temperature":NaN}}', "malformed"),
    (b'{"request_id":1,"prompt_text":"x","sampling":{"temperature":1e999}}', "temperature"),
    (b'{"request_id":1,"prompt_text":"x","sampling":{"temperature":-0.1}}', "temperature"),
    (b'{"request_id":1,"prompt_text":"x","sampling":{"top_p":0}}', "top_p"),
    (b'{"request_id":1,"prompt_text":"x","sampling":{"top_p":1.01}}', "top_p"),
    (b'{"request_id":1,"prompt_text":"x","sampling":{"min_p":2}}', "min_p"),
    (b'{"request_id":1,"prompt_text":"x","sampling":{"repetition_penalty":0}}', "repetition_penalty"),
    (b'{"request_id":1,"prompt_text":"x","sampling":{"seed":18446744073709551616}}', "seed is larger"),
    (b'{"request_id":1,"prompt_text":"x","sampling":{"temp":1}}', "temp"),
    (b'{"request_id":1,"prompt_text":"x","stop":"a"}', "stop"),
    (b'{"request_id":1,"prompt_text":"x","stop":[""]}', "stop"),
    (b'{"request_id":1,"prompt_text":"x","stop":[' + b",".join([b'"a"'] * 17) + b"]}", "stop"),
    (b'{"request_id":1,"prompt_text":"x","events":["done"]}', "done"),
    (b'{"type":"stop"}', "'stop'"),
    (b'{"type":5}', "unknown request type"),
    (b'{"type":"shutdown","force":true}', "force"),
    (b'{"type":"submit","request_id":1,"prompt_text":"x"}', "a prompt has no type"),
    (b'{"request_id":1,"x":' + b"[" * 200_000, "malformed"),
    (b"[" * 200_000, "malformed"),
]


@pytest.mark.spec("S1 2.5", "S1 10.9")
@pytest.mark.parametrize(("line", "names"), BAD, ids=lambda value: repr(value)[:40])
def test_malformed_request_is_one_sentence_that_names_what_is_wrong(line: bytes, names: str) -> None:
    with pytest.raises(ProtocolError) as caught:
        parse_request(line)
    text = str(caught.value)
    assert names in text
    assert "\n" not in text
    assert len(text) < 400


def test_an_unknown_field_of_a_megabyte_does_not_come_back_whole() -> None:
    with pytest.raises(ProtocolError) as caught:
        parse_request(b'{"request_id":1,"prompt_text":"x","' + b"y" * 1_000_000 + b'":1}')
    assert len(str(caught.value)) < 400


@given(st.binary(max_size=200))
def test_any_bytes_are_a_request_or_a_protocol_error(line: bytes) -> None:
    with contextlib.suppress(ProtocolError):
        parse_request(line)


@given(
    st.fixed_dictionaries(
        {"request_id": st.integers(-5, 2**65), "prompt_text": st.text(max_size=20) | st.none() | st.integers()},
        optional={"max_tokens": st.integers(-1, 2**33) | st.none(), "raw": st.booleans(), "stop": st.lists(st.text())},
    )
)
def test_what_is_accepted_is_in_range(request: dict[str, object]) -> None:
    try:
        parsed = parse_request(json.dumps(request).encode())
    except ProtocolError:
        return
    assert isinstance(parsed, SubmitPrompt)
    assert 0 <= parsed.request_id <= U64_MAX
    assert parsed.max_tokens is None or 0 <= parsed.max_tokens < 2**32
    assert parsed.prompt_text == request["prompt_text"]


RESPONSES = [
    (wire.TextDeltaLine(request_id=1, text="ž\n"), '{"type":"text_delta","request_id":1,"text":"ž\\n"}'),
    (
        wire.DoneLine(
            request_id=U64_MAX, final_text="a", tokens_generated=3, elapsed_ms=9, prompt_tokens=4, finish_reason="stop"
        ),
        '{"type":"done","request_id":18446744073709551615,"final_text":"a","tokens_generated":3,"elapsed_ms":9,'
        '"prompt_tokens":4,"finish_reason":"stop"}',
    ),
    (wire.FaultLine(request_id=2, error="no"), '{"type":"fault","request_id":2,"error":"no"}'),
    (wire.QueuedLine(request_id=2, position=1), '{"type":"queued","request_id":2,"position":1}'),
    (wire.ErrorLine(error="bad"), '{"type":"error","error":"bad"}'),
    (wire.ShutdownAcceptedLine(), '{"type":"shutdown_accepted"}'),
]


@pytest.mark.spec("S1 7.8")
@pytest.mark.parametrize(("response", "text"), RESPONSES, ids=lambda value: type(value).__name__)
def test_responses_to_the_byte(response: wire.Response, text: str) -> None:
    line = wire.encode_response(response)
    assert line == text.encode() + b"\n"
    assert wire.decode_response(line) == response
    # The probe's spaces before a line change nothing for any JSON reader.
    assert wire.decode_response(b"  " + line) == response
    assert json.loads(b"  " + line) == msgspec.json.decode(text)


def test_a_client_reads_fields_of_a_later_gateway_and_refuses_what_is_no_response() -> None:
    line = b'{"type":"text_delta","request_id":1,"text":"a","logprob":-1}'
    assert wire.decode_response(line) == wire.TextDeltaLine(request_id=1, text="a")
    for bad in (b"", b"{}", b'{"type":"x"}', b'{"type":"done"}', b"\xff"):
        with pytest.raises(ProtocolError):
            wire.decode_response(bad)
