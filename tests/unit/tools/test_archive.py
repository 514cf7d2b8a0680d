"""`mvp-archive`: it reads what a run and what a killed run left, filters, follows, and says why a run stopped."""

from __future__ import annotations

import csv
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.datastream import stream_text, worker_stream
from common.records import (
    CHANNEL_BOOTSTRAP,
    CHANNEL_EVENTS,
    CHANNEL_PROMPT,
    bootstrap_record,
    event_record,
    log_channel,
    log_record,
    prompt_record,
)
from common.web_socket import WebError, listen
from services.datastream_collector import reader
from services.datastream_collector.archive import FrameArchive
from services.datastream_collector.frames import CollectedFrame
from services.datastream_collector.reader import Entry
from services.datastream_collector.story import ADVICE, Story
from services.orchestrator.children import how_it_ended
from services.provisioner.processes import describe_status
from tools import archive as tool
from tools.archive import explain

ROOT = Path(__file__).resolve().parents[3]
T0 = 1_800_000_000_000


class Writer:
    """Writes archives as the collector does."""

    def __init__(self, path: Path) -> None:
        self.archive = FrameArchive(str(path))
        self.position = 0
        self.ms = T0

    def run(self) -> None:
        self.position = 0

    def put(self, channel: str, payload: bytes, stream: str = "mvp-orchestrator/1") -> None:
        source = "orchestrator" if stream.startswith("mvp") else "node_cluster"
        self.archive.append(CollectedFrame(source, stream, channel, 1, self.position, payload, self.ms))
        self.position += 1
        self.ms += 100

    def phase(self, phase: str, status: str, node_id: int = 1, **detail: Any) -> None:
        self.put(CHANNEL_BOOTSTRAP, bootstrap_record(phase, status, 1, node_id, detail))

    def stderr(self, node_id: int, line: str) -> None:
        self.put(log_channel(node_id, "stderr"), log_record(1, node_id, "stderr", line))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Three runs: a good one, one whose worker died, one that was killed in the middle of a write."""
    path = tmp_path / "a.jsonl"
    writer = Writer(path)
    writer.phase("config", "ready", boot=11)
    writer.phase("weights_loaded", "ready")
    writer.put(CHANNEL_PROMPT, prompt_record("prompt_work", "observed", 1, 1, "r-7", {"prompt_bytes": 5}))
    writer.put(CHANNEL_PROMPT, prompt_record("prompt_complete", "ready", 1, 1, "r-8"))
    writer.phase("shutdown", "started", source="stdin")
    writer.phase("orch_exit", "ready", result="ok")
    writer.run()
    writer.phase("config", "ready", boot=12)
    writer.put(CHANNEL_EVENTS, event_record("ProvisionStart", 1, 2, "process", "starting"))
    for number in range(70):
        writer.stderr(2, f"line {number}")
    for _ in range(12):
        writer.phase("stage_provision_send", "sent", node_id=2, stage_index=0)
    writer.phase("weights_loaded", "failed", node_id=2, error="worker 2 exited with status 9")
    writer.phase("provider_stop", "failed", node_id=2, error="no such process")
    writer.phase("orch_exit", "failed", error="weights_loaded: worker 2 exited with status 9")
    writer.put("mvp.worker.log", b"\xff\xfe", stream=stream_text(worker_stream(2, 1)))
    writer.run()
    writer.phase("config", "ready", boot=13)
    writer.phase("iroh_driver", "ready")
    with path.open("ab") as file:
        file.write(b'{"arrival_seq":99,"sour')
    return path


def call(capsys: pytest.CaptureFixture[str], *argv: object) -> tuple[int, list[str], str]:
    status = tool.main([str(arg) for arg in argv])
    out = capsys.readouterr()
    return status, out.out.splitlines(), out.err


def test_one_line_a_record_and_the_torn_one_is_said(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, lines, err = call(capsys, path)
    assert status == 0
    assert len(lines) == 6 + 88 + 2
    assert lines[0].split()[0] == "0"
    assert lines[0].endswith('mvp.orch.bootstrap  config ready {"boot": 11}')
    assert "prompt_work observed request r-7" in lines[2]
    assert any(line.endswith("2/1 mvp.worker.log  <2 bytes>") for line in lines)
    assert err == "mvp-archive: the last line is torn (23 bytes): its write was cut off\n"


@pytest.mark.parametrize(
    ("options", "count", "word"),
    [
        (["--phase", "weights_loaded"], 2, "weights_loaded"),
        (["--request", "r-8"], 1, "prompt_complete"),
        (["--channel", "mvp.provisioning.logs."], 70, "line "),
        (["--node", "2", "--channel", "mvp.worker."], 1, "<2 bytes>"),
        (["--run", "3"], 2, " ready"),
        (["--run", "1", "--phase", "weights_loaded"], 1, "ready"),
        (["--phase", "nothing"], 0, ""),
    ],
)
def test_filters(path: Path, capsys: pytest.CaptureFixture[str], options: list[str], count: int, word: str) -> None:
    status, lines, _ = call(capsys, path, *options)
    assert (status, len(lines)) == (0, count)
    assert all(word in line for line in lines)


def test_node_finds_records_events_logs_and_streams(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert len(call(capsys, path, "--node", "2")[1]) == 1 + 70 + 12 + 2 + 1


def test_json_is_the_whole_record(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, lines, _ = call(capsys, path, "--json", "--phase", "orch_exit")
    records = [json.loads(line) for line in lines]
    assert [json.loads(record["payload"]["value"])["status"] for record in records] == ["ready", "failed"]
    assert all(record["source"] == "orchestrator" for record in records)


@pytest.mark.spec("S1 10.15")
def test_why_names_phase_cause_stderr_and_timeline(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, lines, _ = call(capsys, path, "why", "2")
    assert status == 0
    assert lines[:3] == [
        "run 2: failed",
        "phase: weights_loaded",
        "cause: weights_loaded: worker 2 exited with status 9",
    ]
    stderr = [line for line in lines if line.startswith("  [2] ")]
    assert (len(stderr), stderr[0], stderr[-1]) == (50, "  [2] line 20", "  [2] line 69")
    timeline = lines[lines.index("timeline:") + 1 :]
    assert "config ready" in timeline[0] and timeline[0].strip().startswith("+0.000 s")
    assert "node 2 ProvisionStart process starting" in timeline[1]
    assert sum("stage_provision_send sent" in line and line.endswith("(×12)") for line in timeline) == 1


@pytest.mark.parametrize(
    ("error", "way"),
    [
        ("node 1 exited while serving prompts: killed by signal 9 (SIGKILL)", "oom"),
        ("the engine was killed by SIGSEGV", "SMQ_ENGINE_KERNELS=portable"),
        ("the engine made no progress for 60 s in phase prefill", "hung"),
        ("node 2 did not start: no such file", "mvp-orchestrator doctor"),
        ("the metrics cannot listen at 127.0.0.1:80: Address already in use", "ss -ltnp"),
        ("something new", ""),
    ],
)
def test_a_failure_comes_with_what_can_be_done(error: str, way: str) -> None:
    story = Story(1)
    for phase in ("serve_prompts", "orch_exit"):
        record = {"phase": phase, "status": "failed", "detail": {"error": error}}
        payload = {"encoding": "utf8", "value": json.dumps(record)}
        story.add(Entry({"channel": "mvp.orch.bootstrap", "stream": "mvp-orchestrator/1", "payload": payload}))
    told = list(explain(story))
    assert told[2] == f"cause: {error}"
    assert told[3].startswith("what to do: ") == bool(way) and way in told[3]


def source(path: str) -> str:
    return (ROOT / path).read_text()


IN_THE_CORE = [
    # Where it is said, the words of it that stand there, and the whole sentence as it comes out.
    ("worker/engine/process.py", "out of memory while loading the model", "", "oom"),
    ("worker/agent/core.py", "the engine made no progress for", " 60 s in phase prefill", "hung"),
    ("services/orchestrator/stages.py", "made no progress in", " loading for 180 s", "hung"),
    ("services/orchestrator/serving.py", "did not answer for", " 5 s while serving prompts", "hung"),
    ("services/orchestrator/serving.py", "dead in SWIM for", " 30 s", "hung"),
    ("services/orchestrator/readiness.py", "not alive in SWIM", "", "hung"),
    ("services/orchestrator/startup.py", "did not start: ", "no such file", "doctor"),
    ("services/orchestrator/startup.py", "was not started by provider", " process in 30 s", "doctor"),
    ("services/orchestrator/startup.py", "was not ready within", " 30 s", "doctor"),
    ("services/provisioner/core.py", "before it was ready", "", "doctor"),
    ("services/orchestrator/run_dir.py", "is in use by another orchestrator", "", ""),
]


def taken() -> Iterator[tuple[str, str]]:
    """(sentence, a word of its advice), each from the code that says it."""
    yield f"router {how_it_ended(-signal.SIGKILL)}", "oom"
    yield describe_status(-signal.SIGKILL, oom_seen=True), "oom"
    for number in (signal.SIGSEGV, signal.SIGILL, signal.SIGBUS, signal.SIGFPE):
        yield describe_status(-number), "SMQ_ENGINE_KERNELS=portable"
    serving = source("services/orchestrator/serving.py")
    assert 'return WHEN.get(self.phase, "before ready")' in serving and "exited {self.when()}: " in serving
    yield f"node 2 exited before ready: {describe_status(1)}", "doctor"
    with socket.create_server(("127.0.0.1", 0)) as there, pytest.raises(WebError) as refused:
        listen(f"127.0.0.1:{there.getsockname()[1]}", token=False, what="the metrics")
    yield str(refused.value), "ss -ltnp"
    for path, words, rest, way in IN_THE_CORE:
        assert words in source(path), f"{path} does not say {words!r}"
        yield f"node 2 {words}{rest}", way


def test_advice_is_for_what_the_program_says() -> None:
    """Each sentence finds its advice, and no pattern waits for words that nothing says."""
    said = list(taken())
    for sentence, way in said:
        story = Story(1)
        record = {"phase": "serve_prompts", "status": "failed", "detail": {"error": sentence}}
        payload = {"encoding": "utf8", "value": json.dumps(record)}
        story.add(Entry({"channel": "mvp.orch.bootstrap", "stream": "mvp-orchestrator/1", "payload": payload}))
        assert (way in story.advice()) if way else not story.advice(), (sentence, story.advice())
    for pattern in (one for row, _ in ADVICE for one in row.split("|")):
        assert any(re.search(pattern, sentence) for sentence, _ in said), f"nothing says {pattern}"


def test_no_archive_says_why_there_may_be_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert tool.main([str(tmp_path / "none.jsonl"), "why"]) == 1
    assert "its line on stderr says why" in capsys.readouterr().err


def test_why_takes_the_last_run_by_default(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, lines, _ = call(capsys, path, "why")
    assert lines[:3] == [
        "run 3: no exit record",
        "phase: iroh_driver",
        "cause: it still runs, or the orchestrator was killed",
    ]
    assert call(capsys, path, "why", "1")[1][:3] == ["run 1: ended", "phase: orch_exit", "cause: shutdown by stdin"]
    status, lines, err = call(capsys, path, "why", "4")
    assert (status, lines) == (1, [])
    assert f"{path} has no run 4; it has runs 1 to 3" in err


def test_a_failure_that_was_survived_is_not_why_a_run_ended(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    writer = Writer(tmp_path / "a.jsonl")
    writer.phase("config", "ready", boot=1)
    writer.phase("node_route", "failed", error="not yet")
    writer.phase("orch_exit", "ready", result="ok")
    _, lines, _ = call(capsys, tmp_path / "a.jsonl", "why")
    assert lines[:3] == ["run 1: ended", "phase: orch_exit", "cause: it was done"]


def test_runs_are_listed(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, lines, _ = call(capsys, path, "runs")
    assert [line.split("  ")[0] for line in lines] == ["run 1", "run 2", "run 3"]
    assert lines[1].endswith("failed in weights_loaded: weights_loaded: worker 2 exited with status 9")


def test_a_boot_tells_runs_apart_where_positions_do_not(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A hosted collector without its archive's past, or S1's `started` records without a boot."""
    writer = Writer(tmp_path / "b.jsonl")
    writer.phase("config", "ready", boot=1)
    writer.phase("run", "started", boot=1)
    writer.phase("run", "started", boot=2)
    writer.phase("config", "started", boot=2)
    assert len(call(capsys, tmp_path / "b.jsonl", "runs")[1]) == 2
    writer = Writer(tmp_path / "c.jsonl")
    for _ in range(3):
        writer.phase("config", "started")
        writer.phase("run", "started")
    assert len(call(capsys, tmp_path / "c.jsonl", "runs")[1]) == 3


