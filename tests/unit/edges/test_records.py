"""MO01 records: any split and merge of the stream, every failure kind (rust-swactor.md 5.1)."""

from __future__ import annotations

import struct
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.edge_records import (
    HEADER_BYTES,
    Record,
    RecordDecoder,
    RecordError,
    RecordFailure,
    decode_tokens,
    encode_record,
    encode_tokens,
)

RECORDS = st.lists(st.tuples(st.integers(0, 2**64 - 1), st.integers(0, 40), st.booleans(), st.booleans()), max_size=8)


def pieces(stream: bytes, cuts: list[int]) -> list[bytes]:
    places = sorted({0, len(stream), *(cut % (len(stream) + 1) for cut in cuts)})
    return [stream[a:b] for a, b in pairwise(places)]


@given(RECORDS, st.lists(st.integers(0, 10_000), max_size=30))
def test_any_cut_of_the_stream_gives_the_same_records(
    specs: list[tuple[int, int, bool, bool]], cuts: list[int]
) -> None:
    records = [
        Record(object_id, sequence, encode_tokens(list(range(count))), begin, end)
        for sequence, (object_id, count, begin, end) in enumerate(specs)
    ]
    stream = b"".join(map(encode_record, records))
    decoder = RecordDecoder(160, 4)
    found = [record for piece in pieces(stream, cuts) for record in decoder.feed(piece)]
    plain = [Record(r.object_id, r.sequence, r.payload, r.begin, r.end) for r in found]
    assert plain == records
    sizes = [HEADER_BYTES + len(record.payload) for record in records]
    assert [record.end_offset for record in found] == [sum(sizes[: i + 1]) for i in range(len(sizes))]
    decoder.finish()


def header(magic: bytes = b"MO01", version: int = 1, length: int = 40, sequence: int = 0, extent: int = 4,
           flags: int = 0, reserved: int = 0) -> bytes:  # fmt: skip
    return struct.pack("<4sHHQQQII", magic, version, length, 9, sequence, extent, flags, reserved)


@pytest.mark.parametrize(
    ("data", "kind", "says"),
    [
        (header(magic=b"MO02"), RecordFailure.UNSUPPORTED_MAGIC, "b'MO02' instead of b'MO01'"),
        (b"XY", RecordFailure.UNSUPPORTED_MAGIC, "b'XY'"),
        (header(version=2), RecordFailure.UNSUPPORTED_VERSION, "record version 2, known is 1"),
        (header(length=48), RecordFailure.MALFORMED_HEADER_LENGTH, "48 instead of 40"),
        (header(flags=4), RecordFailure.MALFORMED_HEADER, "flags 0x4"),
        (header(reserved=1), RecordFailure.MALFORMED_HEADER, "reserved word 0x1"),
        (header(extent=168), RecordFailure.EXTENT_EXCEEDS_MAX, "168 bytes, allowed are 160"),
        (header(extent=2**64 - 1), RecordFailure.EXTENT_EXCEEDS_MAX, "18446744073709551615 bytes"),
        (header(extent=6), RecordFailure.EXTENT_ALIGNMENT_VIOLATION, "6 bytes are no multiple of 4"),
        (header(sequence=3), RecordFailure.SEQUENCE_VIOLATION, "expected 0, got 3"),
    ],
)
def test_failure_kinds(data: bytes, kind: RecordFailure, says: str) -> None:
    decoder = RecordDecoder(160, 4)
    with pytest.raises(RecordError, match=says) as caught:
        decoder.feed(data)
    assert caught.value.kind is kind and str(caught.value).startswith(f"{kind}: ")
    with pytest.raises(RecordError):
        decoder.feed(b"")
    assert decoder.held == 0


def test_what_came_before_the_fault_is_delivered() -> None:
    decoder = RecordDecoder(160, 4)
    good = encode_record(Record(1, 0, b"\0" * 8, begin=True))
    assert len(decoder.feed(good + header(flags=8))) == 1
    assert decoder.broken is not None and decoder.broken.kind is RecordFailure.MALFORMED_HEADER


def test_an_end_in_the_middle_of_a_record() -> None:
    decoder = RecordDecoder(160, 4)
    decoder.feed(header(extent=8) + b"abc")
    with pytest.raises(RecordError, match="EofBeforeFullPayload: the stream ended 43 bytes into a record"):
        decoder.finish()


@given(st.lists(st.integers(0, 2**32 - 1), max_size=50))
def test_token_payloads(ids: list[int]) -> None:
    assert decode_tokens(encode_tokens(ids)) == ids


@given(st.binary(max_size=300))
def test_garbage_is_a_record_error_or_waits(data: bytes) -> None:
    decoder = RecordDecoder(160, 4)
    try:
        decoder.feed(data)
    except RecordError:
        assert decoder.held == 0
    assert decoder.held <= HEADER_BYTES + 160
