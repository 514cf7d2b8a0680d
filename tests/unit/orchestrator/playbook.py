"""The run's actor on a stage: a test says what services, provisioner, gateway, SWIM, routes and workers say."""

from __future__ import annotations

import json
from typing import Any

from common.addresses import Role
from common.config_slices import OrchestratorSlice, encode_slice
from common.effects import SendFailed, ViewChanged
from common.limits import LEASE_MS
from common.messages.bus import MemberEntry, RouteEntry, Snapshot, ViewItem
from common.messages.config import ConfigSlice
from common.messages.node_agent import EmbeddedGguf, LocalPath
from common.messages.orchestrator import (
    EndpointWire,
    ObserveNodeRuntimeReady,
    ObserveNodeRuntimeReadyAck,
    ObserveStageFault,
    ObserveStageProgress,
    ObserveStageReady,
    ObserveStageStopped,
    ObserveWeightsReady,
)
from common.messages.provision import (
    BootstrapCompleted,
    NodeExited,
    NodeProvisionSpec,
    NodesStopped,
    NodeStarted,
    NodeStopped,
    ProviderPrepared,
)
from common.messages.serve import PromptRpcReady, RpcClosed
from common.messages.service import Lease, LeaseKept, ServiceReady
from common.messages.stream import Flushed
from common.records import CHANNEL_BOOTSTRAP
from services.orchestrator.base import SERVICES_OF_A_RUN, Phase, RunOver
from services.orchestrator.core import RunActor
from tests.support.harness import Harness

ADDRESS: dict[Role, bytes] = {role: bytes([0x60 + index]) * 32 for index, role in enumerate(SERVICES_OF_A_RUN)}
NONCE = b"\x05" * 16
RUN_ID, NODE_ID = 7, 3
STRANGER = b"\xee" * 32


def config(**changes: Any) -> OrchestratorSlice:
    values: dict[str, Any] = {
        "provider": "process",
        "image": "",
        "run_id": RUN_ID,
        "node_id": NODE_ID,
        "model_id": "smol",
        "gguf_source": LocalPath(path="/m.gguf"),
        "tokenizer": EmbeddedGguf(),
        "max_context": 512,
        "detail_json": '{"provider":"process","model_id":"smol"}',
    }
    return OrchestratorSlice(**{**values, **changes})


class TwoWorkers(RunActor):
    """A run of two stages: the readiness joins and the order of loading, before there is a planner."""

    def specs(self) -> list[NodeProvisionSpec]:
        return [NodeProvisionSpec(run_id=RUN_ID, node_id=NODE_ID + i, stage_index=i, image="") for i in range(2)]


class _Harness(Harness):
    def __init__(self, play: Play) -> None:
        super().__init__(play.run, name=Role.ORCHESTRATOR)
        self._play = play
        self._kept_ms = self.now_ms

    def advance(self, ms: int) -> None:
        end = self.now_ms + ms
        while not self._play.gateway_hangs and end - self._kept_ms >= LEASE_MS:
            super().advance(max(0, self._kept_ms + LEASE_MS - self.now_ms))
            self._kept_ms = self.now_ms
            self._play.gateway(LeaseKept())
        super().advance(end - self.now_ms)


