"""What a pipeline stage does with a record: rows or ids in, rows or a token out (S1 6.5, 7.10; design.md 4).

Pure but for the model that computes. One sequence at a time, as there is one active prompt. Every inbound record with
END gives exactly one outbound record with END for the same object, also when the sequence was cancelled: then it is
empty, and the last stage's token-out record holds no token. So sequences stay gapless on every edge, and what is left
of a cancelled prompt is recognised by its object_id.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from common.edge_records import Record, decode_tokens, encode_tokens
from worker.engine.fast_path import Departing, Forecast
from worker.engine.feedback import fed_back
from worker.engine.parts import F32, Inputs
from worker.engine.sampler import Sampler, Sampling

ROWS_PER_RECORD_MAX = 64  # design.md 4
WIRE_DTYPES: dict[str, type[np.generic]] = {"f32": np.float32, "f16": np.float16}


class StageModel(Protocol):
    """What a stage needs of its part of the model (worker/engine/parts.py)."""

    max_context: int

    def run_blocks(self, inputs: Inputs, start: int, tick: Callable[[], None] | None = None) -> F32:
        """All blocks of the part on up to `chunk` rows, or on as many tokens, at positions start..."""

    def run_to_logits(self, inputs: Inputs, start: int, tick: Callable[[], None] | None = None) -> F32:
        """run_blocks, then the logits (vocabulary,) of the last row."""


class StepError(ValueError):
    """The stage cannot go on. reason: a StageController reason; the text: one sentence with numbers."""

    def __init__(self, reason: str, why: str) -> None:
        super().__init__(why)
        self.reason = reason


@dataclass(frozen=True, slots=True)
class StageShape:
    """Where the stage stands in the pipeline, what its edges carry. width: values of a row; chunk: rows of a step."""

    is_first: bool
    is_last: bool
    width: int
    chunk: int
    vocab_size: int
    dtype_in: str = "f32"
    dtype_out: str = "f32"
    end_ids: frozenset[int] = frozenset()


class StageSteps:
    """The sequence state of one stage: which objects count, the position, the sampler, the outbound sequence."""

    def __init__(self, model: StageModel, shape: StageShape) -> None:
        self._model, self._shape = model, shape
        self._rows = max(1, min(shape.chunk, ROWS_PER_RECORD_MAX))
        self.request_id: int | None = None
        self.floor = 0
        """Objects below belong to sequences that are over."""
        self.position = -1
        """Rows of the sequence so far; -1 before its BEGIN."""
        self._sampler: Sampler | None = None
        self._out_sequence = 0
        self._last: Record | None = None
        """Of the present sequence, with END: a decoded token is next."""

    def begin(self, request_id: int, first_object_id: int, sampling: Sampling, recent: Sequence[int]) -> None:
        """The next sequence, known before its first record. Raises EngineError for impossible sampling."""
        self._sampler = Sampler(sampling, recent) if self._shape.is_last else None
        self._last = None
        self.request_id, self.floor, self.position = request_id, first_object_id, -1

    def cancel(self, request_id: int) -> bool:
        """The sequence is over: its objects are answered with empty ones. False: it is not the present one."""
        if request_id != self.request_id:
            return False
        self.request_id = None
        return True

    def run(self, record: Record, is_cancelled: Callable[[int], bool], tick: Callable[[], None]) -> Iterator[Record]:
        """The outbound records of one inbound record, each as soon as it is computed. Raises StepError."""
        if record.begin and record.object_id == self.floor and self.request_id is not None:
            self.position = 0
        if not self._counts(record, is_cancelled) or (record.end and not record.payload):
            if record.end:
                yield self._aborted(record)
            return
        if self.position < 0:
            raise StepError("ObjectFailed", f"object {record.object_id} came before the BEGIN of its sequence")
        self._last = record if record.end else None
        if self._shape.is_first:
            yield from self._tokens(record, is_cancelled, tick)
        else:
            yield from self._activations(record, tick)

    def forecast(self, inbound: int, outbound: int, feedback: int | None) -> Forecast | None:
        """The next decode step, from which of these edges to which; None where it cannot be told in every byte."""
        last, shape = self._last, self._shape
        is_room = 0 < self.position < self._model.max_context
        if last is None or self.request_id is None or not is_room or "f16" in (shape.dtype_in, shape.dtype_out):
            return None
        unit = 4 * shape.width
        at = last.object_id + 1
        record = Record(at, last.sequence + 1, bytes(4 if shape.is_first else unit), end=True)
        is_greedy = self._sampler is not None and self._sampler.is_greedy
        if not shape.is_last:
            departing = [Departing(outbound, Record(at, self._out_sequence, bytes(unit), end=True))]
        else:
            out = Record(at, self._out_sequence, bytes(4))
            departing = [Departing(outbound, out, tells_end=True)]
            if feedback is not None and (fed := fed_back(out)) is not None:
                departing.insert(0, Departing(feedback, fed, stays_at_end=True))
        return Forecast(inbound, record, tuple(departing), self.position, shape.is_first, is_greedy, shape.end_ids)

    def rows(self, record: Record) -> int:
        """How many rows a record brings."""
        unit = 4 if self._shape.is_first else np.dtype(WIRE_DTYPES[self._shape.dtype_in]).itemsize * self._shape.width
        return len(record.payload) // unit

    def _counts(self, record: Record, is_cancelled: Callable[[int], bool]) -> bool:
        request_id = self.request_id
        return request_id is not None and record.object_id >= self.floor and not is_cancelled(request_id)

    # --- first stage ------------------------------------------------------------------------------------------
    def _tokens(
        self, record: Record, is_cancelled: Callable[[int], bool], tick: Callable[[], None]
    ) -> Iterator[Record]:
        ids = decode_tokens(record.payload)
        bad = next((token for token in ids if token >= self._shape.vocab_size), None)
        if bad is not None:
            raise StepError("ObjectFailed", f"token {bad} is outside the vocabulary of {self._shape.vocab_size}")
        self._check_room(len(ids))
        for at in range(0, len(ids), self._rows):
            if at and not self._counts(record, is_cancelled):
                yield self._aborted(record)
                return
            piece = ids[at : at + self._rows]
            end = at + len(piece) == len(ids)
            out = self._compute(piece, tick, end=end)
            yield from self._outcome(record, out, begin=record.begin and at == 0, end=end)

    # --- any other stage --------------------------------------------------------------------------------------
    def _activations(self, record: Record, tick: Callable[[], None]) -> Iterator[Record]:
        kind, width = WIRE_DTYPES[self._shape.dtype_in], self._shape.width
        row_bytes = np.dtype(kind).itemsize * width
        if not record.payload or len(record.payload) % row_bytes:
            raise StepError("ObjectFailed", f"{len(record.payload)} bytes are no rows of {row_bytes} bytes")
        rows = np.frombuffer(record.payload, kind).reshape(-1, width).astype(np.float32)
        if len(rows) > ROWS_PER_RECORD_MAX:
            raise StepError("ObjectFailed", f"{len(rows)} rows in one record, allowed are {ROWS_PER_RECORD_MAX}")
        self._check_room(len(rows))
        step = self._shape.chunk
        out = [
            self._compute(rows[at : at + step], tick, end=record.end and at + step >= len(rows))
            for at in range(0, len(rows), step)
        ]
        whole = out[-1] if self._shape.is_last else np.concatenate(out)
        yield from self._outcome(record, whole, begin=record.begin, end=record.end)

    # --- common -----------------------------------------------------------------------------------------------
    def _check_room(self, rows: int) -> None:
        if self.position + rows > self._model.max_context:
            raise StepError(
                "ObjectFailed",
                f"{rows} rows at position {self.position} do not fit the context of {self._model.max_context}",
            )

    def _compute(self, inputs: Inputs, tick: Callable[[], None], *, end: bool) -> F32:
        """Rows after this stage's blocks; on the last stage, at the end of an object, the logits of the last row."""
        run = self._model.run_to_logits if end and self._shape.is_last else self._model.run_blocks
        try:
            out = run(inputs, self.position, tick)
        except (ValueError, RuntimeError, MemoryError) as error:
            text = str(error).strip().splitlines()
            raise StepError("StepFailed", text[0] if text else type(error).__name__) from error
        self.position += len(inputs)
        return out

    def _outcome(self, record: Record, out: F32, *, begin: bool, end: bool) -> Iterator[Record]:
        """out: of _compute."""
        if not self._shape.is_last:
            kind = WIRE_DTYPES[self._shape.dtype_out]
            yield self._emit(record.object_id, np.ascontiguousarray(out, kind).tobytes(), begin=begin, end=end)
        elif end:
            assert self._sampler is not None
            token = self._sampler.next(out)
            payload = encode_tokens([token])
            yield self._emit(record.object_id, payload, begin=False, end=token in self._shape.end_ids)

    def _aborted(self, record: Record) -> Record:
        return self._emit(record.object_id, b"", begin=False, end=not self._shape.is_last)

    def _emit(self, object_id: int, payload: bytes, *, begin: bool, end: bool) -> Record:
        sequence, self._out_sequence = self._out_sequence, self._out_sequence + 1
        return Record(object_id, sequence, payload, begin=begin, end=end)
