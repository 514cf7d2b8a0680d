"""A lazy, memory-mapped reader of GGUF version 2 and 3 files (S1 7.1 model source, 10.4; design.md 4).

Opening walks the header and the tensor index once and keeps byte offsets; no vocabulary array, no string and no
tensor is decoded before it is asked for.

Shapes are given in numpy order (rows, columns): the reverse of GGUF's `ne`. Sizes and offsets are bytes.
"""

from __future__ import annotations

import math
import mmap
import os
import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from common.gguf_metadata import (
    BLOCK_SIZES,
    Cursor,
    MalformedError,
    Metadata,
    NotGgufError,
    TruncatedError,
    UnsupportedTensorTypeError,
    UnsupportedVersionError,
    read_entries,
)

if TYPE_CHECKING:
    from common.gguf_header import ModelHeader

MAGIC = b"GGUF"
VERSIONS = (2, 3)
DIMS_MAX = 4
ALIGNMENT_DEFAULT = 32
ALIGNMENT_MAX = 1 << 20  # no writer uses more than a few KiB; larger values only move offsets out of the file
PARTS_MAX = 999  # of a model in several files
_PART_NAME = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf")


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One row of the tensor index; `offset` counts from the start of its file, `shape` is (rows, columns)."""

    name: str
    shape: tuple[int, ...]
    ggml_type: int
    type_name: str
    offset: int
    nbytes: int
    part: int = 0  # which file of a model in several

    @property
    def elements(self) -> int:
        return math.prod(self.shape)


class GgufFile:
    """An open GGUF model, in one file or several. `metadata` and `tensors` are cheap; `tensor_bytes` is a view."""

    def __init__(self, path: str, data: list[mmap.mmap], metadata: Metadata, tensors: dict[str, TensorInfo]) -> None:
        self.path = path
        self.metadata = metadata
        self.tensors = tensors
        self._data = data

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> GgufFile:
        """Map the file and walk its header; of a model in several files any one may be named.

        Raises GgufError, or OSError where a file cannot be opened.
        """
        names = part_names(os.fspath(path))
        first = cls.open_one(names[0])
        try:
            count = first.metadata.get("split.count", 0)
            if not isinstance(count, int) or (count != len(names) and count > 1):
                raise MalformedError(
                    f"{first.path}: this is one of {count} parts of a model; their names must end in "
                    "-00001-of-0000N.gguf and the like"
                )
            for index, name in enumerate(names[1:], 1):
                first._take_part(cls.open_one(name), index)
            return first
        except BaseException:
            first.close()
            raise

    @classmethod
    def open_one(cls, name: str) -> GgufFile:
        """One file by itself, of a model in several, too. Raises as open does."""
        with open(name, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            if file.read(4) != MAGIC:
                raise NotGgufError(f"{name}: not a GGUF file (it does not start with the letters GGUF)")
            if size < 24:
                raise TruncatedError(f"{name}: truncated: the GGUF header needs 24 bytes, the file has {size} bytes")
            data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        try:
            return cls._parse(name, data)
        except BaseException:
            data.close()
            raise

    @classmethod
    def _parse(cls, name: str, data: mmap.mmap) -> GgufFile:
        cursor = Cursor(name, data)
        cursor.at = 4
        version = cursor.u32("the version")
        if version not in VERSIONS:
            hint = " (a big-endian file)" if version & 0xFFFF == 0 else ""
            raise UnsupportedVersionError(
                f"{name}: GGUF version {version}{hint} is not supported; versions 2 and 3 are"
            )
        tensor_count, key_count = cursor.u64("the tensor count"), cursor.u64("the key count")
        entries = read_entries(cursor, key_count)
        metadata = Metadata(cursor, entries)
        alignment = metadata.get("general.alignment", ALIGNMENT_DEFAULT)
        if not isinstance(alignment, int) or not 0 < alignment <= ALIGNMENT_MAX or alignment & (alignment - 1):
            raise MalformedError(f"{name}: general.alignment is {alignment!r}, not a power of two")
        return cls(name, [data], metadata, _read_tensors(cursor, tensor_count, alignment))

    @property
    def paths(self) -> list[str]:
        """The files of the model."""
        return part_names(self.path)

    def _take_part(self, other: GgufFile, index: int) -> None:
        """Add the tensors of another file of the same model."""
        self._data += other._data
        if other.metadata.get("split.no") != index:
            raise MalformedError(f"{other.path}: this is not part {index + 1} of the model")
        for name, info in other.tensors.items():
            if name in self.tensors:
                raise MalformedError(f"{other.path}: tensor {name} is in an earlier part too")
            self.tensors[name] = replace(info, part=index)

    def tensor_bytes(self, name: str) -> memoryview:
        """The raw bytes of a tensor, read-only, without a copy. Release the view before `close`."""
        info = self.tensor(name)
        return memoryview(self._data[info.part])[info.offset : info.offset + info.nbytes]

    def tensor(self, name: str) -> TensorInfo:
        """The index row of a tensor, or GgufError naming the file and the tensor."""
        info = self.tensors.get(name)
        if info is None:
            raise MalformedError(f"{self.path}: tensor {name} is missing")
        return info

    def checked_tensor(self, name: str, shape: tuple[int, ...]) -> TensorInfo:
        """The same, if it has this shape."""
        info = self.tensor(name)
        if info.shape != shape:
            raise MalformedError(f"{self.path}: tensor {name} has shape {info.shape}, expected {shape}")
        return info

    def close(self) -> None:
        """Unmap. A mapping that numpy still looks into stays until that array is gone."""
        for data in self._data:
            try:
                data.close()
            except BufferError:
                continue

    def __enter__(self) -> GgufFile:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def header(self) -> ModelHeader:
        """The model's facts. Raises UnsupportedArchitectureError or MalformedError naming the key."""
        from common.gguf_header import read_header

        return read_header(self)

    def check_supported(self) -> ModelHeader:
        """Everything that can be refused before a worker is started: architecture, tokenizer, tensor types."""
        from common.gguf_header import check_supported

        return check_supported(self)


