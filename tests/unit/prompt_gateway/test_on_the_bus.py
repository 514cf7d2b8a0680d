"""Router and gateway as processes on a real bus, with hosts of this test as config resolver, orchestrator, worker."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from common import security
from common.actors import Actor, Ctx
from common.addresses import Role
from common.bus import mint_keypair
from common.config_slices import GatewaySlice, encode_slice
from common.host import Host, new_boot
from common.messages.bus import Admit, Admitted
from common.messages.config import ConfigGet, ConfigSlice
from common.messages.node_agent import CancelRequest, InferPrompt
from common.messages.prompt import Done, RequestCancelled, TextDelta
from common.messages.serve import CloseRpc, OpenPromptRpc, PromptRpcReady, RpcClosed, ServingFailed
from common.messages.service import ServiceReady
from common.node import Identity
from services.prompt_gateway.wire import DoneLine
from tools.prompt_client import PromptClient

ROOT = Path(__file__).resolve().parents[3]


class Resolver(Actor):
    Incoming = (ConfigGet,)

    def receive(self, msg: ConfigGet, ctx: Ctx) -> None:
        config = encode_slice(GatewaySlice(rpc_bind="127.0.0.1:0"))
        ctx.reply(ConfigSlice(part=msg.part, digest="d", slice_json=config))


class Orchestrator(Actor):
    Incoming = (ServiceReady, PromptRpcReady, ServingFailed, RpcClosed)

    def __init__(self) -> None:
        self.heard: list[Any] = []
        self.gateway = b""

    def receive(self, msg: Any, ctx: Ctx) -> None:
        self.heard.append(msg)
        if isinstance(msg, ServiceReady):
            self.gateway = ctx.sender

    def of(self, kind: type) -> list[Any]:
        return [msg for msg in self.heard if isinstance(msg, kind)]


class Provisioner(Actor):
    Incoming = (Admitted,)

    def __init__(self) -> None:
        self.admitted: list[bytes] = []

    def receive(self, msg: Admitted, ctx: Ctx) -> None:
        self.admitted.append(msg.key)


class Worker(Actor):
    """Answers "echo" at once, everything else only when it is cancelled."""

    Incoming = (InferPrompt, CancelRequest)

    def __init__(self) -> None:
        self.cancelled: list[int] = []
        self.prompts = 0

    def receive(self, msg: InferPrompt | CancelRequest, ctx: Ctx) -> None:
        if isinstance(msg, CancelRequest):
            self.cancelled.append(msg.request_id)
            ctx.reply(RequestCancelled(request_id=msg.request_id))
            return
        self.prompts += 1
        ctx.send(msg.reply_to, TextDelta(request_id=msg.request_id, text="ok"))
        if msg.prompt == "echo":
            done = Done(
                request_id=msg.request_id,
                final_text="ok",
                tokens_generated=1,
                elapsed_ms=1,
                prompt_tokens=1,
                finish_reason="stop",
            )
            ctx.send(msg.reply_to, done)


class Cluster:
    def __init__(self, folder: Path) -> None:
        self.files = security.init(folder, relay=False)
        self.processes = [self.process(name) for name in ("router", "prompt_gateway")]
        self.hosts: list[Host] = []
        self.orchestrator, self.provisioner, self.worker = Orchestrator(), Provisioner(), Worker()
        self.service(Role.RESOLVER, Resolver())
        self.orchestrator_host, self.orchestrator_address = self.service(Role.ORCHESTRATOR, self.orchestrator)
        self.provisioner_host, self.provisioner_address = self.service(Role.PROVISIONER, self.provisioner)

    def process(self, name: str) -> subprocess.Popen[bytes]:
        file = self.files[Role(name)]
        command = [sys.executable, "-P", "-m", f"services.{name}", "--bus", str(file)]
        return subprocess.Popen(command, cwd="/", env=os.environ | {"PYTHONPATH": str(ROOT), "SMQ_VALIDATE": "1"})

    def service(self, role: Role, actor: Actor) -> tuple[Host, bytes]:
        host = Host.from_bus_file(self.files[role])
        self.hosts.append(host)
        return host, host.spawn(actor, name=role)

    def admit_worker(self) -> bytes:
        """A worker's host; returns the address of its node agent."""
        bus_file, keys = self.provisioner_host.bus_file, mint_keypair()
        router = bus_file.broker_key
        admit = Admit(key=keys.public, role=Role.AGENT, run=b"r" * 16, node_id=1)
        self.until(lambda: self.provisioner_host.node.views.routes.known or self.provisioner_host.node.link.up)
        self.provisioner_host.node.system.post(router, admit, src=self.provisioner_address)
        self.until(lambda: self.provisioner.admitted == [keys.public])
        identity = Identity(keys.public, Role.AGENT, new_boot(), "node 1", b"r" * 16)
        host = Host(identity, broker_key=bus_file.worker_key, endpoints=bus_file.worker_endpoints, keys=keys)
        self.hosts.append(host)
        return host.spawn(self.worker)

    def send(self, message: Any) -> None:
        system = self.orchestrator_host.node.system
        system.post(self.orchestrator.gateway, message, src=self.orchestrator_address)

    def until(self, fact: Callable[[], object], limit_s: float = 60) -> None:
        end = time.monotonic() + limit_s
        while not fact():
            assert time.monotonic() < end, f"it did not come to be so; heard: {self.orchestrator.heard}"
            for host in self.hosts:
                host.loop.turn(2)
                host.pump()

    def close(self) -> None:
        for host in self.hosts:
            host.close()
        for process in self.processes:
            process.kill()
            process.wait()


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    # Hosts take the signals of their process; this one's belong to pytest.
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    with tempfile.TemporaryDirectory(prefix="smq-") as folder:
        cluster = Cluster(Path(folder))
        try:
            yield cluster
        finally:
            cluster.close()
            signal.set_wakeup_fd(-1)
            for number, handler in handlers.items():
                signal.signal(number, handler)


@pytest.mark.spec("S1 4.10", "S1 5.7", "S1 6.9", "S1 9.11")
def test_a_prompt_over_the_real_bus(cluster: Cluster) -> None:
    agent = cluster.admit_worker()
    cluster.until(lambda: cluster.orchestrator.gateway)
    assert cluster.orchestrator.of(ServiceReady)[0].service == Role.GATEWAY
    cluster.send(OpenPromptRpc(run_id=1, node_id=1, mode="direct", encode_actor=agent, decode_actor=agent, nodes=[]))
    cluster.until(lambda: cluster.orchestrator.of(PromptRpcReady))
    addr = cluster.orchestrator.of(PromptRpcReady)[0].addr
    with PromptClient.connect(addr) as client, ThreadPoolExecutor(1) as thread:
        answer = thread.submit(client.complete, "echo")
        cluster.until(answer.done)
        assert isinstance(answer.result(), DoneLine)
        assert answer.result().final_text == "ok"
    client = PromptClient.connect(addr)
    client.submit("hang")
    cluster.until(lambda: cluster.worker.prompts == 2)
    client.close()
    cluster.until(lambda: len(cluster.worker.cancelled) == 1)
    cluster.send(CloseRpc(reason="bye"))
    cluster.until(lambda: cluster.orchestrator.of(RpcClosed))
    assert cluster.orchestrator.of(ServingFailed) == []
