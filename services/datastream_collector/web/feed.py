"""Where the frames come from: the collector's stream socket, or an archive file. Each feeds a Store until cancelled."""

from __future__ import annotations

import asyncio
import contextlib
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from common.datastream import SeqRanges
from common.records import CHANNEL_BOOTSTRAP
from services.datastream_collector.reader import UNREADABLE, Damage, Entry, Numbering, lines, parse
from services.datastream_collector.streams import PRODUCERS_MAX
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


class Seen:
    """Which records have come, by their producer's own numbers. A collector that is started again without an archive
    numbers anew, and its producers send what they still hold once more."""

    def __init__(self) -> None:
        self._seen: OrderedDict[tuple[str, str], SeqRanges] = OrderedDict()
        self._ask: set[tuple[str, str]] = set()
        """Whose first record since the restart is awaited: what is missing before it nobody will send."""

    def restarted(self) -> None:
        """Another collector begins."""
        self._ask = set(self._seen)

    def take(self, entry: Entry) -> tuple[bool, int]:
        """Whether it is new, and how many records of its producer are lost before it."""
        collected = entry.record.get("collected")
        producer = str(collected.get("producer", "")) if isinstance(collected, dict) else ""
        if not producer or not isinstance(collected, dict):
            return True, 0
        seq = collected.get("producer_seq")
        # A worker's stream keeps its own positions.
        number = seq if isinstance(seq, int) and seq else entry.record.get("position")
        if not isinstance(number, int):
            return True, 0
        key = (producer, "" if seq else entry.stream)
        seen = self._seen.setdefault(key, SeqRanges())
        self._seen.move_to_end(key)
        if len(self._seen) > PRODUCERS_MAX:
            self._seen.popitem(last=False)
        lost = max(0, number - seen.last - 1) if key in self._ask else 0
        self._ask.discard(key)
        if number in seen:
            return False, 0
        seen.add(number)
        return True, lost


@dataclass(slots=True)
class Live:
    """What was read of the socket. boot: the collector's; last: its last arrival_seq, so that a replay doubles
    nothing."""

    runs: LiveRuns = field(default_factory=LiveRuns)
    seen: Seen = field(default_factory=Seen)
    boot: int = 0
    last: int = -1


async def follow_live(path: Path, store: Store) -> None:
    """Subscribe with replay, again after each loss; of a collector that was restarted only what is new counts."""
    store.say(kind="live", state="connecting")
    live = Live()
    while True:
        with contextlib.suppress(OSError, ValueError, asyncio.IncompleteReadError):
            reader, writer = await asyncio.open_unix_connection(str(path), limit=LINE_BYTES_MAX)
            try:
                writer.write(b'{"replay":true}\n')
                while line := await reader.readline():
                    live_line(line, store, live)
            finally:
                writer.close()
        store.say(state="lost")
        await asyncio.sleep(RECONNECT_S)


def live_line(line: bytes, store: Store, live: Live) -> None:
    """One line of the socket."""
    entry = parse(line)
    if entry is not None:
        if entry.record["arrival_seq"] <= live.last:
            return
        live.last = entry.record["arrival_seq"]
        is_new, lost = live.seen.take(entry)
        if lost:
            store.miss(lost)
        if is_new:
            entry.run = live.runs.run_of(entry)
            store.add(entry)
        return
    try:
        said = msgspec.json.decode(line)
    except UNREADABLE:
        return
    if header := said.get("header"):
        store.say(state="live")
        if (boot := header.get("boot", 0)) != live.boot:
            live.boot, live.last = boot, -1
            live.seen.restarted()
    if gap := said.get("gap"):
        store.miss(gap.get("missed", 0))


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
