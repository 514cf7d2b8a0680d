"""The whole mvp-orchestrator with provider docker and the real model: an answer, and nothing left."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from common.limits import LEASE_TTL_MS
from services.provisioner.docker_spec import LABEL
from tests.docker.engine import ROOT, TestEngine
from tests.e2e.stack import COLOURS, COLOURS_TOKENS, LONG, Asker, Stack, assert_right, wait_for
from tests.e2e.test_worker_restart import TOKENS, ended, facts
from tools.fetch_model import default_model_path
from tools.prompt_client import PromptClient

CONFIG = """\
[runtime]
run_dir = "{run_dir}"
{runtime}
[provider]
kind = "{provider}"
[image]
node = "{image}"
[docker]
gpus = "none"
pull = "never"
[model]
id = "smollm2-135m-instruct"
cached_path = "{model}"
[prompt]
rpc_addr = "127.0.0.1:0"
[observability]
datastream_frame_log = "{archive}"
{more}
"""
READY_S = 300


class Run:
    """One mvp-orchestrator as a child; state: its XDG_STATE_HOME; runs that share it know each other's ledgers."""

    def __init__(
        self,
        engine: TestEngine,
        folder: Path,
        state: Path,
        image: str,
        more: str = "",
        *,
        provider: str = "docker",
        runtime: str = "",
        args: Sequence[str] = (),
        environ: Mapping[str, str] | None = None,
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.run_dir = Path(f"/tmp/smq-test-{os.getpid()}-{secrets.token_hex(4)}")
        self.archive = folder / "archive.jsonl"
        config = folder / "config.toml"
        model = default_model_path()
        shown = {"image": image, "model": model, "archive": self.archive, "more": more, "run_dir": self.run_dir}
        config.write_text(CONFIG.format(provider=provider, runtime=runtime, **shown))
        environment = engine.environment | {"XDG_STATE_HOME": str(state), "PYTHONPATH": str(ROOT), **(environ or {})}
        command = [sys.executable, "-P", "-m", "services.orchestrator", "--runtime-config", str(config), *args]
        self.started = time.monotonic()
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, env=environment
        )

    def records(self, channel: str = "mvp.orch.bootstrap") -> list[dict[str, Any]]:
        found = []
        with contextlib.suppress(FileNotFoundError):
            for line in self.archive.read_text().splitlines():
                with contextlib.suppress(json.JSONDecodeError):
                    frame = json.loads(line)
                    if frame["channel"] == channel:
                        found.append(json.loads(frame["payload"]["value"]))
        return found

    def wait(self, phase: str, status: str = "ready") -> dict[str, Any]:
        until = time.monotonic() + READY_S
        while time.monotonic() < until:
            for record in self.records():
                if (record["phase"], record["status"]) == (phase, status):
                    return record
            if self.process.poll() is not None:
                pytest.fail(f"the orchestrator ended: {self.error()}")
            time.sleep(0.1)
        pytest.fail(f"{phase} was not {status} in time; last: {self.records()[-1:]}")

    def ready(self) -> str:
        return str(self.wait("prompt_rpc")["detail"]["addr"])

    def error(self) -> str:
        assert self.process.stderr is not None
        return self.process.stderr.read().decode()

    def stop(self) -> int:
        assert self.process.stdin is not None
        self.process.stdin.write(b"stop\n")
        self.process.stdin.flush()
        return self.process.wait(150)

    def pids(self) -> list[int]:
        """Of its services."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        return [int(pid) for pid in children]

    def kill_everything(self) -> None:
        """SIGKILL to it and its services, as one: all are halted first, or one would see another die and clean up."""
        everything = [self.process.pid, *self.pids()]
        for number in (signal.SIGSTOP, signal.SIGKILL):
            for pid in everything:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)
        self.process.wait()


@pytest.fixture
def start(engine: TestEngine, worker_image: str, tmp_path: Path) -> Iterator[Any]:
    made: list[Run] = []

    def begin(state: str = "state", **more: Any) -> Run:
        run = Run(engine, tmp_path / f"run{len(made)}", tmp_path / state, worker_image, **more)
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
    for found in engine.containers():
        engine.client().remove_container(found["Id"], force=True, v=True)


@pytest.mark.spec("S1 4.5", "S1 5.4", "S1 7.2", "S1 7.5", "S1 9.16")
def test_one_command_answers_from_a_container_and_stops_it(start: Any, engine: TestEngine) -> None:
    run = start()
    addr = run.ready()
    with contextlib.closing(PromptClient.connect(addr, wait_s=5)) as client:
        done = client.complete("What is the capital of France? One word.", max_tokens=12)
    assert "Paris" in done.final_text
    (container,) = engine.containers()
    shown = json.dumps(engine.client().inspect_container(container["Id"]))
    assert '"ReadonlyRootfs"' in shown and "secret_key" not in shown
    assert engine.client().inspect_container(container["Id"])["Config"]["User"] == "10001:10001"
    assert run.stop() == 0, run.error()
    assert engine.containers() == []
    assert not list((Path(run.archive).parent.parent / "state" / "swactor-mq" / "ledger").glob("*.jsonl"))
    assert "secret_key" not in run.archive.read_text()


@pytest.mark.spec("S1 9.15", "S1 10.6")
def test_a_killed_container_ends_the_run_with_one_line(start: Any, engine: TestEngine) -> None:
    run = start()
    run.ready()
    (container,) = engine.containers()
    engine.client().kill(container["Id"])
    assert run.process.wait(150) == 1
    lines = run.error().splitlines()
    assert len(lines) == 1 and lines[0].startswith("mvp-orchestrator: "), lines
    assert "killed by signal 9" in lines[0]
    assert engine.containers() == []


@pytest.mark.spec("S1 9.16")
def test_after_a_kill_of_everything_the_next_start_removes_what_was_left(start: Any, engine: TestEngine) -> None:
    killed = start()
    killed.wait("provider_start")
    other = start(state="other")
    other.ready()
    killed.kill_everything()
    before = {found["Id"] for found in engine.containers()}
    assert len(before) == 2
    following = start()
    following.ready()
    assert [
        record["detail"]["reconciled"]
        for record in following.records()
        if (record["phase"], record["status"]) == ("node_provisioner", "ready")
    ] == [1]
    assert following.stop() == 0
    assert len(engine.containers()) == 1, "another orchestrator's worker was touched"
    assert other.stop() == 0
    assert engine.containers() == []


@pytest.mark.spec("S1 2.6", "S1 4.5", "S1 7.2")
def test_a_pipeline_of_two_containers_over_the_relay_says_what_one_worker_says(start: Any, engine: TestEngine) -> None:
    with Stack() as one:
        one.assert_answers()
    run = start(more='[pipeline]\nedges = "relay"\n', args=("--pipeline-stages", "2"))
    with contextlib.closing(PromptClient.connect(run.ready(), wait_s=5)) as client:
        assert_right(client.complete(COLOURS, max_tokens=COLOURS_TOKENS).final_text)
    assert len(engine.containers()) == 2
    assert run.stop() == 0, run.error()
    assert engine.containers() == []


def answer(addr: str, midway: Callable[[], None] | None = None) -> tuple[Any, ...]:
    """What a long answer is in the end; midway: done while it is on its way, or soon after on a busy machine."""
    asker = Asker(addr, LONG, max_tokens=TOKENS)
    if midway is not None:
        wait_for("text", lambda: sum(line["type"] == "text_delta" for line in list(asker.lines)) >= 4, 120)
        midway()
    done = ended(asker)
    assert done["type"] == "done" and done["tokens_generated"] == TOKENS, done
    return facts(done)


@pytest.mark.spec("S1 4.6", "S1 9.15", "S1 9.16")
def test_a_container_killed_in_the_middle_of_an_answer_is_replaced_and_the_answer_goes_on(
    start: Any, engine: TestEngine
) -> None:
    run = start(
        runtime='on_worker_loss = "restart"', more='[pipeline]\nedges = "relay"\n', args=("--pipeline-stages", "2")
    )
    addr = run.ready()
    undisturbed = answer(addr)
    for node in ("3", "2"):
        before = {found["Id"] for found in engine.containers()}
        (wanted,) = [found for found in engine.containers() if found["Labels"][f"{LABEL}.node"] == node]
        assert answer(addr, lambda wanted=wanted: engine.client().kill(wanted["Id"])) == undisturbed  # type: ignore[misc]

        def is_replaced(before: set[str] = before) -> bool:
            after = engine.containers()
            assert len(after) <= 3, after
            is_one_new = len(after) == 2 and len(before - {found["Id"] for found in after}) == 1
            return is_one_new and {found["State"] for found in after} == {"running"}

        # An answer that was whole before the kill does not wait for the replacement; the next prompt does.
        assert answer(addr) == undisturbed
        wait_for("one replaced and none left", is_replaced, 150)
    said = [record["detail"] for record in run.records() if record["phase"] == "worker_restart"]
    causes = [detail["cause"] for detail in said if "cause" in detail]
    assert any("killed by signal 9" in cause and "node 3" in cause for cause in causes), said
    assert run.stop() == 0, run.error()
    assert engine.containers() == []
    assert not list((run.archive.parent.parent / "state" / "swactor-mq" / "ledger").glob("*.jsonl"))


@pytest.mark.spec("S1 9.16", "S1 10.13")
def test_a_worker_whose_lease_is_lost_stops_itself(start: Any, engine: TestEngine) -> None:
    """Dead-man's switch: orchestrator, provisioner and all the rest are killed, and nobody starts anything again."""
    run = start()
    run.ready()
    (container,) = engine.containers()
    run.kill_everything()
    began = time.monotonic()
    while engine.client().inspect_container(container["Id"])["State"]["Running"]:
        assert time.monotonic() - began < LEASE_TTL_MS / 1000 + 90, "it runs on without an orchestrator"
        time.sleep(0.5)
    state = engine.client().inspect_container(container["Id"])["State"]
    said = engine.client().logs(container["Id"]).decode()
    assert state["ExitCode"] == 1 and not state["OOMKilled"], f"{state}: {said[-2000:]}"
    assert "no lease from the orchestrator any more" in said and "stops itself" in said, said
