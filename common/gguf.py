"""A lazy, memory-mapped reader of GGUF version 2 and 3 files (S1 7.1 model source, 10.4; design.md 4).

Opening walks the header and the tensor index once and keeps byte offsets; no vocabulary array, no string and no
tensor is decoded before it is asked for. Every length in the file is checked against the file's size before
anything is read or allocated, so that a truncated or hostile file ends in one `GgufError` sentence.

Shapes are given in numpy order (rows, columns): the reverse of GGUF's `ne`. Sizes and offsets are bytes.
The constants and the type tables are those of the PyPI package `gguf`; its package `__init__` is not executed,
because it imports a YAML parser and a metadata guesser that cost more time than opening the file.
"""

from __future__ import annotations

import importlib.util
import math
import mmap
import os
import struct
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

import numpy as np

MAGIC = b"GGUF"
VERSIONS = (2, 3)
DIMS_MAX = 4
KEY_BYTES_MAX = 65_535  # the GGUF specification's limit for a key
ALIGNMENT_DEFAULT = 32
ALIGNMENT_MAX = 1 << 20  # no writer uses more than a few KiB; larger values only move offsets out of the file
SUPPORTED_ARCHITECTURES = ("llama",)
SUPPORTED_TENSOR_TYPES = ("F32", "F16", "Q4_0", "Q4_1", "Q8_0")
SUPPORTED_PRE_TOKENIZERS = ("smollm", "llama-bpe", "qwen2", "gpt-2", "default")

_T = TypeVar("_T")


class GgufError(ValueError):
    """The file cannot be used; the text is one sentence for a person. S1 10.4."""


class NotGgufError(GgufError):
    """The file does not start with the GGUF magic."""


class UnsupportedVersionError(GgufError):
    """A GGUF version other than 2 and 3, or a big-endian file."""


class TruncatedError(GgufError):
    """A header field, string, array or tensor reaches past the end of the file."""


class MalformedError(GgufError):
    """The header contradicts itself."""


class UnsupportedTensorTypeError(GgufError):
    """A tensor has a type that this reader cannot size or dequantise."""


class UnsupportedArchitectureError(GgufError):
    """`general.architecture` is not one of SUPPORTED_ARCHITECTURES, or uses a variant that is not supported."""


class UnsupportedTokenizerError(GgufError):
    """The vocabulary is absent or is of a kind that is not supported."""


def _load_constants() -> ModuleType:
    """gguf/constants.py alone, without gguf/__init__.py (0.02 s instead of 0.25 s)."""
    name = "common._gguf_constants"
    if name in sys.modules:
        return sys.modules[name]
    parent = importlib.util.find_spec("gguf")
    if parent is None or not parent.submodule_search_locations:
        raise ImportError("the package gguf is not installed")
    spec = importlib.util.spec_from_file_location(name, Path(parent.submodule_search_locations[0]) / "constants.py")
    if spec is None or spec.loader is None:
        raise ImportError("the package gguf has no constants module")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


