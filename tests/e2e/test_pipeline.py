"""One model over several workers, end to end on process workers and the real model (issue 4)."""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.pipeline_stack import PARAGRAPH, stage_pids
from tests.e2e.stack import COLOURS, COLOURS_TOKENS, Asker, Stack, held_worker, wait_for

LONG = "Write a very long story about a lighthouse keeper and the sea."
PROMPTS: list[tuple[str, dict[str, Any]]] = [
    ("What is the capital of France?", {"max_tokens": 48}),
    ("Hi", {"max_tokens": 1}),
    ("Count from one to ten in words.", {"max_tokens": 40, "stop": ["five"]}),
    ("Write one sentence in Japanese about the sea: 海", {"max_tokens": 40}),
    (PARAGRAPH * 14 + "Who is this text about?", {"max_tokens": 24}),
    (PARAGRAPH * 50 + "Who is this text about?", {"max_tokens": 8}),  # about 2,000 tokens
    ("a", {"max_tokens": 12, "raw": True}),
    ("Tell me a joke.", {"max_tokens": 24, "sampling": {"temperature": 0.8, "seed": 7}}),
    ("Say the same word again and again.", {"max_tokens": 24, "sampling": {"repetition_penalty": 1.3}}),
]


def answers(stack: Stack) -> list[tuple[str, int, int, str]]:
    """What does not depend on time: text, tokens of answer and prompt, why it ended."""

    return [answer_facts(stack, at) for at in range(len(PROMPTS))]


def answer_facts(stack: Stack, at: int) -> tuple[str, int, int, str]:
    """Of one of the PROMPTS."""
    prompt, options = PROMPTS[at]
    done = stack.ask(prompt, **options)
    return done.final_text, done.tokens_generated, done.prompt_tokens, done.finish_reason


@pytest.fixture(scope="module")
def one_worker() -> list[tuple[str, int, int, str]]:
    with Stack() as stack:
        found = answers(stack)
        stack.say("stop\n")
        stack.assert_stopped("stdin")
    return found


@pytest.fixture(scope="module")
def two() -> Iterator[Stack]:
    with Stack(args=("--pipeline-stages", "2")) as stack:
        stack.addr()
        yield stack


@pytest.mark.spec("S1 5.8", "S1 6.10", "S1 7.10", "S1 7.11", "S1 9.12")
def test_two_stages_say_what_one_worker_says(one_worker: list[tuple[str, int, int, str]], two: Stack) -> None:
    assert answers(two) == one_worker
    observed = [record.detail["sequence"] for record in two.archive.prompts("pipeline_token_out")]
    assert observed == list(range(len(observed))), "sequences go on over prompts"


@pytest.mark.spec("S1 4.8", "S1 4.9", "S1 9.7", "S1 9.8", "S1 9.3", "S1 5.3", "S1 5.6")
def test_stages_are_provisioned_after_the_acknowledgement_one_after_the_other(two: Stack) -> None:
    steps = [record for record in two.archive.lifecycle() if record.status != "observed" or "weights" in record.phase]
    order = [record.step for record in steps]
    assert order.index(("run_plan", "ready")) < order.index(("provider_start", "started"))
    acked = max(index for index, step in enumerate(order) if step == ("runtime_ready_ack", "ready"))
    sends = [
        (index, record.detail["stage_index"])
        for index, record in enumerate(steps)
        if record.step == ("stage_provision_send", "sent") and record.detail["attempt"] == 1
    ]
    loaded = {
        record.detail["stage_index"]: index
        for index, record in enumerate(steps)
        if record.step == ("weights_loaded", "observed")
    }
    assert [stage for _, stage in sends][:2] == [0, 1] and acked < sends[0][0]
    assert loaded[0] < sends[1][0], "the second stage waits for the first one's weights"
    plan = two.archive.one("run_plan", "ready").detail
    ranges = [(stage["layer_range"]["start"], stage["layer_range"]["end_exclusive"]) for stage in plan["stages"]]
    assert ranges == [(0, 15), (15, 30)] and [stage["node_id"] for stage in plan["stages"]] == [2, 3]
    assert max(loaded.values()) < order.index(("prompt_rpc", "ready"))


