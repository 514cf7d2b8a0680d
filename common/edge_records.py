"""MO01 records: the objects of an edge as bytes (rust-swactor.md 5.1; design.md 4 "Edge records"). Pure.

"MO01" | u16 version 1 | u16 header_len 40 | u64 object_id | u64 sequence | u64 extent | u32 flags | u32 reserved 0 |
payload[extent], little-endian. Token payloads are u32 ids, activation payloads are rows. An edge is a byte stream of
records: the decoder takes it in any pieces and holds at most one unfinished record.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import StrEnum

MAGIC = b"MO01"
VERSION = 1
HEADER = struct.Struct("<4sHHQQQII")
HEADER_BYTES = HEADER.size
FLAGS_AT = HEADER_BYTES - 8  # the flags and the reserved word end it
END_OF_SEQUENCE, BEGIN_SEQUENCE = 1, 2
_KNOWN_FLAGS = END_OF_SEQUENCE | BEGIN_SEQUENCE


class RecordFailure(StrEnum):
    """rust-swactor.md 5.1."""

    UNSUPPORTED_MAGIC = "UnsupportedMagic"
    UNSUPPORTED_VERSION = "UnsupportedVersion"
    MALFORMED_HEADER_LENGTH = "MalformedHeaderLength"
    MALFORMED_HEADER = "MalformedHeader"
    EXTENT_EXCEEDS_MAX = "ExtentExceedsMax"
    EXTENT_ALIGNMENT_VIOLATION = "ExtentAlignmentViolation"
    SEQUENCE_VIOLATION = "SequenceViolation"
    EOF_BEFORE_FULL_PAYLOAD = "EofBeforeFullPayload"
    DEVICE_COPY_FAILED = "DeviceCopyFailed"

    @property
    def stage_reason(self) -> str:
        """What a stage that meets it reports: a reason that StageFailed may name (the kind itself is in the detail)."""
        match self:
            case RecordFailure.EOF_BEFORE_FULL_PAYLOAD:
                return "EdgeFault"
            case RecordFailure.DEVICE_COPY_FAILED:
                return "StepFailed"
            case _:
                return "ObjectFailed"


class RecordError(ValueError):
    """The stream cannot go on behind this: "<kind>: <numbers>"."""

    def __init__(self, kind: RecordFailure, why: str) -> None:
        super().__init__(f"{kind}: {why}")
        self.kind = kind


@dataclass(frozen=True, slots=True)
class Record:
    """One object. end_offset: bytes of the stream up to and with this record (what is credited once it is consumed)."""

    object_id: int
    sequence: int
    payload: bytes
    begin: bool = False
    end: bool = False
    end_offset: int = 0

    @property
    def flags(self) -> int:
        """As they stand in the header."""
        return (END_OF_SEQUENCE if self.end else 0) | (BEGIN_SEQUENCE if self.begin else 0)


def encode_record(record: Record) -> bytes:
    """Header and payload."""
    extent = len(record.payload)
    header = HEADER.pack(MAGIC, VERSION, HEADER_BYTES, record.object_id, record.sequence, extent, record.flags, 0)
    return header + record.payload


class RecordDecoder:
    """Bytes in any pieces → records. After a RecordError every further call raises the same."""

    def __init__(self, max_extent: int, alignment: int, *, sequenced: bool = True) -> None:
        """sequenced: the records' sequences must count from 0 without a gap."""
        self._sequenced = sequenced
        self._max_extent, self._alignment = max_extent, alignment
        self._held = bytearray()
        self._offset = 0
        self._expected = 0
        self._broken: RecordError | None = None

    @property
    def held(self) -> int:
        """Bytes of the unfinished record."""
        return len(self._held)

    def feed(self, data: bytes) -> list[Record]:
        """The records that `data` completes, in order. Raises RecordError."""
        if self._broken is not None:
            raise self._broken
        self._held += data
        records: list[Record] = []
        try:
            while (record := self._next()) is not None:
                records.append(record)
        except RecordError as error:
            self._broken = error
            self._held.clear()
            if not records:
                raise
            # What came whole before the fault is still good; the fault comes with the next call.
        return records

    @property
    def broken(self) -> RecordError | None:
        """The failure that ended the stream; `feed` may have returned the records before it without raising."""
        return self._broken

    def finish(self) -> None:
        """The stream has ended. Raises RecordError EofBeforeFullPayload in the middle of a record."""
        if self._held:
            raise RecordError(
                RecordFailure.EOF_BEFORE_FULL_PAYLOAD, f"the stream ended {len(self._held)} bytes into a record"
            )

    def _next(self) -> Record | None:
        if len(self._held) < HEADER_BYTES:
            self._check_magic()
            return None
        magic, version, header_len, object_id, sequence, extent, flags, reserved = HEADER.unpack_from(self._held)
        if magic != MAGIC:
            raise RecordError(RecordFailure.UNSUPPORTED_MAGIC, f"{bytes(magic)!r} instead of {MAGIC!r}")
        if version != VERSION:
            raise RecordError(RecordFailure.UNSUPPORTED_VERSION, f"record version {version}, known is {VERSION}")
        if header_len != HEADER_BYTES:
            raise RecordError(RecordFailure.MALFORMED_HEADER_LENGTH, f"{header_len} instead of {HEADER_BYTES}")
        if flags & ~_KNOWN_FLAGS or reserved:
            raise RecordError(RecordFailure.MALFORMED_HEADER, f"flags {flags:#x} and reserved word {reserved:#x}")
        if extent > self._max_extent:
            raise RecordError(RecordFailure.EXTENT_EXCEEDS_MAX, f"{extent} bytes, allowed are {self._max_extent}")
        if extent % self._alignment:
            raise RecordError(
                RecordFailure.EXTENT_ALIGNMENT_VIOLATION, f"{extent} bytes are no multiple of {self._alignment}"
            )
        if self._sequenced and sequence != self._expected:
            raise RecordError(RecordFailure.SEQUENCE_VIOLATION, f"expected {self._expected}, got {sequence}")
        size = HEADER_BYTES + extent
        if len(self._held) < size:
            return None
        payload = bytes(memoryview(self._held)[HEADER_BYTES:size])
        del self._held[:size]
        self._offset += size
        self._expected += 1
        return Record(
            object_id,
            sequence,
            payload,
            begin=bool(flags & BEGIN_SEQUENCE),
            end=bool(flags & END_OF_SEQUENCE),
            end_offset=self._offset,
        )

    def _check_magic(self) -> None:
        """Garbage is told from a record as soon as its first bytes are there."""
        if not MAGIC.startswith(bytes(self._held[:4])):
            raise RecordError(RecordFailure.UNSUPPORTED_MAGIC, f"{bytes(self._held[:4])!r} instead of {MAGIC!r}")


def encode_tokens(ids: list[int]) -> bytes:
    """A token payload."""
    return struct.pack(f"<{len(ids)}I", *ids)


def decode_tokens(payload: bytes) -> list[int]:
    """The ids of a token payload; its length is a multiple of 4 because the record's alignment is."""
    return list(struct.unpack(f"<{len(payload) // 4}I", payload))
