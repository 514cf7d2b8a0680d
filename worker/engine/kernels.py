"""The kernels of a llama block as loops over buffers, portable to every tinygrad device (reference/engine.md 9.2a).

Each class binds dimensions and is called with the kernel's buffers: the written one first. T rows, D embedding,
H query heads, K key-value heads, d head dimension, G = H / K query heads that share a key-value head. `layer` and
`start` are symbolic: the block's number within the part, and the position of the first row.

Matrices are float16 tiles [blocks][rows / LANES][columns][LANES]: the innermost axis is the vector. Keys lie
likewise, LANES positions to a tile, so that scores are a product with a matrix of symbolic height.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from worker.engine.tinygrad_shim import (
    LANES,
    TOKEN_UPCAST,
    Expr,
    Symbol,
    as_float,
    choose,
    finish,
    lanes,
    largest,
    loop,
    reduction,
    total,
)

LOG2_E = math.log2(math.e)


def _row_loops(rows: int, number: int) -> tuple[Expr | int, list[Expr]]:
    """The batch's row and its loops, numbered from `number` on: a few rows share one pass over the weights."""
    if rows == 1:
        return 0, []
    outer, inner = loop(rows // TOKEN_UPCAST, number), lanes(TOKEN_UPCAST, number + 1)
    return outer * TOKEN_UPCAST + inner, [outer, inner]


@dataclass(frozen=True)
class Product:
    """out (T, rows) = x (T, columns) · W[layer]ᵀ, plus `residual` (T, rows) where one is given."""

    rows: int
    tiles: int
    columns: int
    layer: Symbol | int
    name: str = "product"

    def __call__(self, out: Expr, weights: Expr, x: Expr, residual: Expr | None = None) -> Expr:
        tile = loop(self.tiles, 0)
        row, rows = _row_loops(self.rows, 1)
        lane = lanes(LANES, 3)
        column = reduction(self.columns, 4)
        value = total(as_float(weights[self.layer, tile, column, lane]) * x[row, column], column)
        at = tile * LANES + lane
        if residual is not None:
            value = value + residual[row, at]
        return finish(self.name, out[row, at].store(value), [tile, *rows, lane])


class GatedProduct(Product):
    """out (T, F) = SiLU(x · Gᵀ) * (x · Uᵀ) in one pass over x."""

    def __call__(self, out: Expr, gate: Expr, up: Expr, x: Expr) -> Expr:  # type: ignore[override]
        tile = loop(self.tiles, 0)
        row, rows = _row_loops(self.rows, 1)
        lane = lanes(LANES, 3)
        column = reduction(self.columns, 4)
        value = x[row, column]
        opened = total(as_float(gate[self.layer, tile, column, lane]) * value, column)
        raised = total(as_float(up[self.layer, tile, column, lane]) * value, column)
        hidden = opened / ((opened * -LOG2_E).exp2() + 1.0) * raised
        at = tile * LANES + lane
        return finish(self.name, out[row, at].store(hidden), [tile, *rows, lane])


@dataclass(frozen=True)
class NormScale:
    """out (T,) = 1 / sqrt(mean(x²) + eps) of x (T, D)."""

    rows: int
    columns: int
    eps: float

    def __call__(self, out: Expr, x: Expr) -> Expr:
        row = loop(self.rows, 0)
        column = reduction(self.columns, 1)
        value = x[row, column]
        mean = total(value * value, column) * (1.0 / self.columns)
        return finish("norm_scale", out[row].store((mean + self.eps).rsqrt()), [row], explicit=False)


@dataclass(frozen=True)
class NormApply:
    """out (T, D) = x * scale (T,) * weight[layer][which] (D,)."""

    rows: int
    columns: int
    layer: Symbol | int
    which: int

    def __call__(self, out: Expr, x: Expr, scale: Expr, weight: Expr) -> Expr:
        row, column = loop(self.rows, 0), loop(self.columns, 1)
        value = x[row, column] * scale[row] * weight[self.layer, self.which, column]
        return finish("norm_apply", out[row, column].store(value), [row, column], explicit=False)


@dataclass(frozen=True)
class Heads:
    """Dimensions that the attention kernels share; `head_dim` is a multiple of LANES or small."""

    rows: int
    head_count: int
    kv_count: int
    head_dim: int
    layer: Symbol
    start: Symbol

    @property
    def groups(self) -> int:
        return self.head_count // self.kv_count

    @property
    def seen(self) -> Expr:
        """Positions that are written once these rows are: the length of the cache that is looked at."""
        return self.start + self.rows

    def rotated(self, source: Expr, table: Expr, row: Expr, first: Expr, pair: Expr, half: Expr) -> Expr:
        """Element 2 * pair + half of a head that starts at column `first`, turned by its position's angle.

        GGUF's llama layout rotates neighbours: (a, b) becomes (a cos - b sin, b cos + a sin); the table holds
        the signed sines.
        """
        at, other = pair * 2 + half, pair * 2 + (1 - half)
        position = self.start + row
        return source[row, first + at] * table[position, 0, at] + source[row, first + other] * table[position, 1, at]


class Queries(Heads):
    """out (H, T, d) = rotated and scaled queries of qkv (T, (H + 2 K) * d)."""

    def __call__(self, out: Expr, qkv: Expr, table: Expr) -> Expr:
        head, row = loop(self.head_count, 0), loop(self.rows, 1)
        pair, half = loop(self.head_dim // 2, 2), loop(2, 3)
        value = self.rotated(qkv, table, row, head * self.head_dim, pair, half) * (1.0 / math.sqrt(self.head_dim))
        return finish("queries", out[head, row, pair * 2 + half].store(value), [head, row, pair, half], explicit=False)


class Keys(Heads):
    """keys [blocks][K][positions / LANES][d][LANES]: write the rotated keys of the rows at `start`."""

    def __call__(self, keys: Expr, qkv: Expr, table: Expr) -> Expr:
        head, row = loop(self.kv_count, 0), loop(self.rows, 1)
        pair, half = loop(self.head_dim // 2, 2), loop(2, 3)
        first = (head + self.head_count) * self.head_dim
        value = self.rotated(qkv, table, row, first, pair, half).cast(keys.dtype.base)
        position = self.start + row
        place = keys[self.layer, head, position // LANES, pair * 2 + half, position % LANES]
        return finish("keys", place.store(value), [head, row, pair, half], explicit=False)


class Values(Heads):
    """values [blocks][K][positions][d]: write the values of the rows at `start`."""

    def __call__(self, values: Expr, qkv: Expr) -> Expr:
        head, row, at = loop(self.kv_count, 0), loop(self.rows, 1), loop(self.head_dim, 2)
        value = qkv[row, (head + (self.head_count + self.kv_count)) * self.head_dim + at]
        place = values[self.layer, head, self.start + row, at]
        return finish("values", place.store(value.cast(values.dtype.base)), [head, row, at], explicit=False)


class Scores(Heads):
    """out (H, T, positions): queries times keys; -inf where the position lies behind the row (causal mask)."""

    def __call__(self, out: Expr, queries: Expr, keys: Expr) -> Expr:
        head = loop(self.kv_count, 0)
        tile = loop((self.seen + (LANES - 1)) // LANES, 1)
        group = loop(self.groups, 2)
        row, rows = _row_loops(self.rows, 3)
        lane = lanes(LANES, 5)
        at = reduction(self.head_dim, 6)
        query_head = head * self.groups + group
        key = as_float(keys[self.layer, head, tile, at, lane])
        score = total(key * queries[query_head, row, at], at)
        position = tile * LANES + lane
        masked = choose(position < self.start + row + 1, score, -math.inf)
        return finish("scores", out[query_head, row, position].store(masked), [head, tile, group, *rows, lane])


class ScoreMax(Heads):
    """out (H, T): the largest score of a row, for a softmax that cannot overflow."""

    def __call__(self, out: Expr, scores: Expr) -> Expr:
        head, row = loop(self.head_count, 0), loop(self.rows, 1)
        position = reduction(self.seen, 2)
        return finish(
            "score_max",
            out[head, row].store(largest(scores[head, row, position], position)),
            [head, row],
            explicit=False,
        )


class ScoreExp(Heads):
    """out (H, T, positions) = exp(score - max); what is masked becomes 0."""

    def __call__(self, out: Expr, scores: Expr, score_max: Expr) -> Expr:
        head, row = loop(self.head_count, 0), loop(self.rows, 1)
        tile, lane = loop((self.seen + (LANES - 1)) // LANES, 2), lanes(LANES, 3)
        position = tile * LANES + lane
        value = ((scores[head, row, position] - score_max[head, row]) * LOG2_E).exp2()
        return finish("score_exp", out[head, row, position].store(value), [head, row, tile, lane])


class Mix(Heads):
    """out (T, H * d) = weights (H, T, positions) times values, divided by the sum of the weights."""

    def __call__(self, out: Expr, weights: Expr, values: Expr) -> Expr:
        width = math.gcd(self.head_dim, LANES)
        head, slab, group = loop(self.kv_count, 0), loop(self.head_dim // width, 1), loop(self.groups, 2)
        row, rows = _row_loops(self.rows, 3)
        lane = lanes(width, 5)
        position = reduction(self.seen, 6)
        query_head = head * self.groups + group
        at = slab * width + lane
        weight = weights[query_head, row, position]
        mixed = total(as_float(values[self.layer, head, position, at]) * weight, position)
        share = mixed / total(weight, position)
        store = out[row, query_head * self.head_dim + at].store(share)
        return finish("mix", store, [head, slab, group, *rows, lane])