def test_garbage_is_counted_and_harmless(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good = path.read_bytes()
    bad = [b"garbage", b"{}", b"[" * 100_000, b"\xff\xff", b'{"arrival_seq":1}', b"null", b""]
    path.write_bytes(b"\n".join(bad) + b"\n" + good)
    status, lines, err = call(capsys, path)
    assert status == 0
    assert len(lines) == 6 + 88 + 2 + 1
    assert "mvp-archive: 5 lines are no archive records" in err
    for command in ("why", "runs"):
        assert call(capsys, path, command)[0] == 0


@given(
    st.recursive(
        st.none() | st.integers() | st.text(max_size=5) | st.sampled_from(["OrchBootstrap", "failed", "config"]),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(
                st.sampled_from(
                    ["arrival_seq", "payload", "value", "encoding", "channel", "stream", "collected", "unix_ms"]
                )
                | st.sampled_from(["detail", "phase", "status", "event", "line", "node_id", "boot", "error"]),
                inner,
                max_size=6,
            )
        ),
        max_leaves=12,
    ),
    st.text(max_size=10),
)
@settings(max_examples=200)
def test_whatever_stands_in_a_record_it_is_printed(value: Any, channel: str) -> None:
    record = {
        "arrival_seq": 1,
        "channel": channel or CHANNEL_BOOTSTRAP,
        "stream": "mvp-orchestrator/1",
        "payload": {"encoding": "utf8", "value": json.dumps(value)},
        "collected": value,
    }
    entry = reader.parse(json.dumps(record).encode())
    assert entry is not None
    assert tool.pretty(entry).isprintable()
    reader.Filter(phase="x", node=1, request="r").wants(entry)
    story = tool.stories([entry])[0]
    assert all(line.isprintable() for line in tool.explain(story))
    assert tool.listed(story).isprintable()
    reader.parse(json.dumps(value).encode())


