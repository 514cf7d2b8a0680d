"""Runtime readiness: reported until it is acknowledged, each acknowledgement answered (S1 5.5, 9.6)."""

from __future__ import annotations

from dataclasses import dataclass, field

from common.actors import Ctx
from common.limits import RUNTIME_READY_RESEND_MS_MAX, RUNTIME_READY_RESEND_MS_MIN
from common.messages.node_agent import RuntimeLoaded, RuntimeReadyAck
from common.messages.orchestrator import EndpointWire, ObserveNodeRuntimeReady, ObserveNodeRuntimeReadyAck
from worker.agent.events import WorkerIdentity
from worker.agent.records import BOOTSTRAP, node_event

READY_TIMER = "ready"
READINESS_ID = 1  # one engine per boot: when it dies the worker ends, so there is never a second readiness


@dataclass(slots=True)
class Readiness:
    """The owner has checked run, node and stage of what it hands over, and gives the timer back through `report`."""

    identity: WorkerIdentity
    publisher: bytes
    acknowledged: bool = False
    edge_candidates: list[str] = field(default_factory=list)
    """Where the engine takes edges."""
    memory_bytes: int = 0
    bytes_per_s: int = 0
    _delay_ms: int = RUNTIME_READY_RESEND_MS_MIN

    def this_runtime(self, ctx: Ctx) -> RuntimeLoaded:
        """The fact that the engine of this worker answers."""
        return RuntimeLoaded(
            run_id=self.identity.run_id,
            node_id=self.identity.node_id,
            stage_index=self.identity.stage_index,
            endpoint=self._endpoint(ctx),
            readiness_id=READINESS_ID,
        )

    def _endpoint(self, ctx: Ctx) -> EndpointWire:
        """Every node can also be reached over the bus, if it takes edges at all."""
        candidates = list(self.edge_candidates)
        return EndpointWire(node_key=ctx.node, candidates=candidates, relay=bool(candidates))

    def loaded(self, msg: RuntimeLoaded, ctx: Ctx) -> None:
        """Begin to report."""
        detail = {"readiness_id": msg.readiness_id}
        node_event(ctx, self.identity, BOOTSTRAP, "runtime_ready", "started", detail)
        self._delay_ms = RUNTIME_READY_RESEND_MS_MIN
        self.report(ctx)

    def report(self, ctx: Ctx) -> None:
        """Say it, and again after 100 ms, doubling to 2 s, until `acknowledge` or `stop`."""
        report = ObserveNodeRuntimeReady(
            run_id=self.identity.run_id,
            node_id=self.identity.node_id,
            stage_index=self.identity.stage_index,
            endpoint=self._endpoint(ctx),
            node_actor=ctx.address,
            datastream_publisher=self.publisher,
            readiness_id=READINESS_ID,
            memory_bytes=self.memory_bytes,
            bytes_per_s=self.bytes_per_s,
        )
        ctx.send(self.identity.orchestrator, report)
        ctx.timer(READY_TIMER, self._delay_ms)
        self._delay_ms = min(2 * self._delay_ms, RUNTIME_READY_RESEND_MS_MAX)

    def acknowledge(self, msg: RuntimeReadyAck, ctx: Ctx) -> None:
        """The orchestrator has it. Each acknowledgement is answered: the answer before may be lost."""
        self.stop(ctx)
        if not self.acknowledged:
            self.acknowledged = True
            detail = {"readiness_id": msg.readiness_id}
            node_event(ctx, self.identity, BOOTSTRAP, "runtime_ready", "ready", detail)
        answer = ObserveNodeRuntimeReadyAck(
            run_id=msg.run_id, node_id=msg.node_id, stage_index=msg.stage_index, readiness_id=msg.readiness_id
        )
        ctx.send(self.identity.orchestrator, answer)

    def stop(self, ctx: Ctx) -> None:
        """Nobody needs to hear it any more."""
        ctx.cancel(READY_TIMER)
