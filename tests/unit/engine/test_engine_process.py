"""The engine process over its socketpair: the whole conversation, cancels, faults and deaths."""

from __future__ import annotations

import os
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from common.messages.engine import (
    Cancel,
    Cancelled,
    ConfigureRole,
    EngineDecode,
    EngineDecoded,
    EngineDone,
    EngineEncode,
    EngineEncoded,
    EngineFault,
    EngineInfer,
    EngineReady,
    Fatal,
    Initialize,
    LoadWeights,
    Progress,
    Released,
    ReleaseRun,
    ResetRole,
    RoleConfigured,
    RoleReset,
    Shutdown,
    TokenDelta,
    WeightsLoaded,
)
from common.messages.node_agent import ChatMessage, EmbeddedGguf, LocalPath, Sampling
from tests.unit.engine.link import EngineLink
from worker.engine.progress import Phase, read_page

pytestmark = pytest.mark.engine


def load(link: EngineLink, path: Path, device: str = "", **options: int) -> WeightsLoaded:
    link.send(Initialize(device=device))
    ready = link.receive()
    assert isinstance(ready, EngineReady) and ready.pid == link.process.pid
    link.send(ConfigureRole(run_id=1, stage_index=0, stage_count=1, layer_start=0))
    assert link.receive() == RoleConfigured()
    link.send(weights(path, **options))
    loaded, before = link.until(WeightsLoaded)
    reports = [message for message in before if isinstance(message, Progress)]
    assert len(reports) == len(before)
    assert {report.phase for report in reports} == {"tensors", "warm_up"}
    return loaded


def weights(path: Path, **options: int) -> LoadWeights:
    return LoadWeights(model_id="m", gguf_source=LocalPath(path=str(path)), tokenizer=EmbeddedGguf(), **options)


@pytest.fixture(scope="module")
def link(model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineLink]:
    with EngineLink(tmp_path_factory.mktemp("engine") / "log") as link:
        loaded = load(link, model_path, max_context=512)
        assert (loaded.layers, loaded.max_context, loaded.eos_tokens) == (30, 512, [0, 2])
        yield link
        link.send(Shutdown())
        assert link.process.wait(60) == 0


@pytest.mark.spec("S1 2.5")
def test_a_prompt_streams_and_ends_once(link: EngineLink) -> None:
    link.send(EngineInfer(request_id=1, prompt="Name three primary colors."))
    done, deltas = link.until(EngineDone)
    assert all(isinstance(delta, TokenDelta) and delta.request_id == 1 for delta in deltas)
    assert "".join(delta.text for delta in deltas) == done.final_text  # type: ignore[attr-defined]
    assert sum(delta.tokens for delta in deltas) == done.tokens_generated  # type: ignore[attr-defined]
    assert (done.request_id, done.finish_reason, done.prompt_tokens) == (1, "stop", 35)
    assert "red" in done.final_text.lower() and done.elapsed_ms > 0


def test_messages_sampling_and_stop_strings_arrive(link: EngineLink) -> None:
    turns = [ChatMessage(role="user", content="Count from 1 to 10.")]
    link.send(
        EngineInfer(request_id=2, prompt="", messages=turns, max_tokens=5, sampling=Sampling(temperature=0.5, seed=3))
    )
    assert link.until(EngineDone)[0].tokens_generated <= 5
    link.send(EngineInfer(request_id=3, prompt="Count: 1, 2, 3,", raw=True, stop=[" 6"], max_tokens=40))
    done = link.until(EngineDone)[0]
    assert " 6" not in done.final_text and done.finish_reason == "stop"


@pytest.mark.spec("S1 2.5")
def test_a_cancel_is_the_one_terminal_and_comes_soon(link: EngineLink) -> None:
    link.send(EngineInfer(request_id=4, prompt="Tell me a very long story."))
    link.until(TokenDelta)
    link.send(EngineInfer(request_id=5, prompt="Another long story."))  # queued behind
    link.send(Cancel(request_id=5))
    link.send(Cancel(request_id=4))
    link.send(Cancel(request_id=4))
    seen = [link.receive(), link.receive()]
    while sum(isinstance(message, Cancelled) for message in seen) < 2:
        seen.append(link.receive())
    assert sum(isinstance(message, TokenDelta) for message in seen) < 200, "the story goes on for nobody"
    assert [message for message in seen if isinstance(message, Cancelled)] == [
        Cancelled(request_id=4),
        Cancelled(request_id=5),
    ]
    link.send(Cancel(request_id=99))
    assert link.receive() == Cancelled(request_id=99, known=False)


