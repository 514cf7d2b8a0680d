"""The frame archive: JSON lines, one per frame, each its own write() on an append descriptor (S1 3.11, 7.13, 8.12).

A process that is killed at any instant leaves at most its last line torn; the next one starts on a fresh line and
continues the numbering. Records hold S1's seven fields in S1's order, then `collected`: {unix_ms, producer,
producer_seq, run_boot}, the collection metadata that S1 3.9 allows; from it a restarted collector knows what it has
already, and whether the run that it finds is the archived one.

Rotation is one generation: beyond archive_max_bytes FILE becomes FILE.1 (replacing the last one).
"""

from __future__ import annotations

import contextlib
import os
import stat
from pathlib import Path

import msgspec

from common.datastream import SeqRanges
from services.datastream_collector.frames import CollectedFrame, Recovered, RecoveredStream

OWN_STREAMS = "mvp-orchestrator/"
SCAN_BYTES = 8 * 1024 * 1024  # what is read of an old archive at start: about 30 ms


class ArchiveError(Exception):
    """The archive cannot be opened; the text is the sentence for the exit line (S1 10.11)."""


class Payload(msgspec.Struct, frozen=True):
    """{encoding: "utf8", value: text} or {encoding: "bytes", value: list of ints} (S1 8.12; rust-swactor.md 7)."""

    encoding: str
    value: str | list[int]


class Collected(msgspec.Struct, frozen=True, omit_defaults=True):
    """Collection metadata."""

    unix_ms: int = 0
    producer: str = ""
    producer_seq: int = 0
    run_boot: int = 0


class FrameArchiveRecord(msgspec.Struct, frozen=True):
    """S1 3.11."""

    arrival_seq: int
    source: str
    stream: str
    channel: str
    channel_id: int
    position: int
    payload: Payload
    collected: Collected = Collected()


class _Head(msgspec.Struct, frozen=True):
    """What is needed of old lines: everything but the payload, which the decoder skips."""

    arrival_seq: int
    stream: str
    channel: str
    channel_id: int
    position: int
    collected: Collected = Collected()


_encoder = msgspec.json.Encoder()
_head_decoder = msgspec.json.Decoder(_Head)


def encode_payload(payload: bytes) -> Payload:
    """UTF-8 as text, anything else as a list of byte values."""
    try:
        return Payload("utf8", payload.decode())
    except UnicodeDecodeError:
        return Payload("bytes", list(payload))


def encode_record(seq: int, frame: CollectedFrame) -> bytes:
    """The line of one frame, with its newline."""
    record = FrameArchiveRecord(
        seq,
        frame.source,
        frame.stream,
        frame.channel,
        frame.channel_id,
        frame.position,
        encode_payload(frame.payload),
        Collected(frame.unix_ms, frame.producer, frame.producer_seq, frame.run_boot),
    )
    return _encoder.encode(record) + b"\n"