_constants = _load_constants()
_BLOCK_SIZES: dict[int, tuple[str, int, int]] = {
    int(t): (t.name, elements, nbytes) for t, (elements, nbytes) in _constants.GGML_QUANT_SIZES.items()
}
_ValueType = _constants.GGUFValueType
_STRING, _ARRAY, _BOOL = int(_ValueType.STRING), int(_ValueType.ARRAY), int(_ValueType.BOOL)
_SCALARS: dict[int, struct.Struct] = {
    int(_ValueType.UINT8): struct.Struct("<B"),
    int(_ValueType.INT8): struct.Struct("<b"),
    int(_ValueType.UINT16): struct.Struct("<H"),
    int(_ValueType.INT16): struct.Struct("<h"),
    int(_ValueType.UINT32): struct.Struct("<I"),
    int(_ValueType.INT32): struct.Struct("<i"),
    int(_ValueType.FLOAT32): struct.Struct("<f"),
    _BOOL: struct.Struct("<?"),
    int(_ValueType.UINT64): struct.Struct("<Q"),
    int(_ValueType.INT64): struct.Struct("<q"),
    int(_ValueType.FLOAT64): struct.Struct("<d"),
}
_U32, _U64 = struct.Struct("<I"), struct.Struct("<Q")


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One row of the tensor index; `offset` counts from the start of the file, `shape` is (rows, columns)."""

    name: str
    shape: tuple[int, ...]
    ggml_type: int
    type_name: str
    offset: int
    nbytes: int

    @property
    def elements(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class _Entry:
    """Where a metadata value lies: a scalar, a string (count = bytes) or an array (count = elements)."""

    value_type: int
    element_type: int
    offset: int
    count: int


@dataclass(frozen=True, slots=True)
class ModelHeader:
    """What the planner and the engine need to know of a model before any tensor is read."""

    name: str
    architecture: str
    block_count: int
    embedding_length: int
    context_length: int
    feed_forward_length: int
    head_count: int
    head_count_kv: int
    head_dim: int
    rope_dim: int
    rms_eps: float
    rope_theta: float
    rope_scale: float
    vocab_size: int
    bos_token_id: int | None
    eos_token_id: int | None
    eot_token_id: int | None
    add_bos_token: bool
    has_chat_template: bool


class _Cursor:
    """Reads little-endian fields with a bounds check before each of them."""

    def __init__(self, path: str, data: mmap.mmap) -> None:
        self.path, self.data, self.size, self.at = path, data, len(data), 0

    def need(self, nbytes: int, what: str) -> int:
        """Reserve `nbytes` at the cursor; returns where they start."""
        start = self.at
        if nbytes > self.size - start:
            raise TruncatedError(
                f"{self.path}: truncated: {what} needs {nbytes} bytes at byte {start}, "
                f"but the file has {self.size} bytes"
            )
        self.at = start + nbytes
        return start

    def u32(self, what: str) -> int:
        return int(_U32.unpack_from(self.data, self.need(4, what))[0])

    def u64(self, what: str) -> int:
        return int(_U64.unpack_from(self.data, self.need(8, what))[0])

    def string(self, what: str) -> str:
        length = self.u64(what)
        start = self.need(length, what)
        return self.text(start, length, what)

    def text(self, start: int, length: int, what: str) -> str:
        try:
            return self.data[start : start + length].decode("utf-8")
        except UnicodeDecodeError as error:
            raise MalformedError(f"{self.path}: {what} is not valid UTF-8") from error

    def skip_strings(self, count: int, what: str) -> None:
        """Pass over `count` length-prefixed strings; the loop is the hot path of opening a file."""
        self.need(0, what)
        if count * 8 > self.size - self.at:
            raise TruncatedError(
                f"{self.path}: truncated: {what} claims {count} strings at byte {self.at}, "
                f"but the file has {self.size} bytes"
            )
        at, size, data, unpack = self.at, self.size, self.data, _U64.unpack_from
        for _ in range(count):
            if size - at < 8:
                break
            at += 8 + unpack(data, at)[0]
        else:
            if at <= size:
                self.at = at
                return
        raise TruncatedError(f"{self.path}: truncated: a string of {what} ends after the file's {size} bytes")


class Metadata(Mapping[str, Any]):
    """The file's key-value pairs; a value is decoded when it is asked for.

    Scalars come as bool, int, float; strings as str; arrays of strings as list[str]; other arrays as numpy arrays
    that own their memory.
    """

    def __init__(self, cursor: _Cursor, entries: dict[str, _Entry]) -> None:
        self._cursor, self._entries = cursor, entries

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __contains__(self, key: object) -> bool:
        return key in self._entries

    def array_length(self, key: str) -> int:
        """Number of elements of an array without decoding it; 0 if the key is absent or not an array."""
        entry = self._entries.get(key)
        return entry.count if entry is not None and entry.value_type == _ARRAY else 0

    def __getitem__(self, key: str) -> Any:
        entry = self._entries[key]
        cursor = self._cursor
        if entry.value_type == _STRING:
            return cursor.text(entry.offset, entry.count, key)
        if entry.value_type != _ARRAY:
            return _SCALARS[entry.value_type].unpack_from(cursor.data, entry.offset)[0]
        if entry.element_type == _STRING:
            return self._strings(key, entry)
        dtype = np.dtype(_SCALARS[entry.element_type].format)
        return np.frombuffer(cursor.data, dtype=dtype, count=entry.count, offset=entry.offset).copy()

    def _strings(self, key: str, entry: _Entry) -> list[str]:
        data, at, unpack = self._cursor.data, entry.offset, _U64.unpack_from
        out: list[str] = []
        try:
            for _ in range(entry.count):
                end = at + 8 + unpack(data, at)[0]
                out.append(data[at + 8 : end].decode("utf-8"))
                at = end
        except UnicodeDecodeError as error:
            raise MalformedError(f"{self._cursor.path}: a string of {key} is not valid UTF-8") from error
        return out


class GgufFile:
    """An open GGUF file. `metadata` and `tensors` are cheap; `tensor_bytes` is a view of the mapping."""

    def __init__(self, path: str, data: mmap.mmap, metadata: Metadata, tensors: dict[str, TensorInfo]) -> None:
        self.path = path
        self.metadata = metadata
        self.tensors = tensors
        self._data = data

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> GgufFile:
        """Map the file and walk its header. Raises GgufError, or OSError where the file cannot be opened."""
        name = os.fspath(path)
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
        cursor = _Cursor(name, data)
        cursor.at = 4
        version = cursor.u32("the version")
        if version not in VERSIONS:
            hint = " (a big-endian file)" if version & 0xFFFF == 0 else ""
            raise UnsupportedVersionError(
                f"{name}: GGUF version {version}{hint} is not supported; versions 2 and 3 are"
            )
        tensor_count, key_count = cursor.u64("the tensor count"), cursor.u64("the key count")
        entries = _read_entries(cursor, key_count)
        metadata = Metadata(cursor, entries)
        alignment = metadata.get("general.alignment", ALIGNMENT_DEFAULT)
        if not isinstance(alignment, int) or not 0 < alignment <= ALIGNMENT_MAX or alignment & (alignment - 1):
            raise MalformedError(f"{name}: general.alignment is {alignment!r}, not a power of two")
        return cls(name, data, metadata, _read_tensors(cursor, tensor_count, alignment))

    def tensor_bytes(self, name: str) -> memoryview:
        """The raw bytes of a tensor, read-only, without a copy. Release the view before `close`."""
        info = self.tensor(name)
        return memoryview(self._data)[info.offset : info.offset + info.nbytes]

    def tensor(self, name: str) -> TensorInfo:
        """The index row of a tensor, or GgufError naming the file and the tensor."""
        info = self.tensors.get(name)
        if info is None:
            raise MalformedError(f"{self.path}: tensor {name} is missing")
        return info

    def close(self) -> None:
        """Unmap. A mapping that numpy still looks into stays until that array is gone."""
        try:
            self._data.close()
        except BufferError:
            return

    def __enter__(self) -> GgufFile:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def header(self) -> ModelHeader:
        """The model's facts. Raises UnsupportedArchitectureError or MalformedError naming the key."""
        return _read_header(self)

    def check_supported(self) -> ModelHeader:
        """Everything that can be refused before a worker is started: architecture, tokenizer, tensor types."""
        header = self.header()
        check_tokenizer(self)
        for info in self.tensors.values():
            if info.type_name not in SUPPORTED_TENSOR_TYPES:
                raise UnsupportedTensorTypeError(
                    f"{self.path}: tensor {info.name} has type {info.type_name}, which is not supported; "
                    f"supported are {', '.join(SUPPORTED_TENSOR_TYPES)}"
                )
        return header


