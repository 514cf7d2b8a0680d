"""Dequantisation of GGUF tensor blocks to float32 with numpy (types of common.gguf.SUPPORTED_TENSOR_TYPES).

The reference for these functions is `gguf.quants`; the tests compare both bit by bit on random blocks.
Each function takes raw bytes of whole rows and returns a float32 array of shape (rows, columns).
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from common.gguf import GgufFile, UnsupportedTensorTypeError

F32 = npt.NDArray[np.float32]
U8 = npt.NDArray[np.uint8]


def _scale(blocks: U8, at: int) -> F32:
    """The float16 at byte `at` of each block, as float32 of shape (blocks, 1)."""
    return blocks[:, at : at + 2].copy().view(np.float16).astype(np.float32)


def _nibbles(blocks: U8, at: int) -> F32:
    """Low nibbles then high nibbles of 16 bytes: the order in which GGUF stores 32 values."""
    packed = blocks[:, at : at + 16]
    out = np.empty((blocks.shape[0], 32), np.float32)
    out[:, :16] = packed & 0x0F
    out[:, 16:] = packed >> 4
    return out


def _q4_0(raw: U8) -> F32:
    blocks = raw.reshape(-1, 18)
    values = _nibbles(blocks, 2)
    values -= 8.0
    values *= _scale(blocks, 0)
    return values


def _q4_1(raw: U8) -> F32:
    blocks = raw.reshape(-1, 20)
    values = _nibbles(blocks, 4)
    values *= _scale(blocks, 0)
    values += _scale(blocks, 2)
    return values


def _q8_0(raw: U8) -> F32:
    blocks = raw.reshape(-1, 34)
    values = blocks[:, 2:].view(np.int8).astype(np.float32)
    values *= _scale(blocks, 0)
    return values


def _f16(raw: U8) -> F32:
    return raw.view(np.float16).astype(np.float32)


def _f32(raw: U8) -> F32:
    return raw.view(np.float32).copy()


_DECODERS: dict[str, Callable[[U8], F32]] = {
    "F32": _f32,
    "F16": _f16,
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q8_0": _q8_0,
}


def dequantise_bytes(raw: memoryview | bytes, type_name: str, columns: int) -> F32:
    """Whole rows of `columns` values. Raises UnsupportedTensorTypeError for a type without a decoder."""
    decoder = _DECODERS.get(type_name)
    if decoder is None:
        raise UnsupportedTensorTypeError(f"tensor type {type_name} cannot be dequantised")
    return decoder(np.frombuffer(raw, np.uint8)).reshape(-1, columns)


def dequantise(file: GgufFile, name: str) -> F32:
    """A whole tensor in its own shape (a vector stays a vector)."""
    info = file.tensor(name)
    columns = info.shape[-1] if info.shape else 1
    try:
        rows = dequantise_bytes(file.tensor_bytes(name), info.type_name, columns)
    except UnsupportedTensorTypeError as error:
        raise UnsupportedTensorTypeError(
            f"{file.path}: tensor {name} has type {info.type_name}, which is not supported"
        ) from error
    return rows.reshape(info.shape)


def dequantise_range(file: GgufFile, name: str, start: int, end: int) -> F32:
    """Rows start..end of a matrix, shape (end - start, columns), without touching the rest of the file."""
    info = file.tensor(name)
    count, columns = info.shape
    row_bytes = info.nbytes // count
    return dequantise_bytes(file.tensor_bytes(name)[start * row_bytes : end * row_bytes], info.type_name, columns)


def dequantise_rows(file: GgufFile, name: str, rows: npt.NDArray[np.int64]) -> F32:
    """Chosen rows of a matrix, shape (len(rows), columns); only their bytes are touched."""
    info = file.tensor(name)
    count, columns = info.shape
    row_bytes = info.nbytes // count
    table = np.frombuffer(file.tensor_bytes(name), np.uint8).reshape(count, row_bytes)
    return dequantise_bytes(table[rows].tobytes(), info.type_name, columns)
