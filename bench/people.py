"""What people see: the collector under 10,000 frames a second, and what HTTP adds to a token.

The collector is a process on a real bus with a real archive; its share is its CPU time over wall time. HTTP is measured
against the same gateway with a scripted worker that answers at once, so that the difference is the front's own cost;
real_token_ms is what it is compared with: the real model's time per token over the prompt RPC.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx

from common.addresses import Role
from common.datastream import Emit, ObserverActor
from common.messages.service import ServiceReady
from services.datastream_collector.streams import CHANNEL_GAP
from tests.unit.datastream_collector.test_collector_process import World
from tests.unit.http.conftest import MODEL, start_front, stop_front
from tests.unit.prompt_gateway.stack import Stack
from tools.prompt_client import PromptClient

RATE = 10_000
WORDS = 2000
ROUNDS = 5
REAL_TOKENS = 64


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of this bench."""
    parser.add_argument("--seconds", type=float, default=10.0, help="seconds of frames (%(default)s)")
    parser.add_argument("--no-model", action="store_true", help="leave the real model out")


def cpu_s(pid: int) -> float:
    """User and system seconds of a process."""
    words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK")


def collector(seconds: float) -> dict[str, object]:
    """RATE records a second of 60 bytes into an archive."""
    with tempfile.TemporaryDirectory(prefix="smq-bench-") as directory:
        os.chmod(directory, 0o700)
        world = World(Path(directory) / "r", Path(directory) / "a.jsonl")
        try:
            world.bus.until(lambda: world.told(ServiceReady), 30)
            pid = world.bus.processes[Role.COLLECTOR].pid
            before, begin, sent = cpu_s(pid), time.monotonic(), 0
            while (now := time.monotonic() - begin) < seconds:
                due = int(now * RATE)
                for number in range(sent, due):
                    event = Emit("load", b'{"n":%d,"text":"%s"}' % (number, b"x" * 40))
                    world.host.deliver(world.host.observer, event)
                sent = due
                world.bus.pump()
            world.bus.until(lambda: not world.host.node.unsettled, 60)
            world.flush()
            took, used = time.monotonic() - begin, cpu_s(pid) - before
            records = world.records()
            observer = world.host.node.system.actor(world.host.observer)
            assert isinstance(observer, ObserverActor)
        finally:
            world.bus.close()
    numbers = [json.loads(record["payload"]["value"])["n"] for record in records if record["channel"] == "load"]
    return {
        "frames": sent,
        "frames_per_s": round(sent / took),
        "core_share": round(used / took, 3),
        "us_per_frame": round(used / sent * 1e6, 1),
        "archived_in_order": numbers == list(range(sent)),
        "gaps": sum(record["channel"] == CHANNEL_GAP for record in records),
        "dropped_at_producer": observer.dropped,
    }


def _over_rpc(addr: str, prompt: str) -> float:
    with PromptClient.connect(addr) as client:
        begin = time.perf_counter()
        client.complete(messages=[{"role": "user", "content": prompt}])
        return time.perf_counter() - begin


def _over_http(url: str, prompt: str) -> float:
    body: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": prompt}], "stream": True}
    begin = time.perf_counter()
    with httpx.stream("POST", f"{url}/v1/chat/completions", json=body, timeout=60) as response:
        for line in response.iter_lines():
            if line == "data: [DONE]":
                break
    return time.perf_counter() - begin


def http_front() -> dict[str, float]:
    """Milliseconds per text delta, over the RPC and over HTTP, in turns."""
    prompt = "echo " + " ".join("word" for _ in range(WORDS))
    rpc, http = [], []
    with Stack() as stack:
        process, url = start_front("--connect", stack.addr)
        for _ in range(ROUNDS):
            rpc.append(_over_rpc(stack.addr, prompt) / WORDS * 1000)
            http.append(_over_http(url, prompt) / WORDS * 1000)
        stop_front(process)
    return {
        "rpc_ms_per_delta": round(statistics.median(rpc), 4),
        "http_ms_per_delta": round(statistics.median(http), 4),
        "http_adds_ms": round(statistics.median(http) - statistics.median(rpc), 4),
    }


def real_token_ms() -> float:
    """The real model's time per token, after the first, over the prompt RPC."""
    from tests.e2e.stack import Stack as RealStack

    with RealStack() as stack:
        stack.ask("Say hello.", max_tokens=4)
        times = []
        for _ in range(3):
            done = stack.ask("Tell me a long story about a river.", max_tokens=REAL_TOKENS)
            times.append(done.elapsed_ms / done.tokens_generated)
        return round(statistics.median(times), 2)


def run(arguments: argparse.Namespace) -> dict[str, object]:
    """The figures of issue 7."""
    front: dict[str, object] = dict(http_front())
    if not arguments.no_model:
        token = real_token_ms()
        front["real_token_ms"] = token
        front["http_adds_percent"] = round(100 * float(str(front["http_adds_ms"])) / token, 2)
    return {**collector(arguments.seconds), **front}
