"""The collector as a process on a real bus: everything arrives, also over a SIGKILL in mid-stream."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from common.actors import Actor, Ctx
from common.addresses import Role
from common.config_slices import CollectorSlice, encode_slice
from common.datastream import Emit, worker_stream
from common.datastream_publisher import DatastreamPublisherActor, StreamProducer
from common.effects import ViewChanged
from common.messages.config import ConfigGet, ConfigSlice
from common.messages.service import ServiceFailed, ServiceReady
from common.messages.stream import DatastreamSubscribe, ExpectFlow, Flush, Flushed
from services.datastream_collector.streams import CHANNEL_GAP
from tests.support.bus import RealBus

pytestmark = pytest.mark.e2e

RECORDS = 3000


class Resolver(Actor):
    """Serves the collector's slice."""

    Incoming = (ConfigGet,)

    def __init__(self, frame_log: Path) -> None:
        self.slice = encode_slice(CollectorSlice(frame_log=str(frame_log), run_id=1))

    def receive(self, msg: Any, ctx: Ctx) -> None:
        ctx.reply(ConfigSlice(part=msg.part, digest="d", slice_json=self.slice))


class Orchestrator(Actor):
    """Knows the collector, emits numbered records, remembers what it was told."""

    Incoming = (ServiceReady, ServiceFailed, Flushed, ViewChanged, ExpectFlow, Flush)

    def __init__(self) -> None:
        self.got: list[Any] = []
        self.emitted = 0

    def on_start(self, ctx: Ctx) -> None:
        ctx.watch("routes")

    def receive(self, msg: Any, ctx: Ctx) -> None:
        if isinstance(msg, ExpectFlow | Flush):
            route = ctx.views.routes.named(Role.COLLECTOR)
            assert route is not None
            ctx.send(route.address, msg)
        elif not isinstance(msg, ViewChanged):
            self.got.append(msg)

    def on_timer(self, key: str, ctx: Ctx) -> None:
        for _ in range(20):
            ctx.observe("mvp.orch.bootstrap", b'{"n":%d}' % self.emitted)
            self.emitted += 1
        if self.emitted < RECORDS:
            ctx.timer("emit", 5)


class World:
    """Router and collector as processes; resolver, orchestrator and a worker's agent as hosts in this one."""

    def __init__(self, directory: Path, frame_log: Path) -> None:
        self.log = frame_log
        self.bus = RealBus(directory)
        self.bus.service(Role.RESOLVER).spawn(Resolver(frame_log), name=Role.RESOLVER)
        self.orchestrator = Orchestrator()
        self.host = self.bus.service(Role.ORCHESTRATOR)
        self.address = self.host.spawn(self.orchestrator, name=Role.ORCHESTRATOR)
        self.agent = self.bus.agent()
        self.producer = StreamProducer(worker_stream(2, 1))
        self.publisher = self.agent.spawn(DatastreamPublisherActor(self.producer))
        self.bus.start(Role.COLLECTOR)

    def told(self, kind: type) -> list[Any]:
        return [message for message in self.orchestrator.got if isinstance(message, kind)]

    def start_emitting(self) -> None:
        self.host.node.system.set_timer(self.address, "emit", 0)

    def tell_collector(self, message: Any) -> None:
        """By the orchestrator, once it knows the way."""
        self.bus.until(lambda: self.host.node.views.routes.named(Role.COLLECTOR), 60)
        self.host.deliver(self.address, message)

    def flush(self) -> Flushed:
        before = len(self.told(Flushed))
        self.tell_collector(Flush())
        self.bus.until(lambda: len(self.told(Flushed)) > before, 60)
        flushed = self.told(Flushed)[-1]
        assert isinstance(flushed, Flushed)
        return flushed

    def collector(self) -> bytes:
        route = self.host.node.views.routes.named(Role.COLLECTOR)
        assert route is not None
        return route.address

    def records(self) -> list[dict[str, Any]]:
        # The last line may be on its way into the file.
        return [json.loads(line) for line in self.log.read_bytes().split(b"\n")[:-1]]


def payload(record: dict[str, Any]) -> bytes:
    value = record["payload"]["value"]
    return bytes(value) if record["payload"]["encoding"] == "bytes" else value.encode()


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    world = World(tmp_path / "r", tmp_path / "logs" / "a.jsonl")
    yield world
    world.bus.close()


