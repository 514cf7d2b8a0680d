"""The llama model on plain tinygrad operations: embedding | blocks a..b | final norm and head (S1 7.4, 7.10).

Any contiguous part can be loaded, so a pipeline stage is the same code with fewer tensors. All blocks of a part
share one captured step: their weights are stacked in one buffer per kind, and the block's number is a symbolic
integer of the step. Capturing costs one block, whatever the number of blocks, and a step has no tensor inputs.

Shapes: T rows (1 when decoding, CHUNK when prefilling), D embedding, H query heads, K key-value heads, d head
dimension, C cache positions. Rows, norms and softmax are float32; weights and cache are float16.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from common.gguf import GgufFile, ModelHeader
from common.gguf_quants import dequantise, dequantise_rows
from worker.engine import tinygrad_shim as tg
from worker.engine.errors import EngineError
from worker.engine.tinygrad_shim import LANES, Step, Symbol, Tensor, dtypes

CHUNK = 32  # rows of a prefill step; 32 to 64 is right on a CPU (reference/engine.md 4)
F32 = npt.NDArray[np.float32]
Progress = Callable[[str, int, int], None]


@dataclass(frozen=True, slots=True)
class Part:
    """Which part of a model a stage holds: blocks [layer_start, layer_end_exclusive), S1 7.10."""

    layer_start: int
    layer_end_exclusive: int
    with_embedding: bool
    with_head: bool

    @property
    def layers(self) -> int:
        return self.layer_end_exclusive - self.layer_start


def whole(header: ModelHeader) -> Part:
    return Part(0, header.block_count, True, True)


def check_part(header: ModelHeader, part: Part) -> None:
    """S1 10.8: a set but invalid range is an error that names both."""
    if not 0 <= part.layer_start < part.layer_end_exclusive <= header.block_count:
        raise EngineError(
            f"layer range {part.layer_start}..{part.layer_end_exclusive} is not inside the model's "
            f"{header.block_count} layers"
        )


def _round_up(value: int, step: int) -> int:
    return -(-value // step) * step


class TiledMatrices:
    """The same matrix of every block, as float16 tiles [blocks][rows/16][columns][16 rows], rows zero-padded."""

    def __init__(self, blocks: int, rows: int, columns: int) -> None:
        self.rows, self.columns = rows, columns
        self.tiles = _round_up(rows, LANES) // LANES
        self.tensor = tg.allocate((blocks, self.tiles, columns, LANES), dtypes.float16)

    def put(self, block: int, weights: F32) -> None:
        """Store a float32 matrix (rows, columns)."""
        padded = np.zeros((self.tiles * LANES, self.columns), np.float16)
        padded[: self.rows] = weights
        tiled = np.ascontiguousarray(padded.reshape(self.tiles, LANES, self.columns).transpose(0, 2, 1))
        tg.write(self.tensor, tiled, block * tiled.size)

    def apply(self, block: Symbol | int, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """x (T, columns) times the block's matrix transposed, (T, rows), plus `residual`; one kernel."""
        count = int(x.shape[0])
        weights = self.tensor[block].reshape(self.tiles, 1, self.columns, LANES).cast(dtypes.float32)
        product = (weights * x.reshape(1, count, self.columns, 1)).sum(2)
        if residual is not None and self.tiles * LANES == self.rows:
            product = product + residual.reshape(count, self.tiles, LANES).permute(1, 0, 2)
        product = tg.tiled_kernel(product, batch_axis=count > 1, tiles_axis=self.tiles > 1)
        result = product.permute(1, 0, 2).reshape(count, self.tiles * LANES)[:, : self.rows]
        if residual is not None and self.tiles * LANES != self.rows:
            result = result + residual
        return result


