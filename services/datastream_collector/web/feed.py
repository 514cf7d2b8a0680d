"""Where the frames come from: the collector's stream socket, or an archive file. Each feeds a Store until cancelled."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from common.records import CHANNEL_BOOTSTRAP
from services.datastream_collector.reader import UNREADABLE, Damage, Entry, Numbering, lines, parse
from services.datastream_collector.web.store import Store

RECONNECT_S = 0.5
LINE_BYTES_MAX = 16 * 1024 * 1024  # a frame of 1 MiB as a list of byte values
SLICE_LINES = 400  # between two looks at the other tasks, some 5 ms
FOLLOW_S = 0.5


class LiveRuns:
    """Run numbers of live frames: another boot of the orchestrator is another run, whatever the positions say."""

    def __init__(self) -> None:
        self.run = 1
        self._boot: Any = None

    def run_of(self, entry: Entry) -> int:
        """The run of the next frame."""
        if entry.channel == CHANNEL_BOOTSTRAP and entry.content.get("phase") == "config":
            boot = entry.detail.get("boot")
            if self._boot not in (None, boot):
                self.run += 1
            self._boot = boot
        return self.run


async def follow_live(path: Path, store: Store) -> None:
    """Subscribe with replay, again after each loss; a collector that was restarted starts with what it has."""
    store.say(kind="live", state="connecting")
    runs = LiveRuns()
    seen = (0, -1)
    while True:
        with contextlib.suppress(OSError, ValueError, asyncio.IncompleteReadError):
            reader, writer = await asyncio.open_unix_connection(str(path), limit=LINE_BYTES_MAX)
            try:
                writer.write(b'{"replay":true}\n')
                while line := await reader.readline():
                    seen = _live_line(line, store, runs, seen)
            finally:
                writer.close()
        store.say(state="lost")
        await asyncio.sleep(RECONNECT_S)


def _live_line(line: bytes, store: Store, runs: LiveRuns, seen: tuple[int, int]) -> tuple[int, int]:
    """One line of the socket. seen: (boot of the collector, last arrival_seq), so that a replay doubles nothing."""
    boot, last = seen
    entry = parse(line)
    if entry is not None:
        seq = entry.record["arrival_seq"]
        if seq > last:
            entry.run = runs.run_of(entry)
            store.add(entry)
            last = seq
        return boot, last
    try:
        said = msgspec.json.decode(line)
    except UNREADABLE:
        return seen
    if header := said.get("header"):
        store.say(state="live")
        new = header.get("boot", 0)
        return (new, last) if new == boot else (new, -1)
    if gap := said.get("gap"):
        store.miss(gap.get("missed", 0))
    return seen


async def read_archive(path: Path, store: Store, *, follow: bool = True) -> None:
    """All of the file, with pauses for the other tasks; then what is appended, if it is still written."""
    store.say(kind="archive", state="reading", file=path.name, size=path.stat().st_size)
    damage, numbering = Damage(), Numbering()
    for part in _slices(path, damage):
        for line in part:
            _archive_line(line, store, damage, numbering)
        await asyncio.sleep(0)
    store.say(state="complete", bad_lines=damage.lines, torn_bytes=damage.torn_bytes)
    size = path.stat().st_size - damage.torn_bytes
    while follow:
        await asyncio.sleep(FOLLOW_S)
        with contextlib.suppress(OSError):
            size = _appended(path, size, store, damage, numbering)


def _archive_line(line: bytes, store: Store, damage: Damage, numbering: Numbering) -> None:
    if line.strip():
        entry = parse(line)
        if entry is None:
            damage.lines += 1
        else:
            entry.run = numbering.run_of(entry)
            store.add(entry)


def _slices(path: Path, damage: Damage) -> Iterator[list[bytes]]:
    part: list[bytes] = []
    for line in lines(path, damage):
        part.append(line)
        if len(part) >= SLICE_LINES:
            yield part
            part = []
    yield part


def _appended(path: Path, size: int, store: Store, damage: Damage, numbering: Numbering) -> int:
    """Whole lines after `size`; returns where the next ones begin. A shorter file is one after a rotation."""
    now = path.stat().st_size
    if now < size:
        size = 0
    if now == size:
        return size
    with path.open("rb") as file:
        file.seek(size)
        data = file.read(LINE_BYTES_MAX)
    whole = data[: data.rfind(b"\n") + 1]
    for line in whole.splitlines():
        _archive_line(line, store, damage, numbering)
    return size + len(whole)
