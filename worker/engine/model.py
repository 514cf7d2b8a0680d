"""The llama model on the kernels of kernels.py: embedding | blocks a..b | final norm and head (S1 7.4, 7.10).

Any contiguous part can be loaded, so a pipeline stage is the same code with fewer tensors. All blocks of a part
share one captured step: their weights are stacked in one buffer per kind, and the block's number is a symbolic
integer of the step. Capturing costs one block, whatever the number of blocks, and a step has no tensor inputs:
it works on persistent buffers.

Shapes: T rows (1 when decoding, CHUNK when prefilling), D embedding, H query heads, K key-value heads, d head
dimension, C cache positions. Rows, norms and softmax are float32; weights and cache are float16.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from common.gguf import GgufFile, ModelHeader
from common.gguf_quants import dequantise, dequantise_range, dequantise_rows
from worker.engine import tinygrad_shim as tg
from worker.engine.errors import EngineError
from worker.engine.kernels import (
    GatedProduct,
    Keys,
    Mix,
    NormApply,
    NormScale,
    Product,
    Queries,
    ScoreExp,
    ScoreMax,
    Scores,
    Values,
)
from worker.engine.parts import Part, Progress, check_part, whole
from worker.engine.tinygrad_shim import LANES, Step, Symbol, Tensor, dtypes

__all__ = ["CHUNK", "LlamaPart", "Part", "Progress", "check_part", "whole"]

CHUNK = 32  # rows of a prefill step; 32 to 64 is right on a CPU (reference/engine.md 4)
SINGLE_ROWS_MAX = 8  # a padded chunk takes as long as some nine single rows
HEAD_ROWS = 2048  # of the vocabulary matrix at once: it is the largest, and float32 would double it
F32 = npt.NDArray[np.float32]


def _round_up(value: int, step: int) -> int:
    return -(-value // step) * step


class TiledMatrices:
    """The same matrix of every block, as float16 tiles [blocks][rows / LANES][columns][LANES], rows zero-padded."""

    def __init__(self, blocks: int, rows: int, columns: int) -> None:
        self.rows, self.columns = rows, columns
        self.tiles = _round_up(rows, LANES) // LANES
        self.tensor = tg.allocate((blocks, self.tiles, columns, LANES), dtypes.float16)

    def put(self, block: int, weights: F32, first_row: int = 0) -> None:
        """Store rows (n, columns) of a block's float32 matrix from `first_row`, a multiple of LANES, on."""
        tiles = _round_up(len(weights), LANES) // LANES
        padded = np.zeros((tiles * LANES, self.columns), np.float16)
        padded[: len(weights)] = weights
        tiled = np.ascontiguousarray(padded.reshape(tiles, LANES, self.columns).transpose(0, 2, 1))
        tg.write(self.tensor, tiled, (block * self.tiles * LANES + first_row) * self.columns)

    def product(self, rows: int, layer: Symbol | int, name: str) -> Product:
        return Product(rows, self.tiles, self.columns, layer, name)


class Workspace:
    """The buffers between the kernels of a step of T rows; one step runs at a time, so all blocks share them."""

    def __init__(self, rows: int, header: ModelHeader, positions: int) -> None:
        h = header
        width, heads = h.embedding_length, h.head_count

        def buffer(*shape: int) -> Tensor:
            return tg.allocate(shape, dtypes.float32)

        self.state, self.middle = buffer(rows, width), buffer(rows, width)
        self.scales = [buffer(rows), buffer(rows)]
        self.normed = [buffer(rows, width), buffer(rows, width)]
        self.qkv = buffer(rows, (heads + 2 * h.head_count_kv) * h.head_dim)
        self.queries = buffer(heads, rows, h.head_dim)
        self.scores, self.weights = buffer(heads, rows, positions), buffer(heads, rows, positions)
        self.score_max = buffer(heads, rows)
        self.mixed = buffer(rows, heads * h.head_dim)
        self.hidden = buffer(rows, h.feed_forward_length)