def test_terminal_escapes_of_a_worker_do_no_harm(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    writer = Writer(tmp_path / "a.jsonl")
    writer.stderr(1, "\x1b]0;owned\x07\x9b2J\u202e<b>\r\nx")
    for options in ([], ["--json"], ["why"]):
        call_out = call(capsys, tmp_path / "a.jsonl", *options)[1]
        assert "owned" in "".join(call_out)
        assert all(line.isprintable() for line in call_out)


def test_a_file_that_cannot_be_read_is_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(capsys, tmp_path / "no") == (
        1,
        [],
        f"mvp-archive: cannot read {tmp_path / 'no'}: No such file or directory\n",
    )
    assert call(capsys, tmp_path)[0] == 1
    (tmp_path / "empty").write_bytes(b"")
    assert call(capsys, tmp_path / "empty") == (0, [], "")
    assert call(capsys, tmp_path / "empty", "why")[0] == 1
    assert call(capsys, tmp_path / "empty", "runs") == (0, [], "")


def test_a_closed_pipe_ends_it_quietly(path: Path) -> None:
    writer = Writer(path)
    for _ in range(3000):
        writer.stderr(2, "x" * 200)
    program = subprocess.Popen(
        [sys.executable, "-m", "tools.archive", str(path)], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert program.stdout is not None and program.stderr is not None
    program.stdout.readline()
    program.stdout.close()
    assert program.stderr.read() == b""
    assert program.wait(60) == 0


def test_follow_goes_on_with_what_is_appended_also_after_a_rotation(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reader, "FOLLOW_POLL_S", 0.01)
    damage = reader.Damage()
    got: list[str] = []
    entries = reader.read(path, damage, follow=True)

    def follow() -> None:
        for entry in entries:
            got.append(tool.summary(entry))
            if got[-1] == "the end":
                return

    thread = threading.Thread(target=follow, daemon=True)
    thread.start()
    writer = Writer(path)
    writer.stderr(2, "appended")
    deadline = time.monotonic() + 60
    while "appended" not in got and time.monotonic() < deadline:
        time.sleep(0.01)
    os.replace(path, path.with_name("a.jsonl.1"))
    Writer(path).stderr(2, "the end")
    thread.join(60)
    assert not thread.is_alive()
    assert got[-2:] == ["appended", "the end"]


def test_help_has_an_example(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as done:
        tool.main(["--help"])
    assert done.value.code == 0
    assert "mvp-archive why run.jsonl" in capsys.readouterr().out


@pytest.mark.parametrize("words", [["why", "FILE", "2"], ["FILE", "why", "2"]])
def test_the_command_may_come_before_or_after_the_file(
    path: Path, capsys: pytest.CaptureFixture[str], words: list[str]
) -> None:
    status, out, _ = call(capsys, *[path if word == "FILE" else word for word in words])
    assert status == 0 and out[:2] == ["run 2: failed", "phase: weights_loaded"]


def test_words_that_mean_nothing_are_refused(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words in ([path, "wy"], [path, "runs", "3"], [path, "why", "x"]):
        with pytest.raises(SystemExit):
            call(capsys, *words)
        assert "is neither a command" in capsys.readouterr().err


def test_the_part_before_a_rotation_is_read_first(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "a.jsonl"
    writer = Writer(path)
    writer.archive.max_bytes = 4000
    writer.phase("config", "ready", boot=1)
    for number in range(20):
        writer.stderr(1, f"line {number}")
    assert path.with_name("a.jsonl.1").exists()
    status, out, err = call(capsys, path, "--json")
    seqs = [json.loads(line)["arrival_seq"] for line in out]
    assert (status, err) == (0, "") and seqs == list(range(seqs[0], 21))
    assert call(capsys, "runs", path)[1][0].startswith("run 1 "), "a rotation starts no run"


def test_since(path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    last_ms = max(entry.unix_ms for entry in reader.read(path, reader.Damage()))
    monkeypatch.setattr("time.time", lambda: last_ms / 1000 + 5)
    assert len(call(capsys, path, "--since", "5.05s")[1]) == 1
    assert len(call(capsys, path, "--since", "5.15s")[1]) == 2
    everything = len(call(capsys, path)[1])
    assert len(call(capsys, path, "--since", "1d")[1]) == everything
    assert len(call(capsys, path, "--since", "2020-01-01")[1]) == everything
    assert call(capsys, path, "--since", "2099-01-01T00:00")[1] == []
    with pytest.raises(SystemExit):
        call(capsys, path, "--since", "yesterday")
    assert "is no time: write 10m" in capsys.readouterr().err


def test_a_time_of_today() -> None:
    now = datetime(2026, 11, 30, 15, 0).timestamp()
    assert tool.since("14:30", now) == (now - 1800) * 1000
    assert tool.since("9:00", now) == (now - 6 * 3600) * 1000
    for bad in ("25:00", "14", "", "9999999999999d", "10x"):
        with pytest.raises(ValueError, match="is no time"):
            tool.since(bad, now)


def test_convert(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Writer(path).stderr(2, "=cmd|' /C calc'!A0")
    status, out, _ = call(capsys, "convert", path, "--node", "2")
    rows = list(csv.reader(out))
    assert status == 0 and rows[0] == list(tool.CSV_COLUMNS)
    assert rows[-1][-1].startswith("'=cmd"), "no formula for whoever opens it"
    assert {row[0] for row in rows[1:]} <= {"2", "4"}
    status, out, _ = call(capsys, "convert", path, "--to", "logs", "--run", "2")
    assert status == 0 and len(out) == 70 and out[0].endswith("[2 stderr] line 0")


def test_grep(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert len(call(capsys, path, "--grep", "LINE 6")[1]) == 11
    assert len(call(capsys, path, "--grep", "line", "--grep", "69")[1]) == 1