@pytest.mark.spec("S1 8.10")
def test_both_ends_of_an_edge_say_what_went_over_it(two: Stack) -> None:
    two.ask("Say hello.", max_tokens=8)

    def ends() -> list[dict[str, Any]]:
        found = [record.body for record in two.archive.records() if record.channel == "mvp.node.edge"]
        last = {body["node_id"]: body["detail"] for body in found if body["detail"]["edge_id"] == 2}
        return list(last.values())

    def agree() -> bool:
        told = {(end["records"], end["bytes"]) for end in ends()}
        return len(ends()) == 2 and len(told) == 1 and (0, 0) not in told

    wait_for("both ends of edge 2 to have told the same", agree, 60)
    assert {"latency_ms", "held_ms"} <= {key for end in ends() for key in end} and ends()[0]["records"] > 0


@pytest.mark.spec("S1 7.10", "S1 9.13")
def test_a_prompt_cut_by_its_client_leaves_the_pipeline_clean(two: Stack) -> None:
    """During the prefill of a long prompt and after random tokens of an answer; the next answers are what they always
    are. Another seed: SMQ_FAULT_SEED."""
    seed = int(os.environ.get("SMQ_FAULT_SEED") or time.time_ns() % 1_000_000)
    print(f"SMQ_FAULT_SEED={seed}")
    draw = random.Random(seed)
    expected = two.ask("What is the capital of France?", max_tokens=48).final_text
    for prompt, tokens in ((PARAGRAPH * 40, 0), (LONG, 1), *((LONG, draw.randrange(2, 60)) for _ in range(3))):
        before = len(two.archive.prompts("pipeline_token_out"))
        begun = len(two.archive.prompts("pipeline_token_in"))
        asker = Asker(two.addr(), prompt)
        wait_for("the prompt", lambda begun=begun: len(two.archive.prompts("pipeline_token_in")) > begun, 60)
        wanted = before + tokens
        wait_for("tokens", lambda wanted=wanted: len(two.archive.prompts("pipeline_token_out")) >= wanted, 60)
        time.sleep(draw.random() * 0.05)
        asker._sock.shutdown(2)
        assert two.ask("What is the capital of France?", max_tokens=48).final_text == expected


def test_a_prompt_that_does_not_fit_is_a_fault_and_nothing_else(two: Stack) -> None:
    asker = Asker(two.addr(), PARAGRAPH * 160, max_tokens=4)
    wait_for("its terminal", lambda: asker.lines, 150)
    assert asker.lines[0]["type"] == "fault" and "but the context holds 4096" in asker.lines[0]["error"]
    assert two.ask("Hi", max_tokens=2).tokens_generated == 2


@pytest.mark.parametrize("part", ["engine", "agent"])
def test_a_short_freeze_heals(two: Stack, part: str) -> None:
    """Two seconds without a stage, in the middle of an answer: the text is the same."""
    expected = two.ask(LONG, max_tokens=40).final_text
    pid = stage_pids(two, part)[1]
    asker = Asker(two.addr(), LONG, max_tokens=40)
    asker.wait_text()
    os.kill(pid, signal.SIGSTOP)
    time.sleep(2)
    os.kill(pid, signal.SIGCONT)
    wait_for("the end", lambda: asker.lines and asker.lines[-1]["type"] != "text_delta", 150)
    assert (asker.lines[-1]["type"], asker.lines[-1]["final_text"]) == ("done", expected)


@pytest.mark.spec("S1 6.5", "S1 6.4", "S1 9.16")
def test_the_teardown_is_performed_and_acknowledged(two: Stack) -> None:
    """Last of this stack: StopRun, edges closed, weights released, role reset, StageStopped; the FSM is torn down."""
    two.say("stop\n")
    two.assert_stopped("stdin")
    events = [record.detail["event"] for record in two.archive.lifecycle() if record.phase == "run_lifecycle"]
    assert events == ["RunOperatorStopped", "RunTornDown"], "no prompt's end was the run's"
    stopped = [record.body for record in two.archive.records() if record.step == ("stop_run", "ready")]
    assert sorted(body["node_id"] for body in stopped) == [2, 3]


