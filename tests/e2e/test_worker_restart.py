"""[runtime] on_worker_loss = "restart": workers die in the middle of an answer and the client does not see it."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from typing import Any

import pytest

from tests.e2e.pipeline_stack import stage_pid
from tests.e2e.stack import LONG, Asker, Stack, wait_for

RESTART = 'on_worker_loss = "restart"'
TOKENS = 90
MANY_TOKENS = 2000  # of an answer that is under way, however late its worker is killed
FROZEN_S = 18  # longer than a broker and a session wait, shorter than any silence limit
SAMPLED = {"temperature": 0.9, "seed": 5, "repetition_penalty": 1.2}


def begun(stack: Stack, deltas: int, max_tokens: int = TOKENS, **options: Any) -> Asker:
    """An answer of which some text is there."""
    asker = Asker(stack.addr(), LONG, max_tokens=max_tokens, **options)
    wait_for("text", lambda: sum(line["type"] == "text_delta" for line in list(asker.lines)) >= deltas, 120)
    return asker


def ended(asker: Asker) -> dict[str, Any]:
    """Its terminal event, the only one; the deltas before it are its text."""
    wait_for("the end", lambda: asker.lines and asker.lines[-1]["type"] in ("done", "fault"), 300)
    *deltas, end = asker.lines
    assert [line["type"] for line in deltas] == ["text_delta"] * len(deltas), asker.lines
    if end["type"] == "done":
        assert "".join(line["text"] for line in deltas) == end["final_text"]
    return end


def facts(done: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(done.get(key) for key in ("final_text", "tokens_generated", "prompt_tokens", "finish_reason"))


@pytest.fixture(scope="module")
def two() -> Iterator[Stack]:
    with Stack(args=("--pipeline-stages", "2"), runtime=RESTART) as stack:
        stack.addr()
        yield stack


def restarted(stack: Stack) -> list[dict[str, Any]]:
    return [record.detail for record in stack.archive.lifecycle() if record.step == ("worker_restart", "ready")]


@pytest.mark.parametrize(
    ("part", "stage", "options"),
    [("agent", 0, {}), ("agent", 1, {"sampling": SAMPLED}), ("engine", 1, {})],
)
def test_a_stage_that_is_killed_is_replaced_and_the_answer_goes_on(
    two: Stack, part: str, stage: int, options: dict[str, Any]
) -> None:
    undisturbed = ended(begun(two, 1, **options))
    assert undisturbed["tokens_generated"] == TOKENS
    before = len(restarted(two))
    pid = stage_pid(two, part, stage)
    asker = begun(two, 4, **options)
    os.kill(pid, signal.SIGKILL)
    end = ended(asker)
    assert facts(end) == facts(undisturbed)
    wait_for("the record", lambda: len(restarted(two)) > before, 60)
    ready = restarted(two)[-1]
    assert ready["attempt"] == 1 and 0 < ready["replayed_tokens"] < TOKENS
    assert f"node {2 + stage}" in ready["cause"] and "while serving prompts" in ready["cause"]
    started = [r for r in two.archive.lifecycle() if r.step == ("worker_restart", "started")][-1]
    assert started.detail["replaced_node_ids"] == [2 + stage]


def test_the_middle_of_three_is_replaced_where_tokens_are_fed_back_directly() -> None:
    feedback = '[pipeline]\nfeedback = "direct"\n'
    with Stack(args=("--pipeline-stages", "3"), runtime=RESTART, config=feedback) as stack:
        undisturbed = ended(begun(stack, 1))
        pid = stage_pid(stack, "agent", 1)
        asker = begun(stack, 4)
        os.kill(pid, signal.SIGKILL)
        assert facts(ended(asker)) == facts(undisturbed)


def test_the_run_still_stops_as_ever(two: Stack) -> None:
    assert two.ask("Hi", max_tokens=2).tokens_generated == 2
    two.say("stop\n")
    two.assert_stopped("stdin")


@pytest.mark.spec("S1 10.12")
def test_a_worker_is_replaced_although_the_gateway_or_the_bus_was_frozen_meanwhile() -> None:
    """What the gateway has to be told cannot be delivered then; it is said again."""
    with Stack(args=("--pipeline-stages", "2"), runtime=RESTART) as stack:
        undisturbed = ended(begun(stack, 1))
        for frozen in ("prompt_gateway", "router"):
            pid, stage = stack.pid(frozen), stage_pid(stack, "agent", 1)
            asker = begun(stack, 4)
            os.kill(pid, signal.SIGSTOP)
            os.kill(stage, signal.SIGKILL)
            time.sleep(FROZEN_S)
            os.kill(pid, signal.SIGCONT)
            assert facts(ended(asker)) == facts(undisturbed), frozen
        stack.say("stop\n")
        stack.assert_stopped("stdin")


def test_when_the_restarts_are_spent_the_run_fails_as_without_them() -> None:
    with Stack(args=("--pipeline-stages", "2"), runtime=RESTART) as stack:
        asker = begun(stack, 3, MANY_TOKENS)
        for count in range(4):
            known = [process.pid for process in stack.left() if process.part == "agent"]
            os.kill(stage_pid(stack, "agent", 1), signal.SIGKILL)
            if count < 3:
                wait_for("a new worker", lambda: len(new_agents(stack, known)) == 1, 60)  # noqa: B023
        error = stack.assert_failed()
        (fault,) = asker.terminals()
        assert error.startswith("node 3 stage 1 exited while serving prompts: ") and "SIGKILL" in error
        assert "after 3 restarts" in error
        assert fault["type"] == "fault" and "node 3" in fault["error"]


def new_agents(stack: Stack, known: list[int]) -> list[int]:
    return [process.pid for process in stack.left() if process.part == "agent" and process.pid not in known]


def test_the_one_worker_of_direct_mode_is_replaced_too() -> None:
    with Stack(runtime=RESTART) as stack:
        undisturbed = ended(begun(stack, 1))
        for count, part in enumerate(("agent", "engine")):
            pid = stack.pid(part)
            asker = begun(stack, 4)
            os.kill(pid, signal.SIGKILL)
            assert facts(ended(asker)) == facts(undisturbed)
            # An answer that was whole before the kill does not wait for the next worker.
            wait_for("the record", lambda count=count: len(restarted(stack)) > count, 60)
        stack.say("stop\n")
        stack.assert_stopped("stdin")
