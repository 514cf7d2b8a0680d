"""Edges over Unix sockets: frames in any pieces, a full socket, damage, and names that a killed process left."""

from __future__ import annotations

import errno
import os
import resource
import select
import socket
import stat
import struct
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from common.limits import EDGE_CHUNK_BYTES
from common.local_edges import LocalEdges, frame_bytes

FRAME = struct.Struct("<II")


class Side:
    """A LocalEdges with what it handed over."""

    def __init__(self) -> None:
        self.edges = LocalEdges()
        self.inbound: list[tuple[bytes, bytes]] = []
        self.outbound: list[tuple[int, bytes]] = []
        self.links: list[tuple[int, bool]] = []

    def drain(self, enough: Callable[[], bool] = lambda: False) -> None:
        self.edges.drain(
            lambda conn, frame: self.inbound.append((conn, frame)),
            lambda edge, frame: self.outbound.append((edge, frame)),
            lambda edge, up: self.links.append((edge, up)),
            enough,
        )


@pytest.fixture
def ends() -> Iterator[tuple[Side, Side]]:
    """A producer and a consumer."""
    sides = Side(), Side()
    yield sides
    for side in sides:
        side.edges.close()
        side.edges.term()


def framed(frame: bytes) -> bytes:
    return FRAME.pack(len(frame), zlib.crc32(frame)) + frame


def dialled(consumer: Side, path: Path) -> socket.socket:
    """A producer whose bytes the test writes itself."""
    raw = socket.socket(socket.AF_UNIX)
    raw.connect(str(path))
    consumer.drain()
    return raw


def test_frames_go_both_ways_and_links_are_told(tmp_path: Path, ends: tuple[Side, Side]) -> None:
    left, right = ends
    address = f"ipc://{tmp_path}/e"
    assert right.edges.bind(address) == address
    assert stat.S_IMODE(os.stat(tmp_path / "e").st_mode) == 0o600
    left.edges.dial(7, address)
    assert left.edges.has(7) and left.edges.send(7, b"one") and left.edges.send(7, b"two")
    right.drain()
    right.drain()
    assert [frame for _, frame in right.inbound] == [b"one", b"two"]
    conn = right.inbound[0][0]
    assert right.edges.owns(conn) and right.edges.reply(conn, b"three")
    left.drain()
    assert left.outbound == [(7, b"three")] and left.links == [(7, True)]


def test_who_waits_for_one_record_gets_one_connection_at_a_time(tmp_path: Path, ends: tuple[Side, Side]) -> None:
    left, right = ends
    right.edges.bind(f"ipc://{tmp_path}/e")
    for edge in (1, 2):
        left.edges.dial(edge, f"ipc://{tmp_path}/e")
        left.edges.send(edge, b"x")
    while not right.inbound:
        right.drain(lambda: bool(right.inbound))
    assert len(right.inbound) == 1
    right.drain()
    assert len(right.inbound) == 2


def test_a_full_socket_keeps_what_is_left_and_its_order(tmp_path: Path, ends: tuple[Side, Side]) -> None:
    left, right = ends
    right.edges.bind(f"ipc://{tmp_path}/e")
    left.edges.dial(1, f"ipc://{tmp_path}/e")
    frames = [bytes([number]) * EDGE_CHUNK_BYTES for number in range(40)]
    assert all(left.edges.send(1, frame) for frame in frames)
    for _ in range(200):
        right.drain()
        left.drain()
    assert [frame for _, frame in right.inbound] == frames


@pytest.mark.parametrize("piece", [1, 3, 7, 1000])
def test_a_frame_comes_whole_in_any_pieces(tmp_path: Path, ends: tuple[Side, Side], piece: int) -> None:
    _, right = ends
    right.edges.bind(f"ipc://{tmp_path}/e")
    with dialled(right, tmp_path / "e") as raw:
        data = framed(b"first") + framed(b"") + framed(b"second" * 20)
        for at in range(0, len(data), piece):
            raw.sendall(data[at : at + piece])
            right.drain()
    assert [frame for _, frame in right.inbound] == [b"first", b"", b"second" * 20]