def _read_entries(cursor: _Cursor, count: int) -> dict[str, _Entry]:
    if count * 13 > cursor.size - cursor.at:  # the shortest pair: u64 key length, u32 type, one byte
        raise TruncatedError(
            f"{cursor.path}: truncated: the header claims {count} keys, but the file has {cursor.size} bytes"
        )
    entries: dict[str, _Entry] = {}
    for index in range(count):
        length = cursor.u64(f"key {index}")
        if length > KEY_BYTES_MAX:
            raise MalformedError(f"{cursor.path}: key {index} claims {length} bytes, the limit is {KEY_BYTES_MAX}")
        key = cursor.text(cursor.need(length, f"key {index}"), length, f"key {index}")
        if key in entries:
            raise MalformedError(f"{cursor.path}: key {key} appears twice")
        entries[key] = _read_entry(cursor, key)
    return entries


def _read_entry(cursor: _Cursor, key: str) -> _Entry:
    value_type = cursor.u32(f"the type of {key}")
    if value_type == _STRING:
        length = cursor.u64(f"the length of {key}")
        return _Entry(value_type, 0, cursor.need(length, key), length)
    if value_type in _SCALARS:
        return _Entry(value_type, 0, cursor.need(_SCALARS[value_type].size, key), 1)
    if value_type != _ARRAY:
        raise MalformedError(f"{cursor.path}: {key} has the unknown value type {value_type}")
    element_type, count = cursor.u32(f"the element type of {key}"), cursor.u64(f"the length of {key}")
    start = cursor.at
    if element_type == _STRING:
        cursor.skip_strings(count, key)
    elif element_type in _SCALARS:
        cursor.need(count * _SCALARS[element_type].size, key)
    else:
        raise MalformedError(f"{cursor.path}: {key} is an array of the unsupported type {element_type}")
    return _Entry(value_type, element_type, start, count)


def _read_tensors(cursor: _Cursor, count: int, alignment: int) -> dict[str, TensorInfo]:
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
    cursor: _Cursor, name: str, shape: tuple[int, ...], ggml_type: int, offset: int, misaligned: int
) -> TensorInfo:
    if ggml_type not in _BLOCK_SIZES:
        raise UnsupportedTensorTypeError(f"{cursor.path}: tensor {name} has the unknown type {ggml_type}")
    type_name, block, block_bytes = _BLOCK_SIZES[ggml_type]
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


