"""Dashboard, metrics and HTTP front of a real run: they start with it, may die without harm, and may not be busy."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import time
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.e2e.stack import Stack, model_file, wait_for

pytestmark = pytest.mark.e2e

OWN_CHANNELS = ("orch.bootstrap", "orch.prompt", "swim.membership", "orch.stage_route", "provisioning.events")
WORKER_CHANNELS = (
    *("mvp.node.bootstrap", "mvp.node.stage", "mvp.node.prompt"),
    *("mvp.worker.engine", "host.cpu", "host.memory"),
)
METRICS_OF_THE_ISSUE = (
    *("smq_prompts", "smq_prompt_first_token_seconds", "smq_tokens", "smq_token_seconds", "smq_prompt_queue_length"),
    *("smq_worker_state", "smq_worker_restarts", "smq_phase_seconds", "smq_bus_envelopes"),
    *("smq_stream_frames", "smq_stream_bytes", "smq_stream_lost_frames", "smq_price_per_hour_dollars"),
)
HTTP, WEB = "prompt_gateway.http", "datastream_collector.web"


def config(stack_home: Stack, **addresses: str) -> str:
    place = {"http": "127.0.0.1:0", "dashboard": "127.0.0.1:0", "metrics": "127.0.0.1:0", **addresses}
    return f"""