@pytest.mark.parametrize(
    "data",
    [
        framed(b"good") + FRAME.pack(4, zlib.crc32(b"good")) + b"goad",
        framed(b"good") + FRAME.pack(1 << 31, 0),
        framed(b"good") + FRAME.pack(EDGE_CHUNK_BYTES + 2000, 0) + b"x",
    ],
)
def test_a_damaged_frame_ends_the_connection_after_the_good_ones(
    tmp_path: Path, ends: tuple[Side, Side], data: bytes
) -> None:
    _, right = ends
    right.edges.bind(f"ipc://{tmp_path}/e")
    with dialled(right, tmp_path / "e") as raw:
        raw.sendall(data)
        right.drain()
        assert [frame for _, frame in right.inbound] == [b"good"]
        assert raw.recv(10) == b""
        assert not right.edges.reply(right.inbound[0][0], b"late")


# --- a fast path: somebody else reads and writes the descriptors --------------------------------------------------
@pytest.fixture
def linked(tmp_path: Path, ends: tuple[Side, Side]) -> tuple[Side, Side]:
    """Edge 7 from left to right."""
    left, right = ends
    right.edges.bind(f"ipc://{tmp_path}/e")
    left.edges.dial(7, f"ipc://{tmp_path}/e")
    return left, right


def test_a_frame_that_was_written_elsewhere_is_not_sent_again(linked: tuple[Side, Side]) -> None:
    left, right = linked
    descriptor = left.edges.writing(7)
    assert descriptor is not None and left.edges.writing(8) is None
    left.edges.was_written(7, frame_bytes(b"one"), os.write(descriptor, frame_bytes(b"one")))
    assert left.edges.send(7, b"one") and left.edges.send(7, b"two")
    right.drain()
    right.drain()
    assert [frame for _, frame in right.inbound] == [b"one", b"two"]


def test_another_frame_than_the_one_that_left_is_a_fault(linked: tuple[Side, Side]) -> None:
    left, _ = linked
    left.edges.was_written(7, frame_bytes(b"one"), len(frame_bytes(b"one")))
    with pytest.raises(RuntimeError, match="sent another frame of 11 bytes"):
        left.edges.send(7, b"two")


@pytest.mark.parametrize("took", [3, -errno.EAGAIN])
def test_what_was_not_taken_elsewhere_follows(linked: tuple[Side, Side], took: int) -> None:
    left, right = linked
    descriptor, data = left.edges.writing(7), frame_bytes(b"one")
    assert descriptor is not None
    if took > 0:
        os.write(descriptor, data[:took])
    left.edges.was_written(7, data, took)
    assert left.edges.send(7, b"one") and left.edges.writing(7) is None and left.edges.send(7, b"two")
    left.drain()
    assert left.edges.writing(7) == descriptor
    right.drain()
    right.drain()
    assert [frame for _, frame in right.inbound] == [b"one", b"two"]


def test_a_connection_that_broke_elsewhere_is_a_lost_link(linked: tuple[Side, Side]) -> None:
    left, right = linked
    right.drain()
    right.edges.close()
    left.edges.was_written(7, frame_bytes(b"one"), -errno.EPIPE)
    assert not left.edges.send(7, b"one")
    left.drain()
    assert left.links == [(7, True), (7, False)] and left.edges.writing(7) is None


@pytest.mark.parametrize(
    "data", [framed(b"one"), framed(b"one") + framed(b"two")[:5], framed(b"one")[:5], b"\xff" * 20]
)
def test_what_was_read_elsewhere_is_as_if_it_was_read_here(
    tmp_path: Path, ends: tuple[Side, Side], data: bytes
) -> None:
    _, right = ends
    right.edges.bind(f"ipc://{tmp_path}/e")
    with dialled(right, tmp_path / "e") as raw:
        raw.sendall(framed(b"hello"))
        right.drain()
        conn = right.inbound[0][0]
        descriptor = right.edges.reading(conn)
        assert descriptor is not None and right.edges.reading(b"unix:99") is None
        raw.sendall(data)
        assert os.read(descriptor, 1000) == data
        right.edges.was_read(conn, data, lambda conn, frame: right.inbound.append((conn, frame)))
        is_whole, is_damaged = data == framed(b"one"), data[0] == 255
        assert right.edges.reading(conn) == (descriptor if is_whole else None), "not in the middle of a frame"
        if not is_damaged:
            raw.sendall((framed(b"one") + framed(b"two"))[len(data) :])
            right.drain()
        wanted = [b"hello"] if is_damaged else [b"hello", b"one", b"two"]
        assert [frame for _, frame in right.inbound] == wanted
        assert not is_damaged or raw.recv(1) == b"", "damage ends the connection"


