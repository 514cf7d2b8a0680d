"""What the dashboard derives from records: phases, workers, prompts, faults; whatever a record holds, it is shown."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.records import (
    CHANNEL_BOOTSTRAP,
    CHANNEL_EVENTS,
    CHANNEL_PROMPT,
    CHANNEL_SWIM,
    log_channel,
    prompt_record,
)
from services.datastream_collector.reader import Damage, Entry, parse, read
from services.datastream_collector.web.metrics import Metrics
from services.datastream_collector.web.prompts import Prompts
from services.datastream_collector.web.run_view import LOG_LINES_MAX, SECTIONS, LogTail, RunView
from services.datastream_collector.web.store import RUNS_MAX, Store
from tests.browser.world import HOSTILE, Writer, good_and_bad


def views(path: Path) -> dict[int, RunView]:
    store = Store()
    for entry in read(path, Damage()):
        store.add(entry)
    return dict(store.runs)


@pytest.fixture
def runs(tmp_path: Path) -> dict[int, RunView]:
    good_and_bad(tmp_path / "a.jsonl")
    return views(tmp_path / "a.jsonl")


@pytest.mark.spec("S1 7.15", "S1 8.11")
def test_phases_have_durations_and_the_failed_one_its_cause(runs: dict[int, RunView]) -> None:
    steps = {step["phase"]: step for step in runs[1].section("phases")}
    assert list(steps)[:4] == ["config", "services", "node_provisioner", "provider_start"]
    assert steps["services"]["end_ms"] - steps["services"]["begin_ms"] == 420
    assert steps["weights_loaded"]["end_ms"] - steps["weights_loaded"]["begin_ms"] > 2000
    assert steps["serve_prompts"]["end_ms"] <= steps["shutdown"]["begin_ms"]
    assert steps["shutdown"]["end_ms"] == steps["orch_exit"]["end_ms"]
    assert {step["status"] for step in steps.values()} == {"ready"}
    failed = {step["phase"]: step for step in runs[2].section("phases") if step["status"] == "failed"}
    assert failed["serve_prompts"]["error"].startswith("node 3 stage 1 faulted while serving prompts")
    assert (runs[1].state, runs[2].state) == ("ended", "failed")


def test_workers_have_what_their_records_say(runs: dict[int, RunView]) -> None:
    first, second = runs[1].section("workers")
    assert (first["node_id"], first["stage_index"], first["layers"], first["state"]) == (2, 0, [0, 15], "stopped")
    assert (first["inbound_edge"], first["outbound_edge"], second["inbound_edge"]) == (1, 2, 2)
    assert first["cpu"]["worker_percent"] == 88.5 and first["memory"]["engine_rss_bytes"] == 700 << 20
    assert first["gpus"][0]["memory_total_mib"] == 24564
    broken = runs[2].section("workers")[1]
    assert (broken["state"], broken["exit"]) == ("failed", "exited with status 1")


def test_prompts_have_rates_and_ends(runs: dict[int, RunView]) -> None:
    rows = {row["prompt_id"]: row for row in runs[1].section("prompts")["rows"]}
    assert [rows[number]["state"] for number in range(1, 6)] == ["done", "done", "done", "cancelled", "done"]
    assert rows[2]["tokens"] == 40 and rows[2]["rate"] == 40.0
    assert rows[2]["first_ms"] - rows[2]["begin_ms"] == 30
    assert runs[1].section("prompts")["counts"] == {"done": 4, "fault": 0, "cancelled": 1}


def test_losses_faults_and_moves(runs: dict[int, RunView]) -> None:
    causes = [(fault["phase"], fault["cause"]) for fault in runs[2].section("faults")]
    assert ("membership", "node 3 is dead: no answer to 3 probes") in causes
    assert any(phase == "serve_prompts" for phase, _ in causes)
    moves = runs[2].section("members")
    assert [member["to"] for member in moves["now"]] == ["alive", "dead"]
    assert len(moves["transitions"]) == 3
    assert [route["node_id"] for route in runs[2].section("routes")] == [2, 3]


def test_lines_are_harmless_and_searchable(runs: dict[int, RunView]) -> None:
    tail = runs[2].logs["3.stderr"]
    (found,) = tail.lines(search="ONERROR")
    assert found[2] == HOSTILE.replace("\x1b", "\\x1b").replace("\x07", "\\x07").replace("\u202e", "\\u202e")
    assert tail.lines(after=30)[0][0] == 31 and len(tail.lines(limit=5)) == 5
    long = LogTail()
    for number in range(LOG_LINES_MAX + 10):
        long.append(0, f"{number}")
    assert (long.total, len(long.lines(limit=99999))) == (LOG_LINES_MAX + 10, LOG_LINES_MAX)


def test_a_worker_that_is_started_again_counts_as_restarted(tmp_path: Path) -> None:
    writer = Writer(tmp_path / "a.jsonl")
    writer.start(1, workers=1)
    for _ in range(3):
        writer.phase("provider_start", "started", 2, stage_index=0)
        writer.phase("provider_start", "ready", 2, stage_index=0)
    (worker,) = views(tmp_path / "a.jsonl")[1].section("workers")
    assert worker["starts"] == 4


def test_a_service_restart_is_a_fault_with_its_cause(tmp_path: Path) -> None:
    writer = Writer(tmp_path / "a.jsonl")
    writer.phase("service_restart", "observed", service="router", how="was killed by SIGKILL")
    (fault,) = views(tmp_path / "a.jsonl")[1].section("faults")
    assert fault["cause"] == "router was killed by SIGKILL; it was restarted"


def test_the_orchestrator_is_no_worker(tmp_path: Path) -> None:
    """Its own records may name a stage: its configuration's, or that of a command."""
    writer = Writer(tmp_path / "a.jsonl")
    writer.start(1)
    writer.phase("config", "ready", node_id=1, stage_index=0, provider="process")
    writer.phase("run_command", "observed", command="StopRun", stage_index=1)
    writer.phase("provider_stop", "ready", provider="process", stopped=[2])
    rows = views(tmp_path / "a.jsonl")[1].section("workers")
    assert rows[0]["state"] == "stopped" != rows[1]["state"]
    assert [row["node_id"] for row in views(tmp_path / "a.jsonl")[1].section("workers")] == [2, 3]