def _number(file: GgufFile, key: str, kind: type[_T], default: _T | None = None) -> _T:
    value = file.metadata.get(key, default)
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    if not isinstance(value, kind) or isinstance(value, bool):
        what = "missing" if value is None else f"{type(value).__name__}, not {kind.__name__}"
        raise MalformedError(f"{file.path}: {key} is {what}")
    return value


def _token_id(file: GgufFile, key: str, vocab_size: int) -> int | None:
    if key not in file.metadata:
        return None
    value = _number(file, key, int)
    if not 0 <= value < vocab_size:
        raise MalformedError(f"{file.path}: {key} is {value}, outside the vocabulary of {vocab_size}")
    return value


def _read_header(file: GgufFile) -> ModelHeader:
    arch = file.metadata.get("general.architecture")
    if not isinstance(arch, str):
        raise MalformedError(f"{file.path}: general.architecture is missing")
    if arch not in SUPPORTED_ARCHITECTURES:
        raise UnsupportedArchitectureError(
            f"{file.path}: architecture {arch!r} is not supported; supported is {', '.join(SUPPORTED_ARCHITECTURES)}"
        )
    if (parts := file.metadata.get("split.count", 0)) and parts > 1:
        raise MalformedError(f"{file.path}: this is one of {parts} parts of a model; join them into one file first")
    if file.metadata.get(f"{arch}.expert_count", 0):
        raise UnsupportedArchitectureError(f"{file.path}: mixture-of-experts models are not supported")
    scaling = file.metadata.get(f"{arch}.rope.scaling.type", "none")
    if scaling not in ("none", "linear"):
        raise UnsupportedArchitectureError(f"{file.path}: rope scaling {scaling!r} is not supported")
    heads = _number(file, f"{arch}.attention.head_count", int)
    kv_heads = _number(file, f"{arch}.attention.head_count_kv", int, heads)
    width = _number(file, f"{arch}.embedding_length", int)
    if heads < 1 or kv_heads < 1 or heads % kv_heads or width < 1:
        raise MalformedError(f"{file.path}: {heads} heads, {kv_heads} key-value heads and width {width} do not fit")
    head_dim = _number(file, f"{arch}.attention.key_length", int, width // heads)
    rope_dim = _number(file, f"{arch}.rope.dimension_count", int, head_dim)
    if not 0 < rope_dim <= head_dim or rope_dim % 2:
        raise MalformedError(f"{file.path}: {rope_dim} rotary dimensions do not fit a head of {head_dim}")
    vocab = file.metadata.array_length("tokenizer.ggml.tokens") or file.tensor("token_embd.weight").shape[0]
    return ModelHeader(
        name=str(file.metadata.get("general.name", Path(file.path).stem)),
        architecture=arch,
        block_count=_number(file, f"{arch}.block_count", int),
        embedding_length=width,
        context_length=_number(file, f"{arch}.context_length", int),
        feed_forward_length=_number(file, f"{arch}.feed_forward_length", int),
        head_count=heads,
        head_count_kv=kv_heads,
        head_dim=head_dim,
        rope_dim=rope_dim,
        rms_eps=_number(file, f"{arch}.attention.layer_norm_rms_epsilon", float),
        rope_theta=_number(file, f"{arch}.rope.freq_base", float, 10_000.0),
        rope_scale=_number(file, f"{arch}.rope.scaling.factor", float, 1.0) if scaling == "linear" else 1.0,
        vocab_size=vocab,
        bos_token_id=_token_id(file, "tokenizer.ggml.bos_token_id", vocab),
        eos_token_id=_token_id(file, "tokenizer.ggml.eos_token_id", vocab),
        eot_token_id=_token_id(file, "tokenizer.ggml.eot_token_id", vocab),
        add_bos_token=bool(file.metadata.get("tokenizer.ggml.add_bos_token", False)),
        has_chat_template="tokenizer.chat_template" in file.metadata,
    )


def check_tokenizer(file: GgufFile) -> str:
    """The pre-tokenizer preset of a byte-level BPE vocabulary, or UnsupportedTokenizerError."""
    model = file.metadata.get("tokenizer.ggml.model")
    if model != "gpt2":
        raise UnsupportedTokenizerError(
            f"{file.path}: tokenizer {model!r} is not supported; byte-level BPE ('gpt2') is"
        )
    preset = file.metadata.get("tokenizer.ggml.pre", "default")
    if preset not in SUPPORTED_PRE_TOKENIZERS:
        raise UnsupportedTokenizerError(
            f"{file.path}: pre-tokenizer {preset!r} is not supported; "
            f"supported are {', '.join(SUPPORTED_PRE_TOKENIZERS)}"
        )
    for key in ("tokenizer.ggml.tokens", "tokenizer.ggml.merges"):
        if not file.metadata.array_length(key):
            raise UnsupportedTokenizerError(f"{file.path}: {key} is missing")
    return str(preset)