def test_tokenizer_work_is_answered_while_a_prompt_runs(link: EngineLink) -> None:
    link.send(EngineInfer(request_id=6, prompt="Tell me a very long story."))
    link.until(TokenDelta)
    link.send(EngineEncode(request_id=7, prompt="ok 🔥", raw=True))
    encoded = link.until(EngineEncoded)[0]
    texts = []
    for index, token in enumerate(encoded.tokens):
        link.send(EngineDecode(request_id=7, tokens=[token], last=index == len(encoded.tokens) - 1))
        texts.append(link.until(EngineDecoded)[0].text)
    assert "".join(texts) == "ok 🔥" and "" in texts
    link.send(EngineDecode(request_id=8, tokens=[1 << 20]))
    assert "outside the vocabulary" in link.until(EngineFault)[0].error
    link.send(Cancel(request_id=6))
    link.until(Cancelled)


@pytest.mark.spec("S1 10.10")
def test_requests_that_cannot_be_served_fault_and_the_engine_goes_on(link: EngineLink) -> None:
    for request, words in (
        (EngineInfer(request_id=9, prompt="word " * 600, raw=True), "the context holds 512"),
        (EngineInfer(request_id=10, prompt="x", sampling=Sampling(temperature=-1.0)), "temperature"),
        (EngineInfer(request_id=11, prompt="", raw=True), "the prompt is empty"),
    ):
        link.send(request)
        fault = link.receive()
        assert isinstance(fault, EngineFault) and words in fault.error and fault.request_id == request.request_id
    link.send(EngineInfer(request_id=12, prompt="Hi", max_tokens=1))
    assert link.until(EngineDone)[0].finish_reason == "length"


def test_the_progress_page_moves(link: EngineLink) -> None:
    until = time.monotonic() + 60  # an earlier test's last word may come before the page says so
    while read_page(link.page)[0] != Phase.IDLE and time.monotonic() < until:
        time.sleep(0.01)
    phase, before, stamp = read_page(link.page)
    assert phase == Phase.IDLE and time.monotonic_ns() - stamp < 60e9
    link.send(EngineInfer(request_id=13, prompt="Hi", max_tokens=2))
    link.until(EngineDone)
    assert read_page(link.page)[1] >= before + 3  # in, two steps; out may come after the word that it is done


def test_release_and_reset(link: EngineLink, model_path: Path) -> None:
    link.send(EngineInfer(request_id=14, prompt="Tell me a very long story."))
    link.until(TokenDelta)
    link.send(ReleaseRun())
    before = link.until(Released)[1]
    assert Cancelled(request_id=14) in before
    link.send(EngineInfer(request_id=15, prompt="x"))
    assert link.receive() == EngineFault(request_id=15, error="the engine has no weights loaded")
    link.send(ResetRole())
    assert link.receive() == RoleReset()
    link.send(ConfigureRole(run_id=2, stage_index=0, stage_count=1, layer_start=0))
    assert link.receive() == RoleConfigured()
    link.send(weights(model_path, max_context=256))
    assert link.until(WeightsLoaded)[0].max_context == 256


@pytest.mark.spec("S1 10.8")
@pytest.mark.parametrize(
    "content, words",
    [(None, "does not exist on this worker"), (b"<html>", "not a GGUF file"), (b"GGUF\x03\0\0\0", "truncated")],
)
def test_a_bad_model_is_one_sentence_and_exit_1(tmp_path: Path, content: bytes | None, words: str) -> None:
    path = tmp_path / "model.gguf"
    if content is not None:
        path.write_bytes(content)
    with EngineLink(tmp_path / "log") as link:
        link.send(Initialize())
        link.send(ConfigureRole(run_id=1, stage_index=0, stage_count=1, layer_start=0))
        link.send(weights(path))
        fatal = link.until(Fatal)[0]
        assert words in fatal.error and "\n" not in fatal.error
        assert content is None or "[model]" in fatal.error
        assert link.process.wait(60) == 1
    assert "Traceback" not in (tmp_path / "log").read_text()


@pytest.mark.spec("S1 10.8")
def test_a_layer_range_that_the_model_does_not_have(tmp_path: Path, model_path: Path) -> None:
    with EngineLink(tmp_path / "log") as link:
        link.send(Initialize())
        link.send(ConfigureRole(run_id=1, stage_index=0, stage_count=1, layer_start=5, layer_end_exclusive=31))
        link.send(weights(model_path))
        assert "layer range 5..31 is not inside the model's 30 layers" in link.until(Fatal)[0].error


