"""The readiness barrier, its acknowledgement and the hand-over by the provider (S1 4.6, 4.7, 5.4, 9.5, 9.6)."""

from __future__ import annotations

from common.actors import Ctx
from common.addresses import Role, short
from common.limits import (
    ACK_LIMIT_MS,
    ACK_RESEND_MS,
    PROVIDER_START_MS,
    READINESS_SILENCE_MS,
    lease_ttl_ms,
    network_profile,
)
from common.messages.node_agent import RuntimeReadyAck
from common.messages.orchestrator import ObservePoolReady
from common.messages.provision import CompleteBootstrap
from common.messages.report import NodeRuntimeReady
from common.messages.service import Lease
from common.messages.stream import DatastreamSubscribe, ExpectFlow
from common.records import CHANNEL_STAGE_ROUTE, bootstrap_record
from services.orchestrator.base import Phase, Worker
from services.orchestrator.route_watch import RouteWatch
from services.orchestrator.stages import Stages

ACK_TIMER = "run:ack"
BEFORE_ACK = (Phase.START, Phase.READINESS, Phase.ACK)
"""While the acknowledgement is not complete, a worker that reports a new runtime starts over; later it is lost."""


class Readiness(Stages):
    """From the last started worker to the hand-over."""

    def __init__(self) -> None:
        super().__init__()
        self._flow_serial = 0
        self._route_watch = RouteWatch()
        self._facts: set[tuple[int, str]] = set()
        """What has been true once: a flapping member makes no progress."""

    # --- the barrier (4.6, 9.5) -------------------------------------------------------------------------------
    def await_readiness(self, ctx: Ctx) -> None:
        """Every worker is started: all three facts of each are awaited."""
        self.phase, self.waiting_for = Phase.READINESS, "node ready"
        node_ids = [worker.node_id for worker in self.workers.values()]
        ctx.send(self.actor_address, ObservePoolReady(nodes=node_ids))
        self.record(ctx, "node_runtime_ready", "started", {"worker_count": len(node_ids), "node_ids": node_ids})
        self.limit(ctx, READINESS_SILENCE_MS, "readiness")
        self.check_barrier(ctx)

    def limit_error(self, ctx: Ctx) -> str:
        """Of the two phases here: what is missing now, and for whom."""
        if self.phase is Phase.READINESS:
            missing = [
                f"node {worker.node_id}: {', '.join(lacks)}"
                for worker in self.workers.values()
                if (lacks := _lacks(worker))
            ]
            return f"no worker readiness for {READINESS_SILENCE_MS // 1000} s ({'; '.join(missing)})"
        if self.phase is Phase.ACK:
            waiting = [
                f"node {worker.node_id} stage {worker.stage_index} readiness {worker.readiness_id}"
                for worker in self.workers.values()
                if not worker.acked
            ]
            limit_s = ACK_LIMIT_MS // 1000
            return f"runtime-ready acknowledgement did not come within {limit_s} s: {', '.join(waiting)}"
        return super().limit_error(ctx)

    def runtime_ready(self, msg: NodeRuntimeReady, ctx: Ctx) -> None:
        """The first fact. A repeat changes nothing; a new readiness starts this worker over, or is its loss."""
        worker = self.workers[msg.stage_index]
        if (worker.readiness_id, worker.node_actor) == (msg.readiness_id, msg.node_actor):
            return
        if self.phase not in BEFORE_ACK:
            self.worker_restarted(worker, msg.readiness_id, ctx)
            return
        worker.acked, worker.routed = False, False
        worker.endpoint, worker.readiness_id = msg.endpoint, msg.readiness_id
        worker.node_actor, worker.publisher = msg.node_actor, msg.datastream_publisher
        worker.memory_bytes, worker.bytes_per_s = msg.memory_bytes, msg.bytes_per_s
        detail = {
            "endpoint": short(msg.endpoint.node_key),
            "node_actor": short(msg.node_actor),
            "stage_index": msg.stage_index,
            "readiness_id": msg.readiness_id,
        }
        self.record(ctx, "node_runtime_ready", "ready", detail, worker.node_id)
        # Its own clock has been running since its start.
        ctx.send(worker.node_actor, Lease(ttl_ms=lease_ttl_ms(network_profile(self.provider or ""))))
        self._progress_once(worker, "report", ctx)
        if worker.subscribed:
            self._expect_flow(worker, ctx)
        self.routes_changed(ctx)
        self.check_barrier(ctx)

    def check_barrier(self, ctx: Ctx) -> None:
        """Join the three facts; called whenever one of them may have changed."""
        if self.phase not in (Phase.READINESS, Phase.ACK):
            return
        for worker in self.workers.values():
            if self.phase is Phase.READINESS or not worker.ready:
                self._check_facts(worker, ctx)
        if self.phase is Phase.READINESS and all(worker.ready for worker in self.workers.values()):
            self._acknowledge(ctx)

    def _check_facts(self, worker: Worker, ctx: Ctx) -> None:
        # Behind the barrier Alive is not asked again: Unknown, while membership restarts, must not hold the run up.
        alive = ctx.views.members.state(worker.node_key) == "alive" or (worker.alive and self.phase is Phase.ACK)
        owner = ctx.views.routes.owner(worker.node_actor) if worker.node_actor else None
        # The endpoint's key must be the one that was minted for this worker: nobody else counts as it.
        same_node = worker.endpoint is not None and worker.endpoint.node_key == worker.node_key
        routed = owner is not None and owner.node == worker.node_key and same_node
        if alive and not worker.alive:
            detail = {"node": short(worker.node_key), "readiness_id": worker.readiness_id}
            self.record(ctx, "node_swim", "ready", detail, worker.node_id)
            self._progress_once(worker, "alive", ctx)
        if routed and not worker.routed:
            detail = {"node_actor": short(worker.node_actor), "node": short(worker.node_key)}
            self.record(ctx, "node_route", "ready", detail, worker.node_id)
            self._progress_once(worker, "routed", ctx)
        worker.alive, worker.routed = alive, routed

    def forget_facts(self, stage_index: int) -> None:
        """Another worker makes its own progress."""
        self._facts = {fact for fact in self._facts if fact[0] != stage_index}

    def _progress_once(self, worker: Worker, fact: str, ctx: Ctx) -> None:
        if self.phase is Phase.READINESS and (worker.stage_index, fact) not in self._facts:
            self._facts.add((worker.stage_index, fact))
            self.progress(ctx)

    def routes_changed(self, ctx: Ctx) -> None:
        """Each transition of a worker's route is a record (S1 8.3)."""
        for worker, detail in self._route_watch.transitions(self.workers.values(), ctx.views):
            record = bootstrap_record("route_transition", "observed", self.run_id, worker.node_id, detail)
            ctx.observe(CHANNEL_STAGE_ROUTE, record)

    # --- acknowledgement (4.7, 9.6) ---------------------------------------------------------------------------
    def _acknowledge(self, ctx: Ctx) -> None:
        self.phase, self.waiting_for = Phase.ACK, "runtime-ready acknowledgement"
        self.limit(ctx, ACK_LIMIT_MS, "acknowledgement")
        for worker in self.workers.values():
            if not worker.subscribed:
                self._expect_flow(worker, ctx)
        self.send_acks(ctx)

    def _expect_flow(self, worker: Worker, ctx: Ctx) -> None:
        """Tell the collector whose frames to take; again with a new flow after a collector restart."""
        collector = self.service(ctx, Role.COLLECTOR)
        if not collector:
            return
        self._flow_serial += 1
        flow = self._flow_serial.to_bytes(8, "little") + worker.node_id.to_bytes(8, "little")
        token = ctx.rng.randbytes(16)
        expect = ExpectFlow(flow_id=flow, token=token, node_id=worker.node_id, run_id=self.run_id)
        ctx.send(collector, expect)
        subscribe = DatastreamSubscribe(collector=collector, flow_id=flow, token=token)
        ctx.send(worker.publisher, subscribe)
        worker.subscribed = True

    def subscribe_again(self, ctx: Ctx) -> None:
        """The collector has a new incarnation."""
        for worker in self.workers.values():
            if worker.subscribed and self.active:
                self._expect_flow(worker, ctx)

    def send_acks(self, ctx: Ctx) -> None:
        """To every ready worker that has not confirmed; repeated until all have."""
        if self.phase is not Phase.ACK:
            return
        for worker in self.workers.values():
            if worker.acked or not worker.ready:
                continue
            worker.acks_sent += 1
            detail = {
                "node_actor": short(worker.node_actor),
                "readiness_id": worker.readiness_id,
                "attempt": worker.acks_sent,
            }
            self.record(ctx, "runtime_ready_ack", "sent", detail, worker.node_id)
            ack = RuntimeReadyAck(
                run_id=self.run_id,
                node_id=worker.node_id,
                stage_index=worker.stage_index,
                readiness_id=worker.readiness_id,
            )
            ctx.send(worker.node_actor, ack)
        ctx.timer(ACK_TIMER, ACK_RESEND_MS)

    def acknowledged(self, stage_index: int, readiness_id: int, ctx: Ctx) -> None:
        """One worker confirmed; stale readiness ids do not count, and none that was never acknowledged."""
        worker = self.workers[stage_index]
        known = worker.acks_sent > 0 and worker.ready and worker.readiness_id == readiness_id
        if self.phase is not Phase.ACK or worker.acked or not known:
            return
        worker.acked = True
        detail = {"readiness_id": readiness_id, "attempts": worker.acks_sent}
        self.record(ctx, "runtime_ready_ack", "ready", detail, worker.node_id)
        if all(worker.acked for worker in self.workers.values()):
            ctx.cancel(ACK_TIMER)
            self._complete_bootstrap(ctx)

    # --- hand-over (5.4, 7.6; design.md 6 row 39) -------------------------------------------------------------
    def _complete_bootstrap(self, ctx: Ctx) -> None:
        self.phase, self.waiting_for = Phase.BOOTSTRAP, "bootstrap completion"
        limit_s = PROVIDER_START_MS // 1000
        error = f"complete_bootstrap was not answered by the provisioner within {limit_s} s"
        self.limit(ctx, PROVIDER_START_MS, error)
        self.record(ctx, "complete_bootstrap", "started", {"provider": self.provider})
        self.say(Role.PROVISIONER, CompleteBootstrap(), ctx)

    def bootstrap_completed(self, error: str, ctx: Ctx) -> None:
        """The provider has handed the workers over."""
        if self.phase is not Phase.BOOTSTRAP:
            return
        if error:
            self.thwarted(ctx, f"complete_bootstrap failed: {error}")
            return
        self.record(ctx, "complete_bootstrap", "ready", {"provider": self.provider})
        self.begin_stages(ctx)


def _lacks(worker: Worker) -> list[str]:
    facts = (
        (worker.endpoint is not None, "no runtime-ready report"),
        (worker.alive, "not alive in SWIM"),
        (worker.routed, "no route to its node actor"),
    )
    return [text for fact, text in facts if not fact]
