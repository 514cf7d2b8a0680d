"""Both threads of two stages, as fast as they are, while everything else wants the edges at any moment."""

from __future__ import annotations

import random
import threading
import time
from pathlib import Path

import pytest

from common.codec import encode_body
from common.edge_records import decode_tokens
from common.messages.edge import EdgeCredit
from common.messages.engine import Cancel, Cancelled, EdgeCarry, EngineBegun, StageFaulted
from tests.unit.engine.stage_rig import Rig, Waits, wait_until
from tests.unit.engine.test_fast_path import PROMPT, without
from worker.engine import stage_port
from worker.engine.engine import Engine

REQUESTS, TOKENS, ANSWER = 40, 12, 110
RUNS, RUNS_MAX = 5, 60


@pytest.fixture(scope="module")
def answer(halves: list[Engine], tmp_path_factory: pytest.TempPathFactory) -> list[int]:
    with pytest.MonkeyPatch.context() as patch:
        without(halves, patch)
        with Rig(halves, tmp_path_factory.mktemp("slow")) as rig:
            tokens = rig.generate(PROMPT, ANSWER, settled=False)
    assert len(tokens) == ANSWER
    return tokens


class Disturbance:
    """Messages over the bus and heartbeats, at odd moments."""

    def __init__(self, rig: Rig, seed: int) -> None:
        self._rig, self._random, self._is_over = rig, random.Random(seed), False
        self._thread = threading.Thread(target=self._run, daemon=True)

    def _run(self) -> None:
        carried = EdgeCarry(peer=b"p" * 32, frame=encode_body(EdgeCredit(edge_id=3, consumed_offset=0)))
        while not self._is_over:
            time.sleep(self._random.uniform(0, 0.01))
            stage = self._random.choice(list(self._rig.stages.values()))
            if self._random.random() < 0.5:
                stage.send(carried, wait=False)
            else:
                stage.beat_at(0)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._is_over = True
        self._thread.join()


@pytest.mark.parametrize("direct", [False, True])
def test_whatever_comes_in_between_the_answer_is_the_same(
    halves: list[Engine], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answer: list[int], direct: bool
) -> None:
    waits = Waits(monkeypatch)
    monkeypatch.setattr(stage_port, "ENGINE_HEARTBEAT_MS", 15)
    for seed in range(RUNS_MAX):
        with Rig(halves, tmp_path, direct=direct) as rig, Disturbance(rig, seed):
            assert rig.generate(PROMPT, ANSWER, settled=False) == answer
        assert not any(stage.said(StageFaulted) for stage in rig.stages.values())
        # At full speed a stage of this size may never have waited for a token.
        if seed >= RUNS - 1 and any(outcome.computed for _, outcome in waits.outcomes):
            break
    assert any(outcome.computed for _, outcome in waits.outcomes)


@pytest.mark.parametrize("seed", range(3))
def test_each_object_has_one_answer_whenever_its_request_is_cancelled(
    halves: list[Engine], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answer: list[int], seed: int
) -> None:
    """An answer is the right token or, once the request is cancelled, none; the sequences of all edges are gapless."""
    waits, chance = Waits(monkeypatch), random.Random(seed)
    monkeypatch.setattr(stage_port, "ENGINE_HEARTBEAT_MS", 15)
    with Rig(halves, tmp_path) as rig, Disturbance(rig, seed):
        for number in range(1, REQUESTS + 1):
            rig.begin(PROMPT)
            first, until = rig.sequences[1], chance.randrange(TOKENS)
            for step in range(until):
                rig.token_in(answer[step - 1 : step] or PROMPT, begin=step == 0)
                record = rig.arrived(3, rig.sequences[1])[-1]
                assert decode_tokens(record.payload) == answer[step : step + 1]
            rig.token_in(answer[until - 1 : until] if until else PROMPT, begin=until == 0)
            time.sleep(chance.uniform(0, 0.002))
            for stage in rig.stages.values():
                stage.send(Cancel(request_id=number), wait=False)
            for stage in rig.stages.values():
                wait_until(lambda stage=stage, number=number: len(stage.said(Cancelled)) == number)
            rig.token_in([])
            *_, last, void = rig.arrived(3, rig.sequences[1])
            assert decode_tokens(last.payload) in ([], answer[until : until + 1]) and void.payload == b""
            assert [record.object_id for record in rig.records[3][first:]] == list(range(first, rig.sequences[1]))
    assert any(outcome.computed for _, outcome in waits.outcomes)
    for stage in rig.stages.values():
        assert len(stage.said(EngineBegun)) == REQUESTS and not stage.said(StageFaulted)
