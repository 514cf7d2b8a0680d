"""The provisioner's actor on a stage: a test says what router, jobs, plugins and orchestrator say."""

from __future__ import annotations

import json
from typing import Any

from common.addresses import Role
from common.config_slices import ProvisionerSlice, encode_slice
from common.effects import Effect, JobDone, Log, RunJob, ViewChanged
from common.messages.bus import Admitted, RouteEntry, Snapshot
from common.messages.config import ConfigSlice
from common.messages.provision import (
    NodeProvisionSpec,
    NodeStarted,
    PrepareProvider,
    ProviderPrepared,
    StartNode,
)
from services.provisioner.core import ProvisionerActor
from services.provisioner.plugin import (
    PluginNodeHandle,
    PluginObservation,
)
from services.provisioner.state import Minted, NodeObserved, Prepared
from tests.support.harness import Harness

ROUTER, RESOLVER, ORCHESTRATOR = b"r" * 32, b"c" * 32, b"o" * 32
RUN = b"\x01" * 16


class Play:
    """The actor with a router, a resolver and an orchestrator around it that only the test speaks for."""

    def __init__(self, *, configured: bool = True, router: bool = True) -> None:
        self.harness = Harness(ProvisionerActor(), name=Role.PROVISIONER)
        self._version = 0
        self.routes(router_boot=1 if router else 0)
        if configured:
            self.configure()
        self.harness.sent()
        self.harness.effects()

    def routes(self, *, router_boot: int = 1, orchestrator: bytes = ORCHESTRATOR) -> None:
        self._version += 1
        services = [(RESOLVER, Role.RESOLVER, 1), (orchestrator, Role.ORCHESTRATOR, orchestrator[0])]
        if router_boot:
            services.append((ROUTER, Role.ROUTER, router_boot))
        items = [
            RouteEntry(address=address, node=address, boot=boot, generation=1, role=role, name=role)
            for address, role, boot in services
        ]
        self.harness.views.routes.apply(Snapshot(view="routes", version=self._version, items=list(items)))
        self.harness.tell(ViewChanged("routes"))

    def configure(self) -> None:
        config = ProvisionerSlice(provider="process", worker_bin="/bin/worker")
        self.harness.tell(ConfigSlice(part=Role.PROVISIONER, digest="d", slice_json=encode_slice(config)))

    # --- saying -----------------------------------------------------------------------------------------------
    def order(self, msg: Any, src: bytes = ORCHESTRATOR) -> None:
        self.harness.tell(msg, src=src, src_node=src)

    def done(self, job: RunJob, result: Any = None, error: str = "") -> None:
        self.harness.tell(JobDone(job.kind, job.key, result, error))

    def see(self, node_id: int, *observations: PluginObservation) -> None:
        self.harness.tell(NodeObserved(f"h{node_id}", observations))

    # --- hearing ----------------------------------------------------------------------------------------------
    def sent(self, to: bytes = ORCHESTRATOR) -> list[Any]:
        """What was sent to one of them since the last call; the rest is forgotten."""
        everything = self.harness.sent()
        return [msg for dst, msg in everything if dst == to]

    def effects(self) -> list[Effect]:
        return [effect for effect in self.harness.effects() if not isinstance(effect, Log)]

    def job(self, kind: str) -> RunJob:
        (found,) = self.effects()
        assert isinstance(found, RunJob) and found.kind == kind, found
        return found

    def records(self) -> list[tuple[str, Any, str]]:
        def read(payload: bytes) -> Any:
            return json.loads(payload) if payload[:1] == b"{" else payload

        return [(seen.channel, read(seen.payload), seen.source) for seen in self.harness.observed()]

    def events(self) -> list[tuple[int, str]]:
        records = self.records()
        return [
            (record["event"]["node_id"], record["event"]["kind"])
            for channel, record, _ in records
            if channel == "mvp.provisioning.events"
        ]

    # --- shortcuts --------------------------------------------------------------------------------------------
    def prepare(self) -> None:
        self.order(PrepareProvider(run_id=1, provider="process"))
        self.done(self.job("prepare"), Prepared(0))
        assert self.sent() == [ProviderPrepared(provider="process")]

    def mint(self, node_id: int) -> Minted:
        self.order(start_node(node_id))
        minted = Minted(bytes([node_id]) * 32, f"h{node_id}", f"nodes/{node_id}/launch.json")
        self.done(self.job("mint"), minted)
        return minted

    def begin(self, node_id: int) -> RunJob:
        """Up to the running start job."""
        minted = self.mint(node_id)
        self.harness.sent()
        self.harness.tell(Admitted(key=minted.public_key), src=ROUTER)
        return self.job("start_node")

    def live(self, node_id: int) -> PluginNodeHandle:
        handle = PluginNodeHandle(f"h{node_id}", 1000 + node_id)
        self.done(self.begin(node_id), handle)
        assert self.sent() == [started(node_id)]
        self.records()
        return handle


def start_node(node_id: int, run: bytes = RUN) -> StartNode:
    spec = NodeProvisionSpec(run_id=1, node_id=node_id, stage_index=node_id - 1, image="i")
    return StartNode(run=run, spec=spec, orchestrator=ORCHESTRATOR)


def started(node_id: int) -> NodeStarted:
    return NodeStarted(node_id=node_id, stage_index=node_id - 1, handle=f"h{node_id}", node_key=bytes([node_id]) * 32)
