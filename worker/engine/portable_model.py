"""The portable backend: a llama-like model on the kernels of kernels.py, on every device of tinygrad (S1 7.4, 7.10).

Any contiguous part can be loaded, so a pipeline stage is the same code with fewer tensors. All blocks of a part
share one captured step: their weights are stacked in one buffer per kind, and the block's number, its window and its
rotary table are symbolic integers of the step. Capturing costs one block, whatever the number of blocks, and a step
has no tensor inputs: it works on persistent buffers.

Shapes: T rows (1 when decoding, CHUNK when prefilling), D embedding, H query heads, K key-value heads, d head
dimension, C cache positions. Rows, norms and softmax are float32; weights and cache are float16.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

from common.gguf import GgufFile, ModelHeader
from common.gguf_quants import dequantise_rows
from worker.engine import tinygrad_shim as tg
from worker.engine.cpu_plan import StagePlan
from worker.engine.errors import EngineError
from worker.engine.fast_path import FastPath
from worker.engine.kernels import (
    GatedProduct,
    HeadNormApply,
    HeadNormScale,
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
from worker.engine.parts import F32, Inputs, Part, Progress, check_part
from worker.engine.portable_weights import Weights, round_up
from worker.engine.tinygrad_shim import LANES, Step, Symbol, Tensor, dtypes

CHUNK = 32  # rows of a prefill step; 32 to 64 is right on a CPU (reference/engine.md 4)
SINGLE_ROWS_MAX = 8  # a padded chunk takes as long as some nine single rows


class Workspace:
    """The buffers between the kernels of a step of T rows; one step runs at a time, so all blocks share them."""

    def __init__(self, rows: int, header: ModelHeader, positions: int) -> None:
        h = header
        width, heads = h.embedding_length, h.head_count

        def buffer(*shape: int) -> Tensor:
            return tg.allocate(shape, dtypes.float32)

        self.state, self.middle, self.added = (buffer(rows, width) for _ in range(3))
        self.scale, self.normed = buffer(rows), buffer(rows, width)
        self.qkv = buffer(rows, (heads + 2 * h.head_count_kv) * h.head_dim)
        self.head_scale = buffer(rows, heads + h.head_count_kv)
        self.normed_heads = buffer(rows, (heads + h.head_count_kv) * h.head_dim)
        self.queries = buffer(heads, rows, h.head_dim)
        self.scores, self.weights = buffer(heads, rows, positions), buffer(heads, rows, positions)
        self.score_max = buffer(heads, rows)
        self.mixed = buffer(rows, heads * h.head_dim)
        self.hidden = buffer(rows, h.feed_forward_length)


class PortablePart:
    """A loaded part of a model with its key-value cache for one sequence of `max_context` positions."""

    chunk = CHUNK
    fast_path: FastPath | None = None

    def __init__(self, file: GgufFile, header: ModelHeader, part: Part, max_context: int, progress: Progress) -> None:
        check_part(header, part)
        self.header, self.part, self.max_context = header, part, max_context
        self.backend = f"tinygrad {tg.device_name()}"
        self._file = file
        h, count = header, part.layers
        plan = StagePlan(file, header, part)
        self._arch = plan.arch
        self._w = Weights(file, header, plan.arch, part, progress)
        # A padded last chunk writes up to CHUNK - 1 rows behind the last real position.
        self._positions = round_up(max_context + CHUNK, LANES)
        self._keys = tg.allocate((count, h.head_count_kv, self._positions // LANES, h.head_dim, LANES), dtypes.float16)
        self._values = tg.allocate((count, h.head_count_kv, self._positions, h.head_dim), dtypes.float16)
        self._rope = tg.upload(self._signed_tables(plan.rope_tables(self._positions)))
        self._spaces = {rows: Workspace(rows, h, self._positions) for rows in (1, CHUNK)}
        self._layer = tg.symbol("layer", 0, count - 1)
        self._start = tg.symbol("start", 0, max_context)
        has_windows = any(traits.window for traits in plan.traits)
        self._window = tg.symbol("window", 1, self._positions) if has_windows else None
        self._table = tg.symbol("table", 0, len(plan.ropes) - 1) if len(plan.ropes) > 1 else None
        self._bound = [
            self._bind(
                index,
                min(traits.window or self._positions, self._positions),
                plan.ropes.index((traits.rope_theta, traits.rope_scale)),
            )
            for index, traits in enumerate(plan.traits)
        ]
        self._steps = {rows: Step(self._block_function(rows)) for rows in (1, CHUNK)}
        head = self._w.head
        self._logits = tg.allocate((1, head.tiles * LANES), dtypes.float32) if head is not None else None
        self._head_step = Step(self._head_function) if part.with_head else None

    def _bind(self, layer: int, window: int, table: int) -> list[Symbol]:
        """The symbols that a block fixes: its number, and its window and table where blocks differ in them."""
        bound = [self._layer.bind(layer)]
        bound += [self._window.bind(window)] if self._window is not None else []
        return bound + ([self._table.bind(table)] if self._table is not None else [])

    def _signed_tables(self, tables: F32) -> F32:
        """(tables, positions, 2, d): cosines, and sines with the sign of each element; (1, 0) where nothing turns."""
        h, half = self.header, self.header.rope_dim // 2
        signed = np.zeros((*tables.shape[:2], 2, h.head_dim), np.float32)
        signed[:, :, 0, :] = 1.0
        signed[:, :, 0, : h.rope_dim] = np.repeat(tables[:, :, :half], 2, axis=2)
        signed[:, :, 1, 0 : h.rope_dim : 2] = -tables[:, :, half:]
        signed[:, :, 1, 1 : h.rope_dim : 2] = tables[:, :, half:]
        return signed

    @property
    def weights_bytes(self) -> int:
        """Bytes held by the matrices, norms and biases of this part."""
        return self._w.nbytes

    @property
    def kv_bytes(self) -> int:
        """Bytes reserved by the key-value cache; they become resident as the context fills."""
        return int(self._keys.nbytes() + self._values.nbytes())

    # -- the captured steps --------------------------------------------------------------------------------

    def _norm(
        self,
        space: Workspace,
        out: Tensor,
        x: Tensor,
        weights: Tensor,
        which: int,
        of_layer: Sequence[Symbol],
        *residual: Tensor,
    ) -> Tensor:
        """`x` normed by row `which` of the block's norms, or by the final one where no block is bound."""
        rows, width = int(x.shape[0]), self.header.embedding_length
        scale = tg.launch(NormScale(rows, width, self.header.rms_eps), space.scale, x)
        apply = NormApply(rows, width, self._layer if of_layer else 0, which)
        return tg.launch(apply, out, x, scale, weights, *residual, bound=of_layer)

    def _attention(self, space: Workspace, qkv: Tensor, layer: Symbol, start: Symbol, more: Sequence[Symbol]) -> Tensor:
        """Write the rows' keys and values, attend to what each row may see. (T, H * d)"""
        h, rows = self.header, int(qkv.shape[0])
        window = more[:1] if self._window is not None else ()
        table = more[-1:] if self._table is not None else ()
        shape = (rows, h.head_count, h.head_count_kv, h.head_dim, self._layer, self._start)
        turning = (*shape, 0 if self._table is None else self._table)
        heads = qkv
        if self._w.head_norms is not None:
            scale = tg.launch(HeadNormScale(*shape, eps=h.rms_eps), space.head_scale, qkv)
            heads = tg.launch(HeadNormApply(*shape), space.normed_heads, qkv, scale, self._w.head_norms, bound=[layer])
        queries = tg.launch(Queries(*turning), space.queries, heads, self._rope, bound=[start, *table])
        keys = tg.launch(Keys(*turning), self._keys, heads, self._rope, bound=[layer, start, *table])
        values = tg.launch(Values(*shape), self._values, qkv, bound=[layer, start])
        seen = Scores(*shape, window=self._window)
        scores = tg.launch(seen, space.scores, queries, keys, bound=[layer, start, *window])
        highest = tg.launch(ScoreMax(*shape), space.score_max, scores, bound=[start])
        weights = tg.launch(ScoreExp(*shape), space.weights, scores, highest, bound=[start])
        return tg.launch(Mix(*shape), space.mixed, weights, values, bound=[layer, start])

    def _block_function(self, rows: int) -> Callable[..., Tensor]:
        space, w = self._spaces[rows], self._w
        gelu, post_norms = self._arch.activation == "gelu", self._arch.post_norms
        qkv_name, bias = ("qkv", []) if w.bias is None else ("qkv_bias", [w.bias])
        qkv_product = Product(rows, w.qkv.tiles, w.qkv.columns, self._layer, qkv_name, biased=w.bias is not None)
        out_product = w.out.product(rows, self._layer, "attention_out")
        down_product = w.down.product(rows, self._layer, "ffn_down")
        gated = GatedProduct(rows, w.gate.tiles, w.gate.columns, self._layer, "ffn_gate_up", gelu=gelu)

        def add(product: Product, to: Tensor, inputs: list[Tensor], residual: Tensor, norm: int, at: Symbol) -> Tensor:
            """to = residual + product, with a norm of the product in between where the architecture has one."""
            if not post_norms:
                return tg.launch(product, to, *inputs, residual, bound=[at])
            added = tg.launch(product, space.added, *inputs, bound=[at])
            return self._norm(space, to, added, w.norms, norm, [at], residual)

        def block(start: Symbol, layer: Symbol, *more: Symbol) -> Tensor:
            normed = self._norm(space, space.normed, space.state, w.norms, 0, [layer])
            qkv = tg.launch(qkv_product, space.qkv, w.qkv.tensor, normed, *bias, bound=[layer])
            mixed = self._attention(space, qkv, layer, start, more)
            middle = add(out_product, space.middle, [w.out.tensor, mixed], space.state, 2, layer)
            normed = self._norm(space, space.normed, middle, w.norms, 1, [layer])
            hidden = tg.launch(gated, space.hidden, w.gate.tensor, w.up.tensor, normed, bound=[layer])
            return add(down_product, space.state, [w.down.tensor, hidden], middle, 3, layer).realize()

        return block

    def _head_function(self) -> Tensor:
        head, norm = self._w.head, self._w.final_norm
        assert head is not None and norm is not None and self._logits is not None
        space = self._spaces[1]
        normed = self._norm(space, space.normed, space.state, norm, 0, [])
        return tg.launch(head.product(1, 0, "head"), self._logits, head.tensor, normed).realize()

    # -- running -------------------------------------------------------------------------------------------

    def _rows(self, inputs: Inputs) -> F32:
        """Rows (n, D): of tokens only their rows of the file are read."""
        if not isinstance(inputs, list):
            return inputs
        rows = dequantise_rows(self._file, "token_embd.weight", np.asarray(inputs, np.int64))
        if self._arch.scaled_embedding:
            rows *= np.float32(math.sqrt(self.header.embedding_length))
        return rows

    def run_blocks(self, inputs: Inputs, start: int, tick: Callable[[], None] | None = None) -> F32:
        """All blocks on up to CHUNK rows at positions start...; returns rows of the same shape (n, D)."""
        rows = self._rows(inputs)
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
        at = self._start.bind(start)
        for bound in self._bound:
            step(at, *bound)
            if tick is not None:
                tick()
        return tg.read(self._spaces[size].state, count * width).reshape(count, width)

    def run_head(self, row: F32) -> F32:
        """Logits (vocabulary,) of one row (D,)."""
        if self._head_step is None:
            raise EngineError("this stage has no head")
        tg.write(self._spaces[1].state, np.ascontiguousarray(row, np.float32))
        return tg.read(self._head_step(), self.header.vocab_size)

    def run_to_logits(self, inputs: Inputs, start: int, tick: Callable[[], None] | None = None) -> F32:
        """All blocks, then the head on the last row."""
        return self.run_head(self.run_blocks(inputs, start, tick)[-1])

    def logits(self, ids: list[int], start: int, tick: Callable[[], None] | None = None) -> F32:
        """Logits of the last of up to `chunk` tokens."""
        return self.run_to_logits(ids, start, tick)

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
                step(self._start.bind(0), *self._bound[0])
                done += 1
                progress("warm_up", done, total)
        if self._head_step is not None:
            for _ in range(2):
                self._head_step()
                done += 1
                progress("warm_up", done, total)
