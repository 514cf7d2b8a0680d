"""A token is answered before it is looked at: two edges on real sockets, the gateway's port between them."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from common.codec import encode_body
from common.edge_records import Record, encode_record, encode_tokens
from common.edges.port import Way
from common.local_edges import frame_bytes
from common.messages.edge import EdgeData
from services.prompt_gateway.token_echo import Foretold, TokenEcho
from tests.unit.edges.test_edge_port import End, inbound, now_ms, outbound, turn

TOKEN_IN, TOKEN_OUT = 1, 3


class Loop:
    """last → gateway → first; the test plays the gateway's actor."""

    def __init__(self, folder: Path) -> None:
        self.last, self.gateway, self.first = End(), End(), End()
        self.echo = TokenEcho()
        for end, edge_id, producer in ((self.gateway, TOKEN_OUT, self.last), (self.first, TOKEN_IN, self.gateway)):
            address = f"ipc://{folder}/{edge_id}"
            end.port.bind([address])
            end.port.accept(inbound(edge_id))
            producer.port.open(outbound(end, [address], edge_id), now_ms())
        turn(*self.ends, until=lambda: all(end.ready for end in self.ends))

    @property
    def ends(self) -> tuple[End, End, End]:
        return self.last, self.gateway, self.first

    def told(self, at: int) -> Foretold:
        return Foretold(TOKEN_OUT, Record(at, at, bytes(4)), TOKEN_IN, Record(at + 1, at + 1, bytes(4), end=True))

    def say(self, record: Record) -> None:
        self.last.port.write(TOKEN_OUT, encode_record(record), now_ms())

    def feed(self, at: int, token: int) -> None:
        """What the actor does with token number `at`."""
        record = Record(at + 1, at + 1, encode_tokens([token]), end=True)
        self.gateway.port.write(TOKEN_IN, encode_record(record), now_ms())

    def turn_echo(self, at: int) -> None:
        self.echo.turn(self.gateway.port, self.told(at), time.monotonic_ns())

    def heard(self) -> list[tuple[int, bytes]]:
        """Of the first stage."""
        self.first.port.pump(now_ms())
        return [(record.object_id, record.payload) for record in self.first.records]

    def settle(self, records: int) -> None:
        turn(*self.ends, until=lambda: len(self.first.records) == records and not self.gateway.port.held(TOKEN_IN))
        for end in self.ends:
            end.port.check()
            assert not end.failed


@pytest.fixture
def loop(tmp_path: Path) -> Iterator[Loop]:
    made = Loop(tmp_path)
    yield made
    for end in made.ends:
        end.port.term()


def token(at: int, value: int, *, end: bool = False) -> Record:
    return Record(at, at, encode_tokens([value]), end=end)


def test_a_token_that_was_foretold_is_answered_at_once_and_only_once(loop: Loop) -> None:
    for at in range(5):
        loop.echo.arm(loop.gateway.port, loop.told(at))
        loop.say(token(at, 70 + at))
        loop.turn_echo(at)
        assert loop.heard()[-1] == (at + 1, encode_tokens([70 + at])), "before the actor has done anything"
        assert loop.gateway.records[-1].payload == encode_tokens([70 + at])
        loop.feed(at, 70 + at)
        loop.settle(at + 1)


def test_an_actor_that_does_another_thing_is_a_defect(loop: Loop) -> None:
    loop.echo.arm(loop.gateway.port, loop.told(0))
    loop.say(token(0, 70))
    loop.turn_echo(0)
    with pytest.raises(RuntimeError, match="another frame"):
        loop.feed(0, 71)


@pytest.mark.parametrize(
    "records",
    [
        [token(0, 70, end=True)],
        [Record(0, 0, b"")],
        [token(1, 70)],
        [token(0, 70), token(1, 71)],
    ],
    ids=["the last one", "given up", "another object", "two at once"],
)
def test_anything_else_is_the_actors_business(loop: Loop, records: list[Record]) -> None:
    loop.echo.arm(loop.gateway.port, loop.told(0))
    for record in records:
        loop.say(record)
    loop.turn_echo(0)
    assert loop.heard() == []
    assert [(r.object_id, r.payload, r.end) for r in loop.gateway.records] == [
        (r.object_id, r.payload, r.end) for r in records
    ]
    loop.feed(5, 75)
    loop.settle(1)


def test_what_the_actor_no_longer_says_is_not_read(loop: Loop) -> None:
    """It was cancelled in between, say; the token comes the usual way."""
    loop.echo.arm(loop.gateway.port, loop.told(0))
    loop.say(token(0, 70))
    loop.echo.turn(loop.gateway.port, None, time.monotonic_ns())
    assert not loop.gateway.records and loop.heard() == []
    loop.turn_echo(0)
    assert not loop.gateway.records, "armed once, asked once"
    turn(*loop.ends, until=lambda: len(loop.gateway.records) == 1)


def way(loop: Loop) -> tuple[Way, bytes]:
    """The last stage's socket, and the whole frame of its next token."""
    record = token(0, 70)
    found = loop.last.port.way_out(TOKEN_OUT, record)
    assert found is not None
    return found, frame_bytes(encode_body(EdgeData(edge_id=TOKEN_OUT, offset=0, data=encode_record(record))))


def test_a_token_in_pieces_comes_the_usual_way(loop: Loop) -> None:
    out, frame = way(loop)
    loop.echo.arm(loop.gateway.port, loop.told(0))
    os.write(out.descriptor, frame[:50])
    loop.turn_echo(0)
    assert not loop.gateway.records
    loop.echo.arm(loop.gateway.port, loop.told(0))
    os.write(out.descriptor, frame[50:])
    loop.turn_echo(0)
    assert not loop.gateway.records and loop.heard() == [], "in the middle of a frame nothing is foretold"
    loop.gateway.port.pump(now_ms())
    assert [record.payload for record in loop.gateway.records] == [encode_tokens([70])]


@pytest.mark.parametrize("at", [2, 6, 20, -1])
def test_a_damaged_token_is_not_answered(loop: Loop, at: int) -> None:
    """Whichever byte it is; the connection is given up, as always."""
    out, frame = way(loop)
    broken = bytearray(frame)
    broken[at] ^= 1
    loop.echo.arm(loop.gateway.port, loop.told(0))
    os.write(out.descriptor, broken)
    loop.turn_echo(0)
    assert not loop.gateway.records and loop.heard() == []


def test_a_first_stage_that_has_just_died_gets_the_answer_on_its_next_connection(loop: Loop) -> None:
    """The answer is lost with the connection; the edge keeps it, and resumes."""
    loop.echo.arm(loop.gateway.port, loop.told(0))
    address = loop.first.port._sockets.local.bind  # the same name is taken again below
    name = next(iter(loop.first.port._sockets.local._names))
    loop.first.port._sockets.close()
    loop.say(token(0, 70))
    loop.turn_echo(0)
    loop.feed(0, 70)
    assert not loop.first.records
    address(f"ipc://{name}")
    loop.settle(1)
    assert loop.heard() == [(1, encode_tokens([70]))]