class LlamaPart:
    """A loaded part of a llama model with its key-value cache for one sequence of `max_context` positions."""

    chunk = CHUNK

    def __init__(self, file: GgufFile, header: ModelHeader, part: Part, max_context: int, progress: Progress) -> None:
        check_part(header, part)
        if header.architecture != "llama":
            raise EngineError(
                f"{file.path}: architecture {header.architecture!r} runs on the CPU's C kernels only, "
                f"not on {tg.device_name()}"
            )
        self.header, self.part, self.max_context = header, part, max_context
        self.backend = f"tinygrad {tg.device_name()}"
        self._file = file
        h = header
        count, width, ffn = part.layers, h.embedding_length, h.feed_forward_length
        self._q_rows, self._kv_rows = h.head_count * h.head_dim, h.head_count_kv * h.head_dim
        self._check_dimensions()
        self._qkv = TiledMatrices(count, self._q_rows + 2 * self._kv_rows, width)
        self._out = TiledMatrices(count, width, self._q_rows)
        self._gate, self._up = TiledMatrices(count, ffn, width), TiledMatrices(count, ffn, width)
        self._down = TiledMatrices(count, width, ffn)
        self._norms = tg.allocate((count, 2, width), dtypes.float32)
        # A padded last chunk writes up to CHUNK - 1 rows behind the last real position.
        self._positions = _round_up(max_context + CHUNK, LANES)
        self._keys = tg.allocate((count, h.head_count_kv, self._positions // LANES, h.head_dim, LANES), dtypes.float16)
        self._values = tg.allocate((count, h.head_count_kv, self._positions, h.head_dim), dtypes.float16)
        self._head = TiledMatrices(1, h.vocab_size, width) if part.with_head else None
        self._final_norm = tg.allocate((1, 1, width), dtypes.float32) if part.with_head else None
        self._load(progress)
        self._rope = tg.upload(self._rope_table())
        self._spaces = {rows: Workspace(rows, h, self._positions) for rows in (1, CHUNK)}
        self._layer = tg.symbol("layer", 0, count - 1)
        self._start = tg.symbol("start", 0, max_context)
        self._steps = {rows: Step(self._block_function(rows)) for rows in (1, CHUNK)}
        self._logits = tg.allocate((1, self._head.tiles * LANES), dtypes.float32) if self._head is not None else None
        self._head_step = Step(self._head_function) if part.with_head else None

    def _check_dimensions(self) -> None:
        """Rows of the inner matrices fill whole tiles; every quantised model's do."""
        h = self.header
        for name, value in (
            ("embedding_length", h.embedding_length),
            ("feed_forward_length", h.feed_forward_length),
            ("query width", self._q_rows),
            ("key-value width", self._kv_rows),
        ):
            if value % LANES:
                raise EngineError(f"{self._file.path}: {name} is {value}, which is not a multiple of {LANES}")

    # -- loading -------------------------------------------------------------------------------------------

    def _load(self, progress: Progress) -> None:
        """Dequantise into the stacked buffers; progress counts bytes of the file."""
        part, file = self.part, self._file
        prefixes = tuple(f"blk.{layer}." for layer in range(part.layer_start, part.layer_end_exclusive))
        total = sum(info.nbytes for name, info in file.tensors.items() if name.startswith(prefixes))
        head_name = "output.weight" if "output.weight" in file.tensors else "token_embd.weight"
        total += file.tensor(head_name).nbytes if part.with_head else 0
        done = 0

        def loaded(*names: str) -> None:
            nonlocal done
            done += sum(file.tensors[name].nbytes for name in names)
            progress("tensors", done, total)

        for index, layer in enumerate(range(part.layer_start, part.layer_end_exclusive)):

            def tensor(name: str, *shape: int, layer: int = layer) -> F32:
                return self._checked(f"blk.{layer}.{name}.weight", shape)

            width, ffn = self.header.embedding_length, self.header.feed_forward_length
            norms = np.stack([tensor("attn_norm", width), tensor("ffn_norm", width)])
            tg.write(self._norms, norms, index * norms.size)
            prefix = f"blk.{layer}."
            loaded(f"{prefix}attn_norm.weight", f"{prefix}ffn_norm.weight")
            kv = [tensor(name, self._kv_rows, width) for name in ("attn_k", "attn_v")]
            self._qkv.put(index, np.concatenate([tensor("attn_q", self._q_rows, width), *kv]))
            loaded(*(f"{prefix}attn_{name}.weight" for name in "qkv"))
            self._out.put(index, tensor("attn_output", width, self._q_rows))
            loaded(f"{prefix}attn_output.weight")
            self._gate.put(index, tensor("ffn_gate", ffn, width))
            self._up.put(index, tensor("ffn_up", ffn, width))
            loaded(f"{prefix}ffn_gate.weight", f"{prefix}ffn_up.weight")
            self._down.put(index, tensor("ffn_down", width, ffn))
            loaded(f"{prefix}ffn_down.weight")
        if self._head is not None and self._final_norm is not None:
            width = self.header.embedding_length
            tg.write(self._final_norm, self._checked("output_norm.weight", (width,)))
            self._check_shape(head_name, (self.header.vocab_size, width))
            for first in range(0, self.header.vocab_size, HEAD_ROWS):
                last = min(first + HEAD_ROWS, self.header.vocab_size)
                self._head.put(0, dequantise_range(file, head_name, first, last), first)
            loaded(head_name)

    @property
    def weights_bytes(self) -> int:
        """Bytes held by the matrices and norms of this part."""
        matrices = (self._qkv, self._out, self._gate, self._up, self._down, self._head)
        total = sum(matrix.tensor.nbytes() for matrix in matrices if matrix is not None)
        return int(total + self._norms.nbytes())

    @property
    def kv_bytes(self) -> int:
        """Bytes reserved by the key-value cache; they become resident as the context fills."""
        return int(self._keys.nbytes() + self._values.nbytes())

    def _check_shape(self, name: str, shape: tuple[int, ...]) -> None:
        found = self._file.tensor(name).shape
        if found != shape:
            raise EngineError(f"{self._file.path}: tensor {name} has shape {found}, expected {shape}")

    def _checked(self, name: str, shape: tuple[int, ...]) -> F32:
        self._check_shape(name, shape)
        return dequantise(self._file, name)

    def _rope_table(self) -> F32:
        """(positions, 2, d): cosines and signed sines; dimensions beyond rope_dim are left as they are."""
        h = self.header
        frequencies = h.rope_theta ** (-np.arange(0, h.rope_dim, 2, dtype=np.float64) / h.rope_dim)
        frequencies /= h.rope_scale
        if "rope_freqs.weight" in self._file.tensors:
            frequencies /= self._checked("rope_freqs.weight", (h.rope_dim // 2,))
        angles = np.outer(np.arange(self._positions, dtype=np.float64), frequencies)
        table = np.zeros((self._positions, 2, h.head_dim), np.float32)
        table[:, 0, :] = 1.0
        table[:, 0, : h.rope_dim] = np.repeat(np.cos(angles), 2, axis=1)
        # GGUF's llama layout rotates neighbouring pairs: (a, b) becomes (a cos - b sin, b cos + a sin).
        table[:, 1, 0 : h.rope_dim : 2] = -np.sin(angles)
        table[:, 1, 1 : h.rope_dim : 2] = np.sin(angles)
        return table

    # -- the captured steps --------------------------------------------------------------------------------

    def _norm(self, space: Workspace, which: int, x: Tensor, weights: Tensor, bound: list[Symbol]) -> Tensor:
        rows, width = int(x.shape[0]), self.header.embedding_length
        scale = tg.launch(NormScale(rows, width, self.header.rms_eps), space.scales[which], x)
        layer, row = (self._layer, which) if bound else (0, 0)
        return tg.launch(NormApply(rows, width, layer, row), space.normed[which], x, scale, weights, bound=bound)

    def _attention(self, space: Workspace, qkv: Tensor, bound: list[Symbol]) -> Tensor:
        """Write the rows' keys and values, attend to everything up to each row. (T, H * d)"""
        h = self.header
        shared = (int(qkv.shape[0]), h.head_count, h.head_count_kv, h.head_dim, self._layer, self._start)
        queries = tg.launch(Queries(*shared), space.queries, qkv, self._rope, bound=bound[1:])
        keys = tg.launch(Keys(*shared), self._keys, qkv, self._rope, bound=bound)
        values = tg.launch(Values(*shared), self._values, qkv, bound=bound)
        scores = tg.launch(Scores(*shared), space.scores, queries, keys, bound=bound)
        highest = tg.launch(ScoreMax(*shared), space.score_max, scores, bound=bound[1:])
        weights = tg.launch(ScoreExp(*shared), space.weights, scores, highest, bound=bound[1:])
        return tg.launch(Mix(*shared), space.mixed, weights, values, bound=bound)

    def _block_function(self, rows: int) -> Callable[[Symbol, Symbol], Tensor]:
        space, layer = self._spaces[rows], self._layer
        qkv_product = self._qkv.product(rows, layer, "qkv")
        out_product = self._out.product(rows, layer, "attention_out")
        down_product = self._down.product(rows, layer, "ffn_down")
        gated = GatedProduct(rows, self._gate.tiles, self._gate.columns, layer, "ffn_gate_up")

        def block(bound_layer: Symbol, bound_start: Symbol) -> Tensor:
            bound, of_layer = [bound_layer, bound_start], [bound_layer]
            normed = self._norm(space, 0, space.state, self._norms, of_layer)
            qkv = tg.launch(qkv_product, space.qkv, self._qkv.tensor, normed, bound=of_layer)
            mixed = self._attention(space, qkv, bound)
            middle = tg.launch(out_product, space.middle, self._out.tensor, mixed, space.state, bound=of_layer)
            normed = self._norm(space, 1, middle, self._norms, of_layer)
            hidden = tg.launch(gated, space.hidden, self._gate.tensor, self._up.tensor, normed, bound=of_layer)
            result = tg.launch(down_product, space.state, self._down.tensor, hidden, middle, bound=of_layer)
            return result.realize()

        return block

    def _head_function(self) -> Tensor:
        assert self._head is not None and self._final_norm is not None and self._logits is not None
        space = self._spaces[1]
        normed = self._norm(space, 0, space.state, self._final_norm, [])
        return tg.launch(self._head.product(1, 0, "head"), self._logits, self._head.tensor, normed).realize()

    # -- running -------------------------------------------------------------------------------------------

    def embed(self, ids: list[int]) -> F32:
        """Rows of the embedding, (len(ids), D); only those rows of the file are read."""
        return dequantise_rows(self._file, "token_embd.weight", np.asarray(ids, np.int64))

    def run_blocks(self, rows: F32, start: int, tick: Callable[[], None] | None = None) -> F32:
        """All blocks on up to CHUNK rows at positions start...; returns rows of the same shape (n, D)."""
        count, width = rows.shape
        if 1 < count <= SINGLE_ROWS_MAX:
            return np.concatenate([self.run_blocks(rows[i : i + 1], start + i, tick) for i in range(count)])
        size = 1 if count == 1 else CHUNK
        if count > CHUNK or start < 0 or start + count > self.max_context:
            raise EngineError(f"{count} rows at position {start} do not fit the context of {self.max_context}")
        if count < size:
            rows = np.concatenate([rows, np.zeros((size - count, width), np.float32)])
        tg.write(self._spaces[size].state, np.ascontiguousarray(rows, np.float32))
        step = self._steps[size]
        bound = self._start.bind(start)
        for index in range(self.part.layers):
            step(self._layer.bind(index), bound)
            if tick is not None:
                tick()
        return tg.read(self._spaces[size].state, count * width).reshape(count, width)

    def run_head(self, row: F32) -> F32:
        """Logits (vocabulary,) of one row (D,)."""
        if self._head_step is None:
            raise EngineError("this stage has no head")
        tg.write(self._spaces[1].state, np.ascontiguousarray(row, np.float32))
        return tg.read(self._head_step(), self.header.vocab_size)

    def logits(self, ids: list[int], start: int, tick: Callable[[], None] | None = None) -> F32:
        """Logits of the last of up to `chunk` tokens."""
        return self.run_head(self.run_blocks(self.embed(ids), start, tick)[-1])

    def reusable(self, ids: Sequence[int]) -> int:
        """Nothing: another cut into chunks gives other bits here, and a prompt shall have one answer."""
        return 0

    def close(self) -> None:
        """Nothing to stop: the memory goes when the last reference goes."""

    def warm_up(self, progress: Progress) -> None:
        """Compile and capture every step (first call runs, second captures, third replays)."""
        width = self.header.embedding_length
        total = 2 * len(self._steps) + (2 if self._head_step is not None else 0)
        done = 0
        for size, step in self._steps.items():
            tg.write(self._spaces[size].state, np.zeros((size, width), np.float32))
            for _ in range(2):
                step(self._layer.bind(0), self._start.bind(0))
                done += 1
                progress("warm_up", done, total)
        if self._head_step is not None:
            for _ in range(2):
                self._head_step()
                done += 1
                progress("warm_up", done, total)