def test_prompts_of_a_pipeline_have_a_first_token_and_a_rate(tmp_path: Path) -> None:
    prompts = Prompts()
    steps = [
        ("prompt_work", {}),
        *(("pipeline_token_out", {"generated_index": at, "eos": at == 4}) for at in range(1, 5)),
    ]
    for at, (phase, detail) in enumerate(steps):
        record = prompt_record(phase, "observed", 1, 1, 1, {"prompt_id": 1, "unix_ms": 1000 + 100 * at, **detail})
        prompts.add(Entry({"channel": "mvp.orch.prompt", "payload": {"value": record.decode()}}, run=1))
    (row,) = prompts.rows()["rows"]
    assert (row["tokens"], row["first_ms"], row["rate"]) == (3, 1100, 10.0), "the end of the sequence is no token"


def test_tokens_that_a_restarted_worker_says_again_are_counted_once() -> None:
    prompts = Prompts()
    said = [(1, False), (2, False), (1, True), (2, True), (3, False)]
    for at, (index, replayed) in enumerate(said):
        detail = {"prompt_id": 1, "unix_ms": 1000 + 100 * at, "generated_index": index, "eos": False}
        record = prompt_record("pipeline_token_out", "observed", 1, 1, 1, {**detail, "replayed": replayed})
        prompts.add(Entry({"channel": "mvp.orch.prompt", "payload": {"value": record.decode()}}, run=1))
    (row,) = prompts.rows()["rows"]
    assert (row["tokens"], prompts.tokens) == (3, 3)


def test_edges_have_rates(tmp_path: Path) -> None:
    writer = Writer(tmp_path / "a.jsonl")
    writer.start(1)
    for second in range(3):
        detail = {"edge_id": 2, "records": 40 * second, "bytes": 1000 * second, "latency_ms": 0.4}
        writer.node(3, "mvp.node.edge", {"type": "NodeEvent", "detail": detail}, ms=1000)
    edge = {"type": "NodeEvent", "phase": "edge", "status": "ready", "detail": {"edge_id": 2, "path": "direct"}}
    writer.node(3, "mvp.node.stage", edge)
    worker = views(tmp_path / "a.jsonl")[1].section("workers")[1]
    assert worker["paths"] == {"2": "direct"}
    assert (worker["edges"]["2"]["records_per_s"], worker["edges"]["2"]["latency_ms"]) == (40.0, 0.4)


def test_old_runs_are_dropped() -> None:
    store = Store()
    for number in range(1, RUNS_MAX + 5):
        store.add(Entry({"channel": "x", "stream": "s/1"}, run=number))
    assert len(store.runs) == RUNS_MAX and store.view(None) is store.runs[RUNS_MAX + 4]
    assert store.view(1) is None


KEYS = [
    *("detail", "phase", "status", "event", "line", "node_id", "stage_index", "prompt_id", "tokens", "stages"),
    *("layer_range", "error", "kind", "peer", "to", "lost", "gpus", "edge_id", "unix_ms", "max_tokens", "boot"),
]
ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=20),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(
            st.sampled_from(KEYS),
            inner,
            max_size=6,
        )
    ),
    max_leaves=12,
)
PHASES = ["config", "provider_start", "stage_provision", "weights_loaded", "prompt_complete", "prompt_work"]
CHANNELS = [
    *(CHANNEL_BOOTSTRAP, CHANNEL_EVENTS, CHANNEL_PROMPT, CHANNEL_SWIM, "mvp.orch.stage_route", "mvp.datastream.gap"),
    *(log_channel(1, "stderr"), "host.cpu", "host.gpu", "mvp.node.edge", "mvp.node.stage", "mvp.node.bootstrap"),
]


@given(
    st.lists(
        st.tuples(
            st.sampled_from(CHANNELS),
            st.sampled_from(["mvp-orchestrator/1", "2/1", "x", "99999999999999999999999/1"]),
            st.sampled_from(PHASES),
            st.sampled_from(["started", "ready", "failed", "observed"]),
            ANYTHING,
        ),
        max_size=8,
    )
)
@settings(max_examples=300)
def test_whatever_a_record_holds_nothing_breaks(records: list[tuple[str, str, str, str, Any]]) -> None:
    metrics = Metrics()
    store = Store((metrics.add,))
    metrics.watch(store)
    view = RunView(1)
    for number, (channel, stream, phase, status, value) in enumerate(records):
        content = {"phase": phase, "status": status, **(value if isinstance(value, dict) else {"detail": value})}
        record = {"arrival_seq": number, "stream": stream, "channel": channel, "collected": value, "position": value}
        payload = {"encoding": "utf8", "value": json.dumps(content)}
        entry = parse(json.dumps({**record, "payload": payload}).replace("NaN", "1").replace("Infinity", "1").encode())
        if entry is not None:
            view.add(entry)
            metrics.add(entry)
            store.add(entry)
    if records:
        text = json.dumps({name: view.section(name) for name in SECTIONS})
        assert text.isprintable()
    metrics.render()
