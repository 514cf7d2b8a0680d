"""mvp-chat: on terminals, in pipes, with commands, and with a stack of its own that it starts and stops."""

from __future__ import annotations

import io
import json
import os
import pty
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.unit.prompt_gateway.stack import Stack
from tools import chat
from tools.chat_run import Steps, run_directory

ROOT = Path(__file__).parents[3]


@pytest.fixture
def stack() -> Iterator[Stack]:
    with Stack() as stack:
        yield stack


def talk(stack: Stack, text: str, **options: object) -> tuple[int, str, str]:
    out, log = io.StringIO(), io.StringIO()
    status = chat.run_chat(stack.addr, stdin=io.StringIO(text), stdout=out, stderr=log, **options)  # type: ignore[arg-type]
    return status, out.getvalue(), log.getvalue()


class Terminal:
    """mvp-chat on a pseudo terminal."""

    def __init__(self, *arguments: str, **environ: str) -> None:
        self.main, chat_end = pty.openpty()
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-m", "tools.chat", *arguments],
            env={**os.environ, "PYTHONPATH": str(ROOT), "TERM": "xterm", **environ},
            stdin=chat_end,
            stdout=chat_end,
            stderr=chat_end,
            start_new_session=True,
        )
        os.close(chat_end)
        self.seen = bytearray()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        try:
            while data := os.read(self.main, 4096):
                self.seen.extend(data)
                if b"\x1b[6n" in data:
                    # prompt_toolkit asks where the cursor is; a real terminal answers.
                    os.write(self.main, b"\x1b[1;1R")
        except OSError:
            pass  # the terminal of a process that ended

    @property
    def text(self) -> str:
        return self.seen.decode(errors="replace")

    def see(self, fact: Callable[[str], bool], limit_s: float = 60) -> None:
        until = time.monotonic() + limit_s
        while not fact(self.text):
            assert time.monotonic() < until, f"the terminal shows {self.text[-2000:]!r}"
            time.sleep(0.02)

    def at_prompt(self, number: int) -> None:
        """The prompt is there for the number-th time: what is typed before that is read by the kernel's own editor."""
        self.see(lambda text: text.count("\x1b[?2004h") >= number)

    def type(self, keys: bytes) -> None:
        os.write(self.main, keys)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self.main)


@pytest.fixture
def terminal(stack: Stack, tmp_path: Path) -> Iterator[Terminal]:
    terminal = Terminal("--connect", stack.addr, XDG_STATE_HOME=str(tmp_path))
    yield terminal
    terminal.close()


# --- terminals ---------------------------------------------------------------------------------------------------
def test_a_chat_on_a_terminal_with_history_and_several_lines(terminal: Terminal, stack: Stack, tmp_path: Path) -> None:
    terminal.see(lambda text: ">" in text)
    terminal.type(b"echo **a** b\r")
    terminal.see(lambda text: "\x1b[1m" in text and "b" in text.partition("\x1b[1m")[2])
    terminal.at_prompt(2)
    terminal.type(b"echo first\x1b\rsecond\r")
    stack.until(lambda: len(stack.infers) == 2)
    assert stack.infers[1].messages[-1].content == "echo first\nsecond"
    history = tmp_path / "swactor-mq" / "chat_history"
    assert "echo **a** b" in history.read_text() and history.stat().st_mode & 0o077 == 0
    terminal.at_prompt(3)
    terminal.type(b"/stats\r")
    terminal.see(lambda text: "this chat: 2 answers" in text)
    terminal.at_prompt(4)
    terminal.type(b"\x04")
    assert terminal.process.wait(60) == 0


def test_ctrl_c_stops_an_answer_and_twice_at_the_prompt_leaves(terminal: Terminal, stack: Stack) -> None:
    terminal.see(lambda text: ">" in text)
    terminal.type(b"drip\r")
    terminal.see(lambda text: text.count("drip ") > 3)
    terminal.process.send_signal(signal.SIGINT)
    terminal.see(lambda text: "[stopped]" in text)
    stack.until(lambda: stack.cancels)
    terminal.at_prompt(2)
    terminal.type(b"\x03")
    terminal.see(lambda text: "Ctrl-C again or Ctrl-D leaves" in text)
    terminal.at_prompt(3)
    terminal.type(b"\x03")
    assert terminal.process.wait(60) == 0


class Screen(io.StringIO):
    """A terminal in memory."""

    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("term", ["xterm", "dumb"])
def test_what_the_model_says_does_nothing_to_the_terminal(
    stack: Stack, monkeypatch: pytest.MonkeyPatch, term: str
) -> None:
    monkeypatch.setenv("TERM", term)
    screen = Screen()
    chat.Chat(stack.addr, out=screen, log=io.StringIO()).say("echo a\x1b]0;owned\x07\u202eb")
    assert "a\\x1b]0;owned\\x07\\u202eb" in screen.getvalue()


