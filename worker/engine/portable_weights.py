"""The weights of a part of a model as the portable kernels read them: one stacked buffer per kind of matrix.

D embedding, F feed-forward width, H query heads, K key-value heads, d head dimension. Matrices are float16 tiles
[blocks][rows / LANES][columns][LANES], norms and biases float32. The kernels turn neighbours of a head together
(S1 7.4 leaves the layout to the engine): heads whose two halves turn in the file are stored in that order.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from common.gguf import GgufFile, ModelHeader
from common.gguf_arch import Architecture
from common.gguf_quants import dequantise, dequantise_range
from worker.engine import tinygrad_shim as tg
from worker.engine.errors import EngineError
from worker.engine.kernels import Product
from worker.engine.parts import F32, Part, Progress
from worker.engine.tinygrad_shim import LANES, Symbol, dtypes

HEAD_ROWS = 2048  # of the vocabulary matrix at once: it is the largest, and float32 would double it
QKV = ("q", "k", "v")


def round_up(value: int, step: int) -> int:
    return -(-value // step) * step


def neighbour_order(rows: int, head_dim: int, rope_dim: int) -> npt.NDArray[np.int64]:
    """Stored row r is row order[r] of a file whose heads turn their two halves: partners come to lie side by side."""
    order = np.arange(rows, dtype=np.int64).reshape(-1, head_dim)
    halves = order[:, :rope_dim].reshape(len(order), 2, rope_dim // 2)
    paired = halves.transpose(0, 2, 1).reshape(len(order), rope_dim)
    flat: npt.NDArray[np.int64] = np.concatenate([paired, order[:, rope_dim:]], axis=1).reshape(-1)
    return flat


class TiledMatrices:
    """The same matrix of every block, as float16 tiles [blocks][rows / LANES][columns][LANES], rows zero-padded."""

    def __init__(self, blocks: int, rows: int, columns: int) -> None:
        self.rows, self.columns = rows, columns
        self.tiles = round_up(rows, LANES) // LANES
        self.tensor = tg.allocate((blocks, self.tiles, columns, LANES), dtypes.float16)

    def put(self, block: int, weights: F32, first_row: int = 0) -> None:
        """Store rows (n, columns) of a block's float32 matrix from `first_row`, a multiple of LANES, on."""
        tiles = round_up(len(weights), LANES) // LANES
        padded = np.zeros((tiles * LANES, self.columns), np.float16)
        padded[: len(weights)] = weights
        tiled = np.ascontiguousarray(padded.reshape(tiles, LANES, self.columns).transpose(0, 2, 1))
        tg.write(self.tensor, tiled, (block * self.tiles * LANES + first_row) * self.columns)

    def product(self, rows: int, layer: Symbol | int, name: str) -> Product:
        return Product(rows, self.tiles, self.columns, layer, name)


