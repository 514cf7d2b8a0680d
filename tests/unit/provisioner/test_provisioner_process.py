"""The provisioner as a process on a real bus: real admission, real workers, and no death that leaves one behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from common.actors import Actor, Ctx
from common.addresses import Role
from common.bus import KeyPair
from common.config_slices import ProvisionerSlice, encode_slice
from common.effects import ViewChanged
from common.launch_file import LaunchFile
from common.messages.config import ConfigGet, ConfigSlice
from common.messages.provision import (
    BootstrapCompleted,
    CompleteBootstrap,
    NodeExited,
    NodeFailed,
    NodeProvisionSpec,
    NodesStopped,
    NodeStarted,
    NodeStopped,
    PrepareProvider,
    ProviderPrepared,
    ProviderPrepareFailed,
    StartNode,
    StopNodes,
)
from common.messages.service import RunEnded, ServiceReady
from common.messages.stream import Gap, Observe
from tests.support.bus import RealBus

pytestmark = pytest.mark.e2e

RUN = b"\x01" * 16


class Resolver(Actor):
    """Serves the provisioner's slice, and takes the records: it is the collector, too."""

    Incoming = (ConfigGet,)

    def __init__(self, config: ProvisionerSlice) -> None:
        self.slice = encode_slice(config)

    def receive(self, msg: Any, ctx: Ctx) -> None:
        ctx.reply(ConfigSlice(part=msg.part, digest="d", slice_json=self.slice))


class Collector(Actor):
    """Keeps what is observed."""

    Incoming = (Observe, Gap)

    def __init__(self) -> None:
        self.payloads: list[bytes] = []

    def receive(self, msg: Any, ctx: Ctx) -> None:
        self.payloads += [record.payload for record in msg.records] if isinstance(msg, Observe) else []


class Orchestrator(Actor):
    """Passes the test's orders on, and remembers the answers."""

    Orders = (PrepareProvider, StartNode, CompleteBootstrap, StopNodes, RunEnded)
    Incoming = (
        *(ServiceReady, ViewChanged, *Orders),
        *(ProviderPrepared, ProviderPrepareFailed, NodeStarted, NodeFailed, BootstrapCompleted),
        *(NodesStopped, NodeStopped, NodeExited),
    )

    def __init__(self) -> None:
        self.got: list[Any] = []

    def on_start(self, ctx: Ctx) -> None:
        ctx.watch("routes")

    def receive(self, msg: Any, ctx: Ctx) -> None:
        if isinstance(msg, self.Orders):
            route = ctx.views.routes.named(Role.PROVISIONER)
            assert route is not None
            ctx.send(route.address, msg)
        elif not isinstance(msg, ViewChanged):
            self.got.append(msg)


class World:
    """Router and provisioner as processes; resolver, collector and orchestrator as hosts in this one."""

    def __init__(self, directory: Path, worker: str) -> None:
        self.state = directory / "state"
        self.directory = directory / "run"
        self.directory.mkdir(mode=0o700)
        self.bus = RealBus(self.directory)
        config = ProvisionerSlice(provider="process", worker_bin=worker)
        self.bus.service(Role.RESOLVER).spawn(Resolver(config), name=Role.RESOLVER)
        self.collector = Collector()
        self.bus.service(Role.COLLECTOR).spawn(self.collector, name=Role.COLLECTOR)
        self.orchestrator = Orchestrator()
        self.host = self.bus.service(Role.ORCHESTRATOR)
        self.address = self.host.spawn(self.orchestrator, name=Role.ORCHESTRATOR)
        owner, self.owner = os.pipe()
        command = [sys.executable, "-P", "-m", "services.provisioner"]
        bus_file = self.bus.files[Role.PROVISIONER]
        self.provisioner = subprocess.Popen(
            [*command, "--bus", str(bus_file), "--owner-fd", str(owner)], pass_fds=[owner], env=self.environment
        )
        os.close(owner)
        self.bus.processes[Role.PROVISIONER] = self.provisioner
        self.until(ServiceReady)

    @property
    def environment(self) -> dict[str, str]:
        return {**os.environ, "XDG_STATE_HOME": str(self.state), "SMQ_VALIDATE": "1"}

    def order(self, msg: Any) -> None:
        self.bus.until(lambda: self.host.node.views.routes.named(Role.PROVISIONER), 60)
        self.host.deliver(self.address, msg)

    def until(self, kind: type, limit_s: float = 60) -> Any:
        """Pump until such an answer is there, and take it."""

        def find() -> Any:
            return next((msg for msg in self.orchestrator.got if isinstance(msg, kind)), None)

        self.bus.until(find, limit_s)
        found = find()
        self.orchestrator.got.remove(found)
        return found

    def start(self, node_id: int = 1) -> NodeStarted:
        self.order(PrepareProvider(run_id=1, provider="process"))
        self.until(ProviderPrepared)
        spec = NodeProvisionSpec(run_id=1, node_id=node_id, stage_index=0, image="")
        self.order(StartNode(run=RUN, spec=spec, orchestrator=self.address))
        started: NodeStarted = self.until(NodeStarted)
        return started

    def launch_file(self, node_id: int = 1) -> LaunchFile:
        return LaunchFile.read(self.directory / "nodes" / str(node_id) / "launch.json")

    def exit_status(self, limit_s: float) -> int:
        self.bus.until(lambda: self.provisioner.poll() is not None, limit_s)
        self.bus.processes.pop(Role.PROVISIONER)
        return self.provisioner.returncode

    def close(self) -> None:
        os.close(self.owner)
        self.bus.processes.pop(Role.PROVISIONER, None)
        self.provisioner.kill()
        self.provisioner.wait()
        self.bus.close()