@pytest.mark.spec("S1 7.4")
def test_three_stages_say_what_one_worker_says(one_worker: list[tuple[str, int, int, str]]) -> None:
    with Stack(args=("--pipeline-stages", "3")) as stack:
        assert answers(stack) == one_worker
        stack.say("stop\n")
        stack.assert_stopped("stdin")


RELAY = '[relay]\nmode = "default"\n[pipeline]\nedges = "relay"\n'


def ways(stack: Stack) -> list[str]:
    """The candidates that edges have taken, as their producers tell."""
    told = [record.body["detail"]["path"] for record in stack.archive.records() if record.step == ("edge", "ready")]
    return [path for path in told if path]


def test_edges_over_the_relay_say_the_same(one_worker: list[tuple[str, int, int, str]]) -> None:
    """No direct connection at all: the stream messages cross the relay's and the router's edge plane."""
    with Stack(args=("--pipeline-stages", "2"), config=RELAY) as stack:
        assert answers(stack) == one_worker
        wait_for("both producers' edges on record", lambda: len(ways(stack)) >= 2, 60)
        assert set(ways(stack)) == {"relay"}
        stack.say("stop\n")
        stack.assert_stopped("stdin")


# --- planning errors ----------------------------------------------------------------------------------------------
@pytest.mark.spec("S1 10.4", "S1 9.3", "S1 4.4")
def test_a_plan_that_cannot_be_ends_the_start_before_any_worker() -> None:
    with Stack(args=("--pipeline-stages", "31")) as stack:
        error = stack.assert_failed()
        assert error == "pipeline_stages = 31 exceeds GGUF layer count 30; choose pipeline_stages <= 30"
        assert stack.archive.one("run_plan", "failed").detail["error"] == error
        assert stack.archive.find("provider_start", "started") is None


# --- faults -------------------------------------------------------------------------------------------------------
@pytest.mark.spec("S1 10.10", "S1 9.15", "S1 3.1")
@pytest.mark.parametrize(
    ("part", "stage", "says"),
    [
        ("agent", 0, ["node 2", "SIGKILL"]),
        ("engine", 1, ["node 3", "stage 1", "WorkerCrashed", "SIGKILL"]),
    ],
)
def test_a_stage_that_dies_while_it_serves(part: str, stage: int, says: list[str]) -> None:
    """One terminal event for the active prompt, exit 1, a sentence that names stage, node and cause, nothing left."""
    with Stack(args=("--pipeline-stages", "2")) as stack:
        stack.addr()
        pid = stage_pids(stack, part)[stage]
        asker = Asker(stack.addr(), LONG)
        asker.wait_text()
        os.kill(pid, signal.SIGKILL)
        terminals = asker.terminals()
        error = stack.assert_failed()
        assert all(word in error for word in says), error
        assert [line["type"] for line in terminals] == ["fault"], terminals


@pytest.mark.spec("S1 10.8", "S1 9.8", "S1 4.9")
def test_a_stage_that_dies_while_it_loads(tmp_path: Path) -> None:
    with Stack(args=("--pipeline-stages", "2", *held_worker(tmp_path, "weights_loaded"))) as stack:
        stack.wait_record("stage_provision_send", "sent")
        os.kill(stage_pids(stack, "agent")[0], signal.SIGKILL)
        error = stack.assert_failed()
        assert "node 2" in error and "while loading weights" in error and "SIGKILL" in error
        assert stack.archive.find("prompt_rpc", "ready") is None


DIRECT_FEEDBACK = '[pipeline]\nfeedback = "direct"\n'


