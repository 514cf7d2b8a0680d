"""A part of a model on the C kernels: tinygrad buffers, one captured program for all its blocks and the head.

What the kernels compute is bit-identical for any cut into chunks and stages and any number of threads, on one
instruction set: every sum has one order. Rows are float32, keys and values float16, weights as in the file.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

from common.gguf import ModelHeader
from worker.engine import tinygrad_shim as tg
from worker.engine.cpu_cache import Arena, load_arena
from worker.engine.cpu_native import PHASE_BYTES, Kernels, Team, control_tensor
from worker.engine.cpu_plan import ROWS_MAX, StagePlan
from worker.engine.errors import EngineError
from worker.engine.fast_path import FastPath
from worker.engine.parts import F32, Inputs, Part, Progress, check_part
from worker.engine.tinygrad_shim import dtypes


class CpuPart:
    """A loaded part with a key-value cache for `slots` sequences of `max_context` positions each."""

    chunk = ROWS_MAX

    def __init__(
        self,
        plan: StagePlan,
        kernels: Kernels,
        max_context: int,
        threads: int,
        progress: Progress,
        slots: int = 1,
    ) -> None:
        self.header: ModelHeader = plan.header
        self.part: Part = plan.part
        check_part(self.header, self.part)
        self.max_context, self.slots = max_context, slots
        self.backend = f"c {kernels.instruction_set}, {threads} threads"
        self._kernels = kernels
        self._held: list[int] = []  # tokens whose keys and values the first slot holds, from position 0 on
        h = self.header
        positions = -(-max_context // 16) * 16
        self._arena = load_arena(plan, kernels, threads, progress)
        packed = np.frombuffer(plan.pack(positions, slots), np.uint8)
        plan_tensor = tg.allocate((len(packed),), dtypes.uint8)
        tg.view(plan_tensor)[:] = packed
        self._cache = Arena.anonymous(slots * self.part.layers * 2 * h.key_value_width * positions * 2, "empty")
        scratch = tg.allocate((kernels.scratch_bytes(tg.address(plan_tensor), threads),), dtypes.uint8)
        tg.view(scratch)[: PHASE_BYTES * (self.part.layers + 1)] = 0
        tables = plan.rope_tables(positions)
        rope = tg.allocate((tables.size,), dtypes.float32)
        tg.view(rope)[:] = tables.reshape(-1)
        self._padded_vocab = -(-h.vocab_size // 16) * 16 if self.part.with_head else 0
        logits = tg.allocate((max(1, slots * self._padded_vocab),), dtypes.float32)
        state = tg.allocate((ROWS_MAX * h.embedding_length,), dtypes.float32)
        weights = tg.borrow(self._arena.address, self._arena.nbytes)
        cache = tg.borrow(self._cache.address, self._cache.nbytes)
        self._state = tg.view(state).reshape(ROWS_MAX, h.embedding_length)
        self._logits = tg.view(logits)
        tensors = [control_tensor(), state, weights, plan_tensor, cache, scratch, rope, logits]
        self._team = Team(kernels, tensors, threads, (self._arena, self._cache))
        self._has_embedding = self.part.with_embedding
        if self._has_embedding:
            scale = math.sqrt(h.embedding_length) if plan.arch.scaled_embedding else 1.0
            self._team.set_embedding(plan.file, "token_embd.weight", scale)
        self.fast_path: FastPath | None = None

    @property
    def weights_bytes(self) -> int:
        """Bytes of the matrices and norms in tiles."""
        return self._arena.nbytes

    @property
    def kv_bytes(self) -> int:
        """Bytes reserved by the key-value cache; they become resident as the context fills, in huge pages at once."""
        return self._cache.nbytes

    def use_threads(self, threads: int) -> None:
        """Work with fewer threads than the part was loaded for."""
        if not 1 <= threads <= self._team.threads:
            raise EngineError(f"{threads} threads, but the part was loaded for 1 to {self._team.threads}")
        self._team.control.head[1] = threads

    def _run(self, count: int, head_rows: int, skip_blocks: bool = False) -> None:
        head = self._team.control.head
        head[2], head[3], head[5] = count, head_rows, int(skip_blocks)
        self._team.step()

    def _enter(self, inputs: Inputs, positions: Sequence[int] | range, slots: int | Sequence[int]) -> None:
        count = len(inputs)
        control = self._team.control
        if isinstance(inputs, list):
            if not self._has_embedding:
                raise EngineError("this stage has no embedding")
            if not 0 <= min(inputs) <= max(inputs) < self.header.vocab_size:
                raise EngineError(f"token {max(inputs)} is outside the vocabulary of {self.header.vocab_size}")
            control.tokens[:count] = inputs
            control.args[0] = count
        else:
            self._state[:count] = inputs
            control.args[0] = 0
        control.positions[:count] = positions
        control.slots[:count] = slots

    def _check(self, count: int, start: int) -> None:
        if not 1 <= count <= ROWS_MAX or start < 0 or start + count > self.max_context:
            raise EngineError(f"{count} rows at position {start} do not fit the context of {self.max_context}")

    def run_blocks(self, inputs: Inputs, start: int, tick: Callable[[], None] | None = None) -> F32:
        """All blocks on up to `chunk` rows at positions start...; returns rows of the same shape."""
        count = len(inputs)
        self._compute(inputs, start, 0, tick)
        return self._state[:count].copy()

    def _compute(self, inputs: Inputs, start: int, head_rows: int, tick: Callable[[], None] | None) -> None:
        count = len(inputs)
        self._check(count, start)
        self._held = []  # rows are not tokens
        done_at = self.fast_path.take() if self.fast_path is not None else None
        if done_at is None:
            self._enter(inputs, range(start, start + count), 0)
            self._run(count, head_rows)
        elif (count, start) != (1, done_at):
            raise EngineError(f"{count} rows at position {start} are wanted, the fast path computed that at {done_at}")
        if tick is not None:
            tick()

    def run_head(self, row: F32) -> F32:
        """Logits (vocabulary,) of one row (width,)."""
        self._need_head()
        self._enter(row[np.newaxis], [0], 0)
        self._run(1, 1, skip_blocks=True)
        return self._logits[: self.header.vocab_size].copy()

    def run_to_logits(self, inputs: Inputs, start: int, tick: Callable[[], None] | None = None) -> F32:
        """run_blocks and run_head on the last row as one step: each start of a step costs a decoded token 0.1 ms."""
        self._need_head()
        self._compute(inputs, start, 1, tick)
        return self._logits[: self.header.vocab_size].copy()

    def _need_head(self) -> None:
        if not self.part.with_head:
            raise EngineError("this stage has no head")

    def logits(self, ids: list[int], start: int, tick: Callable[[], None] | None = None) -> F32:
        """Logits (vocabulary,) of the last of up to `chunk` tokens in one step."""
        self._need_head()
        count = len(ids)
        self._check(count, start)
        self._enter(ids, range(start, start + count), 0)
        known = len(self._held) >= start
        del self._held[start if known else 0 :]
        self._run(count, 1)
        if known:
            self._held += ids
        if tick is not None:
            tick()
        return self._logits[: self.header.vocab_size].copy()

    def batch_logits(self, ids: Sequence[int], positions: Sequence[int], slots: Sequence[int]) -> F32:
        """One token of each of several sequences in one step; logits (len(ids), vocabulary), valid until the next."""
        self._need_head()
        count = len(ids)
        if not 1 <= count <= self.slots or len(set(slots)) != count or not all(0 <= s < self.slots for s in slots):
            raise EngineError(f"{count} sequences in slots {list(slots)}, but the cache has {self.slots}")
        self._check(count, 0)
        if not all(0 <= position < self.max_context for position in positions):
            raise EngineError(f"a position of {list(positions)} is outside the context of {self.max_context}")
        self._held = []
        self._enter(list(ids), positions, slots)
        self._run(count, count)
        return self._logits.reshape(self.slots, -1)[:count, : self.header.vocab_size]

    def reusable(self, ids: Sequence[int]) -> int:
        """How many tokens at the start of `ids` the cache holds; a reused token has the same bits as a new one."""
        same = 0
        for mine, theirs in zip(self._held, ids, strict=False):
            if mine != theirs:
                break
            same += 1
        return same

    def warm_up(self, progress: Progress) -> None:
        """Capture the step and touch what a first prompt needs (first call runs, second captures)."""
        for done in (1, 2):
            self._enter(np.zeros((1, self.header.embedding_length), np.float32), [0], 0)
            self._held = []
            self._run(1, int(self.part.with_head))
            progress("warm_up", done, 2)
        if self._team.addresses:
            self.fast_path = FastPath(self._kernels, self._team.addresses, self.header.vocab_size, self.part.with_head)

    def close(self) -> None:
        self._team.close()
