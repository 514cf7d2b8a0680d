"""The header of GGUF files: errors, bounds-checked reading, and the lazily decoded key-value pairs (S1 10.4).

Every length in the file is checked against the file's size before anything is read or allocated, so that a
truncated or hostile file ends in one `GgufError` sentence. The constants and the type tables are those of the PyPI
package `gguf`; its package `__init__` is not executed, because it imports a YAML parser and a metadata guesser that
cost more time than opening the file.
"""

from __future__ import annotations

import importlib.util
import mmap
import struct
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

KEY_BYTES_MAX = 65_535  # the GGUF specification's limit for a key


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
    """`general.architecture` is not one of common.gguf_arch.names(), or uses a variant that is not supported."""


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
BLOCK_SIZES: dict[int, tuple[str, int, int]] = {
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
class Entry:
    """Where a metadata value lies: a scalar, a string (count = bytes) or an array (count = elements)."""

    value_type: int
    element_type: int
    offset: int
    count: int


class Cursor:
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

    def __init__(self, cursor: Cursor, entries: dict[str, Entry]) -> None:
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

    def _strings(self, key: str, entry: Entry) -> list[str]:
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


def read_entries(cursor: Cursor, count: int) -> dict[str, Entry]:
    if count * 13 > cursor.size - cursor.at:  # the shortest pair: u64 key length, u32 type, one byte
        raise TruncatedError(
            f"{cursor.path}: truncated: the header claims {count} keys, but the file has {cursor.size} bytes"
        )
    entries: dict[str, Entry] = {}
    for index in range(count):
        length = cursor.u64(f"key {index}")
        if length > KEY_BYTES_MAX:
            raise MalformedError(f"{cursor.path}: key {index} claims {length} bytes, the limit is {KEY_BYTES_MAX}")
        key = cursor.text(cursor.need(length, f"key {index}"), length, f"key {index}")
        if key in entries:
            raise MalformedError(f"{cursor.path}: key {key} appears twice")
        entries[key] = _read_entry(cursor, key)
    return entries


def _read_entry(cursor: Cursor, key: str) -> Entry:
    value_type = cursor.u32(f"the type of {key}")
    if value_type == _STRING:
        length = cursor.u64(f"the length of {key}")
        return Entry(value_type, 0, cursor.need(length, key), length)
    if value_type in _SCALARS:
        return Entry(value_type, 0, cursor.need(_SCALARS[value_type].size, key), 1)
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
    return Entry(value_type, element_type, start, count)