def part_names(path: str) -> list[str]:
    """All files of the model that `path` belongs to, by llama.cpp's way to name them."""
    match = _PART_NAME.fullmatch(path)
    if match is None or not 1 <= int(match[3]) <= PARTS_MAX:
        return [path]
    return [f"{match[1]}-{number:05}-of-{match[3]}.gguf" for number in range(1, int(match[3]) + 1)]


def _read_tensors(cursor: Cursor, count: int, alignment: int) -> dict[str, TensorInfo]:
    if count * 24 > cursor.size - cursor.at:  # the shortest row: name length, rank, type, offset
        raise TruncatedError(
            f"{cursor.path}: truncated: the header claims {count} tensors, but the file has {cursor.size} bytes"
        )
    rows: list[tuple[str, tuple[int, ...], int, int]] = []
    for index in range(count):
        name = cursor.string(f"the name of tensor {index}")
        rank = cursor.u32(f"the rank of tensor {name}")
        if rank > DIMS_MAX:
            raise MalformedError(f"{cursor.path}: tensor {name} has {rank} dimensions, the limit is {DIMS_MAX}")
        dims = tuple(cursor.u64(f"the shape of tensor {name}") for _ in range(rank))
        rows.append((name, dims[::-1], cursor.u32(f"the type of tensor {name}"), cursor.u64(f"tensor {name}")))
    base = -(-cursor.at // alignment) * alignment
    tensors: dict[str, TensorInfo] = {}
    for name, shape, ggml_type, offset in rows:
        if name in tensors:
            raise MalformedError(f"{cursor.path}: tensor {name} appears twice")
        tensors[name] = _tensor_info(cursor, name, shape, ggml_type, base + offset, offset % alignment)
    return tensors


def _tensor_info(
    cursor: Cursor, name: str, shape: tuple[int, ...], ggml_type: int, offset: int, misaligned: int
) -> TensorInfo:
    if ggml_type not in BLOCK_SIZES:
        raise UnsupportedTensorTypeError(f"{cursor.path}: tensor {name} has the unknown type {ggml_type}")
    type_name, block, block_bytes = BLOCK_SIZES[ggml_type]
    columns = shape[-1] if shape else 1
    if columns % block:
        raise MalformedError(
            f"{cursor.path}: tensor {name} has {columns} columns, not a multiple of {type_name}'s block of {block}"
        )
    if misaligned:
        raise MalformedError(f"{cursor.path}: tensor {name} is not aligned")
    nbytes = math.prod(shape) // block * block_bytes
    if offset + nbytes > cursor.size:
        raise TruncatedError(
            f"{cursor.path}: truncated: tensor {name} ends at byte {offset + nbytes}, "
            f"but the file has {cursor.size} bytes"
        )
    return TensorInfo(name, shape, ggml_type, type_name, offset, nbytes)
