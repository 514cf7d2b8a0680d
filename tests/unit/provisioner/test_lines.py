"""From bytes to lines: whatever the chunks, the same lines; nothing grows without end; secrets are not cut in two."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.redact import Redactor
from services.provisioner.lines import REDACTION_OVERLAP_BYTES, LineSplitter, bridge_frame


def split(splitter: LineSplitter, data: bytes, size: int) -> list[str]:
    lines = [line for at in range(0, len(data), size) for line in splitter.feed(data[at : at + size])]
    return lines + splitter.flush()


@given(data=st.binary(max_size=300), size=st.integers(1, 50))
def test_short_lines_do_not_depend_on_the_chunks(data: bytes, size: int) -> None:
    whole = split(LineSplitter(), data, 1000)
    assert split(LineSplitter(), data, size) == whole
    expected = data.split(b"\n")
    if not expected[-1]:
        expected.pop()
    assert whole == [line.removesuffix(b"\r").decode("utf-8", "replace") for line in expected]


@given(text=st.text(alphabet="aä€😀", min_size=1, max_size=200), size=st.integers(1, 64), limit=st.integers(4, 32))
def test_long_lines_are_cut_between_characters(text: str, size: int, limit: int) -> None:
    pieces = split(LineSplitter(line_bytes_max=limit), text.encode(), size)
    assert "".join(pieces) == text
    assert all(len(piece.encode()) <= limit for piece in pieces)


@given(size=st.integers(1, 4000), before=st.integers(0, 400))
def test_a_secret_at_the_cut_is_redacted_whole(size: int, before: int) -> None:
    secret = b"hf_" + b"S" * 60
    data = b"x" * before + secret + b"y" * 3000
    pieces = split(LineSplitter(Redactor([secret]).redact, line_bytes_max=128), data, size)
    assert "SS" not in "".join(pieces)
    assert "".join(pieces).count("redacted") == 1


def test_memory_is_bounded_while_no_newline_comes() -> None:
    splitter = LineSplitter(line_bytes_max=100)
    for _ in range(1000):
        splitter.feed(b"z" * 1000)
        assert len(splitter._held) <= 100 + REDACTION_OVERLAP_BYTES + 1000


@pytest.mark.parametrize(
    "line",
    [
        "plain",
        '{"mvp_stdio_event":1}',
        '{"mvp_stdio_event":1,"kind":"other","channel":"c","payload":"p"}',
        '{"mvp_stdio_event":1,"kind":"datastream_frame","channel":"","payload":"p"}',
        '{"mvp_stdio_event":1,"kind":"datastream_frame","channel":"a\\nb","payload":"p"}',
        '{"mvp_stdio_event":1,"kind":"datastream_frame","channel":"' + "c" * 257 + '","payload":"p"}',
        '{"mvp_stdio_event":1,"kind":"datastream_frame","channel":"c","payload":7}',
        '{"mvp_stdio_event":' + "[" * 5000,
    ],
)
def test_what_is_no_frame_is_a_log_line(line: str) -> None:
    assert bridge_frame(line) is None


def test_a_payload_that_is_json_itself_is_taken_as_its_text() -> None:
    frame = bridge_frame('{"mvp_stdio_event":1,"kind":"datastream_frame","channel":"c","payload":{"a":[1]}}')
    assert frame is not None and frame.payload == b'{"a":[1]}'
