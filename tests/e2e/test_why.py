"""`mvp-archive FILE why` on runs that really lost a part: the right answer, readable, with what can be done."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.e2e.stack import Asker, Stack

pytestmark = pytest.mark.e2e


def why(stack: Stack) -> list[str]:
    command = [sys.executable, "-P", "-m", "tools.archive", str(stack.archive.path), "why"]
    told = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert told.stderr == ""
    return told.stdout.splitlines()


@pytest.mark.spec("S1 10.15")
@pytest.mark.parametrize(
    ("part", "cause"),
    [
        ("agent", "node 1 exited while serving prompts: killed by signal 9 (SIGKILL)"),
        ("engine", "the engine was killed by SIGKILL"),
        ("prompt_gateway", "the prompt gateway was killed by SIGKILL"),
    ],
)
def test_a_part_that_is_killed_is_the_cause(part: str, cause: str) -> None:
    with Stack() as stack:
        asker = Asker(stack.addr(), "Write a very long story about a lighthouse keeper.", max_tokens=400)
        asker.wait_text()
        stack.kill(part)
        assert stack.wait() == 1
        lines = why(stack)
        assert lines[:2] == ["run 1: failed", "phase: serve_prompts"]
        assert lines[2].startswith("cause: ") and cause in lines[2]
        assert stack.stderr.strip().endswith(lines[2].removeprefix("cause: ")), "the archive and stderr say the same"
        assert lines[3].startswith("what to do: ") and "oom" in lines[3]
        timeline = lines[lines.index("timeline:") + 1 :]
        assert len(timeline) > 20
        # What others say of the worker's end may come after that.
        assert any("orch_exit failed" in line for line in timeline[-6:])


@pytest.mark.spec("S1 10.15")
def test_a_relay_that_is_killed_is_restarted_and_no_cause() -> None:
    with Stack(config='[relay]\nmode = "default"\n') as stack:
        stack.addr()
        stack.kill("relay")
        stack.wait_record("service_restart", "observed")
        stack.ask("Say hello.", max_tokens=4)
        stack.say("stop\n")
        stack.assert_stopped("stdin")
        lines = why(stack)
        assert lines[:3] == ["run 1: ended", "phase: orch_exit", "cause: shutdown by stdin"]
        assert any("service_restart observed" in line and "relay" in line for line in lines)
