"""Reading a frame archive (S1 8.12): lines to entries, runs numbered, damage counted. Nothing in a file can raise here.

Used by mvp-archive and by the dashboard; live frames of the stream socket have the same form (subscribe.py).
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec

from common.records import CHANNEL_BOOTSTRAP

FOLLOW_POLL_S = 0.2
OWN_STREAMS = "mvp-orchestrator/"
START_PHASES = frozenset({"config", "run"})
UNREADABLE = (msgspec.MsgspecError, UnicodeError, RecursionError, ValueError)

_decode = msgspec.json.Decoder().decode


@dataclass
class Entry:
    """One archived frame: its record as it stands in the file, and what it says."""

    record: dict[str, Any]
    run: int = 0

    @property
    def channel(self) -> str:
        """The channel's name."""
        return str(self.record.get("channel", ""))

    @property
    def stream(self) -> str:
        """The stream's name, as "mvp-orchestrator/1"."""
        return str(self.record.get("stream", ""))

    @property
    def unix_ms(self) -> int:
        """When it was collected, 0 if the archive does not say."""
        collected = self.record.get("collected")
        at = collected.get("unix_ms", 0) if isinstance(collected, dict) else 0
        return at if isinstance(at, int) and 0 <= at < 1 << 53 else 0

    @cached_property
    def text(self) -> str:
        """The payload as text."""
        payload = self.record.get("payload")
        value = payload.get("value") if isinstance(payload, dict) else None
        if isinstance(value, list):
            return f"<{len(value)} bytes>"
        return value if isinstance(value, str) else ""

    @cached_property
    def content(self) -> dict[str, Any]:
        """The payload's JSON object, {} if it is none."""
        with contextlib.suppress(*UNREADABLE):
            content = _decode(self.text) if self.text.lstrip().startswith("{") else None
            return content if isinstance(content, dict) else {}
        return {}

    @property
    def detail(self) -> dict[str, Any]:
        """A record's detail, {} without one."""
        return self.body("detail")

    def body(self, key: str) -> dict[str, Any]:
        """The object inside `event`, `line` or `detail`, {} if this is no such record."""
        inner = self.content.get(key)
        return inner if isinstance(inner, dict) else {}


def parse(line: bytes) -> Entry | None:
    """The entry of a line, or None for what is no archive record."""
    try:
        record = _decode(line)
    except UNREADABLE:
        return None
    if not isinstance(record, dict) or not isinstance(record.get("arrival_seq"), int):
        return None
    return Entry(record)


@dataclass(slots=True)
class Damage:
    """What could not be read: whole lines, and the bytes of a last line without its end."""

    lines: int = 0
    torn_bytes: int = 0


def rotated(path: Path) -> Path:
    """Where the part before the last rotation is (archive.py keeps one)."""
    return path.with_name(path.name + ".1")


def read(path: Path, damage: Damage, *, follow: bool = False) -> Iterator[Entry]:
    """Entries in file order, the rotated part first, with their runs. Raises OSError when the file cannot be read."""
    numbering = Numbering()
    for line in lines(path, damage, follow=follow):
        if not line.strip():
            continue
        entry = parse(line)
        if entry is None:
            damage.lines += 1
            continue
        entry.run = numbering.run_of(entry)
        yield entry


def lines(path: Path, damage: Damage, *, follow: bool = False) -> Iterator[bytes]:
    """The lines of FILE.1 and FILE. A torn last line is no line; with follow it is given once it is whole."""
    file = path.open("rb")
    older = rotated(path)
    if older.is_file():
        with older.open("rb") as part:
            yield from part
    rest = b""
    try:
        while True:
            line = file.readline()
            if line.endswith(b"\n"):
                yield rest + line
                rest = b""
            elif line:
                rest += line
            elif not follow:
                break
            else:
                time.sleep(FOLLOW_POLL_S)
                with contextlib.suppress(OSError):
                    now, ours = path.stat(), os.fstat(file.fileno())
                    if (now.st_ino, now.st_dev) != (ours.st_ino, ours.st_dev) or now.st_size < file.tell():
                        # What was written before the rotation is read to its end first.
                        yield from file
                        file.close()
                        file, rest = path.open("rb"), b""
    finally:
        file.close()
    if rest:
        # The process was killed in the middle of its last write, or is writing it now.
        damage.torn_bytes = len(rest)


class Numbering:
    """Runs 1..n in file order (design.md 6 row 33). A run starts where the orchestrator's stream starts again from its
    first position, or with a first bootstrap record of another boot."""

    def __init__(self) -> None:
        self._run = 1
        self._boot: Any = None
        self._position = -1
        self._begun: set[str] = set()

    def run_of(self, entry: Entry) -> int:
        """The run that this entry, the next one of the file, belongs to."""
        position = entry.record.get("position")
        if entry.stream.startswith(OWN_STREAMS) and isinstance(position, int):
            if position <= self._position:
                self._next()
            self._position = position
        if entry.channel == CHANNEL_BOOTSTRAP:
            self._bootstrap(entry)
        return self._run

    def _bootstrap(self, entry: Entry) -> None:
        phase, status = str(entry.content.get("phase", "")), entry.content.get("status")
        boot = entry.detail.get("boot")
        if phase in START_PHASES:
            if boot is not None:
                if self._boot not in (None, boot):
                    self._next()
                self._boot = boot
            elif status == "started" and phase in self._begun:
                self._next()
            if status == "started":
                self._begun.add(phase)

    def _next(self) -> None:
        self._run += 1
        self._boot = None
        self._begun = set()


def shown(text: str) -> str:
    """Text that does nothing to a terminal: control, format and unassigned characters as escapes."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


@dataclass(frozen=True, slots=True)
class Filter:
    """What the options ask for; None, "" or 0 = everything. since_ms: collected then or later."""

    channel: str = ""
    phase: str = ""
    node: int | None = None
    request: str = ""
    run: int | None = None
    since_ms: int = 0
    words: tuple[str, ...] = field(default=())

    def wants(self, entry: Entry) -> bool:
        """Whether an entry is to be shown."""
        return (
            entry.channel.startswith(self.channel)
            and (self.run is None or entry.run == self.run)
            and (not self.since_ms or entry.unix_ms >= self.since_ms)
            and (not self.phase or entry.content.get("phase") == self.phase)
            and (self.node is None or self.node in nodes_of(entry))
            and (not self.request or str(entry.content.get("request_id", "")) == self.request)
            and all(word in entry.text.casefold() for word in self.words)
        )


def nodes_of(entry: Entry) -> set[Any]:
    """The nodes that an entry is about: its own stream's, and those its record names."""
    found: set[Any] = {
        entry.content.get("node_id"),
        entry.body("event").get("node_id"),
        entry.body("line").get("node_id"),
    }
    node = entry.stream.partition("/")[0]
    if node.isdecimal():
        found.add(int(node))
    return {item for item in found if isinstance(item, int)}
