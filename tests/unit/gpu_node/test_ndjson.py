"""The worker of S2 6.4 as a process, with its stub, and its line logic alone."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from worker.engine.errors import EngineError
from worker.engine.ndjson import LINE_BYTES_MAX, Pipes, Stub, reply_to, source_of

COMMAND = [sys.executable, "-P", "-m", "worker.engine", "--ndjson"]


def run(data: bytes, *options: str) -> tuple[int, list[dict[str, Any]], str]:
    done = subprocess.run([*COMMAND, *options], input=data, capture_output=True, timeout=120, check=False)
    return done.returncode, [json.loads(line) for line in done.stdout.splitlines()], done.stderr.decode()


@pytest.mark.spec("S2 6.4")
def test_ready_first_then_one_line_for_each_in_order() -> None:
    lines = [b'{"prompt":"a","max_tokens":1,"temperature":0}', b"nonsense", b"", b'{"id":7,"prompt":"b"}', b"{}"]
    status, (ready, *answers), _ = run(b"\n".join(lines), "--stub")
    assert status == 0
    assert ready["status"] == "ready" and isinstance(ready["pid"], int)
    assert answers == [
        {"response": "[stub] a"},
        {"error": "invalid JSON: Expecting value: line 1 column 1 (char 0)"},
        {"id": 7, "response": "[stub] b"},
        {"error": "missing 'prompt' field"},
    ]


@pytest.mark.spec("S2 6.4")
@pytest.mark.parametrize(
    ("line", "error"),
    [
        (b"[]", "invalid JSON: the line is not an object"),
        (b"\xff", "invalid JSON: "),
        (b"[" * 100_000, "invalid JSON: "),
        (b'{"prompt":5}', "missing 'prompt' field"),
        (b'{"prompt":"x","max_tokens":"5"}', "'max_tokens' is not a number of tokens"),
        (b'{"prompt":"x","max_tokens":-1}', "'max_tokens' is not a number of tokens"),
        (b'{"prompt":"x","temperature":true}', "'temperature' is not a number"),
        (None, f"the line is longer than {LINE_BYTES_MAX} bytes"),
    ],
)
def test_bad_lines_are_one_error_each(line: bytes | None, error: str) -> None:
    assert reply_to(line, Stub())["error"].startswith(error)


@pytest.mark.spec("S2 6.4", "S2 7.3.3")
def test_a_failing_generation_is_an_error_line() -> None:
    class Failing:
        def answer(self, prompt: str, max_tokens: int, temperature: float) -> str:
            raise {"engine": EngineError("the prompt is empty"), "other": RuntimeError("boom")}[prompt]

    assert reply_to(b'{"prompt":"engine","id":1}', Failing()) == {"id": 1, "error": "the prompt is empty"}
    assert reply_to(b'{"prompt":"other"}', Failing()) == {"error": "generation failed: boom"}


def test_lines_are_cut_anywhere_and_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("worker.engine.ndjson.LINE_BYTES_MAX", 10)
    monkeypatch.setattr("worker.engine.ndjson.READ_BYTES", 3)
    reader, writer = os.pipe()
    os.write(writer, b"ab\ncdefg\n" + b"x" * 40 + b"\nlast")
    os.close(writer)
    pipes = Pipes(reader, 2)
    assert list(pipes.lines()) == [b"ab", b"cdefg", None, b"last"]
    os.close(reader)


@pytest.mark.spec("S2 6.4")
def test_a_model_that_cannot_be_loaded_is_one_error_and_status_1(tmp_path: Path) -> None:
    for model in (str(tmp_path / "none.gguf"), __file__, "hf://nobody"):
        status, lines, said = run(b"", "--model", model)
        assert status == 1 and len(lines) == 1 and lines[0]["error"].startswith("the model could not be loaded: ")
        assert "Traceback" not in said


def test_model_sources() -> None:
    assert source_of("a/b.gguf").path == "a/b.gguf"  # type: ignore[union-attr]
    hub = source_of("hf://o/r/sub/f.gguf")
    assert (hub.repo, hub.file) == ("o/r", "sub/f.gguf")  # type: ignore[union-attr]


@pytest.mark.spec("S2 5")
def test_it_ends_when_its_parent_is_gone() -> None:
    process = subprocess.Popen([*COMMAND, "--stub"], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdin and process.stdout and b"ready" in process.stdout.readline()
    process.stdin.close()
    process.stdout.close()
    assert process.wait(60) == 0
    half = subprocess.Popen([*COMMAND, "--stub"], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert half.stdin and half.stdout and b"ready" in half.stdout.readline()
    half.stdout.close()
    time.sleep(0.1)
    half.stdin.write(b'{"prompt":"x"}\n')
    half.stdin.flush()
    assert half.wait(60) == 0, "nobody reads the answers"
    half.stdin.close()
