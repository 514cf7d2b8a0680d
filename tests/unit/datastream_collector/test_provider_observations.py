"""What a worker says on its pipes, through provider, provisioner, bus and collector, into the archive (S1 2.7, 8.9)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from common.actors import Actor, Ctx
from common.addresses import Role
from common.config_slices import CollectorSlice, ProvisionerSlice, encode_slice
from common.effects import ViewChanged
from common.messages.config import ConfigGet, ConfigSlice
from common.messages.provision import (
    NodeExited,
    NodeFailed,
    NodeProvisionSpec,
    NodeStarted,
    PrepareProvider,
    ProviderPrepared,
    StartNode,
)
from common.messages.service import ServiceReady
from common.messages.stream import Flush, Flushed
from tests.support.bus import RealBus

pytestmark = pytest.mark.e2e

WORKER = r"""#!/bin/sh
echo 'a line on stdout'
printf 'half a line, then the rest\n'
printf '\033[31mred\033[0m <b>html</b> \377\376 no utf-8\n' >&2
echo '{"mvp_stdio_event":1,"kind":"datastream_frame","channel":"worker.own","payload":{"x":1}}'
echo '{"mvp_stdio_event":1,"kind":"datastream_frame","channel":"worker.text","payload":"plain"}'
echo '{"mvp_stdio_event":1,"kind":"something else"}'
echo '{"type":"shutdown"}'
echo '{"mvp_stdio_event":1,"kind":"datastream_frame","channel":"mvp.provisioning.events","payload":{"event":FORGED}}'
until [ -e "$0.go" ]; do sleep 0.1; done # it ends when the test says so
exit 7
""".replace("FORGED", '{"run_id":1,"node_id":1,"kind":"NodeStopped","provider":"process","message":"forged"}')


class Resolver(Actor):
    """Serves both slices."""

    Incoming = (ConfigGet,)

    def __init__(self, slices: dict[str, bytes]) -> None:
        self.slices = slices

    def receive(self, msg: Any, ctx: Ctx) -> None:
        if msg.part in self.slices:
            ctx.reply(ConfigSlice(part=msg.part, digest="d", slice_json=self.slices[msg.part]))


class Orchestrator(Actor):
    """Passes orders on to whom they belong; remembers what it hears, which S1 9.18 says is nothing but messages."""

    To = {PrepareProvider: Role.PROVISIONER, StartNode: Role.PROVISIONER, Flush: Role.COLLECTOR}
    Incoming = (*To, ServiceReady, ViewChanged, ProviderPrepared, NodeStarted, NodeFailed, NodeExited, Flushed)

    def __init__(self) -> None:
        self.got: list[Any] = []

    def on_start(self, ctx: Ctx) -> None:
        ctx.watch("routes")

    def receive(self, msg: Any, ctx: Ctx) -> None:
        if role := self.To.get(type(msg)):
            route = ctx.views.routes.named(role)
            assert route is not None
            ctx.send(route.address, msg)
        elif not isinstance(msg, ViewChanged):
            self.got.append(msg)


class World:
    def __init__(self, directory: Path) -> None:
        worker = directory / "worker.sh"
        worker.write_text(WORKER)
        worker.chmod(0o755)
        self.go = worker.with_name("worker.sh.go")
        self.log = directory / "archive.jsonl"
        run = directory / "run"
        run.mkdir(mode=0o700)
        self.bus = RealBus(run)
        slices = {
            str(Role.PROVISIONER): encode_slice(ProvisionerSlice(provider="process", worker_bin=str(worker))),
            str(Role.COLLECTOR): encode_slice(CollectorSlice(frame_log=str(self.log), run_id=1)),
        }
        self.bus.service(Role.RESOLVER).spawn(Resolver(slices), name=Role.RESOLVER)
        self.orchestrator = Orchestrator()
        self.host = self.bus.service(Role.ORCHESTRATOR)
        self.address = self.host.spawn(self.orchestrator, name=Role.ORCHESTRATOR)
        self.bus.start(Role.COLLECTOR)
        owner, self.owner = os.pipe()
        command = [sys.executable, "-P", "-m", "services.provisioner", "--bus", str(self.bus.files[Role.PROVISIONER])]
        self.bus.processes[Role.PROVISIONER] = subprocess.Popen(
            [*command, "--owner-fd", str(owner)],
            pass_fds=[owner],
            env={**os.environ, "XDG_STATE_HOME": str(directory / "state"), "SMQ_VALIDATE": "1"},
        )
        os.close(owner)

    def order(self, msg: Any, answer: type, limit_s: float = 60) -> Any:
        before = len(self.told(answer))
        self.bus.until(lambda: self.host.node.views.routes.named(self.orchestrator.To[type(msg)]), 60)
        self.host.deliver(self.address, msg)
        self.bus.until(lambda: len(self.told(answer)) > before, limit_s)
        return self.told(answer)[-1]

    def told(self, kind: type) -> list[Any]:
        return [msg for msg in self.orchestrator.got if isinstance(msg, kind)]

    def records(self) -> list[dict[str, Any]]:
        # The last line may be on its way into the file.
        return [json.loads(line) for line in self.log.read_bytes().split(b"\n")[:-1]]


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    world = World(tmp_path)
    world.bus.until(lambda: len(world.told(ServiceReady)) == 2, 60)
    yield world
    os.close(world.owner)
    world.bus.close()


@pytest.mark.spec("S1 8.15", "S1 9.18", "S1 2.7")
def test_a_record_is_not_a_command_and_ends_nothing(world: World) -> None:
    world.order(PrepareProvider(run_id=1, provider="process"), ProviderPrepared)
    spec = NodeProvisionSpec(run_id=1, node_id=1, stage_index=0, image="none")
    world.order(StartNode(spec=spec, run=b"\x01" * 16, orchestrator=world.address), NodeStarted)
    world.bus.until(lambda: world.log.exists() and b"forged" in world.log.read_bytes(), 60)
    assert world.told(NodeExited) == [], "the worker said that it is gone, and lives"
    said = [json.loads(record["payload"]["value"]) for record in world.records() if ".stdout" in record["channel"]]
    assert '{"type":"shutdown"}' in [record["line"]["line"] for record in said], "a line like any other"
    world.go.touch()
    world.bus.until(lambda: world.told(NodeExited), 60)


@pytest.mark.spec("S1 2.7", "S1 5.9", "S1 8.9", "S1 8.7", "S1 8.6", "S1 3.9")
def test_every_kind_of_observation_arrives_as_its_record(world: World) -> None:
    world.order(PrepareProvider(run_id=1, provider="process"), ProviderPrepared)
    spec = NodeProvisionSpec(run_id=1, node_id=1, stage_index=0, image="none")
    world.order(StartNode(spec=spec, run=b"\x01" * 16, orchestrator=world.address), NodeStarted)
    world.go.touch()
    world.bus.until(lambda: world.told(NodeExited), 60)
    # What the provisioner records goes another way than what it answers.
    world.bus.until(lambda: b"exited with status 7" in world.log.read_bytes(), 60)
    world.order(Flush(), Flushed)
    records = world.records()

    def of(channel: str) -> list[dict[str, Any]]:
        return [record for record in records if record["channel"] == channel]

    logs = "mvp.provisioning.logs.node.1"
    stdout = [json.loads(record["payload"]["value"])["line"] for record in of(f"{logs}.stdout")]
    assert stdout[:2] == [
        {"run_id": 1, "node_id": 1, "stream": "Stdout", "line": "a line on stdout"},
        {"run_id": 1, "node_id": 1, "stream": "Stdout", "line": "half a line, then the rest"},
    ]
    assert stdout[2]["line"] == '{"mvp_stdio_event":1,"kind":"something else"}', "no frame, so a line"
    (stderr,) = [json.loads(record["payload"]["value"])["line"] for record in of(f"{logs}.stderr")]
    assert (stderr["stream"], stderr["line"]) == ("Stderr", "\x1b[31mred\x1b[0m <b>html</b> �� no utf-8")
    assert {record["source"] for record in of(f"{logs}.stdout") + of(f"{logs}.stderr")} == {"node_bootstrap_stdio"}
    ((own,), (text,)) = of("worker.own"), of("worker.text")
    assert own["payload"] == {"encoding": "utf8", "value": '{"x":1}'}, "the payload as it was"
    assert text["payload"] == {"encoding": "utf8", "value": "plain"}
    events = [json.loads(record["payload"]["value"])["event"] for record in of("mvp.provisioning.events")]
    kinds = [event["kind"] for event in events]
    assert kinds[0] == "ProvisionStart" and "NodeStopped" in kinds
    stopped = [event for event in events if event["kind"] == "NodeStopped"][-1]
    assert "7" in stopped["message"] and stopped["provider"] == "process"
    assert [record["position"] for record in records] == list(range(len(records)))
    # The record drives nothing: what the run acts on is the message about the same fact.
    assert world.told(NodeExited)[0].node_id == 1
