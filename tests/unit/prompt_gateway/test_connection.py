"""Lines, bounds and addresses: the pure parts below the gateway's actor."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.limits import CLIENT_BUFFER_BYTES_MAX, PROMPT_LINE_BYTES_MAX, PROMPT_QUEUE_LEN_MAX
from services.prompt_gateway.bind import checked_bind, join_addr, split_addr
from services.prompt_gateway.connection import Connection, LineSplitter
from services.prompt_gateway.queue import PromptQueue, PromptWork
from services.prompt_gateway.wire import ProtocolError, SubmitPrompt


@given(st.lists(st.binary(max_size=30).filter(lambda line: b"\n" not in line)), st.data())
def test_lines_do_not_depend_on_how_the_bytes_were_cut(lines: list[bytes], data: st.DataObject) -> None:
    stream = b"".join(line + b"\n" for line in lines) + b"rest"
    splitter, found, at = LineSplitter(), [], 0
    while at < len(stream):
        size = data.draw(st.integers(1, 17))
        splitter.feed(stream[at : at + size])
        found += splitter.lines()
        at += size
    assert found == lines
    assert splitter.rest() == b"rest"
    assert len(splitter) == 0


def test_the_longest_line_is_taken_and_one_byte_more_is_not() -> None:
    splitter = LineSplitter(limit=8)
    splitter.feed(b"12345678\n")
    assert list(splitter.lines()) == [b"12345678"]
    splitter.feed(b"123456789\n")
    with pytest.raises(ProtocolError, match="longer than 8 bytes"):
        list(splitter.lines())
    endless = LineSplitter(limit=8)
    endless.feed(b"123456789")
    with pytest.raises(ProtocolError, match="longer than 8 bytes"):
        list(endless.lines())


def test_memory_of_a_connection_that_never_ends_its_line() -> None:
    connection, chunk, sent = Connection(1, "peer"), b"x" * 65536, 0
    with pytest.raises(ProtocolError, match=str(PROMPT_LINE_BYTES_MAX)):
        while sent < 10 * 1024 * 1024:
            assert list(connection.requests(chunk)) == []
            sent += len(chunk)
            assert connection.held_bytes <= PROMPT_LINE_BYTES_MAX
    connection.close()
    assert connection.held_bytes == 0
    assert list(connection.requests(chunk)) == []
    assert connection.held_bytes == 0


def test_what_waits_for_a_client_is_bounded_but_one_line_always_goes() -> None:
    connection = Connection(1, "peer")
    assert connection.may_write(CLIENT_BUFFER_BYTES_MAX * 2)
    connection.wrote(CLIENT_BUFFER_BYTES_MAX - 10)
    assert connection.may_write(10)
    assert not connection.may_write(11)
    # A prompt's last line repeats all that was sent: it says nothing of whether the client reads.
    assert connection.may_write(2 * CLIENT_BUFFER_BYTES_MAX, is_last=True)
    connection.wrote(11)
    assert not connection.may_write(1, is_last=True)
    connection.drained(CLIENT_BUFFER_BYTES_MAX + 1)
    assert connection.may_write(11)


def work(number: int, **more: object) -> PromptWork:
    return PromptWork(number, number, SubmitPrompt(request_id=number, prompt_text="x", **more), 0)  # type: ignore[arg-type]


@pytest.mark.spec("S1 9.9")
def test_the_queue_is_first_in_first_out_and_bounded() -> None:
    queue = PromptQueue()
    works = [work(n) for n in range(PROMPT_QUEUE_LEN_MAX)]
    assert all(queue.push(item) for item in works)
    assert queue.is_full
    assert not queue.push(work(99))
    assert queue.remove(works[1])
    assert not queue.remove(works[1])
    assert [queue.pop() for _ in range(2)] == [works[0], works[2]]
    assert len(queue) == PROMPT_QUEUE_LEN_MAX - 3
    assert PromptQueue().pop() is None


def test_positions_are_told_once_and_again_when_they_change() -> None:
    queue, asks, silent = PromptQueue(), work(1, events=["queued"]), work(2)
    other = work(3, events=["queued"])
    for item in (silent, asks, other):
        queue.push(item)
    assert queue.news() == [(asks, 2), (other, 3)]
    assert queue.news() == []
    queue.pop()
    assert queue.news() == [(asks, 1), (other, 2)]


@pytest.mark.parametrize(
    ("addr", "allow_remote", "expected"),
    [
        ("127.0.0.1:19777", False, ("127.0.0.1", 19777)),
        ("localhost:0", False, ("127.0.0.1", 0)),
        ("[::1]:80", False, ("::1", 80)),
        ("127.8.8.8:1", False, ("127.8.8.8", 1)),
        ("0.0.0.0:1", True, ("0.0.0.0", 1)),
        ("0.0.0.0:1", False, "allow_remote"),
        ("[::]:1", False, "allow_remote"),
        ("10.0.0.1:1", False, "allow_remote"),
        ("example.org:1", True, "neither an IP address"),
        ("127.0.0.1", False, "HOST:PORT"),
        ("::1:80", False, "HOST:PORT"),
        (":80", False, "HOST:PORT"),
        ("127.0.0.1:65536", False, "port number"),
        ("127.0.0.1:²", False, "port number"),
        ("127.0.0.1:-1", False, "port number"),
    ],
)
def test_bind_addresses(addr: str, allow_remote: bool, expected: tuple[str, int] | str) -> None:
    if isinstance(expected, tuple):
        assert checked_bind(addr, allow_remote=allow_remote) == expected
        assert split_addr(join_addr(*expected)) == expected
    else:
        with pytest.raises(ValueError, match=expected):
            checked_bind(addr, allow_remote=allow_remote)
