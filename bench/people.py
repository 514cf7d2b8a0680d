"""What people see: the collector under 10,000 frames a second, what HTTP adds to a token, the dashboard's first paint.

The collector is a process on a real bus with a real archive; its share is its CPU time over wall time. HTTP is measured
against the same gateway with a scripted worker that answers at once, so that the difference is the front's own cost;
real_token_ms is what it is compared with: the real model's time per token over the prompt RPC. The dashboard is opened
in Chromium while its server reads an archive of 100 MB; a page's bytes are all that it loads before its data.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
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
ARCHIVE_BYTES = 100_000_000
CHROMIUMS = ("chromium", "chromium-browser", "google-chrome")
FIRST_PAINT = "(performance.getEntriesByName('first-contentful-paint')[0] || {}).startTime ?? null"
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
        "archive_frames_per_s": round(sent / took),
        "archive_cpu_share": round(used / took, 3),
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


def http_front() -> tuple[dict[str, object], list[float]]:
    """Milliseconds per text delta, over the RPC and over HTTP, in turns; and what HTTP added in each round."""
    prompt = "echo " + " ".join("word" for _ in range(WORDS))
    rpc, http = [], []
    with Stack() as stack:
        process, url = start_front("--connect", stack.addr)
        for _ in range(ROUNDS):
            rpc.append(_over_rpc(stack.addr, prompt) / WORDS * 1000)
            http.append(_over_http(url, prompt) / WORDS * 1000)
        stop_front(process)
    added = [over - under for over, under in zip(http, rpc, strict=True)]
    figures: dict[str, object] = {
        "rpc_ms_per_delta": round(statistics.median(rpc), 4),
        "http_ms_per_delta": round(statistics.median(http), 4),
        "http_adds_ms": round(statistics.median(added), 4),
    }
    return figures, added


def dashboard() -> dict[str, object]:
    """Seconds until a page of a 100 MB archive is first painted, and the bytes of page, script and style."""
    program = next((found for name in CHROMIUMS if (found := shutil.which(name))), None)
    if program is None:
        why = "no Chromium on the PATH: apt-get install chromium"
        keys = ("dashboard_first_paint_s", "dashboard_bytes")
        return {key: value for name in keys for key, value in ((name, None), (f"{name}_why", why))}
    from playwright.sync_api import sync_playwright

    from tests.browser.world import huge

    paints: list[float] = []
    sizes: dict[str, int] = {}
    with tempfile.TemporaryDirectory(prefix="smq-bench-") as directory, sync_playwright() as play:
        archive = Path(directory) / "huge.jsonl"
        huge(archive, ARCHIVE_BYTES)
        browser = play.chromium.launch(executable_path=program, args=["--no-sandbox", "--disable-dev-shm-usage"])
        for _ in range(ROUNDS):
            command = [sys.executable, "-P", "-m", "services.datastream_collector.web", "--archive", str(archive)]
            with subprocess.Popen(
                [*command, "--dashboard", "127.0.0.1:0"], stdout=subprocess.PIPE, text=True
            ) as server:
                assert server.stdout is not None
                url = server.stdout.readline().split()[1]
                page = browser.new_page()
                page.on(
                    "response",
                    lambda response, url=url: sizes.update(
                        {response.url.removeprefix(url): int(response.headers.get("content-length", 0))}
                    ),
                )
                page.goto(url, wait_until="commit")
                while (paint := page.evaluate(FIRST_PAINT)) is None:
                    page.wait_for_timeout(10)
                paints.append(paint / 1000)
                page.close()
                server.terminate()
        browser.close()
    page_bytes = sum(size for path, size in sizes.items() if not path.startswith(("api/", "events", "favicon")))
    return {
        "dashboard_first_paint_s": round(statistics.median(paints), 3),
        "dashboard_first_paint_s_min": round(min(paints), 3),
        "dashboard_first_paint_s_max": round(max(paints), 3),
        "dashboard_bytes": page_bytes,
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
    front, added = http_front()
    if arguments.no_model:
        front |= {"http_overhead_share": None, "http_overhead_share_why": "the model was left out (--no-model)"}
    else:
        token = real_token_ms()
        shares = [one / token for one in added]
        front |= {
            "real_token_ms": token,
            "http_overhead_share": round(statistics.median(shares), 4),
            "http_overhead_share_min": round(min(shares), 4),
            "http_overhead_share_max": round(max(shares), 4),
        }
    return {"rounds": ROUNDS, **collector(arguments.seconds), **front, **dashboard()}
