"""Which part of a model a stage holds, and what every backend offers for it (S1 7.10, 10.8)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np
import numpy.typing as npt

from common.gguf import ModelHeader
from worker.engine.errors import EngineError

if TYPE_CHECKING:
    from worker.engine.fast_path import FastPath

F32 = npt.NDArray[np.float32]
Inputs = F32 | list[int]
"""Rows (n, width), or ids of tokens whose embedding they are."""
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


class ModelPart(Protocol):
    """A loaded part with its key-value cache for one sequence of `max_context` positions.

    A row is float32 (embedding_length,); up to `chunk` of them go through a step together.
    """

    header: ModelHeader
    part: Part
    max_context: int
    chunk: int
    backend: str
    fast_path: FastPath | None
    """Once it is warm, where the backend has one."""

    @property
    def weights_bytes(self) -> int: ...

    @property
    def kv_bytes(self) -> int: ...

    def run_blocks(self, inputs: Inputs, start: int, tick: Callable[[], None] | None = None) -> F32:
        """All blocks on up to `chunk` rows at positions start...; returns rows (n, width)."""

    def run_head(self, row: F32) -> F32:
        """Logits (vocabulary,) of one row. Raises EngineError in a stage without the head."""

    def run_to_logits(self, inputs: Inputs, start: int, tick: Callable[[], None] | None = None) -> F32:
        """run_blocks, then run_head on the last row, in one step where that saves time."""

    def logits(self, ids: list[int], start: int, tick: Callable[[], None] | None = None) -> F32:
        """Logits of the last of up to `chunk` tokens, of a whole model."""

    def reusable(self, ids: Sequence[int]) -> int:
        """How many tokens at the start of `ids` the cache holds; 0 where the cut into chunks changes the bits."""

    def warm_up(self, progress: Progress) -> None: ...

    def close(self) -> None: ...