def test_each_send_dials_until_somebody_listens_and_a_lost_link_is_told(
    tmp_path: Path, ends: tuple[Side, Side]
) -> None:
    left, right = ends
    address = f"ipc://{tmp_path}/e"
    left.edges.dial(1, address)
    assert not left.edges.send(1, b"nobody")
    with socket.socket(socket.AF_UNIX) as killed:  # its name is left behind
        killed.bind(str(tmp_path / "e"))
    assert not left.edges.send(1, b"nobody")
    right.edges.bind(address)
    assert left.edges.send(1, b"hello")
    right.drain()
    right.drain()
    right.edges.close()
    left.drain()
    assert left.links == [(1, True), (1, False)] and not (tmp_path / "e").exists()
    assert not left.edges.send(1, b"nobody")
    right.edges.bind(address)
    assert left.edges.send(1, b"again")
    left.edges.hang_up(1)
    assert not left.edges.has(1)


def test_an_address_that_cannot_be_bound_or_dialled(tmp_path: Path, ends: tuple[Side, Side]) -> None:
    left, _ = ends
    with pytest.raises(OSError, match="No such file"):
        left.edges.bind("ipc:///nowhere/at/all/e")
    left.edges.dial(1, f"ipc://{tmp_path}/{'long' * 40}")
    assert not left.edges.send(1, b"nobody")


def test_what_a_consumer_said_before_it_left_is_read_though_sending_fails(
    tmp_path: Path, ends: tuple[Side, Side]
) -> None:
    left, right = ends
    right.edges.bind(f"ipc://{tmp_path}/e")
    left.edges.dial(1, f"ipc://{tmp_path}/e")
    left.edges.send(1, b"hello")
    right.drain()
    right.edges.reply(right.inbound[0][0], b"refused")
    right.edges.close()
    assert not left.edges.send(1, b"more")
    left.drain()
    assert left.outbound == [(1, b"refused")] and left.links == [(1, True), (1, False)]


def test_a_predecessor_leaves_the_name_to_its_successor(tmp_path: Path, ends: tuple[Side, Side]) -> None:
    old, new = ends
    address = f"ipc://{tmp_path}/e"
    old.edges.bind(address)
    new.edges.bind(address)
    old.edges.close()
    third = Side()
    third.edges.dial(1, address)
    assert third.edges.send(1, b"to the successor")
    new.drain()
    assert [frame for _, frame in new.inbound] == [b"to the successor"]
    third.edges.close()
    third.edges.term()
    new.edges.close()
    assert not (tmp_path / "e").exists()


def test_a_peer_that_never_stops_sending_does_not_hold_up_its_reader(tmp_path: Path, ends: tuple[Side, Side]) -> None:
    _, right = ends
    right.edges.bind(f"ipc://{tmp_path}/e")
    seen = 0
    with dialled(right, tmp_path / "e") as raw:
        raw.sendall(framed(b"x"))

        def again(_conn: bytes, _frame: bytes) -> None:
            nonlocal seen
            seen += 1
            assert seen < 10_000, "drain does not end"
            raw.sendall(framed(b"x"))

        right.edges.drain(again, lambda *_: None, lambda *_: None)
        assert seen and select.select([right.edges.fd], [], [], 0)[0], "what is left wakes the reader"


def test_without_descriptors_nobody_is_dialled_and_who_dials_is_turned_away(
    tmp_path: Path, ends: tuple[Side, Side]
) -> None:
    left, right = ends
    address = f"ipc://{tmp_path}/e"
    right.edges.bind(address)
    left.edges.dial(1, address)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    probe = os.dup(0)
    os.close(probe)  # the lowest free number: above it nothing can be opened
    resource.setrlimit(resource.RLIMIT_NOFILE, (probe, hard))
    try:
        left.edges.dial(2, address)
        assert not left.edges.send(2, b"no descriptor")
        right.drain()
        assert not select.select([right.edges.fd], [], [], 0)[0], "nothing is left that wakes it again and again"
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    left.drain()
    assert left.links == [(1, True), (1, False)]
    assert left.edges.send(1, b"one") and left.edges.send(2, b"two")
    right.drain()
    assert sorted(frame for _, frame in right.inbound) == [b"one", b"two"]