@pytest.mark.parametrize("measure", [False, True])
def test_speed_is_measured_only_where_it_is_asked_for(tmp_path: Path, measure: bool) -> None:
    with EngineLink(tmp_path / "log") as link:
        link.send(Initialize(device="CPU", measure=measure))
        ready = link.receive()
        assert isinstance(ready, EngineReady)
        assert ready.memory_bytes > 0 and (ready.bytes_per_s > 0) is measure


def test_it_dies_with_its_agent(tmp_path: Path) -> None:
    link = EngineLink(tmp_path / "log")
    link.send(Initialize())
    assert isinstance(link.receive(), EngineReady)
    os.kill(link.process.pid, signal.SIGINT)  # a terminal's Ctrl-C is not for it
    time.sleep(0.1)
    assert link.process.poll() is None
    link.socket.close()
    assert link.process.wait(60) == 0


@pytest.mark.parametrize(
    "data",
    [struct.pack("<I", 1 << 31), struct.pack("<I", 3) + b"\xff\xff\xff", struct.pack("<I", 4) + b"\x81\xa1t\x01"],
)
def test_nonsense_on_the_link_is_fatal_and_no_traceback(tmp_path: Path, data: bytes) -> None:
    with EngineLink(tmp_path / "log") as link:
        link.socket.sendall(data)
        assert "the agent sent a" in link.until(Fatal)[0].error
        assert link.process.wait(60) == 1
    assert "Traceback" not in (tmp_path / "log").read_text()


@pytest.mark.parametrize("device", ["", "CPU:X86"])
def test_it_runs_without_any_program_on_the_path(tmp_path: Path, device: str) -> None:
    """No compiler and no cache: the C kernels come compiled, under tinygrad's own assembler too."""
    from tests.unit.engine.tiny_model import TinySpec, write_model

    write_model(tmp_path / "m.gguf", TinySpec(layers=1))
    env = {"PATH": "", "HOME": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path / "cache")}
    with EngineLink(tmp_path / "log", env) as link:
        load(link, tmp_path / "m.gguf", device)
        link.send(EngineInfer(request_id=1, prompt="hello", raw=True, max_tokens=3))
        assert link.until(EngineDone)[0].finish_reason in ("length", "stop")
    cache = tmp_path / "cache" / "swactor-mq"
    assert list(cache.glob("weights-*"))


def test_the_portable_kernels_need_no_program_either(tmp_path: Path) -> None:
    """DEV=CPU:X86 is an assembler in Python; it has nothing worth keeping."""
    from tests.unit.engine.tiny_model import TinySpec, write_model

    write_model(tmp_path / "m.gguf", TinySpec(layers=1))
    env = {"PATH": "", "HOME": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path), "SMQ_ENGINE_KERNELS": "portable"}
    with EngineLink(tmp_path / "log", env) as link:
        load(link, tmp_path / "m.gguf", "CPU:X86")
        link.send(EngineInfer(request_id=1, prompt="hello", raw=True, max_tokens=3))
        assert link.until(EngineDone)[0].finish_reason in ("length", "stop")


def test_the_command_line_says_what_it_needs() -> None:
    result = subprocess.run([sys.executable, "-P", "-m", "worker.engine"], capture_output=True, text=True, check=False)
    assert result.returncode == 2 and "--fd" in result.stderr


def test_a_broken_kernel_cache_is_made_again(tmp_path: Path) -> None:
    from tests.unit.engine.tiny_model import TinySpec, write_model
    from worker.engine import tinygrad_shim

    write_model(tmp_path / "m.gguf", TinySpec(layers=1))
    env = {**os.environ, "XDG_CACHE_HOME": str(tmp_path / "cache"), "SMQ_ENGINE_KERNELS": "portable"}
    env.pop("CACHEDB", None)
    name = tinygrad_shim._cache_file(tinygrad_shim.compiler_command()).name
    cache = tmp_path / "cache" / "swactor-mq" / name
    cache.parent.mkdir(parents=True)
    cache.write_bytes(b"not a database at all")
    with EngineLink(tmp_path / "log", env) as link:
        load(link, tmp_path / "m.gguf")
    assert cache.read_bytes().startswith(b"SQLite format 3")
