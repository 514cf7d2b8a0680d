"""Provider vastai with machines that are real sshds: deployment, tunnel, output, the dead-man's switch."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from services.provisioner import vastai_scripts as scripts
from services.provisioner.plugin import Exited, Failed, StderrLine, StdoutLine
from tests.unit.provisioner.vastai_stage import SECRET, VastStage, no_machines

pytestmark = pytest.mark.skipif(bool(no_machines()), reason=no_machines())


@pytest.fixture
def market(tmp_path: Path) -> Iterator[VastStage]:
    made = VastStage(tmp_path, real=True)
    yield made
    made.close()


def machine_of(market: VastStage) -> Any:
    (instance,) = market.fake.instances.values()
    return instance.machine


def ended(watched: Any, limit_s: float = 60) -> Exited | Failed:
    watched.wait(lambda seen: any(isinstance(item, Exited | Failed) for item in seen), limit_s)
    last = watched.seen[-1]
    assert isinstance(last, Exited | Failed)
    return last


@pytest.mark.spec("S1 7.5", "S1 8.9", "S1 9.16")
@pytest.mark.parametrize("behaviour", ["good", "proxy"])
def test_a_worker_is_deployed_heard_and_destroyed(market: VastStage, behaviour: str) -> None:
    market.fake.offer(behaviour=behaviour)
    provider = market.provider()
    provider.prepare()
    handle, watched = market.start(provider)
    length = len(json.dumps({"secret_key": SECRET}))
    watched.wait(lambda seen: StdoutLine(f"ready {length}") in seen and StderrLine("careful") in seen)
    machine = machine_of(market)
    assert oct(machine.file("launch.json").stat().st_mode & 0o777) == "0o600"
    assert SECRET not in json.dumps(market.fake.requests)
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdecimal():
                assert SECRET.encode() not in (entry / "cmdline").read_bytes()
    provider.stop_node(handle, False)
    assert not market.fake.instances and not machine.alive
    provider.stop_node(handle, False)


def test_an_exit_is_told_and_the_machine_then_destroys_itself(
    market: VastStage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scripts.deploy, "__defaults__", (1, ""))
    market.fake.offer()
    provider = market.provider()
    provider.prepare()
    _, watched = market.start(provider)
    watched.wait(lambda seen: StdoutLine("tick 1") in seen)
    # Nobody stops it: as after the operator's laptop died.
    machine_of(market).file("go").touch()
    assert ended(watched) == Exited(3, "exited with status 3")
    until = time.monotonic() + 60
    while market.fake.instances and time.monotonic() < until:
        time.sleep(0.1)
    assert not market.fake.instances


def test_a_machine_that_nobody_comes_to_destroys_itself(market: VastStage) -> None:
    market.fake.offer()
    onstart = scripts.onstart("", market.fake.url, None, unused_s=1)
    assert len(onstart) < scripts.ONSTART_CHARS_MAX
    from services.provisioner.vastai_api import VastClient

    client = VastClient(market.fake.key, {"VASTAI_BASE_URL": market.fake.url}, pace=0)
    instance = client.create(market.fake.offers[0]["id"], {"label": "x", "onstart": onstart})
    for _ in range(3):
        client.show(instance)
    until = time.monotonic() + 60
    while market.fake.instances and time.monotonic() < until:
        time.sleep(0.1)
    assert not market.fake.instances


def echo_server() -> tuple[int, list[bytes]]:
    heard: list[bytes] = []
    server = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        while True:
            connection, _ = server.accept()
            with connection:
                heard.append(connection.recv(100))
                connection.sendall(b"here")

    threading.Thread(target=serve, daemon=True).start()
    return server.getsockname()[1], heard


def dial(port: int) -> bytes:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 2) as connection:
        connection.sendall(b"hello")
        return connection.recv(100)
    return b""


def test_the_tunnel_leads_here_and_survives_a_broken_connection(market: VastStage) -> None:
    port, heard = echo_server()
    with socket.create_server(("127.0.0.1", 0)) as probe:
        far = probe.getsockname()[1]
    market.fake.offer()
    provider = market.provider(forwards=[(far, f"127.0.0.1:{port}")])
    provider.prepare()
    handle, watched = market.start(provider)
    watched.wait(lambda seen: StdoutLine("tick 1") in seen)
    assert dial(far) == b"here" and heard == [b"hello"]
    session = provider._rented[handle.id].session
    assert session is not None and session._process is not None
    os.kill(session._process.pid, signal.SIGKILL)
    until = time.monotonic() + 60
    while dial(far) != b"here" and time.monotonic() < until:
        time.sleep(0.1)
    assert dial(far) == b"here"
    count = len(watched.seen)
    watched.wait(lambda seen: len(seen) > count + 20)
    ticks = [item.line for item in watched.seen if isinstance(item, StdoutLine) and item.line.startswith("tick")]
    assert ticks == [f"tick {number + 1}" for number in range(len(ticks))], "a line came twice or not at all"
    provider.stop_node(handle, True)
    assert not market.fake.instances


def test_a_machine_that_vanishes_ends_the_run(market: VastStage) -> None:
    market.fake.offer()
    provider = market.provider()
    provider.prepare()
    handle, watched = market.start(provider)
    watched.wait(lambda seen: StdoutLine("tick 1") in seen)
    (instance,) = market.fake.instances
    market.fake._destroy(instance)
    end = ended(watched)
    assert isinstance(end, Failed) and end.reason == f"instance {instance} vanished"
    provider.stop_node(handle, True)
    assert not market.fake.instances


def test_the_spending_limit_ends_the_run(market: VastStage) -> None:
    market.fake.offer(price=0.3)
    provider = market.provider(max_hours=0.0005)
    provider.prepare()
    handle, watched = market.start(provider)
    end = ended(watched)
    assert isinstance(end, Failed) and "the limit [vastai] max_hours = 0.0005 is reached" in end.reason
    provider.stop_node(handle, True)
    assert not market.fake.instances
