"""Provider docker on a real engine: what a worker sees, what it says, how it ends, and that nothing of it is left."""

from __future__ import annotations

import json
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from common.messages.provision import ProviderMount
from services.provisioner.plugin import (
    Exited,
    Failed,
    LeftBehind,
    MayBeLeft,
    Owner,
    ProviderError,
    StderrLine,
    StdoutLine,
)


def looks(watched: Any) -> dict[str, Any]:
    watched.ended()
    line = next(item.line for item in watched.seen if isinstance(item, StdoutLine))
    found: dict[str, Any] = json.loads(line)
    return found


@pytest.mark.spec("S1 5.4", "S1 8.9")
def test_a_polite_worker_is_heard_stopped_and_removed(stage: Any) -> None:
    provider, handle, watched = stage.start("polite", stage.provider(grace_ms=60_000))
    watched.wait(lambda seen: StdoutLine("ready") in seen and StderrLine("careful") in seen)
    provider.stop_node(handle, False)
    assert watched.ended() == Exited(0, "exited with status 0")
    assert StdoutLine("bye") in watched.seen
    assert stage.engine.containers() == []
    provider.stop_node(handle, False)


@pytest.mark.spec("S1 10.6")
def test_an_early_exit_is_told_once_after_its_last_words(stage: Any) -> None:
    provider, handle, watched = stage.start("exits")
    assert watched.ended() == Exited(3, "exited with status 3")
    assert watched.seen == [StderrLine("cannot: no such model"), Exited(3, "exited with status 3")]
    provider.stop_node(handle, False)
    assert stage.engine.containers() == []


def test_a_worker_that_ignores_sigterm_is_killed_after_the_grace(stage: Any) -> None:
    provider, handle, watched = stage.start("stubborn", stage.provider(grace_ms=1000))
    watched.wait(lambda seen: StdoutLine("deaf") in seen)
    begin = time.monotonic()
    provider.stop_node(handle, False)
    assert 1 <= time.monotonic() - begin < 60
    assert watched.ended() == Exited(-signal.SIGKILL, "stopped")
    assert stage.engine.containers() == []


def test_a_fast_stop_ends_a_graceful_one_that_is_under_way(stage: Any) -> None:
    provider, handle, watched = stage.start("stubborn", stage.provider(grace_ms=60_000))
    watched.wait(lambda seen: StdoutLine("deaf") in seen)
    patient = threading.Thread(target=provider.stop_node, args=(handle, False))
    patient.start()
    time.sleep(0.3)
    begin = time.monotonic()
    provider.stop_node(handle, True)
    patient.join(50)
    assert not patient.is_alive()
    assert time.monotonic() - begin < 50
    assert stage.engine.containers() == []


def test_long_lines_are_whole_and_the_last_half_line_is_not_lost(stage: Any) -> None:
    _, _, watched = stage.start("long")
    watched.ended()
    lines = [item.line for item in watched.seen if isinstance(item, StdoutLine)]
    assert [len(line) for line in lines] == [16384, 16384, 7233, 4, 11]
    assert lines[-2:] == ["next", "half a line"]


@pytest.mark.spec("S1 5.4", "S1 7.2")
def test_the_worker_gets_its_launch_file_and_the_model_read_only(stage: Any, tmp_path: Path) -> None:
    model = tmp_path / "model.gguf"
    model.write_text("weights")
    model.chmod(0o666)
    mount = ProviderMount(host_path=str(model), container_path="/models/cached/model.gguf")
    env = {"HF_TOKEN": "hf_secret", "VASTAI_API_KEY": "vast_secret", "DEV": "CPU"}
    provider, handle, watched = stage.start("looks", mounts=[mount], args=["/models/cached/model.gguf"], env=env)
    found = looks(watched)
    assert found["launch"] == '{"secret_key": "s3cret-of-the-worker"}'
    assert found["modes"] == ["0o700", "0o600"]
    assert found["owners"] == [4711, 4711, 4711] and found["uid"] == 4711
    assert (found["model"], found["writable"]) == ("weights", "Read-only file system")
    assert found["environment"]["DEV"] == "CPU"
    assert not {"HF_TOKEN", "VASTAI_API_KEY"} & set(found["environment"])
    shown = json.dumps(stage.engine.client().inspect_container(handle.facts["container"]))
    for secret in ("s3cret-of-the-worker", "hf_secret", "vast_secret"):
        assert secret not in shown
    provider.stop_node(handle, True)


def test_labels_say_whose_worker_it_is(stage: Any) -> None:
    provider, handle, _ = stage.start("polite")
    container = stage.engine.client().inspect_container(handle.facts["container"])
    labels = container["Config"]["Labels"]
    assert labels["swactor-mq.fleet"] == "0123456789abcdef" and labels["swactor-mq.instance"] == "test"
    assert labels["swactor-mq.handle"] == handle.id and labels["swactor-mq.run"] == "cafe0123"
    assert (labels["swactor-mq.run_id"], labels["swactor-mq.stage"]) == ("1", "0")
    assert container["HostConfig"]["CapDrop"] == ["ALL"]
    assert container["HostConfig"]["RestartPolicy"]["Name"] in ("", "no")
    provider.stop_node(handle, True)


def test_running_out_of_memory_is_told_apart(stage: Any) -> None:
    provider, handle, watched = stage.start("hungry")
    watched.wait(lambda seen: StdoutLine("hungry") in seen)
    stage.engine.client().update_container(handle.facts["container"], mem_limit="64m", memswap_limit="64m")
    stage.engine.client().kill(handle.facts["container"], "SIGUSR1")
    end = watched.ended()
    assert end.status == -signal.SIGKILL
    assert "ran out of memory" in end.reason
    provider.stop_node(handle, True)


