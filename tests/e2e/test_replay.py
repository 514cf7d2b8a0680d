"""A real run recorded from its start, and its core on the recording: the same, unless something was changed."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from pathlib import Path

import msgspec
import pytest

from common.addresses import SERVICES, Plane, Role
from common.codec import encode_envelope
from common.messages.bus import Hello
from common.messages.provision import NodeStarted, PrepareProvider
from tests.e2e.stack import Stack, wait_for
from tools import replay, tap
from tools.replay import Outcome, Replay, read

TRIES = 5
PARTIES = [str(role) for role in SERVICES - {Role.ROUTER, Role.RELAY}]


@pytest.fixture(scope="module")
def recording(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a whole run; again, where the tap found the router only after others had."""
    for number in range(TRIES):
        file = tmp_path_factory.mktemp(f"replay{number}") / "run.tap"
        record_run(file)
        if is_whole(file):
            return file
    raise AssertionError(f"the tap was {TRIES} times later than those whom it listens to")


def is_whole(file: Path) -> bool:
    """Every party's first word on each plane is there."""
    passed = [one.message for one in read(file)[0]]
    said = Counter(message.logical_id for message in passed if isinstance(message, Hello))
    is_early = any(isinstance(message, PrepareProvider) for message in passed)
    return is_early and all(said[party] >= len(Plane) for party in (*PARTIES, "node 1"))


def record_run(file: Path) -> None:
    stack = Stack()
    bus = stack.run_dir / "bus" / "tap.json"
    command = [sys.executable, "-P", "-m", "tools.tap", "--wait", "--bus", str(bus), "--record", str(file), "--stats"]
    listener = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        # Imported and polling before there is anything to miss.
        wait_for("the tap", lambda: b"pyzmq" in Path(f"/proc/{listener.pid}/maps").read_bytes(), 60)
        with stack:
            stack.ask("Name three primary colors.", max_tokens=8)
            stack.say("stop\n")
            stack.assert_stopped("stdin")
            out, _ = listener.communicate(timeout=150)
    finally:
        if listener.poll() is None:
            listener.kill()
    assert "TextDelta" in out


@pytest.mark.e2e
def test_the_core_says_what_it_said(recording: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert replay.main([str(recording)]) == 0, capsys.readouterr().out
    assert replay.SAME in capsys.readouterr().out


@pytest.mark.e2e
def test_an_input_that_is_missing_is_where_it_diverges(recording: Path) -> None:
    passed = [one for one in read(recording)[0] if not isinstance(one.message, NodeStarted)]
    found = Replay(passed).run().divergences()
    assert "recorded provider_start ready of node 1" in found[0], found
    assert any("RuntimeReadyAck" in sentence and sentence.startswith("recorded only") for sentence in found)


@pytest.mark.e2e
def test_what_a_prompt_caused_is_in_the_recording(recording: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = next(one for one in read(recording)[0] if type(one.message).__name__ == "InferPrompt")
    assert tap.main(["--read", str(recording), "--tree", str(asked.envelope.id)]) == 0
    lines = capsys.readouterr().out.splitlines()
    at = next(number for number, line in enumerate(lines) if "InferPrompt" in line)
    assert any("TextDelta" in line for line in lines[at + 1 :])


@pytest.mark.e2e
def test_what_cannot_be_fed_in_is_counted(recording: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    replay.main([str(recording)])
    before = capsys.readouterr().out
    assert "cannot be decoded" not in before
    file = tmp_path / "more.tap"
    file.write_bytes(recording.read_bytes())
    passed, _ = read(recording)
    asked = next(one for one in passed if isinstance(one.message, NodeStarted))
    stray = msgspec.structs.replace(asked.envelope, dst=b"?" * 32, id=asked.envelope.id + (1 << 40))
    with file.open("ab") as more:
        for frame in (b"junk", encode_envelope(stray)):
            at_ms = passed[-1].at_ms
            tap.write_entry(
                more, "router", msgspec.msgpack.encode((at_ms, int(Plane.CONTROL), "in", "forwarded", frame))
            )
    assert replay.main([str(file)]) == 0
    told = capsys.readouterr().out
    assert "1 entries of the router cannot be decoded" in told
    assert Replay(read(file)[0]).run().unknown == Replay(passed).run().unknown + 1
    assert "inputs went to addresses that the core does not have" in told


def test_how_often_is_shown_and_is_no_divergence() -> None:
    what, once = ("prompt_gateway", "OpenPromptRpc"), ("worker", "RuntimeReadyAck")
    outcome = Outcome(recorded=Counter({what: 2, once: 1}), replayed=Counter({what: 3, once: 1}))
    assert outcome.divergences() == []
    assert outcome.amounts() == ["2 recorded, 3 replayed: OpenPromptRpc to prompt_gateway"]


def test_what_cannot_be_replayed_is_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert replay.main([str(tmp_path / "none")]) == 1
    (tmp_path / "empty").touch()
    assert replay.main([str(tmp_path / "empty")]) == 1
    (tmp_path / "junk").write_bytes(b"\xff" * 100)
    assert replay.main([str(tmp_path / "junk")]) == 1
    errors = capsys.readouterr().err.splitlines()
    assert len(errors) == 3 and all(line.startswith("mvp-replay: ") for line in errors), errors
