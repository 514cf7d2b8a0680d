"""Where everything of a stage lies for the C kernels: the weights' arena and the plan that they read.

The structures are those of cpu/model.h. All numbers of the plan are 64-bit; offsets and sizes are bytes; -1 says
"not there". Rows of a rotary head that turn as neighbours in the file are moved into its two halves.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from common.gguf import GgufFile, ModelHeader
from common.gguf_arch import LayerTraits, architecture
from common.gguf_quants import dequantise
from worker.engine.parts import Part

LAYOUT = 3  # of the arena: changes when a cached arena can no longer be used
ALIGN = 64
TILE_ROWS = 16
ROWS_MAX = 64  # rows of a step
KINDS = (
    "F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "IQ4_NL", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K",
    "IQ4_XS",
)  # fmt: skip
_NUMBER = {name: index for index, name in enumerate(KINDS)}
# Columns and bytes of a unit of 16 rows: cpu/tiles.h.
_UNITS = {
    "F32": (32, 2048), "F16": (32, 1024), "BF16": (32, 1024), "Q4_0": (64, 576), "Q4_1": (32, 320), "Q5_0": (64, 704),
    "Q5_1": (32, 384), "Q8_0": (64, 1088), "IQ4_NL": (64, 576), "Q2_K": (256, 2624), "Q3_K": (256, 2368),
    "Q4_K": (256, 2368), "Q5_K": (256, 2880), "Q6_K": (256, 3392), "IQ4_XS": (256, 2240),
}  # fmt: skip
_NO_MATRIX = (0, -1, 0, 0, -1)
F32 = npt.NDArray[np.float32]


def tiled_bytes(kind: str, rows: int, columns: int) -> int:
    """Bytes of a matrix in tiles, its rows padded to whole tiles and its columns to whole units."""
    unit, nbytes = _UNITS[kind]
    return -(-rows // TILE_ROWS) * -(-columns // unit) * nbytes


@dataclass(frozen=True, slots=True)
class Item:
    """A tensor's place in the arena; `kind` None is a vector, stored as float32."""

    name: str
    kind: str | None
    rows: int
    columns: int
    offset: int
    nbytes: int
    rotary: bool

    @property
    def number(self) -> int:
        assert self.kind is not None
        return _NUMBER[self.kind]


def rotary_order(rows: int, head_dim: int, rope_dim: int) -> npt.NDArray[np.int64]:
    """Row r of the arena is row order[r] of the file: even members of the pairs first, then the odd ones."""
    order = np.arange(rows).reshape(-1, head_dim)
    turned = order[:, :rope_dim]
    order = np.concatenate([turned[:, 0::2], turned[:, 1::2], order[:, rope_dim:]], axis=1)
    flat: npt.NDArray[np.int64] = order.reshape(-1).astype(np.int64)
    return flat