class LlamaPart:
    """A loaded part of a llama model with its key-value cache for one sequence of `max_context` positions."""

    def __init__(self, file: GgufFile, header: ModelHeader, part: Part, max_context: int, progress: Progress) -> None:
        check_part(header, part)
        self.header, self.part, self.max_context = header, part, max_context
        self._file = file
        h = header
        count, width, ffn = part.layers, h.embedding_length, h.feed_forward_length
        self._q_rows, self._kv_rows = h.head_count * h.head_dim, h.head_count_kv * h.head_dim
        self._qkv = TiledMatrices(count, self._q_rows + 2 * self._kv_rows, width)
        self._out = TiledMatrices(count, width, self._q_rows)
        self._gate_up = TiledMatrices(count, 2 * ffn, width)
        self._down = TiledMatrices(count, width, ffn)
        self._norms = tg.allocate((count, 2, width), dtypes.float32)
        # A padded last chunk writes up to CHUNK - 1 rows behind the last real position.
        self._positions = max_context + CHUNK
        self._cache = tg.allocate((count, 2, h.head_count_kv, self._positions, h.head_dim), dtypes.float16)
        self._head = TiledMatrices(1, h.vocab_size, width) if part.with_head else None
        self._final_norm = tg.allocate((width,), dtypes.float32) if part.with_head else None
        self._load(progress)
        self._rope = tg.upload(self._rope_table())
        self._rows = {rows: tg.allocate((rows, width), dtypes.float32) for rows in (1, CHUNK)}
        self._layer = tg.symbol("layer", 0, count - 1)
        self._start = tg.symbol("start", 0, max_context)
        self._steps = {rows: Step(self._block_function(rows)) for rows in (1, CHUNK)}
        self._head_step = Step(self._head_function) if part.with_head else None

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
            self._gate_up.put(index, np.concatenate([tensor("ffn_gate", ffn, width), tensor("ffn_up", ffn, width)]))
            loaded(f"{prefix}ffn_gate.weight", f"{prefix}ffn_up.weight")
            self._down.put(index, tensor("ffn_down", width, ffn))
            loaded(f"{prefix}ffn_down.weight")
        if self._head is not None and self._final_norm is not None:
            width = self.header.embedding_length
            tg.write(self._final_norm, self._checked("output_norm.weight", (width,)))
            self._head.put(0, self._checked(head_name, (self.header.vocab_size, width)))
            loaded(head_name)

    @property
    def weights_bytes(self) -> int:
        """Bytes held by the matrices and norms of this part."""
        matrices = (self._qkv, self._out, self._gate_up, self._down, self._head)
        total = sum(matrix.tensor.nbytes() for matrix in matrices if matrix is not None)
        return int(total + self._norms.nbytes())

    @property
    def kv_bytes(self) -> int:
        """Bytes reserved by the key-value cache; they become resident as the context fills."""
        return int(self._cache.nbytes())

    def _checked(self, name: str, shape: tuple[int, ...]) -> F32:
        found = self._file.tensor(name).shape
        if found != shape:
            raise EngineError(f"{self._file.path}: tensor {name} has shape {found}, expected {shape}")
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

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        scale = (x.square().mean(-1, keepdim=True) + self.header.rms_eps).rsqrt().contiguous()
        return (x * scale * weight).contiguous()

    def _rotate(self, x: Tensor, table: Tensor) -> Tensor:
        """x (T, heads, d), table (T, 2, d): each pair of neighbours turned by its position's angle."""
        swapped = x.reshape(*x.shape[:-1], x.shape[-1] // 2, 2).flip(-1).reshape(*x.shape)
        return x * table[:, 0:1, :] + swapped * table[:, 1:2, :]

    def _attention(self, qkv: Tensor, layer: Symbol, start: Symbol) -> Tensor:
        """Write the rows' keys and values at `start`, attend to everything up to each row. (T, H * d)"""
        h, rows = self.header, int(qkv.shape[0])
        groups = h.head_count // h.head_count_kv
        table = self._rope[start : start + rows]
        q = self._rotate(qkv[:, : self._q_rows].reshape(rows, h.head_count, h.head_dim), table)
        k = self._rotate(
            qkv[:, self._q_rows : self._q_rows + self._kv_rows].reshape(rows, h.head_count_kv, h.head_dim), table
        )
        v = qkv[:, self._q_rows + self._kv_rows :].reshape(rows, h.head_count_kv, h.head_dim)
        fresh = Tensor.stack(k, v).permute(0, 2, 1, 3).cast(dtypes.float16)
        target = self._cache[layer, :, :, start : start + rows, :]
        target.assign(fresh).realize()
        seen = self._cache[layer, :, :, 0 : start + rows, :]
        keys, values = seen[0].unsqueeze(1), seen[1].unsqueeze(1)
        q = (q * (1.0 / math.sqrt(h.head_dim))).permute(1, 0, 2).reshape(h.head_count_kv, groups, rows, h.head_dim)
        scores = q.contiguous() @ keys.cast(dtypes.float32).transpose(-1, -2)
        if rows > 1:
            mask = Tensor.full((1, 1, rows, start + rows), float("-inf"), buffer=False).triu(start + 1)
            scores = scores + mask
        weights = scores.contiguous().softmax(-1)
        mixed = weights @ values.cast(dtypes.float32)
        return mixed.permute(2, 0, 1, 3).reshape(rows, self._q_rows).contiguous()

    def _block_function(self, rows: int) -> Callable[[Symbol, Symbol], Tensor]:
        state = self._rows[rows]

        def block(layer: Symbol, start: Symbol) -> Tensor:
            norms = self._norms[layer]
            qkv = self._qkv.apply(layer, self._norm(state, norms[0]))
            middle = self._out.apply(layer, self._attention(qkv, layer, start), state)
            both = self._gate_up.apply(layer, self._norm(middle, norms[1]))
            ffn = self.header.feed_forward_length
            hidden = (both[:, :ffn].silu() * both[:, ffn:]).contiguous()
            return state.assign(self._down.apply(layer, hidden, middle)).realize()

        return block

    def _head_function(self) -> Tensor:
        assert self._head is not None and self._final_norm is not None
        return self._head.apply(0, self._norm(self._rows[1], self._final_norm)).contiguous().realize()

    # -- running -------------------------------------------------------------------------------------------

    def embed(self, ids: list[int]) -> F32:
        """Rows of the embedding, (len(ids), D); only those rows of the file are read."""
        return dequantise_rows(self._file, "token_embd.weight", np.asarray(ids, np.int64))

    def run_blocks(self, rows: F32, start: int, tick: Callable[[], None] | None = None) -> F32:
        """All blocks on up to CHUNK rows at positions start...; returns rows of the same shape (n, D)."""
        count, width = rows.shape
        size = 1 if count == 1 else CHUNK
        if count > CHUNK or start < 0 or start + count > self.max_context:
            raise EngineError(f"{count} rows at position {start} do not fit the context of {self.max_context}")
        if count < size:
            rows = np.concatenate([rows, np.zeros((size - count, width), np.float32)])
        tg.write(self._rows[size], np.ascontiguousarray(rows, np.float32))
        step = self._steps[size]
        bound = self._start.bind(start)
        for index in range(self.part.layers):
            step(self._layer.bind(index), bound)
            if tick is not None:
                tick()
        return tg.read(self._rows[size], count * width).reshape(count, width)

    def run_head(self, row: F32) -> F32:
        """Logits (vocabulary,) of one row (D,)."""
        if self._head_step is None:
            raise EngineError("this stage has no head")
        tg.write(self._rows[1], np.ascontiguousarray(row, np.float32))
        return tg.read(self._head_step(), self.header.vocab_size)

    def warm_up(self, progress: Progress) -> None:
        """Compile and capture every step (first call runs, second captures, third replays)."""
        width = self.header.embedding_length
        total = 2 * len(self._steps) + (2 if self._head_step is not None else 0)
        done = 0
        for size, step in self._steps.items():
            tg.write(self._rows[size], np.zeros((size, width), np.float32))
            for _ in range(2):
                step(self._layer.bind(0), self._start.bind(0))
                done += 1
                progress("warm_up", done, total)
        if self._head_step is not None:
            for _ in range(2):
                self._head_step()
                done += 1
                progress("warm_up", done, total)
