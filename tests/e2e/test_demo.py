"""`./dev demo` as a stranger types it: the answer alone on stdout, and everything is gone afterwards."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.stack import (
    COLOURS,
    COLOURS_TOKENS,
    GONE_S,
    Process,
    assert_right,
    processes,
    wait_for,
    wait_taken_apart,
)


@pytest.fixture
def state() -> Iterator[Path]:
    """The mark of everything that is started; killed at the end."""
    with tempfile.TemporaryDirectory(prefix="smq-e2e-", dir="/tmp") as directory:
        yield Path(directory) / "state"
        for process in left(Path(directory) / "state"):
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGKILL)


def left(state: Path) -> list[Process]:
    """What still runs."""
    return processes("XDG_STATE_HOME", str(state))


def start(state: Path, *arguments: str) -> subprocess.Popen[str]:
    """The demo with pipes for everything."""
    environ = {**os.environ, "XDG_STATE_HOME": str(state)}
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "tools.demo", *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environ,
        cwd=state.parent,
    )


def test_a_prompt(state: Path) -> None:
    demo = start(state, "--prompt", COLOURS, "--max-tokens", str(COLOURS_TOKENS))
    out, err = demo.communicate(timeout=300)
    assert demo.returncode == 0, err
    assert out.endswith("\n") and out.strip() == out[:-1]
    assert_right(out[:-1])
    said = [line.split(" s  ", 1)[1] for line in err.splitlines()]
    assert said[0] == "services are up" and said[-2:] == ["ready for prompts", "everything is stopped"]
    wait_taken_apart(lambda: left(state))
    assert len(list((state / "swactor-mq" / "demo").glob("*.jsonl"))) == 1


def test_a_chat_that_is_killed(state: Path) -> None:
    """SIGKILL takes the demo in the middle of a chat: the orchestrator is told by the kernel and stops everything."""
    demo = start(state)
    assert demo.stderr is not None
    for line in demo.stderr:
        if "ready for prompts" in line:
            break
    assert {"agent", "engine", "prompt_gateway"} <= {process.part for process in left(state)}
    demo.kill()
    demo.wait(60)
    wait_for("all gone", lambda: not left(state), GONE_S)


def test_a_wrong_model(state: Path, tmp_path: Path) -> None:
    """One sentence, and where to look."""
    bad = tmp_path / "bad.gguf"
    bad.write_text("<html>")
    demo = start(state, "--prompt", COLOURS, "--model", str(bad))
    out, err = demo.communicate(timeout=300)
    assert (demo.returncode, out) == (1, "")
    lines = [line for line in err.splitlines() if line.startswith("demo: ")]
    assert len(lines) == 2 and "not a GGUF file" in lines[0] and "mvp-archive" in lines[1]
    wait_taken_apart(lambda: left(state))
