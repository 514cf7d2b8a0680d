"""A model cut into stages, all of them in this process: StageSteps chained without transport."""

from __future__ import annotations

from pathlib import Path

from common.edge_records import Record, decode_tokens, encode_tokens
from services.orchestrator.planner import layer_range
from worker.engine.engine import Engine
from worker.engine.parts import Part
from worker.engine.sampler import Sampling
from worker.engine.stage_steps import StageShape, StageSteps

RECENT_TOKENS = 64  # of the prompt, which the sampler is told


class Chain:
    """The stages, loaded and warm; use as a context manager. Raises EngineError, GgufError."""

    def __init__(self, model: Path, stages: int, *, max_context: int) -> None:
        self.engines: list[Engine] = []
        self._steps: list[StageSteps] = []
        self._sequence = 0
        for index in range(stages):

            def part_of(layers: int, index: int = index) -> Part:
                return Part(*layer_range(layers, stages, index), index == 0, index == stages - 1)

            engine = Engine.load(model, max_context=max_context, part_of=part_of, threads=1)
            self.engines.append(engine)
            engine.warm_up()
            shape = StageShape(
                is_first=index == 0,
                is_last=index == stages - 1,
                width=engine.header.embedding_length,
                chunk=engine.chunk,
                vocab_size=engine.header.vocab_size,
                end_ids=frozenset(engine.tokenizer.vocabulary.end_ids),
            )
            self._steps.append(StageSteps(engine.model, shape))

    def __enter__(self) -> Chain:
        return self

    def __exit__(self, *_: object) -> None:
        for engine in self.engines:
            engine.close()

    def answer(self, ids: list[int], max_tokens: int) -> list[int]:
        """Greedy, without the end token. Each object must give exactly one token-out record."""
        for stage in self._steps:
            stage.begin(1, self._sequence, Sampling(), ids[-RECENT_TOKENS:])
        tokens: list[int] = []
        feed, begin = ids, True
        while len(tokens) < max_tokens:
            records = [Record(self._sequence, self._sequence, encode_tokens(feed), begin=begin, end=True)]
            for stage in self._steps:
                records = [out for record in records for out in stage.run(record, lambda _: False, lambda: None)]
            (last,) = records
            self._sequence += 1
            if last.end:
                break
            feed, begin = decode_tokens(last.payload), False
            tokens += feed
        return tokens


def whole_answer(engine: Engine, ids: list[int], max_tokens: int) -> tuple[list[int], str]:
    """Ids and text that an uncut model answers."""
    tokens: list[int] = []
    text = ""
    for event in engine.generate(ids, max_tokens=max_tokens).events():
        tokens += getattr(event, "token_ids", ())
        text = getattr(event, "final_text", text)
    return tokens, text
