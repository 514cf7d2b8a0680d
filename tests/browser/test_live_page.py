"""The dashboard of a live collector: frames as they come, a collector that restarts, a page that reconnects."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Page, expect

from common.addresses import Role
from common.datastream import Emit, ObserverActor
from common.messages.service import ServiceReady
from common.records import CHANNEL_BOOTSTRAP, CHANNEL_PROMPT, bootstrap_record, log_channel, log_record, prompt_record
from tests.unit.datastream_collector.test_collector_process import World

Serve = Callable[..., str]


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    world = World(tmp_path / "r", tmp_path / "a.jsonl")
    world.bus.until(lambda: world.told(ServiceReady), 60)
    yield world
    world.bus.close()


def say(world: World, channel: str, payload: bytes) -> None:
    world.host.deliver(world.host.observer, Emit(channel, payload))


def settle(world: World, seconds: float = 0.3) -> None:
    """Until what was said is with the collector: sent, and acknowledged by it."""
    observer = world.host.node.system.actor(world.host.observer)
    assert isinstance(observer, ObserverActor)
    until = time.monotonic() + seconds
    while time.monotonic() < until or world.host.node.unsettled or observer._pending:
        assert time.monotonic() < until + 60, "the collector does not take it"
        world.bus.pump()


def phase(world: World, name: str, status: str, **detail: Any) -> None:
    say(world, CHANNEL_BOOTSTRAP, bootstrap_record(name, status, 1, 1, detail))


def prompt(world: World, name: str, status: str, **detail: Any) -> None:
    say(world, CHANNEL_PROMPT, prompt_record(name, status, 1, 1, 1, {"prompt_id": 1, **detail}))


@pytest.mark.spec("S1 8.11", "S1 7.15")
def test_what_happens_is_shown_as_it_happens(page: Page, serve: Serve, world: World, shot: Callable[..., None]) -> None:
    phase(world, "config", "ready", model_id="smol", provider="process", boot=1)
    phase(world, "provider_start", "started", stage_index=0, provider="process")
    settle(world)
    url = serve("--run-dir", world.bus.bus_file(Role.COLLECTOR).run_dir)
    page.goto(url)
    expect(page.locator("#source")).to_have_text("live: live")
    expect(page.get_by_role("status").first).to_have_text("starting · provider start")
    phase(world, "provider_start", "ready", stage_index=0)
    phase(world, "stage_provision_wait", "observed", stage_index=0, phase="tensors", done=40, total=100)
    settle(world)
    expect(page.locator("#workers tbody tr")).to_contain_text("tensors 40 %")
    phase(world, "serve_prompts", "started")
    prompt(world, "prompt_work", "observed", max_tokens=50)
    prompt(world, "node_prompt_send", "started")
    for _ in range(10):
        prompt(world, "node_prompt_event", "observed", event="text_delta", tokens=1)
        settle(world, 0.05)
    row = page.locator("#prompts tbody tr").first
    expect(row).to_contain_text("active")
    expect(row).to_contain_text("10 of 50")
    expect(page.locator("#pipeline .edge").first).to_contain_text("tokens/s")
    say(world, log_channel(1, "stderr"), log_record(1, 1, "stderr", "a line from the worker"))
    settle(world)
    expect(page.get_by_role("log")).to_contain_text("a line from the worker")
    shot(page, "live")


def test_a_restarted_collector_and_a_flood_change_nothing(page: Page, serve: Serve, world: World) -> None:
    phase(world, "config", "ready", model_id="smol", boot=1)
    settle(world)
    page.goto(serve("--run-dir", world.bus.bus_file(Role.COLLECTOR).run_dir))
    expect(page.locator("#facts")).to_contain_text("smol")
    world.bus.kill(Role.COLLECTOR)
    expect(page.locator("#source")).to_have_text("live: lost")
    world.bus.start(Role.COLLECTOR)
    world.bus.until(lambda: len(world.told(ServiceReady)) > 1, 60)
    for number in range(30_000):
        say(world, log_channel(1, "stdout"), log_record(1, 1, "stdout", f"flood {number}"))
        if number % 100 == 0:
            world.bus.pump()
    phase(world, "serve_prompts", "started")
    settle(world)
    expect(page.locator("#source")).to_have_text("live: live")
    expect(page.get_by_role("status").first).to_contain_text("serving")
    page.get_by_label("Source").select_option("1.stdout")
    expect(page.get_by_role("log")).to_contain_text("flood 29999")
