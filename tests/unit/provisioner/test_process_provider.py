"""The process provider with real children: what they say arrives, how they end is known, and nothing is left."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from common.limits import LOG_LINE_BYTES_MAX
from common.messages.provision import NodeProvisionSpec
from common.redact import Redactor
from services.provisioner import processes
from services.provisioner.plugin import DatastreamFrame, Exited, ProviderError, StderrLine, StdoutLine
from services.provisioner.process_provider import ProcessProvider, worker_environment

SPEC = NodeProvisionSpec(run_id=1, node_id=1, stage_index=0, image="")


@pytest.mark.spec("S1 5.4", "S1 8.9")
def test_a_polite_worker_is_heard_and_ends_on_the_shutdown_line(stage: Any) -> None:
    provider, handle, watched = stage.start("polite")
    watched.wait(lambda seen: StdoutLine("ready") in seen and StderrLine("careful") in seen)
    assert stage.alive_with(handle.id) == [handle.provider_process_id]
    provider.stop_node(handle, False)
    assert watched.ended() == Exited(0, "exited with status 0")
    assert StdoutLine("bye") in watched.seen
    assert not stage.alive_with(handle.id)


@pytest.mark.spec("S1 10.6")
def test_an_early_exit_is_noticed_at_once_and_after_its_last_words(stage: Any) -> None:
    _, _, watched = stage.start("exits")
    assert watched.ended() == Exited(3, "exited with status 3")
    assert watched.seen == [StderrLine("cannot: no such model"), Exited(3, "exited with status 3")]
    assert watched.at[1] - watched.at[0] < 10


def test_a_worker_that_ignores_everything_is_killed_with_all_its_children(stage: Any) -> None:
    provider, handle, watched = stage.start("stubborn", grace_ms=200)
    watched.wait(lambda seen: StdoutLine("deaf") in seen)
    assert len(stage.alive_with(handle.id)) == 3
    before = time.monotonic()
    provider.stop_node(handle, False)
    assert 0.2 <= time.monotonic() - before < 20
    assert watched.ended() == Exited(-signal.SIGKILL, "stopped")
    assert not stage.alive_with(handle.id)


def test_a_fast_stop_has_no_grace(stage: Any) -> None:
    provider, handle, watched = stage.start("stubborn", grace_ms=60_000)
    watched.wait(lambda seen: StdoutLine("deaf") in seen)
    before = time.monotonic()
    provider.stop_node(handle, True)
    assert time.monotonic() - before < 30
    assert not stage.alive_with(handle.id)


def test_a_fast_stop_shortens_the_grace_of_the_one_under_way(stage: Any) -> None:
    provider, handle, watched = stage.start("stubborn", grace_ms=60_000)
    watched.wait(lambda seen: StdoutLine("deaf") in seen)
    patient = threading.Thread(target=provider.stop_node, args=(handle, False))
    patient.start()
    provider.stop_node(handle, True)
    patient.join(50)
    assert not patient.is_alive()


def test_stopping_twice_and_stopping_the_dead_is_fine(stage: Any) -> None:
    provider, handle, watched = stage.start("exits")
    watched.ended()
    provider.stop_node(handle, False)
    provider.stop_node(handle, False)
    provider.complete_bootstrap(handle)
    assert watched.seen.count(Exited(3, "exited with status 3")) == 1


def test_children_left_by_a_dead_worker_go_with_it(stage: Any) -> None:
    _, handle, watched = stage.start("careless")
    assert watched.ended().status == 5
    assert watched.seen[0] == StdoutLine("gone")
    assert not stage.alive_with(handle.id)


def test_a_line_without_end_comes_in_pieces(stage: Any) -> None:
    _, _, watched = stage.start("megabyte")
    watched.ended()
    lines = [item.line for item in watched.seen if isinstance(item, StdoutLine)]
    assert lines.pop() == "next"
    assert "".join(lines) == "ä" * 524288
    assert all(len(line.encode()) <= LOG_LINE_BYTES_MAX for line in lines)


@pytest.mark.spec("S1 2.7", "S1 8.9")
def test_bridge_lines_become_frames_and_broken_ones_stay_lines(stage: Any) -> None:
    _, _, watched = stage.start("bridge")
    watched.ended()
    assert watched.seen[0] == DatastreamFrame("worker.load", b'{"phase":"weights"}')
    assert watched.seen[1] == DatastreamFrame("worker.big", b"x" * 100_000)
    assert [type(item) for item in watched.seen[2:]] == [StdoutLine, StdoutLine, Exited]


def test_the_worker_sees_an_allow_list_and_never_a_secret(stage: Any) -> None:
    own = {"PATH": os.environ["PATH"], "OMP_NUM_THREADS": "2", "DEV": "CPU", "XDG_CACHE_HOME": "/c", "CUDA_X": "1"}
    secret = {"HF_TOKEN": "hf_x", "VASTAI_API_KEY": "v", "AWS_SECRET_ACCESS_KEY": "a", "PYTHONPATH": "/evil"}
    _, handle, watched = stage.start(
        "environment", environment=own | secret, env={"HF_TOKEN": "hf_y", "MVP_X": "1"}, args=["--more"]
    )
    watched.ended()
    found, leads_session, arguments = json.loads(watched.seen[0].line)
    found.pop("LC_CTYPE", None)  # the interpreter's own
    assert found == own | {"MVP_X": "1", "PYTHONUNBUFFERED": "1", "SMQ_WORKER": handle.id}
    assert leads_session
    assert arguments == ["--launch", "launch.json", "--more"]
    assert worker_environment(secret, {}, "m") == {"PYTHONUNBUFFERED": "1", "SMQ_WORKER": "m"}


def test_the_signal_is_named(stage: Any) -> None:
    _, _, watched = stage.start("suicide")
    assert watched.ended() == Exited(-9, "killed by signal 9 (SIGKILL)")


def test_the_out_of_memory_killer_is_named(stage: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    count = iter(range(100))
    monkeypatch.setattr(processes, "oom_kills", lambda: next(count))
    _, _, watched = stage.start("suicide")
    assert "out of memory" in watched.ended().reason


@pytest.mark.spec("S1 9.20", "S1 10.16")
def test_a_secret_in_the_workers_output_is_redacted(stage: Any) -> None:
    _, _, watched = stage.start("leaky", args=["hf_0123456789abcdef"], redact=Redactor(["hf_0123456789abcdef"]).redact)
    watched.ended()
    assert watched.seen[0] == StderrLine("token=<redacted>")


@pytest.mark.spec("S1 7.5", "S1 10.5")
@pytest.mark.parametrize(
    ("content", "mode", "prepare_says", "start_says"),
    [
        (None, 0, "does not exist", "does not exist"),
        ("#!/bin/sh\n", 0o644, "not an executable", "not executable"),
        ("\0\0\0", 0o755, "", "exec format error"),
        ("#!/no/such/python\n", 0o755, "", "interpreter in its first line"),
    ],
)
def test_a_bad_worker_binary_is_one_sentence(
    tmp_path: Path, content: str | None, mode: int, prepare_says: str, start_says: str
) -> None:
    path = tmp_path / "worker"
    if content is not None:
        path.write_text(content)
        path.chmod(mode)
    provider = ProcessProvider(str(path), os.environ)
    if prepare_says:
        with pytest.raises(ProviderError, match=prepare_says):
            provider.prepare()
    else:
        provider.prepare()
    with pytest.raises(ProviderError, match=start_says) as caught:
        provider.start_node("mark", SPEC, tmp_path / "launch.json", lambda _: None)
    assert "\n" not in str(caught.value) and str(path) in str(caught.value)


def test_no_descriptor_and_no_thread_is_left(stage: Any) -> None:
    def count() -> tuple[int, int]:
        return len(os.listdir("/proc/self/fd")), threading.active_count()

    def is_left() -> bool:
        """Threads of other tests may end meanwhile."""
        return any(now > then for now, then in zip(count(), before, strict=True))

    before = count()
    for _ in range(3):
        provider, handle, watched = stage.start("polite")
        provider.stop_node(handle, False)
        watched.ended()
    deadline = time.monotonic() + 60
    while is_left() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not is_left(), (count(), before)


def test_workers_end_when_the_provisioner_is_killed(
    stage: Any, worker_bin: Callable[[str], str], tmp_path: Path
) -> None:
    script = tmp_path / "provisioner.py"
    script.write_text(
        textwrap.dedent(
            """
            import os, sys, time
            from pathlib import Path
            from common.messages.provision import NodeProvisionSpec
            from services.provisioner.process_provider import ProcessProvider
            spec = NodeProvisionSpec(run_id=1, node_id=1, stage_index=0, image="")
            seen = []
            provider = ProcessProvider(sys.argv[1], os.environ)
            handle = provider.start_node(sys.argv[2], spec, Path("launch.json"), seen.append)
            while not seen:
                time.sleep(0.01)
            print(handle.provider_process_id, flush=True)
            time.sleep(60)
            """
        )
    )
    mark = f"orphan-{os.getpid()}"
    root = Path(__file__).parents[3]
    with subprocess.Popen(
        [sys.executable, script, worker_bin("polite"), mark],
        stdout=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": str(root)},
    ) as provisioner:
        assert provisioner.stdout is not None
        pid = int(provisioner.stdout.readline())
        assert stage.alive_with(mark) == [pid]
        provisioner.kill()
    deadline = time.monotonic() + 60
    while stage.alive_with(mark) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not stage.alive_with(mark)
