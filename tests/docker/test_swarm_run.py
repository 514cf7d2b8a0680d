"""The whole mvp-orchestrator with provider swarm: a pipeline across two nodes, and a node that is lost."""

from __future__ import annotations

import contextlib
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from common.door import free_ports
from tests.docker.swarm_engines import GATEWAY, TestSwarm
from tests.docker.test_docker_run import Run, answer
from tests.e2e.stack import COLOURS, COLOURS_TOKENS, Asker, Stack, assert_right, wait_for
from tools.prompt_client import PromptClient, PromptClientError

TWO_STAGES = ("--pipeline-stages", "2")


@pytest.fixture
def start(swarm: TestSwarm, worker_image: str, tmp_path: Path) -> Iterator[Any]:
    made: list[Run] = []

    def begin(state: str = "state", **more: Any) -> Run:
        relay = f'[relay]\nbind_addr = "{GATEWAY}:{free_ports(GATEWAY)}"\n'
        folder = tmp_path / f"run{len(made)}"
        run = Run(swarm.manager, folder, tmp_path / state, worker_image, relay, provider="swarm", **more)
        made.append(run)
        return run

    yield begin
    for run in made:
        if run.process.poll() is None:
            run.process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                run.process.wait(30)
            run.process.kill()
        shutil.rmtree(run.run_dir, ignore_errors=True)  # one that was killed leaves it
    swarm.clear()


@pytest.mark.spec("S1 4.5", "S1 5.4", "S1 7.2", "S1 7.5", "S1 9.16")
def test_a_pipeline_across_both_nodes_answers_and_nothing_is_left(start: Any, swarm: TestSwarm) -> None:
    with Stack() as one:
        one.assert_answers()  # what one worker here says is what the two have to say
    run = start(args=TWO_STAGES)
    addr = run.ready()
    assert sorted(swarm.workers()) == ["node1 running", "node2 running"]
    with contextlib.closing(PromptClient.connect(addr, wait_s=5)) as client:
        assert_right(client.complete(COLOURS, max_tokens=COLOURS_TOKENS).final_text)
    assert run.stop() == 0, run.error()
    assert swarm.left() == ([], [])
    swarm.wait_gone()  # the swarm removes a container some seconds after its service
    assert not list((run.archive.parent.parent / "state" / "swactor-mq" / "ledger").glob("*.jsonl"))


@pytest.mark.spec("S1 9.15", "S1 10.6")
def test_a_node_that_dies_ends_the_request_with_a_fault_and_the_run_with_one_line(start: Any, swarm: TestSwarm) -> None:
    run = start(args=TWO_STAGES)
    asker = Asker(run.ready(), "Write a very long story about a lighthouse keeper and the sea.", max_tokens=2000)
    asker.wait_text()
    began = time.monotonic()
    swarm.kill_second()
    try:
        (end,) = [line for line in asker.terminals(150) if line["type"] in ("done", "fault")]
        assert end["type"] == "fault", end
        assert run.process.wait(200) == 1
        print(f"the run ended {time.monotonic() - began:.1f} s after the node")
        for record in run.records()[-25:]:
            print(record.get("unix_ms"), record["phase"], record["status"], str(record["detail"])[:150])
        lines = run.error().splitlines()
        assert len(lines) == 1 and lines[0].startswith("mvp-orchestrator: "), lines
        assert "node 3" in lines[0] or "node 2" in lines[0], lines
        assert swarm.left() == ([], [])
        wait_for("the other one's end", lambda: not [item for item in swarm.workers() if "node1" in item], 150)
    finally:
        swarm.second.start()
        swarm.wait_nodes("ready", "ready")


@pytest.mark.spec("S1 9.16")
def test_after_a_kill_of_everything_the_next_start_removes_what_was_left(start: Any, swarm: TestSwarm) -> None:
    killed = start()
    killed.ready()
    killed.kill_everything()
    assert len(swarm.left()[0]) == 1
    following = start()
    following.ready()
    assert len(swarm.left()[0]) == 1, "the first one's is still there"
    assert following.stop() == 0
    assert swarm.left() == ([], [])


@pytest.mark.spec("S1 4.6", "S1 9.15", "S1 9.16")
def test_a_run_goes_on_elsewhere_and_the_node_that_comes_back_is_no_part_of_it(start: Any, swarm: TestSwarm) -> None:
    """Opt-in. The cut-off worker runs on out there: its key is worthless, and its newer incarnation has its place."""
    run = start(args=TWO_STAGES, runtime='on_worker_loss = "restart"')
    addr = run.ready()
    with contextlib.closing(PromptClient.connect(addr, wait_s=5, read_timeout_s=120)) as client:
        first = client.complete(COLOURS, max_tokens=COLOURS_TOKENS).final_text
    swarm.cut(off=True)
    try:
        until = time.monotonic() + 300
        while sorted(swarm.workers()).count("node1 running") < 2:
            assert run.process.poll() is None, run.error()
            assert time.monotonic() < until, swarm.workers()
            time.sleep(0.5)
        assert "node2 running" in swarm.workers(), "the stale one lives on, cut off"
        assert _answers(addr) == first
    finally:
        swarm.cut(off=False)
    swarm.wait_nodes("ready", "ready")
    assert _answers(addr) == first, "it came back and changed nothing"
    until = time.monotonic() + 150
    while [item for item in swarm.workers() if item.startswith("node2")]:
        assert time.monotonic() < until, "the swarm did not end the stale one"
        time.sleep(0.5)
    assert _answers(addr) == first
    assert run.stop() == 0, run.error()
    assert swarm.left() == ([], [])
    swarm.wait_gone()  # the swarm removes a container some seconds after its service


@pytest.mark.spec("S1 4.6", "S1 9.15", "S1 9.16")
def test_a_task_killed_in_the_middle_of_an_answer_is_replaced_and_the_answer_goes_on(
    start: Any, swarm: TestSwarm
) -> None:
    run = start(args=TWO_STAGES, runtime='on_worker_loss = "restart"')
    addr = run.ready()
    undisturbed = answer(addr)
    (wanted,) = swarm.second.containers()
    assert answer(addr, lambda: swarm.second.client().kill(wanted["Id"])) == undisturbed
    # An answer that was whole before the kill does not wait for the replacement; the next prompt does.
    assert answer(addr) == undisturbed
    wait_for("two that run", lambda: [item.split()[1] for item in swarm.workers()].count("running") == 2, 150)
    wait_for("the end of the dead one's service and secret", lambda: list(map(len, swarm.left())) == [2, 2], 150)
    assert run.stop() == 0, run.error()
    assert swarm.left() == ([], [])
    swarm.wait_gone()
    assert not list((run.archive.parent.parent / "state" / "swactor-mq" / "ledger").glob("*.jsonl"))


def _answers(addr: str) -> str:
    """An answer, as soon as the run gives one again."""
    until = time.monotonic() + 300
    while True:
        try:
            with contextlib.closing(PromptClient.connect(addr, wait_s=5, read_timeout_s=120)) as client:
                return client.complete(COLOURS, max_tokens=COLOURS_TOKENS).final_text
        except PromptClientError:
            assert time.monotonic() < until
            time.sleep(1)