class FrameArchive:
    """State of S1 7.13: {file, next_seq}. One writer per file."""

    def __init__(self, path: str, max_bytes: int = 0) -> None:
        """Create parent directories, open in append mode, continue the numbering. Raises ArchiveError."""
        self.path = Path(path)
        self.max_bytes = max_bytes
        self.next_seq = 0
        self.written = 0
        """Frames written by this process."""
        self.errors = 0
        """Frames lost to failed writes, and failed rotations."""
        self.recovered = Recovered()
        self._fd = -1
        self._size = 0
        self._torn = False
        self._make_parent()
        try:
            self._open()
        except OSError as error:
            self.close()
            raise ArchiveError(f"cannot open the frame archive {path}: {error.strerror or error}") from None

    def _make_parent(self) -> None:
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ArchiveError(
                f"cannot create the directory {self.path.parent} of the frame archive {self.path}: {error.strerror}"
            ) from None

    def _open(self) -> None:
        # O_NONBLOCK only matters for a FIFO without a reader, which would otherwise hang here for ever.
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK
        self._fd = os.open(self.path, flags, 0o644)
        mode = os.fstat(self._fd).st_mode
        if not stat.S_ISREG(mode):
            if stat.S_ISCHR(mode):
                return
            raise OSError("it is not a regular file")
        self._size = os.fstat(self._fd).st_size
        self._torn = self._recover(self.path)
        rotated = self._rotated()
        if not self._size and rotated.is_file():
            self._recover(rotated)

    def _rotated(self) -> Path:
        return self.path.with_name(self.path.name + ".1")

    def _recover(self, path: Path) -> bool:
        """Read the end of an old archive; True if its last line is torn."""
        found: list[_Head] = []
        window, size, data = SCAN_BYTES, path.stat().st_size, b""
        with path.open("rb") as file:
            while not found and len(data) < size:
                # Only garbage, or one line larger than the window: look further back.
                file.seek(max(0, size - window))
                data = file.read(window)
                found = _heads(data)
                window *= 4
        if found:
            self.next_seq = max(head.arrival_seq for head in found) + 1
            self.recovered = _recovered(found, whole=len(data) >= size)
        return bool(data) and not data.endswith(b"\n")

    def append(self, frame: CollectedFrame) -> None:
        """Write one line. Raises OSError; the frame is lost then and the next line starts fresh."""
        line = encode_record(self.next_seq, frame)
        if self.max_bytes and self._size and self._size + len(line) > self.max_bytes:
            self._rotate()
        if self._torn:
            line = b"\n" + line
        try:
            count = os.write(self._fd, line)
        except OSError:
            self.errors += 1
            raise
        self._size += count
        if count != len(line):
            # The disk is full: half a line stands there.
            self._torn = True
            self.errors += 1
            raise OSError(28, f"only {count} of {len(line)} bytes were written")
        self._torn = False
        self.next_seq += 1
        self.written += 1

    def _rotate(self) -> None:
        """FILE → FILE.1. On failure the archive goes on in the old file: too long beats lost."""
        try:
            os.replace(self.path, self._rotated())
            flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
            fd = os.open(self.path, flags, 0o644)
        except OSError:
            self.errors += 1
            self.max_bytes = 0
            return
        os.close(self._fd)
        self._fd, self._size, self._torn = fd, 0, False

    def close(self) -> None:
        """Idempotent; nothing is buffered here."""
        if self._fd >= 0:
            with contextlib.suppress(OSError):
                os.close(self._fd)
        self._fd = -1


def _heads(data: bytes) -> list[_Head]:
    """The readable records among the lines; the first may be cut by the window, the last by a kill."""
    found = []
    for line in data.split(b"\n"):
        if line:
            with contextlib.suppress(msgspec.DecodeError, RecursionError):
                found.append(_head_decoder.decode(line))
    return found


def _recovered(heads: list[_Head], *, whole: bool) -> Recovered:
    streams: dict[str, RecoveredStream] = {}
    producers: dict[str, SeqRanges] = {}
    positions: dict[tuple[str, str], SeqRanges] = {}
    for head in heads:
        if not head.stream.startswith(OWN_STREAMS):
            if head.collected.producer:
                positions.setdefault((head.collected.producer, head.stream), SeqRanges()).add(head.position)
            continue
        stream = streams.setdefault(head.stream, RecoveredStream())
        if head.position <= stream.position:
            # Positions start again: a later run of the same stream id in the same file.
            stream = streams[head.stream] = RecoveredStream()
        stream.position = head.position
        stream.run_boot, stream.unix_ms = head.collected.run_boot, head.collected.unix_ms
        stream.channels[head.channel] = head.channel_id
        if head.collected.producer_seq:
            producers.setdefault(head.collected.producer, SeqRanges()).add(head.collected.producer_seq)
    return Recovered(
        streams,
        {name: seen.ranges for name, seen in producers.items()},
        whole,
        {name: seen.ranges for name, seen in positions.items()},
    )
