"""The worker with its real engine and the real model: loads, answers, cancels, dies (S1 4.8, 4.9, 6.9)."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from common.messages.node_agent import CancelRequest, DecodeTokens, EncodePrompt, InferPrompt, StopRun
from common.messages.orchestrator import (
    ObserveStageFault,
    ObserveStageProgress,
    ObserveStageReady,
    ObserveStageStopped,
    ObserveWeightsReady,
)
from common.messages.prompt import Done, PromptEncoded, RequestCancelled, TextDelta, TokensDecoded
from tests.unit.agent.real_worker import RealRun, RealWorker, is_gone

MODEL = Path(__file__).resolve().parents[3] / ".model-cache" / "SmolLM2-135M-Instruct.Q4_1.gguf"
LOAD_LIMIT_S = 180
TRIES = 5

pytestmark = pytest.mark.engine


@pytest.fixture
def worker(tmp_path: Path) -> Iterator[RealWorker]:
    if not MODEL.is_file():
        pytest.fail(f"the model {MODEL.name} is missing; run ./dev fetch-model", pytrace=False)
    run = RealRun(tmp_path, workers=1)
    worker = RealWorker(run, tmp_path)
    yield worker
    worker.close()
    run.close()


def cancelled_in_time(worker: RealWorker, count: int) -> bool:
    """Cancel the next answer when it has begun; whether it was known still."""
    request_id = 100 + count
    worker.tell(InferPrompt(request_id=request_id, prompt="Tell me a very long story.", reply_to=worker.address))
    worker.bus.until(lambda: any(delta.request_id == request_id for delta in worker.heard(TextDelta)), 60)
    worker.tell(CancelRequest(request_id=request_id))
    return worker.wait_for(RequestCancelled, count=count).known


@pytest.mark.spec("S1 5.6", "S1 6.5", "S1 6.6", "S1 6.9", "S1 9.7", "S1 9.11")
def test_a_real_worker_loads_answers_cancels_and_tears_down(worker: RealWorker) -> None:
    worker.ready(60)
    worker.provision(str(MODEL), max_context=256)
    worker.wait_for(ObserveWeightsReady, LOAD_LIMIT_S)
    worker.wait_for(ObserveStageReady)
    progress = worker.heard(ObserveStageProgress)
    assert progress and {item.phase for item in progress} & {"tensors", "warm_up", "kernels"}

    question = "Name the capital of France."
    worker.tell(InferPrompt(request_id=1, prompt=question, max_tokens=12, reply_to=worker.address))
    done = worker.wait_for(Done, 60)
    assert "Paris" in done.final_text
    assert "".join(delta.text for delta in worker.heard(TextDelta)) == done.final_text
    assert sum(delta.tokens for delta in worker.heard(TextDelta)) <= done.tokens_generated <= 12

    # An answer of some seconds may be whole before the cancel is there.
    assert any(cancelled_in_time(worker, count) for count in range(1, TRIES + 1))
    heard = len(worker.boss.heard)

    worker.tell(EncodePrompt(request_id=3, prompt="héllo 🎉", raw=True, reply_to=worker.address))
    tokens = worker.wait_for(PromptEncoded).tokens
    for index, token in enumerate(tokens):
        last = index == len(tokens) - 1
        worker.tell(DecodeTokens(request_id=4, tokens=[token], last=last, reply_to=worker.address))
    worker.wait_for(TokensDecoded, count=len(tokens))
    assert "".join(item.text for item in worker.heard(TokensDecoded)) == "héllo 🎉"
    late = [msg for msg in worker.boss.heard[heard:] if isinstance(msg, TextDelta | Done)]
    assert late == [], "nothing of a cancelled request comes after the confirmation"

    worker.tell(StopRun(run_id=1))
    worker.wait_for(ObserveStageStopped)
    engine = worker.engine_pid()
    status, stderr = worker.exit()
    assert (status, stderr) == (0, "")
    assert is_gone(engine)


@pytest.mark.spec("S1 10.8")
def test_a_model_that_is_not_there_is_a_stage_fault_that_names_it(worker: RealWorker) -> None:
    worker.ready(60)
    worker.provision("/no/such/model.gguf")
    fault = worker.wait_for(ObserveStageFault, 60)
    assert fault.reason.startswith("WorkerCrashed: ") and "/no/such/model.gguf" in fault.reason
    status, stderr = worker.exit()
    assert status == 1
    assert stderr.splitlines()[-1].startswith("node 1: ") and "/no/such/model.gguf" in stderr


@pytest.mark.spec("S1 10.8")
def test_an_engine_that_is_killed_while_loading_is_a_stage_fault(worker: RealWorker) -> None:
    worker.ready(60)
    worker.provision(str(MODEL), max_context=256)
    worker.wait_for(ObserveStageProgress, 60)
    os.kill(worker.engine_pid(), signal.SIGKILL)
    assert "killed by SIGKILL" in worker.wait_for(ObserveStageFault).reason
    assert worker.exit()[0] == 1
    assert worker.heard(ObserveWeightsReady) == []