class Weights:
    """All tensors of a part; raises EngineError or MalformedError for dimensions that do not fit."""

    def __init__(self, file: GgufFile, header: ModelHeader, arch: Architecture, part: Part, progress: Progress) -> None:
        self._file, self._header, self._arch, self._part = file, header, arch, part
        count, width, ffn = part.layers, header.embedding_length, header.feed_forward_length
        self._widths = {"q": header.query_width, "k": header.key_value_width, "v": header.key_value_width}
        self._check_dimensions()
        self._head_name = "output.weight" if "output.weight" in file.tensors else "token_embd.weight"
        self._norm_names = ("attn_norm", "ffn_norm", *(("post_attention_norm", "post_ffw_norm") * arch.post_norms))
        layers = range(part.layer_start, part.layer_end_exclusive)
        has_bias = arch.qkv_bias or any(f"blk.{i}.attn_{n}.bias" in file.tensors for i in layers for n in QKV)
        self.qkv = TiledMatrices(count, sum(self._widths.values()), width)
        self.out = TiledMatrices(count, width, header.query_width)
        self.gate, self.up = TiledMatrices(count, ffn, width), TiledMatrices(count, ffn, width)
        self.down = TiledMatrices(count, width, ffn)
        self.norms = tg.allocate((count, len(self._norm_names), width), dtypes.float32)
        self.head_norms = tg.allocate((count, 2, header.head_dim), dtypes.float32) if arch.qk_norm else None
        self.bias = tg.allocate((count, self.qkv.rows), dtypes.float32) if has_bias else None
        self.head = TiledMatrices(1, header.vocab_size, width) if part.with_head else None
        self.final_norm = tg.allocate((1, 1, width), dtypes.float32) if part.with_head else None
        self._load(progress)

    def _check_dimensions(self) -> None:
        """Rows of the inner matrices fill whole tiles; every quantised model's do."""
        h = self._header
        for name, value in (
            ("embedding_length", h.embedding_length),
            ("feed_forward_length", h.feed_forward_length),
            ("query width", h.query_width),
            ("key-value width", h.key_value_width),
        ):
            if value % LANES:
                raise EngineError(f"{self._file.path}: {name} is {value}, which is not a multiple of {LANES}")

    @property
    def nbytes(self) -> int:
        """Bytes held by the matrices, norms and biases of this part."""
        matrices = (self.qkv, self.out, self.gate, self.up, self.down, self.head)
        vectors = (self.norms, self.head_norms, self.bias, self.final_norm)
        total = sum(matrix.tensor.nbytes() for matrix in matrices if matrix is not None)
        return int(total + sum(vector.nbytes() for vector in vectors if vector is not None))

    # -- loading -------------------------------------------------------------------------------------------

    def _load(self, progress: Progress) -> None:
        """Dequantise into the stacked buffers; progress counts bytes of the file."""
        part, file = self._part, self._file
        prefixes = tuple(f"blk.{layer}." for layer in range(part.layer_start, part.layer_end_exclusive))
        total = sum(info.nbytes for name, info in file.tensors.items() if name.startswith(prefixes))
        total += file.tensor(self._head_name).nbytes if part.with_head else 0
        done = 0
        for index, prefix in enumerate(prefixes):
            self._load_block(index, prefix)
            done += sum(info.nbytes for name, info in file.tensors.items() if name.startswith(prefix))
            progress("tensors", done, total)
        if self.head is not None and self.final_norm is not None:
            rows, width = self._header.vocab_size, self._header.embedding_length
            tg.write(self.final_norm, self._tensor("output_norm.weight", width))
            file.checked_tensor(self._head_name, (rows, width))
            for first in range(0, rows, HEAD_ROWS):
                last = min(first + HEAD_ROWS, rows)
                self.head.put(0, dequantise_range(file, self._head_name, first, last), first)
            progress("tensors", total, total)

    def _load_block(self, index: int, prefix: str) -> None:
        width, ffn, head_dim = self._header.embedding_length, self._header.feed_forward_length, self._header.head_dim

        def tensor(name: str, *shape: int) -> F32:
            return self._tensor(f"{prefix}{name}", *shape)

        norms = np.stack([tensor(f"{name}.weight", width) for name in self._norm_names])
        tg.write(self.norms, norms, index * norms.size)
        heads = [self._paired(name, tensor(f"attn_{name}.weight", self._widths[name], width)) for name in QKV]
        self.qkv.put(index, np.concatenate(heads))
        if self.head_norms is not None:
            pair = np.stack([self._paired(name, tensor(f"attn_{name}_norm.weight", head_dim)) for name in "qk"])
            tg.write(self.head_norms, pair, index * pair.size)
        if self.bias is not None:
            tg.write(self.bias, np.concatenate([self._bias(prefix, name) for name in QKV]), index * self.qkv.rows)
        self.out.put(index, tensor("attn_output.weight", width, self._header.query_width))
        self.gate.put(index, tensor("ffn_gate.weight", ffn, width))
        self.up.put(index, tensor("ffn_up.weight", ffn, width))
        self.down.put(index, tensor("ffn_down.weight", width, ffn))

    def _bias(self, prefix: str, name: str) -> F32:
        full, rows = f"{prefix}attn_{name}.bias", self._widths[name]
        if not self._arch.qkv_bias and full not in self._file.tensors:
            return np.zeros(rows, np.float32)
        return self._paired(name, self._tensor(full, rows))

    def _paired(self, name: str, values: F32) -> F32:
        """Rows of queries and keys in the order that the kernels turn them in."""
        if name == "v" or self._arch.interleaved_rope:
            return values
        return values[neighbour_order(len(values), self._header.head_dim, self._header.rope_dim)]

    def _tensor(self, name: str, *shape: int) -> F32:
        self._file.checked_tensor(name, shape)
        return dequantise(self._file, name)
