"""The kernels of a llama-like block as loops over buffers, for every tinygrad device (reference/engine.md 9.2a).

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
    as_half,
    choose,
    finish,
    lanes,
    largest,
    loop,
    reduction,
    total,
)

LOG2_E = math.log2(math.e)
GELU_SCALE, GELU_CUBIC = 2 * math.sqrt(2 / math.pi), 0.044715


def _row_loops(rows: int, number: int) -> tuple[Expr | int, list[Expr]]:
    """The batch's row and its loops, numbered from `number` on: a few rows share one pass over the weights."""
    if rows == 1:
        return 0, []
    outer, inner = loop(rows // TOKEN_UPCAST, number), lanes(TOKEN_UPCAST, number + 1)
    return outer * TOKEN_UPCAST + inner, [outer, inner]


@dataclass(frozen=True)
class Product:
    """out (T, rows) = x (T, columns) · W[layer]ᵀ, plus a residual (T, rows) or a bias [layer] (rows,)."""

    rows: int
    tiles: int
    columns: int
    layer: Symbol | int
    name: str = "product"
    biased: bool = False  # the last input is a bias, not a residual

    def __call__(self, out: Expr, weights: Expr, x: Expr, added: Expr | None = None) -> Expr:
        tile = loop(self.tiles, 0)
        row, rows = _row_loops(self.rows, 1)
        lane = lanes(LANES, 3)
        column = reduction(self.columns, 4)
        value = total(as_float(weights[self.layer, tile, column, lane]) * x[row, column], column)
        at = tile * LANES + lane
        if added is not None:
            value = value + (added[self.layer, at] if self.biased else added[row, at])
        return finish(self.name, out[row, at].store(value), [tile, *rows, lane])


@dataclass(frozen=True)
class GatedProduct(Product):
    """out (T, F) = activation(x · Gᵀ) * (x · Uᵀ) in one pass over x; SiLU, or GELU by its tanh formula."""

    gelu: bool = False

    def __call__(self, out: Expr, gate: Expr, up: Expr, x: Expr) -> Expr:  # type: ignore[override]
        tile = loop(self.tiles, 0)
        row, rows = _row_loops(self.rows, 1)
        lane = lanes(LANES, 3)
        column = reduction(self.columns, 4)
        value = x[row, column]
        opened = total(as_float(gate[self.layer, tile, column, lane]) * value, column)
        raised = total(as_float(up[self.layer, tile, column, lane]) * value, column)
        # x (1 + tanh(u)) / 2 is x / (1 + exp(-2 u)): both activations are x times a logistic function.
        inner = (opened + opened * opened * opened * GELU_CUBIC) * GELU_SCALE if self.gelu else opened
        hidden = opened / ((inner * -LOG2_E).exp2() + 1.0) * raised
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
    """out (T, D) = x * scale (T,) * weight[layer][which] (D,), plus `residual` (T, D) where one is given."""

    rows: int
    columns: int
    layer: Symbol | int
    which: int

    def __call__(self, out: Expr, x: Expr, scale: Expr, weight: Expr, residual: Expr | None = None) -> Expr:
        row, column = loop(self.rows, 0), loop(self.columns, 1)
        value = x[row, column] * scale[row] * weight[self.layer, self.which, column]
        if residual is not None:
            value = value + residual[row, column]
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
    table: Symbol | int = 0  # which rotary table the block uses
    window: Symbol | None = None  # positions that the block sees; None: all

    @property
    def groups(self) -> int:
        return self.head_count // self.kv_count

    @property
    def seen(self) -> Expr:
        """Positions that are written once these rows are: the length of the cache that is looked at."""
        return self.start + self.rows

    def rotated(self, source: Expr, table: Expr, row: Expr, first: Expr, pair: Expr, half: Expr) -> Expr:
        """Element 2 * pair + half of a head that starts at column `first`, turned by its position's angle.

        Neighbours turn together: (a, b) becomes (a cos - b sin, b cos + a sin); the table holds the signed sines.
        """
        at, other = pair * 2 + half, pair * 2 + (1 - half)
        cosine, sine = (table[self.table, self.start + row, part, at] for part in (0, 1))
        return source[row, first + at] * cosine + source[row, first + other] * sine


@dataclass(frozen=True)
class HeadNormScale(Heads):
    """out (T, H + K) = 1 / sqrt(mean(x²) + eps) of each query's and key's head in qkv (T, (H + 2 K) * d)."""

    eps: float = 0.0

    def __call__(self, out: Expr, qkv: Expr) -> Expr:
        row, head = loop(self.rows, 0), loop(self.head_count + self.kv_count, 1)
        at = reduction(self.head_dim, 2)
        value = qkv[row, head * self.head_dim + at]
        mean = total(value * value, at) * (1.0 / self.head_dim)
        return finish("head_norm_scale", out[row, head].store((mean + self.eps).rsqrt()), [row, head], explicit=False)


class HeadNormApply(Heads):
    """out (T, (H + K) * d) = heads of qkv * scale (T, H + K) * weight[layer][query | key] (d,)."""

    def __call__(self, out: Expr, qkv: Expr, scale: Expr, weight: Expr) -> Expr:
        row, head, at = loop(self.rows, 0), loop(self.head_count + self.kv_count, 1), loop(self.head_dim, 2)
        column = head * self.head_dim + at
        which = head // self.head_count  # at most 1: there are no more key-value heads than query heads
        value = qkv[row, column] * scale[row, head] * weight[self.layer, which, at]
        return finish("head_norm_apply", out[row, column].store(value), [row, head, at], explicit=False)


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
        value = as_half(self.rotated(qkv, table, row, first, pair, half))
        position = self.start + row
        place = keys[self.layer, head, position // LANES, pair * 2 + half, position % LANES]
        return finish("keys", place.store(value), [head, row, pair, half], explicit=False)


class Values(Heads):
    """values [blocks][K][positions][d]: write the values of the rows at `start`."""

    def __call__(self, values: Expr, qkv: Expr) -> Expr:
        head, row, at = loop(self.kv_count, 0), loop(self.rows, 1), loop(self.head_dim, 2)
        value = qkv[row, (head + (self.head_count + self.kv_count)) * self.head_dim + at]
        place = values[self.layer, head, self.start + row, at]
        return finish("values", place.store(as_half(value)), [head, row, at], explicit=False)


class Scores(Heads):
    """out (H, T, positions): queries times keys; -inf behind the row (causal mask) and before its window."""

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
        visible = position < self.start + row + 1
        if self.window is not None:
            visible = visible & (self.start + row < position + self.window)
        masked = choose(visible, score, -math.inf)
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