def test_a_kill_from_outside_is_an_exit_and_a_removal_a_failure(stage: Any) -> None:
    provider, handle, watched = stage.start("polite")
    stage.engine.client().kill(handle.facts["container"])
    assert watched.ended() == Exited(-signal.SIGKILL, "killed by signal 9 (SIGKILL)")
    provider.stop_node(handle, True)
    provider, handle, watched = stage.start("polite")
    watched.wait(lambda seen: StdoutLine("ready") in seen)
    stage.engine.client().remove_container(handle.facts["container"], force=True)
    watched.wait(lambda seen: any(isinstance(item, Exited | Failed) for item in seen))
    assert isinstance(watched.seen[-1], Exited | Failed)
    provider.stop_node(handle, True)
    assert stage.engine.containers() == []


@pytest.mark.spec("S1 10.5")
def test_refusals_say_what_to_do_and_leave_nothing(stage: Any) -> None:
    with pytest.raises(ProviderError, match=r'image smq-none:1 is not on the engine and \[docker\] pull is "never"'):
        stage.provider(image="smq-none:1").prepare()
    with pytest.raises(ProviderError, match="the engine knows no GPU driver; install the NVIDIA container toolkit"):
        stage.start("polite", stage.provider(gpus="all"))
    provider, handle, watched = stage.start("polite", image="debian:bookworm-slim")
    assert "its image has no program mvp-worker-node that can run; build it from compose/" in watched.ended().reason
    provider.stop_node(handle, True)
    mount = ProviderMount(host_path="/nowhere/model.gguf", container_path="/models/model.gguf")
    with pytest.raises(ProviderError, match="the model file is not on the engine's machine"):
        stage.start("polite", mounts=[mount])
    with pytest.raises(ProviderError, match=r"cannot pull image smq-none:1: .*build it with"):
        stage.start("polite", stage.provider(image="smq-none:1", pull="missing"), image="smq-none:1")
    assert stage.engine.containers() == []


def test_an_engine_that_is_not_there_is_said_so(stage: Any) -> None:
    provider = stage.provider()
    provider._engine._environment["DOCKER_HOST"] = "unix:///tmp/smq-no-engine.sock"
    with pytest.raises(ProviderError, match=r"no engine answers at unix:///tmp/smq-no-engine\.sock; start Docker"):
        provider.prepare()


@pytest.mark.spec("S1 9.16")
def test_leftovers_are_found_by_label_and_nobody_elses_are_touched(stage: Any) -> None:
    _, mine, _ = stage.start("polite")
    other = stage.provider(owner=Owner("fedcba9876543210", "other"))
    _, theirs, _ = stage.start("polite", other)
    third = stage.provider()
    left = LeftBehind(mine.id, "docker", "cafe0123", 1, "", mine)
    assert third.stop_left_behind(left)
    assert not third.stop_left_behind(left)
    assert [found["Id"] for found in stage.engine.containers()] == [theirs.facts["container"]]
    # Died between intent and handle: by the label alone.
    assert third.stop_left_behind(LeftBehind(theirs.id, "docker", "cafe0123", 1, ""))
    foreign = LeftBehind(mine.id, "docker", "cafe0123", 1, "", type(mine)(mine.id, None, {"engine": "AAAA:BBBB"}))
    with pytest.raises(ProviderError, match="started on another Docker engine"):
        third.stop_left_behind(foreign)


def test_an_unclear_create_keeps_the_entry_open(stage: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    provider = stage.provider()
    provider.prepare()
    real = provider._engine.api().create_container

    def times_out(**arguments: Any) -> Any:
        real(**arguments)
        raise TimeoutError("read timed out")

    monkeypatch.setattr(provider._engine.api(), "create_container", times_out)
    with pytest.raises(MayBeLeft):
        stage.start("polite", provider)
    assert stage.engine.containers() == []


def test_an_engine_restart_with_live_restore_loses_neither_worker_nor_lines(stage: Any) -> None:
    engine = stage.engine
    engine.end()
    engine.live_restore = True
    engine.start()
    try:
        provider, handle, watched = stage.start("ticks")
        watched.wait(lambda seen: StdoutLine("tick 3") in seen)
        engine.end(signal.SIGKILL)
        time.sleep(1)
        engine.start()
        watched.wait(lambda seen: StdoutLine("tick 60") in seen, 150)
        ticks = [item.line for item in watched.seen if isinstance(item, StdoutLine) and item.line.startswith("tick")]
        assert ticks == [f"tick {count}" for count in range(len(ticks))]
        provider.stop_node(handle, True)
        assert engine.containers() == []
    finally:
        engine.end()
        engine.live_restore = False
        engine.start()


def test_an_engine_that_stops_takes_the_worker_along_and_that_is_said(stage: Any) -> None:
    engine = stage.engine
    provider, handle, watched = stage.start("ticks")
    watched.wait(lambda seen: StdoutLine("tick 1") in seen)
    engine.end()
    engine.start()
    watched.wait(lambda seen: any(isinstance(item, Exited | Failed) for item in seen), 150)
    end = watched.seen[-1]
    assert isinstance(end, Exited) and end.status is not None and end.status < 0
    provider.stop_node(handle, True)
    assert engine.containers() == []
