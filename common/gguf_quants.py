"""Dequantisation of GGUF tensor blocks to float32 with numpy (types of gguf_header.SUPPORTED_TENSOR_TYPES).

The reference for these functions is `gguf.quants`; the tests compare both bit by bit on random blocks.
Each function takes raw bytes of whole rows and returns a float32 array of shape (rows, columns).
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from common.gguf_file import GgufFile
from common.gguf_metadata import UnsupportedTensorTypeError

F32 = npt.NDArray[np.float32]
U8 = npt.NDArray[np.uint8]
_IQ4 = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.float32)


def _scale(blocks: U8, at: int) -> F32:
    """The float16 at byte `at` of each block, as float32 of shape (blocks, 1)."""
    return blocks[:, at : at + 2].copy().view(np.float16).astype(np.float32)


def _nibbles(packed: U8) -> U8:
    """Low nibbles, then high nibbles, of the last axis: the order in which GGUF stores 32 values in 16 bytes."""
    return np.concatenate([packed & 0x0F, packed >> 4], axis=-1)


def _fifth_bits(blocks: U8, at: int) -> U8:
    """32 bits at byte `at` as values 0 or 16, (blocks, 32)."""
    return np.unpackbits(blocks[:, at : at + 4], axis=1, bitorder="little") << np.uint8(4)


def _pairs(packed: U8, bits: int) -> U8:
    """(blocks, bytes) to (blocks, 8 / bits, bytes): the first of the values that share a byte come first."""
    shifts = np.arange(0, 8, bits, dtype=np.uint8)[None, :, None]
    return (packed[:, None, :] >> shifts) & np.uint8((1 << bits) - 1)


def _q4_0(raw: U8) -> F32:
    blocks = raw.reshape(-1, 18)
    return (_nibbles(blocks[:, 2:]).astype(np.float32) - 8.0) * _scale(blocks, 0)


def _q4_1(raw: U8) -> F32:
    blocks = raw.reshape(-1, 20)
    return _nibbles(blocks[:, 4:]).astype(np.float32) * _scale(blocks, 0) + _scale(blocks, 2)


def _q5_0(raw: U8) -> F32:
    blocks = raw.reshape(-1, 22)
    codes = _nibbles(blocks[:, 6:]) | _fifth_bits(blocks, 2)
    return (codes.astype(np.float32) - 16.0) * _scale(blocks, 0)


def _q5_1(raw: U8) -> F32:
    blocks = raw.reshape(-1, 24)
    codes = _nibbles(blocks[:, 8:]) | _fifth_bits(blocks, 4)
    return codes.astype(np.float32) * _scale(blocks, 0) + _scale(blocks, 2)


def _q8_0(raw: U8) -> F32:
    blocks = raw.reshape(-1, 34)
    values = blocks[:, 2:].view(np.int8).astype(np.float32)
    values *= _scale(blocks, 0)
    return values


def _scales_and_minima(packed: U8) -> tuple[F32, F32]:
    """The 6-bit pairs of Q4_K and Q5_K: (blocks, 12) to twice (blocks, 8)."""
    a, b, c = packed[:, 0:4], packed[:, 4:8], packed[:, 8:12]
    scales = np.concatenate([a & 63, (c & 15) | (a >> 6 << 4)], axis=1)
    minima = np.concatenate([b & 63, (c >> 4) | (b >> 6 << 4)], axis=1)
    return scales.astype(np.float32), minima.astype(np.float32)


def _with_minima(blocks: U8, codes: U8) -> F32:
    scales, minima = _scales_and_minima(blocks[:, 4:16])
    d = (_scale(blocks, 0) * scales)[:, :, None]
    low = (_scale(blocks, 2) * minima)[:, :, None]
    return d * codes.reshape(-1, 8, 32).astype(np.float32) - low


def _q4_k(raw: U8) -> F32:
    blocks = raw.reshape(-1, 144)
    return _with_minima(blocks, _nibbles(blocks[:, 16:].reshape(-1, 4, 32)))


def _q5_k(raw: U8) -> F32:
    blocks = raw.reshape(-1, 176)
    low = _nibbles(blocks[:, 48:].reshape(-1, 4, 32)).reshape(-1, 8, 32)
    return _with_minima(blocks, low | _pairs(blocks[:, 16:48], 1) << np.uint8(4))


def _q6_k(raw: U8) -> F32:
    blocks = raw.reshape(-1, 210)
    low = blocks[:, :128].reshape(-1, 2, 1, 64) >> np.array([0, 4], np.uint8).reshape(1, 1, 2, 1) & np.uint8(15)
    high = np.stack([_pairs(blocks[:, 128:160], 2), _pairs(blocks[:, 160:192], 2)], axis=1)
    codes = low.reshape(-1, 16, 16) | high.reshape(-1, 16, 16) << np.uint8(4)
    scales = blocks[:, 192:208].view(np.int8).astype(np.float32)
    values: F32 = (_scale(blocks, 208) * scales)[:, :, None] * (codes.astype(np.float32) - 32.0)
    return values


def _q2_k(raw: U8) -> F32:
    blocks = raw.reshape(-1, 84)
    codes = np.stack([_pairs(blocks[:, 16:48], 2), _pairs(blocks[:, 48:80], 2)], axis=1).reshape(-1, 16, 16)
    d = (_scale(blocks, 80) * (blocks[:, :16] & 15).astype(np.float32))[:, :, None]
    low = (_scale(blocks, 82) * (blocks[:, :16] >> 4).astype(np.float32))[:, :, None]
    return d * codes.astype(np.float32) - low


def _q3_k(raw: U8) -> F32:
    blocks = raw.reshape(-1, 110)
    low = np.stack([_pairs(blocks[:, 32:64], 2), _pairs(blocks[:, 64:96], 2)], axis=1).reshape(-1, 16, 16)
    high = _pairs(blocks[:, :32], 1).reshape(-1, 16, 16) << np.uint8(2)
    scales = _nibbles(blocks[:, 96:104]) | _pairs(blocks[:, 104:108], 2).reshape(-1, 16) << np.uint8(4)
    d = _scale(blocks, 108) * (scales.astype(np.float32) - 32.0)
    values: F32 = d[:, :, None] * ((low | high).astype(np.float32) - 4.0)
    return values


def _iq4_nl(raw: U8) -> F32:
    blocks = raw.reshape(-1, 18)
    return _IQ4[_nibbles(blocks[:, 2:])] * _scale(blocks, 0)


def _iq4_xs(raw: U8) -> F32:
    blocks = raw.reshape(-1, 136)
    high = blocks[:, 2:4].copy().view(np.uint16) >> (2 * np.arange(8, dtype=np.uint16)) & np.uint16(3)
    low = np.stack([blocks[:, 4:8] & 15, blocks[:, 4:8] >> 4], axis=2).reshape(-1, 8)
    scales = (low | high.astype(np.uint8) << np.uint8(4)).astype(np.float32) - 32.0
    values = _IQ4[_nibbles(blocks[:, 8:].reshape(-1, 8, 16))]
    out: F32 = (_scale(blocks, 0) * scales)[:, :, None] * values
    return out


def _f16(raw: U8) -> F32:
    return raw.view(np.float16).astype(np.float32)


def _bf16(raw: U8) -> F32:
    return (raw.view(np.uint16).astype(np.uint32) << np.uint32(16)).view(np.float32)


def _f32(raw: U8) -> F32:
    return raw.view(np.float32).copy()


_DECODERS: dict[str, Callable[[U8], F32]] = {
    "F32": _f32, "F16": _f16, "BF16": _bf16, "Q4_0": _q4_0, "Q4_1": _q4_1, "Q5_0": _q5_0, "Q5_1": _q5_1,
    "Q8_0": _q8_0, "Q2_K": _q2_k, "Q3_K": _q3_k, "Q4_K": _q4_k, "Q5_K": _q5_k, "Q6_K": _q6_k, "IQ4_NL": _iq4_nl,
    "IQ4_XS": _iq4_xs,
}  # fmt: skip


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
