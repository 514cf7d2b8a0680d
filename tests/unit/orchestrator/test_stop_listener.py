"""The stop listener: words on standard input (S1 7.16, 9.17)."""

from __future__ import annotations

import pytest

from services.orchestrator.service import StopListener


def heard(*chunks: bytes, end: bool = False) -> list[str]:
    words: list[str] = []
    listener = StopListener(words.append)
    for chunk in chunks:
        listener.feed(chunk)
    if end:
        listener.end()
    return words


@pytest.mark.spec("S1 7.16", "S1 9.17")
@pytest.mark.parametrize("line", [b"stop\n", b"  SHUTDOWN \r\n", b"Quit\n", b"hello\nstop\n"])
def test_stop_words_are_trimmed_and_compared_case_insensitively(line: bytes) -> None:
    assert heard(line) == [line.split(b"\n")[-2].decode().strip().lower()]
    assert heard(*(bytes([byte]) for byte in line)) == heard(line)


@pytest.mark.spec("S1 7.16", "S1 9.17")
@pytest.mark.parametrize("line", [b"\n", b"stopp\n", b"stop now\n", b"\xff\xfe\n", b"Name three colors.\n"])
def test_anything_else_is_nothing(line: bytes) -> None:
    assert heard(line) == []


@pytest.mark.spec("S1 7.16")
def test_one_notification_however_often_it_is_said() -> None:
    assert heard(b"stop\nstop\n", b"quit\n") == ["stop"]


def test_last_line_needs_no_newline_and_the_end_alone_is_no_stop() -> None:
    assert heard(b"stop") == []
    assert heard(b"stop", end=True) == ["stop"]
    assert heard(b"hello\n", end=True) == []


def test_endless_line_is_thrown_away_and_does_not_grow() -> None:
    words: list[str] = []
    listener = StopListener(words.append)
    for _ in range(1000):
        listener.feed(b"x" * 1000)
    listener.feed(b"stop\n")
    assert words == []
    listener.feed(b"stop\n")
    assert words == ["stop"]