[runtime]
run_dir = {json.dumps(str(stack_home.run_dir))}
[provider]
kind = "process"
[model]
id = "smol"
gguf_local_path = {json.dumps(str(model_file()))}
[prompt]
rpc_addr = "127.0.0.1:0"
http_addr = "{place["http"]}"
[observability]
datastream_frame_log = {json.dumps(str(stack_home.archive.path))}
dashboard_addr = "{place["dashboard"]}"
metrics_addr = "{place["metrics"]}"
"""


def made(**addresses: str) -> Stack:
    stack = Stack(text="")
    stack.config_file.write_text(config(stack, **addresses))
    return stack


def where(stack: Stack, what: str) -> str:
    """The URL that a process said when it started."""

    def found() -> str:
        for record in stack.archive.records():
            line = str(record.body.get("line", {}).get("line", ""))
            if f"{what}: http://" in line:
                return line.rpartition(" ")[2]
        return ""

    return str(wait_for(f"where the {what} is", found, 60))


def state(url: str) -> dict[str, Any]:
    answer: dict[str, Any] = httpx.get(f"{url}api/state", timeout=60).json()
    return answer


@pytest.fixture(scope="module")
def stack() -> Iterator[Stack]:
    with made() as stack:
        stack.wait_record("prompt_rpc", "ready")
        yield stack
        stack.say("stop\n")
        assert stack.wait() == 0, stack.stderr
        assert not stack.run_dir.exists()
        wait_for("nothing left", lambda: not stack.left(), 30)


@pytest.mark.spec("S1 7.15", "S1 8.11", "S1 5.9")
def test_the_dashboard_follows_the_run(stack: Stack) -> None:
    url = where(stack, "dashboard")
    now = wait_for("serving", lambda: (found := state(url)).get("run", {}).get("state") == "serving" and found, 60)
    assert now["source"] == {"kind": "live", "state": "live"}
    # What a worker holds it tells itself, in a stream of its own.
    wait_for("what it holds", lambda: state(url)["workers"][0].get("layers_held"), 60)
    (worker,) = state(url)["workers"]
    assert (worker["state"], worker["provider"], worker["layers_held"]) == ("ready", "process", 30)
    assert now["run"]["facts"]["addr"] == stack.addr()
    before = len(now["prompts"]["rows"])
    done = stack.ask("Say hello.", max_tokens=8)
    rows = wait_for("the prompt", lambda: len(found := state(url)["prompts"]["rows"]) > before and found, 60)
    row = wait_for("its end", lambda: (found := state(url)["prompts"]["rows"][0])["state"] == "done" and found, 60)
    assert rows and (row["tokens"], row["max_tokens"]) == (done.tokens_generated, 8)
    hosts = wait_for("host samples", lambda: state(url)["workers"][0].get("cpu"), 60)
    assert hosts["percent"] is not None
    with httpx.stream("GET", f"{url}events", timeout=60) as events:
        lines = events.iter_lines()
        while not (line := next(lines)).startswith("data: "):
            pass
        assert set(json.loads(line[6:])) >= {"run", "phases", "workers", "prompts", "source"}


def test_the_openai_client_talks_to_the_real_model(stack: Stack) -> None:
    client = openai.OpenAI(base_url=where(stack, "http"), api_key="none", max_retries=0, timeout=60)
    turns = [{"role": "user", "content": "What is the capital of France?"}]
    ask: Any = {"model": "smol", "messages": turns, "temperature": 0, "max_tokens": 20}
    whole = client.chat.completions.create(**ask)
    text = whole.choices[0].message.content
    streamed = client.chat.completions.create(**ask, stream=True)
    assert text and text == "".join(chunk.choices[0].delta.content or "" for chunk in streamed)
    with stack.client() as plain:
        done = plain.complete(messages=turns, max_tokens=20)
    assert (done.final_text, done.tokens_generated) == (text, whole.usage and whole.usage.completion_tokens)


@pytest.mark.spec("S1 8", "S1 8.3")
def test_every_kind_of_record_of_a_real_run_is_collected(stack: Stack) -> None:
    stack.ask("Say hello.", max_tokens=4)

    def missing() -> list[str]:
        found = {(record.stream, record.channel) for record in stack.archive.records()}
        wanted = [("mvp-orchestrator/1", f"mvp.{name}") for name in OWN_CHANNELS]
        wanted += [("1/1", name) for name in WORKER_CHANNELS]
        return [f"{stream} {channel}" for stream, channel in wanted if (stream, channel) not in found]

    wait_for("records of all kinds", lambda: not missing(), 60)
    positions = [r["position"] for r in _frames(stack) if r["stream"] == "1/1"]
    assert positions == sorted(set(positions)), "a worker's positions are its own"
    secrets = [file.read_bytes().strip() for file in (stack.run_dir / "keys").rglob("*") if file.is_file()]
    text = stack.archive.path.read_bytes()
    assert secrets and not any(secret in text for secret in secrets)


def _frames(stack: Stack) -> list[dict[str, Any]]:
    return [json.loads(line) for line in stack.archive.path.read_bytes().split(b"\n")[:-1]]


def test_metrics_count_what_happened(stack: Stack) -> None:
    stack.ask("Say hello.", max_tokens=8)
    url = where(stack, "metrics")
    assert url.endswith("/metrics")

    def counted() -> str:
        text = httpx.get(url, timeout=60).text
        is_there = all(
            part in text
            for part in (
                'smq_prompts_total{outcome="done"} ',
                'smq_run{state="serving"} 1.0',
                "smq_bus_envelopes_total{",
            )
        )
        # The bus is counted each 10 s, and the prompt's way is in the count after it.
        is_there = is_there and re.search(r'smq_bus_envelopes_total\{[^}]*plane="prompt"', text) is not None
        return text if is_there and 'smq_prompts_total{outcome="done"} 0.0' not in text else ""

    text = wait_for("metrics", counted, 90)
    families = {family.name: family for family in text_string_to_metric_families(text)}
    assert all(family.documentation and family.type != "unknown" for family in families.values())
    for name in METRICS_OF_THE_ISSUE:
        assert name in families, f"{name} is missing: {sorted(families)}"
        if name not in ("smq_worker_restarts", "smq_stream_lost_frames"):
            assert families[name].samples, name
    passed = {
        (sample.labels["plane"], sample.labels["verdict"]): sample.value
        for sample in families["smq_bus_envelopes"].samples
    }
    assert passed["control", "forwarded"] > 0 and passed["prompt", "forwarded"] > 0, passed
    values = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    assert float(values['smq_prompts_total{outcome="done"}']) >= 1
    assert float(values["smq_prompt_first_token_seconds_count"]) >= 1
    assert 0 < float(values["smq_token_seconds_sum"]) < 60


@pytest.mark.spec("S1 7.15", "S1 9.18", "S1 10.11")
def test_their_death_is_a_restart_and_nothing_else(stack: Stack) -> None:
    url, front = where(stack, "dashboard"), where(stack, "http")
    for part in (WEB, HTTP):
        old = stack.kill(part)
        wait_for(f"another {part}", lambda part=part, old=old: old not in _pids(stack, part) and _pids(stack, part), 60)
    assert wait_for("the page at its old address", lambda: _status(url) == 200, 60)
    assert wait_for("the front at its old address", lambda: _status(front.removesuffix("/v1") + "/readyz") == 200, 60)
    assert stack.ask("Say hello.", max_tokens=4).tokens_generated > 0

    def restarted() -> set[str]:
        restarts = [r for r in stack.archive.lifecycle() if r.step == ("service_restart", "observed")]
        return {r.detail["service"] for r in restarts}

    wait_for("both restarts on record", lambda: restarted() >= {WEB, HTTP}, 60)
    assert restarted() == {WEB, HTTP}
    hung = _pids(stack, WEB)[0]
    os.kill(hung, signal.SIGSTOP)
    begin = time.monotonic()
    assert stack.ask("Say hello.", max_tokens=4).tokens_generated > 0
    assert time.monotonic() - begin < 60, "a dashboard that hangs slows nobody"
    os.kill(hung, signal.SIGCONT)

    def is_told() -> bool:
        return any("it was restarted" in fault["cause"] for fault in state(url)["faults"])

    wait_for("the restart on the page", is_told, 60)


def _pids(stack: Stack, part: str) -> list[int]:
    return [process.pid for process in stack.left() if process.part == part]


def _status(url: str) -> int:
    try:
        return httpx.get(url, timeout=5).status_code
    except httpx.HTTPError:
        return 0


@pytest.mark.spec("S1 10.3", "S1 7.15")
@pytest.mark.parametrize("what", ["dashboard", "metrics", "http"])
def test_a_busy_address_fails_the_start_before_any_worker(what: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with made(**{what: address}) as stack:
            assert stack.wait() == 1
            assert f"cannot listen at {address}: Address already in use; set [" in stack.stderr
            assert stack.stderr.count("\n") == 1
            record = stack.archive.one(what, "failed")
            assert address in record.detail["error"]
            assert stack.archive.find("provider_start", "started") is None
            assert stack.archive.one("orch_exit", "failed")


def test_without_addresses_nothing_is_started() -> None:
    with Stack() as stack:
        stack.wait_record("config", "ready")
        assert _pids(stack, WEB) == [] == _pids(stack, HTTP)
        stack.say("stop\n")
        stack.wait()