@pytest.fixture
def make_world(tmp_path: Path, worker_bin: Callable[[str], str]) -> Iterator[Callable[[str], World]]:
    made: list[World] = []

    def make(habit: str) -> World:
        made.append(World(tmp_path, worker_bin(habit)))
        return made[-1]

    yield make
    for world in made:
        world.close()


@pytest.mark.spec("S1 4.5", "S1 4.12", "S1 5.4", "S1 8.6", "S1 8.7")
def test_a_worker_is_admitted_started_and_stopped(make_world: Callable[[str], World], stage: Any) -> None:
    world = make_world("polite")
    started = world.start()
    assert stage.alive_with(started.handle)
    launch = world.launch_file()
    assert launch.public_key == started.node_key.hex() and launch.orchestrator == world.address.hex()
    # Whoever has the launch file can join as that worker.
    keys = KeyPair(bytes.fromhex(launch.public_key), bytes.fromhex(launch.secret_key))
    agent = world.bus.agent(keys=keys)
    world.bus.until(lambda: agent.node.link.up, 60)
    world.bus.until(lambda: any(b'"ready"' in payload for payload in world.collector.payloads), 60)
    world.order(CompleteBootstrap())
    assert world.until(BootstrapCompleted) == BootstrapCompleted()
    world.order(StopNodes())
    assert world.until(NodesStopped) == NodesStopped(stopped=[1])
    assert not stage.alive_with(started.handle)
    world.bus.until(lambda: not agent.node.link.up, 60)
    world.bus.until(lambda: any(b"NodeStopped" in payload for payload in world.collector.payloads), 60)
    text = b"\n".join(world.collector.payloads)
    positions = [text.index(word) for word in (b"ProvisionStart", b'"ready"', b"NodeLive", b'"bye"', b"NodeStopped")]
    assert positions == sorted(positions)
    assert launch.secret_key.encode() not in text
    world.order(RunEnded(status=0))
    world.bus.pump()
    world.bus.until(lambda: not world.host.node.unsettled, 60)
    world.provisioner.terminate()
    assert world.exit_status(60) == 0
    assert list((world.state / "swactor-mq" / "ledger").iterdir()) == []


@pytest.mark.spec("S1 9.15")
def test_a_worker_that_dies_is_reported(make_world: Callable[[str], World], stage: Any) -> None:
    world = make_world("polite")
    (pid,) = stage.alive_with(world.start().handle)
    os.kill(pid, signal.SIGKILL)
    exited = world.until(NodeExited)
    assert (exited.status, exited.reason) == (-9, "killed by signal 9 (SIGKILL)")


@pytest.mark.spec("S1 4.13", "S1 9.16")
def test_when_the_owner_is_gone_the_worker_goes_and_the_provisioner_too(
    make_world: Callable[[str], World], stage: Any
) -> None:
    world = make_world("stubborn")
    handle = world.start().handle
    world.bus.until(lambda: len(stage.alive_with(handle)) == 3, 60)
    world.bus.kill(Role.ROUTER)
    os.close(world.owner)
    world.owner = os.open("/dev/null", os.O_RDONLY)
    assert world.exit_status(60) == 0
    assert not stage.alive_with(handle)
    assert list((world.state / "swactor-mq" / "ledger").iterdir()) == []


@pytest.mark.spec("S1 4.13", "S1 9.16")
def test_when_the_provisioner_is_killed_its_cleanup_stops_the_worker(
    make_world: Callable[[str], World], stage: Any
) -> None:
    world = make_world("stubborn")
    handle = world.start().handle
    world.bus.until(lambda: len(stage.alive_with(handle)) == 3, 60)
    world.provisioner.kill()
    assert world.exit_status(60) == -9
    cleanup = [sys.executable, "-P", "-m", "services.provisioner", "--cleanup"]
    done = subprocess.run(cleanup, env=world.environment, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "provisioner: 1 worker of an earlier run stopped\n")
    assert not stage.alive_with(handle)
    assert not (world.directory / "nodes" / "1" / "launch.json").exists()