class StagePlan:
    """Lays out a part of a model; `reason` says why the C kernels cannot take it, if so."""

    def __init__(self, file: GgufFile, header: ModelHeader, part: Part) -> None:
        self.file, self.header, self.part = file, header, part
        self.arch = architecture(header.architecture)
        self.items: list[Item] = []
        self.nbytes = 0
        self._by_name: dict[str, Item] = {}
        self.head_name = "output.weight" if "output.weight" in file.tensors else "token_embd.weight"
        self.traits = [
            self.arch.traits_of(file.metadata, layer, header.rope_theta, header.rope_scale)
            for layer in range(part.layer_start, part.layer_end_exclusive)
        ]
        self.ropes: list[tuple[float, float]] = sorted({(t.rope_theta, t.rope_scale) for t in self.traits})
        self.reason = self._reason()
        if self.reason is None:
            self._lay_out()

    # -- what fits -----------------------------------------------------------------------------------------

    def _matrices(self, layer: int) -> dict[str, tuple[int, int]]:
        """Names and shapes of a block's matrices."""
        h = self.header
        width, ffn, q, kv = h.embedding_length, h.feed_forward_length, h.query_width, h.key_value_width
        shapes = {
            "attn_q": (q, width), "attn_k": (kv, width), "attn_v": (kv, width), "attn_output": (width, q),
            "ffn_gate": (ffn, width), "ffn_up": (ffn, width), "ffn_down": (width, ffn),
        }  # fmt: skip
        return {f"blk.{layer}.{name}.weight": shape for name, shape in shapes.items()}

    def _vectors(self, layer: int) -> dict[str, int]:
        h, a = self.header, self.arch
        names = {"attn_norm.weight": h.embedding_length, "ffn_norm.weight": h.embedding_length}
        if a.qk_norm:
            names |= {"attn_q_norm.weight": h.head_dim, "attn_k_norm.weight": h.head_dim}
        if a.post_norms:
            names |= {"post_attention_norm.weight": h.embedding_length, "post_ffw_norm.weight": h.embedding_length}
        for name, rows in (("q", h.query_width), ("k", h.key_value_width), ("v", h.key_value_width)):
            if a.qkv_bias or f"blk.{layer}.attn_{name}.bias" in self.file.tensors:
                names[f"attn_{name}.bias"] = rows
        return {f"blk.{layer}.{name}": length for name, length in names.items()}

    def _reason(self) -> str | None:
        h = self.header
        for name, value, unit in (
            ("embedding_length", h.embedding_length, 32), ("feed_forward_length", h.feed_forward_length, 32),
            ("query width", h.query_width, 32), ("key-value width", h.key_value_width, TILE_ROWS),
            ("head size", h.head_dim, TILE_ROWS),
        ):  # fmt: skip
            if value % unit:
                return f"{name} is {value}, not a multiple of {unit}"
        return None

    # -- the arena -----------------------------------------------------------------------------------------

    def _add(self, name: str, kind: str | None, rows: int, columns: int, nbytes: int, rotary: bool = False) -> None:
        item = Item(name, kind, rows, columns, self.nbytes, nbytes, rotary and self.arch.interleaved_rope)
        self.items.append(item)
        self._by_name[name] = item
        self.nbytes += -(-nbytes // ALIGN) * ALIGN

    def _matrix(self, name: str, shape: tuple[int, int]) -> None:
        info = self.file.checked_tensor(name, shape)
        rotary = name.endswith(("attn_q.weight", "attn_k.weight"))
        self._add(name, info.type_name, *shape, tiled_bytes(info.type_name, *shape), rotary)

    def _vector(self, name: str, length: int) -> None:
        self.file.checked_tensor(name, (length,))
        self._add(name, None, 1, length, 4 * length, name.endswith(("attn_q.bias", "attn_k.bias")))

    def _lay_out(self) -> None:
        if self.part.with_embedding:  # stays in the file; the kernels read rows of it without looking
            self.file.checked_tensor("token_embd.weight", (self.header.vocab_size, self.header.embedding_length))
        for layer in range(self.part.layer_start, self.part.layer_end_exclusive):
            for name, length in self._vectors(layer).items():
                self._vector(name, length)
            for name, shape in self._matrices(layer).items():
                self._matrix(name, shape)
        if self.part.with_head:
            self._vector("output_norm.weight", self.header.embedding_length)
            self._matrix(self.head_name, (self.header.vocab_size, self.header.embedding_length))

    def vector(self, item: Item) -> F32:
        """A vector's values as they lie in the arena."""
        values = dequantise(self.file, item.name)
        if item.rotary:
            values = values[rotary_order(len(values), self.header.head_dim, self.header.rope_dim)]
        return values

    @property
    def source_bytes(self) -> int:
        """Bytes of the file that this part is made of."""
        return sum(self.file.tensors[item.name].nbytes for item in self.items)

    # -- the plan ------------------------------------------------------------------------------------------

    def _offset(self, name: str) -> int:
        item = self._by_name.get(name)
        return -1 if item is None else item.offset

    def _matrix_fields(self, name: str) -> tuple[int, ...]:
        item = self._by_name[name]
        return item.offset, item.number, item.rows, item.columns, self._offset(name.removesuffix("weight") + "bias")

    def _layer_fields(self, layer: int, traits: LayerTraits) -> list[int]:
        prefix = f"blk.{layer}."
        norms = ("attn_norm", "ffn_norm", "attn_q_norm", "attn_k_norm", "post_attention_norm", "post_ffw_norm")
        fields = [self._offset(f"{prefix}{name}.weight") for name in norms]
        fields += [traits.window, self.ropes.index((traits.rope_theta, traits.rope_scale))]
        for name in self._matrices(layer):
            fields += self._matrix_fields(name)
        return fields

    def pack(self, positions: int, slots: int) -> bytes:
        """The C structure Plan for a cache of `slots` sequences of `positions` (a multiple of 16)."""
        h = self.header
        numbers = [
            h.embedding_length, h.feed_forward_length, h.head_count, h.head_count_kv, h.head_dim, h.rope_dim,
            positions, self.part.layers, int(self.arch.activation == "gelu"), slots,
        ]  # fmt: skip
        head = self._matrix_fields(self.head_name) if self.part.with_head else _NO_MATRIX
        packed = struct.pack(f"<{len(numbers)}q2d", *numbers, h.rms_eps, 1.0 / float(np.sqrt(h.head_dim)))
        packed += struct.pack("<6q", self._offset("output_norm.weight"), *head)
        for index, traits in enumerate(self.traits):
            fields = self._layer_fields(self.part.layer_start + index, traits)
            packed += struct.pack(f"<{len(fields)}q", *fields)
        return packed

    def rope_tables(self, positions: int) -> F32:
        """[table][position][cosines of the pairs | sines of the pairs]."""
        half = self.header.rope_dim // 2
        factors = self._rope_factors(half)
        tables = np.empty((len(self.ropes), positions, 2 * half), np.float32)
        for table, (theta, scale) in zip(tables, self.ropes, strict=True):
            frequencies = theta ** (-np.arange(half, dtype=np.float64) / half) / factors / scale
            angles = np.arange(positions, dtype=np.float64)[:, None] * frequencies
            np.cos(angles, out=table[:, :half], casting="same_kind")
            np.sin(angles, out=table[:, half:], casting="same_kind")
        return tables

    def _rope_factors(self, half: int) -> npt.NDArray[np.float64]:
        """Divisors of the frequencies: Llama 3's long-context scaling, else 1."""
        if "rope_freqs.weight" not in self.file.tensors:
            return np.ones(half)
        self.file.checked_tensor("rope_freqs.weight", (half,))
        return dequantise(self.file, "rope_freqs.weight").astype(np.float64)
