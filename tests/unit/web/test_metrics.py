"""Metrics: the right numbers from records, in the text that Prometheus reads."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from services.datastream_collector.reader import Damage, Entry, read
from services.datastream_collector.web.metrics import Metrics
from services.datastream_collector.web.store import Store
from tests.browser.world import Writer, good_and_bad

Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def scrape(path: Path) -> Samples:
    metrics = Metrics()
    store = Store((metrics.add,))
    metrics.watch(store)
    for entry in read(path, Damage()):
        store.add(entry)
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(metrics.render().decode())
        for sample in family.samples
    }


def value(samples: Samples, name: str, **labels: str) -> float:
    return samples[name, tuple(sorted(labels.items()))]


@pytest.fixture
def samples(tmp_path: Path) -> Samples:
    good_and_bad(tmp_path / "a.jsonl")
    return scrape(tmp_path / "a.jsonl")


def test_prompts_and_tokens(samples: Samples) -> None:
    outcomes = {name: value(samples, "smq_prompts_total", outcome=name) for name in ("done", "fault", "cancelled")}
    assert outcomes == {"done": 4, "fault": 1, "cancelled": 1}
    assert value(samples, "smq_tokens_total", kind="generated") == 20 + 40 + 60 + 100
    assert value(samples, "smq_tokens_total", kind="prompt") == 4 * 9
    assert value(samples, "smq_prompt_first_token_seconds_count") == 6
    assert value(samples, "smq_prompt_first_token_seconds_sum") == pytest.approx(6 * 0.030)
    assert value(samples, "smq_token_seconds_count") == 300 - 5 + 12 - 1
    assert value(samples, "smq_token_seconds_bucket", le="0.05") == 306
    assert value(samples, "smq_token_seconds_bucket", le="0.02") == 0
    assert value(samples, "smq_prompt_queue_length") == 0


def test_the_newest_run(samples: Samples) -> None:
    assert value(samples, "smq_run", state="failed") == 1
    assert value(samples, "smq_worker_state", node_id="3", state="failed") == 1
    assert value(samples, "smq_worker_state", node_id="3", state="ready") == 0
    assert value(samples, "smq_phase_seconds", phase="services") == pytest.approx(0.42)
    assert value(samples, "smq_worker_cpu_percent", node_id="2") == 88.5
    assert value(samples, "smq_worker_memory_bytes", node_id="2", process="engine") == 700 << 20
    assert value(samples, "smq_worker_gpu_percent", node_id="2", gpu="0") == 37


def test_three_restarts_of_a_worker_are_three(tmp_path: Path) -> None:
    """gpustack#4371: what restarts must show."""
    writer = Writer(tmp_path / "a.jsonl")
    writer.start(1, workers=1)
    for _ in range(3):
        writer.phase("provider_start", "started", 2, stage_index=0)
    writer.phase("service_restart", "observed", service="router", how="was killed by SIGKILL")
    samples = scrape(tmp_path / "a.jsonl")
    assert value(samples, "smq_worker_restarts_total", node_id="2") == 3
    assert value(samples, "smq_service_restarts_total", service="router") == 1


def test_streams_losses_and_waiting_prompts(tmp_path: Path) -> None:
    writer = Writer(tmp_path / "a.jsonl")
    writer.put("mvp.datastream.gap", b'{"stream":"2/1","lost":7,"reason":"overrun"}')
    writer.node(2, "own", {"text": "x" * 88})
    writer.answer(1, 3, end="")
    writer.prompt("prompt_work", "observed", 2, max_tokens=0)
    writer.prompt("prompt_work", "observed", 3, max_tokens=0)
    samples = scrape(tmp_path / "a.jsonl")
    assert value(samples, "smq_stream_lost_frames_total", stream="2/1", reason="overrun") == 7
    assert value(samples, "smq_stream_frames_total", stream="2/1", channel="own") == 1
    assert value(samples, "smq_stream_bytes_total", stream="2/1") == 100
    assert value(samples, "smq_prompt_queue_length") == 2


def test_the_gateways_own_clock_counts_where_it_is_told(tmp_path: Path) -> None:
    """Records are collected in batches of 20 ms; a latency must not be made of that."""
    writer = Writer(tmp_path / "a.jsonl")
    writer.prompt("prompt_work", "observed", 1, unix_ms=writer.now, max_tokens=0)
    writer.prompt("node_prompt_event", "observed", 1, event="text_delta", tokens=1, unix_ms=writer.now + 100)
    writer.prompt("node_prompt_event", "observed", 1, event="text_delta", tokens=2, unix_ms=writer.now + 140)
    samples = scrape(tmp_path / "a.jsonl")
    assert value(samples, "smq_prompt_first_token_seconds_sum") == pytest.approx(0.1, abs=0.01)
    assert value(samples, "smq_token_seconds_sum") == pytest.approx(0.04, abs=0.01)


def test_envelopes_by_plane_and_verdict_are_the_brokers_own_totals() -> None:
    metrics = Metrics()
    for count in (5, 9):
        payload = {"broker": "router", "passed": {"control": {"forwarded": count, "full": 1}, "prompt": 7}}
        record = {"channel": "mvp.bus.envelopes", "stream": "mvp-orchestrator/1", "arrival_seq": count}
        metrics.add(Entry({**record, "payload": {"value": json.dumps(payload)}}, run=1))
    text = metrics.render().decode()
    assert 'smq_bus_envelopes_total{broker="router",plane="control",verdict="forwarded"} 9.0' in text
    assert 'verdict="full"} 1.0' in text