# --- pipes and scripts -------------------------------------------------------------------------------------------
def test_one_prompt_for_scripts(stack: Stack, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--connect", stack.addr, "--prompt", "echo a b", "--temperature", "0.5", "--seed", "7", "--top-k", "3"]
    assert chat.main(arguments) == 0
    assert capsys.readouterr().out == "ab\n"
    sampling = stack.infers[0].sampling
    assert sampling is not None and (sampling.temperature, sampling.seed, sampling.top_k) == (0.5, 7, 3)
    assert chat.main(["--connect", stack.addr, "--prompt", "fault no\x1b[2J"]) == 1
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", "mvp-chat: error: no\\x1b[2J\n")


def test_commands(stack: Stack, tmp_path: Path) -> None:
    text = f"echo a\n/save {tmp_path}/c.json\n/save {tmp_path}/c.md\n/save\n/save /nowhere/x\n/plan\n/help\n/stats\n"
    status, out, log = talk(stack, text, system="s")
    assert (status, out) == (0, "a\n")
    assert [turn["role"] for turn in json.loads((tmp_path / "c.json").read_text())] == ["system", "user", "assistant"]
    assert "## assistant\n\na\n" in (tmp_path / "c.md").read_text()
    for words in ("needs the name", "cannot write /nowhere/x", "somebody else", "/reset", "this chat: 1 answers"):
        assert words in log
    conversation = chat.Chat(stack.addr, out=io.StringIO(), log=io.StringIO())
    assert not chat.command(conversation, "/etc/passwd is what?", None, io.StringIO()), "a turn may begin with a slash"


@pytest.mark.parametrize(
    "arguments",
    [
        ["--connect", "x:1", "--process"],
        ["--docker", "--process"],
        ["--connect", "x:1", "--config", "f"],
        ["--max-tokens", "-1"],
        ["--pipeline-stages", "0"],
    ],
)
def test_what_does_not_go_together(arguments: list[str]) -> None:
    with pytest.raises(SystemExit):
        chat.main(arguments)


def test_help_has_examples(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        chat.main(["--help"])
    assert "mvp-chat --connect 127.0.0.1:19777" in capsys.readouterr().out


def test_steps_and_bars(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    screen = Screen()
    steps = Steps(screen)
    steps.record({"phase": "provider_start", "status": "ready", "node_id": 2})
    steps.record(
        {"phase": "stage_provision_wait", "node_id": 2, "detail": {"phase": "tensors", "done": 5, "total": 10}}
    )
    steps.record({"phase": "stage_provision_wait", "node_id": 2, "detail": {"phase": "x", "done": 0, "total": 0}})
    steps.record({"phase": "stage_provision_wait", "detail": 7})
    steps.record({"phase": "weights_loaded", "status": "ready"})
    assert "worker 2 started" in screen.getvalue()
    assert "[############............]  50%" in screen.getvalue()


def test_the_run_directory_is_found_by_its_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    for name, pid in (("smq-a", 41), ("smq-b", 42)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "lock").write_text(str(pid))
    assert run_directory(42, "") == tmp_path / "smq-b"
    assert run_directory(43, "") is None
    assert run_directory(41, str(tmp_path / "smq-a")) == tmp_path / "smq-a"
    assert run_directory(41, str(tmp_path / "smq-b")) is None


# --- a stack of its own ------------------------------------------------------------------------------------------
@pytest.mark.e2e
def test_it_starts_and_stops_a_stack_of_its_own(tmp_path: Path) -> None:
    environ = {**os.environ, "XDG_STATE_HOME": str(tmp_path), "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-P", "-m", "tools.chat", "--max-tokens", "6"],
        input="Say hello.\n/plan\n",
        capture_output=True,
        text=True,
        timeout=300,
        env=environ,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() and done.stdout.count("\n") == 1
    for words in (
        "worker 1 started",
        "ready for prompts",
        "worker 1: stage 0, all layers",
        "stopped: worker 1 (process)",
    ):
        assert words in done.stderr
    assert done.stderr.endswith("everything is stopped\n")


@pytest.mark.e2e
def test_a_configuration_that_is_wrong_is_one_sentence(tmp_path: Path) -> None:
    config = tmp_path / "c.toml"
    config.write_text('[model]\nid = "x"\n[nonsense]\n')
    done = subprocess.run(
        [sys.executable, "-P", "-m", "tools.chat", "--config", str(config), "--prompt", "x"],
        capture_output=True,
        text=True,
        timeout=180,
        env={**os.environ, "XDG_STATE_HOME": str(tmp_path), "PYTHONPATH": str(ROOT)},
    )
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("mvp-chat: ") and "nonsense" in done.stderr and done.stderr.count("\n") == 1