@pytest.mark.parametrize("stages", [2, 3])
def test_direct_feedback_says_the_same_and_leaves_the_pipeline_clean(
    one_worker: list[tuple[str, int, int, str]], stages: int
) -> None:
    """EOS, caps, stop strings and clients that leave: what ran ahead is never seen by the next prompt."""
    with Stack(args=("--pipeline-stages", str(stages)), config=DIRECT_FEEDBACK) as stack:
        assert answers(stack) == one_worker
        plan = stack.archive.one("run_plan", "ready").detail
        assert plan["edges"][-1]["kind"] == "TokenFeedback"
        expected = one_worker[0][0]
        for prompt, wait_s in ((PARAGRAPH * 40, 0.3), (LONG, 1.5), (LONG, 0.02)):
            asker = Asker(stack.addr(), prompt)
            time.sleep(wait_s)
            asker._sock.shutdown(2)
            assert stack.ask(PROMPTS[0][0], **PROMPTS[0][1]).final_text == expected
        stack.say("stop\n")
        stack.assert_stopped("stdin")


@pytest.mark.spec("S1 9.3", "S1 7.10")
def test_a_cached_model_on_one_worker_is_planned_too(one_worker: list[tuple[str, int, int, str]]) -> None:
    """One stage, both token edges at the gateway, no activation edge."""
    with Stack(model_key="cached_path") as stack:
        assert [answer_facts(stack, at) for at in (0, 2)] == [one_worker[0], one_worker[2]]
        plan = stack.archive.one("run_plan", "ready").detail
        assert [edge["kind"] for edge in plan["edges"]] == ["TokenIn", "TokenOut"]
        stack.say("stop\n")
        stack.assert_stopped("stdin")


def test_float16_rows_halve_the_activation_edges_and_still_answer() -> None:
    with Stack(args=("--pipeline-stages", "2"), config='[pipeline]\nactivation_dtype = "float16"\n') as stack:
        answer = stack.ask(COLOURS, max_tokens=COLOURS_TOKENS)
        assert "red" in answer.final_text.lower() and "blue" in answer.final_text.lower()
        assert stack.ask(COLOURS, max_tokens=COLOURS_TOKENS).final_text == answer.final_text
        plan = stack.archive.one("run_plan", "ready").detail
        row_bytes = 2 * plan["hidden_dim"]
        assert plan["edges"][1]["data_capacity"] == 40 + plan["max_seq_len"] * row_bytes

        def activations() -> list[dict[str, object]]:
            moved = [r.body["detail"] for r in stack.archive.records() if r.channel == "mvp.node.edge"]
            return [detail for detail in moved if detail["edge_id"] == 2]

        wait_for("the record of edge 2, made once a second", activations, 60)
        stack.say("stop\n")
        stack.assert_stopped("stdin")


SLOW_THIRD = """\
import sys
if any("nodes/4/" in word for word in sys.argv) or __import__("os").environ.get("SMQ_TEST_SLOW"):
    __import__("os").environ["SMQ_TEST_SLOW"] = "1"
    from worker.engine import measure
    measure.read_speed = lambda *_: 10_000_000
"""


def test_a_worker_that_measures_slow_is_left_out_and_the_text_is_the_same(
    one_worker: list[tuple[str, int, int, str]], tmp_path: Path
) -> None:
    """The third worker says that it reads 10 MB/s: the other two hold the model, it is stopped again."""
    (tmp_path / "sitecustomize.py").write_text(SLOW_THIRD)
    script = tmp_path / "worker"
    worker = Path(sys.executable).with_name("mvp-worker-node")
    script.write_text(f'#!/bin/sh\nPYTHONPATH={tmp_path} exec {worker} "$@"\n')
    script.chmod(0o700)
    placed = '[pipeline]\nplacement = "measured"\n'
    args = ("--pipeline-stages", "3", "--worker-bin", str(script))
    with Stack(args=args, config=placed) as stack:
        assert [answer_facts(stack, at) for at in (0, 2)] == [one_worker[0], one_worker[2]]
        plans = [r.detail for r in stack.archive.lifecycle() if r.step == ("run_plan", "ready")]
        assert len(plans[0]["stages"]) == 3 and [stage["node_id"] for stage in plans[1]["stages"]] == [2, 3]
        assert plans[1]["left_out"][0].startswith("node 4 is left out: ")
        wait_for("its end", lambda: len([p for p in stack.left() if p.part == "agent"]) == 2, 60)
        stack.say("stop\n")
        stack.assert_stopped("stdin")
