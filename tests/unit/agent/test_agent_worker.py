"""The worker as a process on a real bus with a fake engine: the whole way up, and each way down."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from common.launch_file import LaunchFile
from common.messages.node_agent import CancelRequest, EncodePrompt, InferPrompt, StopRun
from common.messages.orchestrator import (
    ObserveStageFault,
    ObserveStageReady,
    ObserveStageStopped,
    ObserveWeightsReady,
)
from common.messages.prompt import Done, Fault, PromptEncoded, RequestCancelled, TextDelta
from tests.unit.agent.real_worker import RealRun, RealWorker, is_gone

SCRIPT = Path(__file__).with_name("worker_with_fake_engine.py")
Start = Callable[..., RealWorker]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealRun]:
    real = RealRun(tmp_path_factory.mktemp("run"), workers=16)
    yield real
    real.close()


@pytest.fixture
def start(run: RealRun, tmp_path: Path) -> Iterator[Start]:
    made: list[RealWorker] = []

    def begin(how: str = "well") -> RealWorker:
        made.append(RealWorker(run, tmp_path, (sys.executable, str(SCRIPT), how)))
        return made[-1]

    yield begin
    for worker in made:
        worker.close()


def serving(start: Start) -> RealWorker:
    worker = start()
    worker.ready()
    worker.provision()
    worker.wait_for(ObserveStageReady)
    return worker


@pytest.mark.spec("S1 5.5", "S1 5.6", "S1 6.2", "S1 6.5", "S1 6.9", "S1 9.6", "S1 9.11")
def test_a_worker_joins_loads_answers_and_tears_down(start: Start) -> None:
    worker = start()
    report = worker.ready()
    assert report.endpoint.node_key == worker.keys.public
    routes = worker.host.node.views.routes
    worker.bus.until(lambda: routes.owner(report.node_actor) and routes.owner(report.datastream_publisher), 60)
    worker.provision()
    worker.wait_for(ObserveWeightsReady)
    worker.wait_for(ObserveStageReady)
    worker.tell(InferPrompt(request_id=7, prompt="to be or not", reply_to=worker.address))
    done = worker.wait_for(Done)
    assert (done.request_id, done.final_text, done.tokens_generated) == (7, "to be or not", 4)
    assert "".join(delta.text for delta in worker.heard(TextDelta)) == "to be or not "
    worker.tell(EncodePrompt(request_id=8, prompt="ab", reply_to=worker.address))
    assert worker.wait_for(PromptEncoded).tokens == [97, 98]
    worker.tell(CancelRequest(request_id=9))
    assert not worker.wait_for(RequestCancelled).known
    worker.provision()
    worker.wait_for(ObserveStageReady, count=2)
    worker.tell(StopRun(run_id=1))
    worker.wait_for(ObserveStageStopped)
    engine = worker.engine_pid()
    status, stderr = worker.exit()
    assert (status, stderr) == (0, "fake engine: well\n")
    assert is_gone(engine)


@pytest.mark.spec("S1 6.5", "S1 10.8")
def test_a_killed_engine_is_a_stage_fault_and_exit_1_with_one_line(start: Start) -> None:
    worker = serving(start)
    os.kill(worker.engine_pid(), signal.SIGKILL)
    fault = worker.wait_for(ObserveStageFault)
    assert fault.reason == "WorkerCrashed: the engine was killed by SIGKILL (out of memory?)"
    status, stderr = worker.exit()
    assert status == 1
    assert stderr.splitlines()[1:] == ["node 1: the engine was killed by SIGKILL (out of memory?)"]


def test_a_stopped_engine_that_is_killed_faults_the_active_request(start: Start) -> None:
    worker = serving(start)
    os.kill(worker.engine_pid(), signal.SIGSTOP)
    worker.tell(InferPrompt(request_id=7, prompt="x", reply_to=worker.address))
    worker.tell(InferPrompt(request_id=8, prompt="x", reply_to=worker.address))
    busy = worker.wait_for(Fault)
    assert (busy.request_id, busy.error) == (8, "busy: request 7 is still being answered")
    os.kill(worker.engine_pid(), signal.SIGKILL)
    assert worker.wait_for(Fault, count=2).request_id == 7
    assert worker.exit()[0] == 1
    assert len(worker.heard(Fault)) == 2


@pytest.mark.parametrize("how", ["fatal", "garbage", "exit", "cut"])
def test_an_engine_that_fails_at_its_start_is_reported(start: Start, how: str) -> None:
    worker = start(how)
    worker.wait_for(ObserveStageFault)
    status, stderr = worker.exit()
    assert status == 1 and len(stderr.splitlines()) == 2


@pytest.mark.parametrize("how", ["shutdown", "ShutDown\r", "eof", "SIGTERM", "SIGINT"])
def test_whoever_started_the_worker_stops_it(start: Start, how: str) -> None:
    worker = serving(start)
    engine = worker.engine_pid()
    assert worker.process.stdin is not None
    if how.startswith("SIG"):
        worker.process.send_signal(signal.Signals[how])
    elif how == "eof":
        worker.process.stdin.close()
    else:
        worker.process.stdin.write(f"hello\n{how}\n".encode())
        worker.process.stdin.flush()
    assert worker.exit() == (0, "fake engine: well\n"), "by itself: whoever is killed after the grace has no status 0"
    assert is_gone(engine)


def test_a_killed_agent_takes_its_engine_with_it(start: Start) -> None:
    worker = serving(start)
    engine = worker.engine_pid()
    worker.process.send_signal(signal.SIGKILL)
    worker.process.wait()
    assert is_gone(engine)


def run_cli(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-P", "-m", "worker.agent", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, stdin=subprocess.DEVNULL, check=False)


def test_help_and_version_say_what_this_is() -> None:
    shown = run_cli("--help")
    assert shown.returncode == 0 and "--launch FILE" in shown.stdout and "One worker" in shown.stdout
    version = run_cli("--version")
    assert version.returncode == 0 and version.stdout.startswith("mvp-worker-node ")


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"endpoints": {"control": "ipc:///x"}}, "names no endpoint for the planes prompt, edge, stream"),
        (
            {"endpoints": dict.fromkeys(("control", "prompt", "edge", "stream"), "tcp://nowhere")},
            "is no tcp or ipc address",
        ),
        ({"profile": "moon"}, "profile is 'moon', known are lan, wan"),
    ],
)
def test_a_launch_file_that_does_not_fit_is_one_sentence(
    tmp_path: Path, changes: dict[str, Any], sentence: str
) -> None:
    fields: dict[str, Any] = {
        "run_id": 1,
        "run": "00" * 16,
        "node_id": 1,
        "endpoints": dict.fromkeys(("control", "prompt", "edge", "stream"), "ipc:///tmp/x"),
        "broker_public_key": "00" * 32,
        "public_key": "00" * 32,
        "secret_key": "00" * 32,
        "orchestrator": "00" * 32,
    }
    LaunchFile(**{**fields, **changes}).write(tmp_path / "launch.json")
    result = run_cli("--launch", str(tmp_path / "launch.json"))
    assert result.returncode == 1 and sentence in result.stderr
    assert result.stderr.startswith("mvp-worker-node: ") and len(result.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ((), "mvp-worker-node: the following arguments are required: --launch; try mvp-worker-node --help"),
        (("--nonsense",), "mvp-worker-node: the following arguments are required: --launch"),
        (("--launch", "/no/such/file"), "mvp-worker-node: cannot read launch file /no/such/file: No such file"),
        (("--launch", "/"), "mvp-worker-node: "),
    ],
)
def test_usage_and_file_errors_are_one_sentence_and_status_1(arguments: tuple[str, ...], sentence: str) -> None:
    result = run_cli(*arguments)
    assert result.returncode == 1
    assert result.stderr.startswith(sentence) and len(result.stderr.splitlines()) == 1
    assert result.stdout == ""
