"""Subscribers on the real socket of a collector process under load: none of them slows producers or the archive."""

from __future__ import annotations

import contextlib
import json
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from common.addresses import Role
from common.datastream import Emit, ObserverActor
from common.messages.service import ServiceReady
from services.datastream_collector.streams import CHANNEL_GAP
from services.datastream_collector.subscribe import SOCKET_NAME
from tests.unit.datastream_collector.test_collector_process import World

pytestmark = pytest.mark.e2e

RATE = 10_000
SECONDS = 3
BATCHES_MAX = 20  # on their way: beyond what the observer holds, a slow machine would have to lose records


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    world = World(tmp_path / "r", tmp_path / "logs" / "a.jsonl")
    world.bus.until(lambda: world.told(ServiceReady), 60)
    yield world
    world.bus.close()


def subscribe(world: World, request: bytes = b"{}") -> socket.socket:
    sock = socket.socket(socket.AF_UNIX)
    sock.connect(str(world.bus.bus_file(Role.COLLECTOR).run_dir / SOCKET_NAME))
    sock.sendall(request + b"\n")
    return sock


def heard_the_header(sock: socket.socket) -> socket.socket:
    """A subscriber that the collector knows of; what follows the header is not read."""
    sock.settimeout(60)
    head = b""
    while not head.endswith(b"\n"):
        byte = sock.recv(1)
        assert byte, "turned away"
        head += byte
    assert "header" in json.loads(head)
    return sock


def read_lines(sock: socket.socket, enough: Callable[[list[dict[str, Any]]], bool]) -> list[dict[str, Any]]:
    """All lines, once these are enough or nothing more has come for long."""
    sock.settimeout(20)
    found: list[dict[str, Any]] = []
    data = b""
    with contextlib.suppress(TimeoutError):
        while not enough(found) and (chunk := sock.recv(1 << 20)):
            *lines, data = (data + chunk).split(b"\n")
            found += [json.loads(line) for line in lines]
    return found


def seen_and_missed(lines: list[dict[str, Any]]) -> tuple[list[int], int]:
    seqs = [line["arrival_seq"] for line in lines if "arrival_seq" in line]
    return seqs, sum(line["gap"]["missed"] for line in lines if "gap" in line)


def emit(world: World, number: int) -> None:
    world.host.deliver(world.host.observer, Emit("load", b'{"n":%d,"text":"%s"}' % (number, b"x" * 40)))


@pytest.mark.spec("S1 9.18", "S1 5.9", "S1 8.11", "S1 10.11")
def test_slow_and_dead_subscribers_slow_nobody(world: World) -> None:
    """10,000 records a second for three seconds beside one subscriber that never reads and others that die."""
    stuck = heard_the_header(subscribe(world))
    stuck.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    dying = [subscribe(world, b'{"replay":true}') for _ in range(10)]
    garbage = subscribe(world, b"no request at all")
    begin = time.monotonic()
    sent = 0
    worst_ms = 0.0
    while sent < RATE * SECONDS:
        due = min(RATE * SECONDS, sent + RATE // 10, int((time.monotonic() - begin) * RATE) + 1)
        before = time.monotonic()
        for number in range(sent, due):
            emit(world, number)
        world.bus.pump()
        while world.host.node.unsettled > BATCHES_MAX:  # as fast as this machine goes
            world.bus.pump()
        worst_ms = max(worst_ms, (time.monotonic() - before) * 1000)
        sent = due
        if dying and sent > RATE:
            dying.pop().close()
    took = time.monotonic() - begin
    world.bus.until(lambda: not world.host.node.unsettled, 60)
    flushed = world.flush()
    assert flushed.error == ""
    observer = world.host.node.system.actor(world.host.observer)
    assert isinstance(observer, ObserverActor)
    assert observer.dropped == 0, "a producer had to drop"
    records = world.records()
    assert [record for record in records if record["channel"] == CHANNEL_GAP] == []
    numbers = [json.loads(record["payload"]["value"])["n"] for record in records if record["channel"] == "load"]
    assert numbers == list(range(RATE * SECONDS))
    print(f"{took:.1f} s for {SECONDS} s of records; the slowest turn had {worst_ms:.0f} ms")
    assert took < 300, "whoever waits for one that never reads waits for ever"
    # Who was stuck reads at last: what it missed is said, and nothing else is missing since it was known. The router
    # counts beside the test, before and after.
    first_load = next(record["arrival_seq"] for record in records if record["channel"] == "load")

    def is_all(lines: list[dict[str, Any]]) -> bool:
        return seen_and_missed(lines)[0][-1:] >= [len(records) - 1]

    seqs, missed = seen_and_missed(read_lines(stuck, is_all))
    assert missed > 0 and len(set(seqs)) == len(seqs)
    assert 0 <= seqs[-1] + 1 - len(seqs) - missed <= first_load
    garbage.settimeout(60)
    assert garbage.recv(10) == b"", "who asks nonsense is turned away"
    for sock in (stuck, garbage, *dying):
        sock.close()


def test_a_subscriber_gets_replay_filters_and_new_frames(world: World) -> None:
    emit(world, 1)
    world.host.deliver(world.host.observer, Emit("other", b"{}"))
    world.bus.until(lambda: not world.host.node.unsettled, 60)
    world.flush()
    sock = subscribe(world, b'{"replay":true,"channels":["load"]}')
    for _ in range(20):
        world.bus.pump()
    emit(world, 2)
    world.bus.until(lambda: not world.host.node.unsettled, 60)
    world.flush()
    lines = read_lines(sock, lambda lines: len(lines) >= 4)
    assert "header" in lines[0] and [channel["name"] for channel in lines[1]["channels"]] == ["load"]
    frames = [json.loads(line["payload"]["value"])["n"] for line in lines[2:]]
    assert frames == [1, 2]
    sock.close()


def test_a_restarted_collector_binds_its_socket_again(world: World) -> None:
    world.bus.kill(Role.COLLECTOR)
    world.bus.start(Role.COLLECTOR)
    world.bus.until(lambda: len(world.told(ServiceReady)) > 1, 60)
    with subscribe(world) as sock:
        assert "header" in read_lines(sock, bool)[0]
