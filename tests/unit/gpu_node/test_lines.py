"""Lines off a pipe: however they are cut, within the bound (S2 3.2's output_buffer)."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from worker.gpu_node.lines import LineBuffer, printable


@pytest.mark.spec("S2 3.2")
@given(lines=st.lists(st.binary(max_size=20).filter(lambda line: b"\n" not in line)), cuts=st.lists(st.integers(1, 7)))
def test_lines_come_out_as_they_were_said_however_they_are_cut(lines: list[bytes], cuts: list[int]) -> None:
    data = b"".join(line + b"\n" for line in lines)
    buffer, out = LineBuffer(100), []
    for cut in [*cuts, len(data)]:
        out += buffer.feed(data[:cut])
        data = data[cut:]
    assert out == lines


@given(data=st.lists(st.binary(max_size=30)))
def test_no_line_is_longer_than_the_limit_and_no_more_is_held(data: list[bytes]) -> None:
    buffer = LineBuffer(10)
    for piece in data:
        assert all(line is None or len(line) <= 10 for line in buffer.feed(piece))
        assert len(buffer) <= 10
    whole = b"".join(data).split(b"\n")[:-1]
    assert sum(len(line) > 10 for line in whole) <= buffer.cut


def test_a_long_line_is_said_once_and_the_next_one_counts() -> None:
    buffer = LineBuffer(3)
    assert buffer.feed(b"aaaa") == [None]
    assert buffer.feed(b"aaaa\nbb\ncccc\n") == [b"bb", None]
    assert buffer.feed(b"dd") == [] and buffer.take_rest() == b"dd"


def test_a_log_line_cannot_move_the_cursor() -> None:
    assert "\x1b" not in printable(b"\x1b[2Jred\r", 100)
    assert printable(b"abc", 2) == "ab…"