@pytest.mark.spec("S1 2.8", "S1 3.9", "S1 3.11", "S1 5.9", "S1 7.12", "S1 8.12")
def test_records_and_worker_frames_reach_the_archive(world: World) -> None:
    world.bus.until(lambda: world.told(ServiceReady), 60)
    world.start_emitting()
    world.tell_collector(ExpectFlow(flow_id=b"flow", token=b"token", node_id=2, run_id=1))
    subscribe = DatastreamSubscribe(collector=world.collector(), flow_id=b"flow", token=b"token")
    world.agent.node.system.deliver(world.publisher, subscribe)
    for number in range(256):
        world.agent.deliver(world.publisher, Emit("mvp.worker.raw", bytes([number, 255])))
    world.bus.until(lambda: world.orchestrator.emitted >= RECORDS, 60)
    world.bus.until(lambda: not world.host.node.unsettled and not world.agent.node.unsettled, 60)
    flushed = world.flush()
    assert flushed.error == ""
    own = [record for record in world.records() if record["stream"] == "mvp-orchestrator/1"]
    assert [record["position"] for record in own] == list(range(len(own)))
    numbered = [record for record in own if b'{"n":' in payload(record)]
    assert [payload(record) for record in numbered] == [b'{"n":%d}' % number for number in range(RECORDS)]
    worker = [record for record in world.records() if record["stream"] == "2/1"]
    assert [(r["position"], payload(r), r["channel"], r["channel_id"], r["source"]) for r in worker] == [
        (number, bytes([number, 255]), "mvp.worker.raw", 1, "node_cluster") for number in range(256)
    ]
    # The router may count once more after that.
    assert [record["arrival_seq"] for record in world.records()[: flushed.archived]] == list(range(flushed.archived))
    collector = world.bus.processes.pop(Role.COLLECTOR)
    world.host.node.system.deliver(world.host.observer, Emit("mvp.orch.bootstrap", b"after the flush"))
    for _ in range(3):
        world.bus.pump()
    collector.send_signal(signal.SIGTERM)
    world.bus.until(lambda: collector.poll() is not None, 60)
    assert collector.returncode == 0
    said = [payload(record) for record in world.records() if record["channel"] == "mvp.orch.bootstrap"]
    assert said[-1] == b"after the flush"


def test_a_kill_in_mid_stream_loses_and_doubles_nothing_silently(world: World) -> None:
    world.bus.until(lambda: world.told(ServiceReady), 60)
    world.start_emitting()
    for part in (1, 2):
        world.bus.until(lambda part=part: world.orchestrator.emitted > part * RECORDS // 3, 60)
        world.bus.kill(Role.COLLECTOR)
        world.bus.start(Role.COLLECTOR)
        world.bus.until(lambda part=part: len(world.told(ServiceReady)) > part, 60)
    # After a failed send the observer waits up to five seconds with what it holds.
    last = b'{"n":%d}' % (RECORDS - 1)
    world.bus.until(lambda: any(payload(record) == last for record in world.records()), 60)
    world.flush()
    records = world.records()
    assert [record["arrival_seq"] for record in records] == list(range(len(records)))
    assert [record["position"] for record in records] == list(range(len(records)))
    lost = [json.loads(payload(record)) for record in records if record["channel"] == CHANNEL_GAP]
    numbered = [payload(record) for record in records if b'{"n":' in payload(record)]
    assert len(set(numbered)) == len(numbered)
    assert len(numbered) + sum(gap["lost"] for gap in lost) == RECORDS
    assert lost == [], "the tail that producers keep covers a kill at this rate"


@pytest.mark.spec("S1 10.11")
def test_an_archive_that_cannot_be_opened_fails_the_start(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    world = World(tmp_path / "r", tmp_path / "file" / "a.jsonl")
    try:
        world.bus.until(lambda: world.told(ServiceFailed), 60)
        (failed,) = world.told(ServiceFailed)
        assert (failed.service, failed.phase) == (Role.COLLECTOR, "datastream_archive")
        assert failed.error.startswith("cannot create the directory ")
        assert world.told(ServiceReady) == []
    finally:
        world.bus.close()