class Play:
    """`said` and `records` give what is new since the last call. gateway_hangs: else it answers leases."""

    def __init__(self, actor: RunActor | None = None) -> None:
        self.run = actor or RunActor(NONCE)
        self.gateway_hangs = False
        self.harness = _Harness(self)
        self.exit_record: dict[str, Any] | None = None
        self._version = 0
        self._routes: dict[bytes, RouteEntry] = {}
        self._members: dict[bytes, MemberEntry] = {}
        for role, address in ADDRESS.items():
            self.route(address, role, role)

    # --- views --------------------------------------------------------------------------------------------------
    def route(self, address: bytes, role: Role = Role.AGENT, name: str = "", node: bytes = b"", boot: int = 1) -> None:
        self._routes[address] = RouteEntry(
            address=address, node=node or address, boot=boot, generation=1, role=role, name=name
        )
        self._publish("routes", list(self._routes.values()))

    def unroute(self, *addresses: bytes) -> None:
        for address in addresses:
            self._routes.pop(address, None)
        self._publish("routes", list(self._routes.values()))

    def member(self, stage: int = 0, state: str = "alive") -> None:
        node = self.key(stage)
        self._members[node] = MemberEntry(
            node=node, boot=1, logical_id="node", role=Role.AGENT, state=state, incarnation=1
        )
        self._publish("members", list(self._members.values()))

    def membership_restarts(self) -> None:
        self._members.clear()
        self.harness.views.members.forget()
        self.harness.tell(ViewChanged("members"))

    def _publish(self, view: str, items: list[Any]) -> None:
        self._version += 1
        typed: list[ViewItem] = items
        self.harness.views.by_name(view).apply(Snapshot(view=view, version=self._version, items=typed))
        self.harness.tell(ViewChanged(view))

    # --- who says it --------------------------------------------------------------------------------------------
    def tell(self, msg: Any) -> None:
        """An event of the shell."""
        self.harness.tell(msg)

    def from_service(self, role: Role, msg: Any) -> None:
        self.harness.tell(msg, src=ADDRESS[role], src_node=ADDRESS[role])

    def provisioner(self, msg: Any) -> None:
        self.from_service(Role.PROVISIONER, msg)

    def gateway(self, msg: Any) -> None:
        self.from_service(Role.GATEWAY, msg)

    @staticmethod
    def key(stage: int = 0) -> bytes:
        return bytes([0x10 + stage]) * 32

    @staticmethod
    def node_actor(stage: int = 0) -> bytes:
        return bytes([0x20 + stage]) * 32

    @staticmethod
    def publisher(stage: int = 0) -> bytes:
        return bytes([0x30 + stage]) * 32

    def worker(self, msg: Any, stage: int = 0, node: bytes = b"") -> None:
        self.harness.tell(msg, src=self.node_actor(stage), src_node=node or self.key(stage), dst=self.run.actor_address)

    # --- steps --------------------------------------------------------------------------------------------------
    def configure(self, **changes: Any) -> None:
        self.from_service(
            Role.RESOLVER,
            ConfigSlice(part=Role.ORCHESTRATOR, digest="d", slice_json=encode_slice(config(**changes))),
        )

    def service_ready(self, role: Role, boot: int = 1) -> None:
        self.from_service(role, ServiceReady(service=role, boot=boot))

    def services_ready(self) -> None:
        for role in SERVICES_OF_A_RUN:
            self.service_ready(role)

    def prepared(self) -> None:
        self.provisioner(ProviderPrepared(provider="process"))

    def started(self, stage: int = 0) -> None:
        self.provisioner(
            NodeStarted(node_id=NODE_ID + stage, stage_index=stage, handle=f"h{stage}", node_key=self.key(stage))
        )

    def reported(self, stage: int = 0, readiness_id: int = 1, node: bytes = b"", **changes: Any) -> None:
        values: dict[str, Any] = {
            "run_id": RUN_ID,
            "node_id": NODE_ID + stage,
            "stage_index": stage,
            "endpoint": EndpointWire(node_key=self.key(stage)),
            "node_actor": self.node_actor(stage),
            "datastream_publisher": self.publisher(stage),
            "readiness_id": readiness_id,
        }
        self.worker(ObserveNodeRuntimeReady(**{**values, **changes}), stage, node)

    def routed(self, stage: int = 0) -> None:
        self.route(self.node_actor(stage), node=self.key(stage))

    def acked(self, stage: int = 0, readiness_id: int = 1) -> None:
        self.worker(
            ObserveNodeRuntimeReadyAck(
                run_id=RUN_ID, node_id=NODE_ID + stage, stage_index=stage, readiness_id=readiness_id
            ),
            stage,
        )

    def completed(self, error: str = "") -> None:
        self.provisioner(BootstrapCompleted(error=error))

    def progressed(self, stage: int = 0, phase: str = "loading_weights", done: int = 1) -> None:
        self.worker(
            ObserveStageProgress(
                run_id=RUN_ID, node_id=NODE_ID + stage, stage_index=stage, phase=phase, done=done, total=9
            ),
            stage,
        )

    def loaded(self, stage: int = 0) -> None:
        self.worker(ObserveWeightsReady(run_id=RUN_ID, node_id=NODE_ID + stage, stage_index=stage), stage)

    def stage_ready(self, stage: int = 0) -> None:
        self.worker(ObserveStageReady(run_id=RUN_ID, stage_index=stage), stage)

    def faulted(self, reason: str = "WorkerCrashed: no memory", stage: int = 0) -> None:
        self.worker(ObserveStageFault(run_id=RUN_ID, stage_index=stage, reason=reason), stage)

    def stage_stopped(self, stage: int = 0) -> None:
        self.worker(ObserveStageStopped(run_id=RUN_ID, stage_index=stage), stage)

    def exited(self, stage: int = 0, status: int = 1, tail: list[str] | None = None) -> None:
        self.provisioner(NodeExited(node_id=NODE_ID + stage, stage_index=stage, status=status, stderr_tail=tail or []))

    def opened(self) -> None:
        self.gateway(PromptRpcReady(addr="127.0.0.1:19777"))

    def rpc_closed(self) -> None:
        self.gateway(RpcClosed(settled=0))

    def node_stopped(self, error: str = "") -> None:
        self.provisioner(NodeStopped(node_id=NODE_ID, error=error))

    def nodes_stopped(self, first_error: str = "") -> None:
        self.provisioner(NodesStopped(stopped=[NODE_ID], first_error=first_error))

    def flushed(self) -> None:
        self.from_service(Role.COLLECTOR, Flushed(archived=1))

    def out_of_reach(self, dst: bytes, message: Any, for_ms: int, reason: str = "unroutable") -> list[int]:
        """`message` and each repetition of it is given back, for so long. Returns when it was repeated."""
        repeated: list[int] = []
        begin_ms = self.harness.now_ms
        self.tell(SendFailed(dst, message, reason))
        while self.harness.now_ms - begin_ms < for_ms:
            assert self.run.active, f"over after {self.harness.now_ms - begin_ms} ms"
            self.harness.advance(250)
            outbound = self.harness.system.outbound
            again = [out for out in outbound if out.dst == dst and type(out.message) is type(message)]
            outbound[:] = [out for out in outbound if out not in again]
            for out in again:
                repeated.append(self.harness.now_ms - begin_ms)
                self.tell(SendFailed(dst, out.message, reason))
        return repeated

    def until(self, phase: Phase) -> Play:
        """Through the happy path to the beginning of this phase; what was said until then is forgotten."""
        steps: list[tuple[Phase, list[Any]]] = [
            (Phase.SERVICES, [self.configure, self.services_ready]),
            (Phase.PROVIDER, [self.prepared]),
            (Phase.START, [self.started]),
            (Phase.READINESS, [self.reported, self.routed, self.member]),
            (Phase.ACK, [self.acked]),
            (Phase.BOOTSTRAP, [self.completed]),
            (Phase.WEIGHTS, [self.loaded, self.stage_ready]),
            (Phase.RPC, [self.opened]),
        ]
        for at, actions in steps:
            if self.run.phase is phase:
                break
            if self.run.phase is not at:
                continue
            for action in actions:
                action()
        assert self.run.phase is phase
        self.said()
        self.records()
        self.harness.effects()
        return self

    def at(self, phase: Phase) -> bool:
        return self.run.phase is phase

    def finish(self) -> RunOver:
        """Answer every step of the shutdown, and return the one result."""
        self.rpc_closed()
        self.stage_stopped()
        self.nodes_stopped()
        self.flushed()
        return self.over()

    # --- what the run did ---------------------------------------------------------------------------------------
    def said(self, *kinds: type) -> list[Any]:
        """Messages sent to others, leases left out unless asked for."""
        sent = [msg for _, msg in self.harness.sent()]
        return [msg for msg in sent if (isinstance(msg, kinds) if kinds else not isinstance(msg, Lease))]

    def names(self) -> list[str]:
        return [type(msg).__name__ for msg in self.said()]

    def records(self, channel: str = CHANNEL_BOOTSTRAP) -> list[dict[str, Any]]:
        return [json.loads(item.payload) for item in self.harness.observed() if item.channel == channel]

    def transitions(self) -> list[tuple[str, str]]:
        return [(record["phase"], record["status"]) for record in self.records()]

    def failure(self) -> dict[str, Any]:
        """The one failure record of a phase."""
        failed = [record for record in self.records() if record["status"] == "failed"]
        self.exit_record = next((record for record in failed if record["phase"] == "orch_exit"), None)
        (of_phase,) = [record for record in failed if record is not self.exit_record]
        return of_phase

    def over(self) -> RunOver:
        (effect,) = [effect for effect in self.harness.effects() if isinstance(effect, RunOver)]
        return effect

    def not_over(self) -> None:
        assert not [effect for effect in self.harness.effects() if isinstance(effect, RunOver)]
