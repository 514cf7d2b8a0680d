"""The beginning of a run: services, provider, workers (S1 4.1-4.5, 7.5, 10.5, 10.6). Each phase ends in the next one,
or in `fail`."""

from __future__ import annotations

from typing import Any

from common.actors import Ctx
from common.addresses import Role, short
from common.limits import PROVIDER_START_MS, SERVICE_READY_MS, provider_start_ms
from common.messages.orchestrator import ObservePlanAvailable, StageAssignment
from common.messages.provision import (
    NodeFailed,
    NodeProvisionSpec,
    NodeStarted,
    PrepareProvider,
    ProviderMount,
    StartNode,
    WorkerAwaited,
)
from services.orchestrator.actor import ExpectNode, OrchestratorActor, ReportInbox
from services.orchestrator.base import SERVICES_OF_A_RUN, Console, Phase, Worker
from services.orchestrator.readiness import Readiness


class StartUp(Readiness):
    """From nothing to started workers."""

    def __init__(self, nonce: bytes) -> None:
        super().__init__()
        self.nonce = nonce
        self.inbox: ReportInbox | None = None

    # --- configuration and services (4.1-4.3) -----------------------------------------------------------------
    def on_config(self, config: Any, ctx: Ctx) -> None:
        """The run id is known: the first record, and the actors that carry it."""
        self.record(ctx, "config", "ready", {**self.config_detail(), "boot": ctx.boot, "notes": config.notes})
        self.inbox = ReportInbox(ctx.address)
        inbox = ctx.spawn(self.inbox)
        self.record(ctx, "orchestrator_report_actor", "ready", {"actor": short(inbox)})
        restarts = config.on_worker_loss == "restart"
        self.actor_address = ctx.spawn(OrchestratorActor(config.run_id, inbox, restarts=restarts))
        self.record(ctx, "orchestrator_actor", "ready", {"actor": short(self.actor_address)})
        if self.active:
            self.renew_lease(ctx)
            self.begin_if_complete(ctx)

    def begin_if_complete(self, ctx: Ctx) -> None:
        """All services are ready and the configuration is here."""
        missing = [str(role) for role in SERVICES_OF_A_RUN if role not in self.services]
        if self.config is None:
            missing.insert(0, "the configuration")
        if self.phase is not Phase.SERVICES:
            return
        if missing:
            self.waiting_for = f"services ({', '.join(missing)})"
            return
        config = self.config
        self.record(ctx, "services", "ready", {"services": [str(role) for role in SERVICES_OF_A_RUN]})
        if config.cached_model is not None or config.pipeline_stages > 1:
            self.make_plan(ctx)
        else:
            self.prepare_provider(ctx)

    def make_plan(self, ctx: Ctx) -> None:
        """S1 4.4 (planned.py); ends in prepare_provider."""
        raise NotImplementedError

    def services_timed_out(self, ctx: Ctx) -> None:
        """SERVICE_READY_MS are over."""
        if self.phase is Phase.SERVICES:
            limit_s = SERVICE_READY_MS // 1000
            self.fail(ctx, f"not all services were ready within {limit_s} s: still waiting for {self.waiting_for}")

    # --- provider (4.5, 7.5) ----------------------------------------------------------------------------------
    def prepare_provider(self, ctx: Ctx) -> None:
        """The first step that touches anything outside of this run."""
        self.phase, self.waiting_for = Phase.PROVIDER, "the provider"
        limit_s = PROVIDER_START_MS // 1000
        self.limit(ctx, PROVIDER_START_MS, f"provider {self.provider} was not ready within {limit_s} s")
        self.provider_touched = True
        self.record(ctx, "node_provisioner", "started", {"provider": self.provider})
        message = PrepareProvider(run_id=self.run_id, provider=self.config.provider)
        self.say(Role.PROVISIONER, message, ctx)

    def provider_prepared(self, reconciled: int, ctx: Ctx) -> None:
        """The provider can start workers; leftovers of earlier runs are stopped."""
        if self.phase is Phase.PROVIDER:
            detail = {"provider": self.provider, "owner": "provisioner", "reconciled": reconciled}
            self.record(ctx, "node_provisioner", "ready", detail)
            self._start_workers(ctx)

    def provider_failed(self, error: str, ctx: Ctx) -> None:
        """S1 10.5: before any worker is started."""
        if self.phase is Phase.PROVIDER:
            self.fail(ctx, f"provider {self.provider}: {error}")

    # --- workers (4.5, 10.6) ----------------------------------------------------------------------------------
    def specs(self) -> list[NodeProvisionSpec]:
        """One per worker; direct execution has one (S1 4.5, design.md 6 row 18)."""
        config = self.config
        return [
            NodeProvisionSpec(
                run_id=config.run_id,
                node_id=config.node_id,
                stage_index=config.stage_index,
                image=config.image,
                mounts=self.mounts(),
            )
        ]

    def mounts(self) -> list[ProviderMount]:
        """The cached model, for providers whose workers do not see this machine's files (S1 7.2)."""
        cached = self.config.cached_model
        if cached is None or self.config.provider not in ("docker", "swarm"):
            return []
        return [ProviderMount(host_path=cached.host_path, container_path=cached.container_path)]

    def _start_workers(self, ctx: Ctx) -> None:
        specs = self.specs()
        self.phase, self.waiting_for = Phase.START, "provider start"
        detail = {
            "provider": self.provider,
            "image": self.config.image,
            "relay_mode": self.config.relay_mode,
            "docker_gpus": self.config.docker_gpus,
            "env_keys": sorted({key for spec in specs for key in spec.env}),
            "worker_count": len(specs),
            "worker_node_ids": [spec.node_id for spec in specs],
        }
        self.record(ctx, "node_spec", "ready", detail)
        stages = [StageAssignment(stage_index=spec.stage_index, node_id=spec.node_id) for spec in specs]
        ctx.send(self.actor_address, ObservePlanAvailable(run_id=self.run_id, stages=stages))
        self.limit(ctx, provider_start_ms(self.config.provider), "provider start")
        for spec in specs:
            self.start_worker(spec, ctx)

    def start_worker(self, spec: NodeProvisionSpec, ctx: Ctx) -> None:
        """One worker, from nothing."""
        self.workers[spec.stage_index] = Worker(spec.node_id, spec.stage_index, spec.attempt)
        started = {"provider": self.provider, "image": spec.image, "stage_index": spec.stage_index}
        self.record(ctx, "provider_start", "started", started, spec.node_id)
        start = StartNode(spec=spec, orchestrator=self.actor_address, run=self.nonce)
        self.say(Role.PROVISIONER, start, ctx)

    def limit_error(self, ctx: Ctx) -> str:
        """Of the start: which workers did not."""
        if self.phase is not Phase.START:
            return super().limit_error(ctx)
        missing = [str(worker.node_id) for worker in self.workers.values() if not worker.node_key]
        limit_s = provider_start_ms(self.config.provider) // 1000
        return f"provider start: node {', '.join(missing)} was not started by provider {self.provider} in {limit_s} s"

    def node_started(self, msg: NodeStarted, ctx: Ctx) -> None:
        """The guard owns this worker's handle; its bus key is known before it says a word."""
        worker = self.worker_of(msg.stage_index, msg.node_id)
        if worker is None or worker.node_key or self.phase is not Phase.START or worker.attempt != msg.attempt:
            return
        worker.node_key = msg.node_key
        ctx.send(self.actor_address, ExpectNode(msg.node_id, msg.stage_index, msg.node_key))
        detail: dict[str, Any] = {"provider": self.provider, "stage_index": msg.stage_index, "handle": msg.handle}
        if msg.dph_total:
            detail["dph_total"] = msg.dph_total
        self.record(ctx, "provider_start", "ready", detail, msg.node_id)
        self.progress(ctx)
        if all(worker.node_key for worker in self.workers.values()):
            self.await_readiness(ctx)

    def worker_awaited(self, msg: WorkerAwaited, ctx: Ctx) -> None:
        """Provider external: only the user can go on, so he is told where the launch file is."""
        self.record(ctx, "provider_start", "observed", {"awaited": True, "launch": msg.launch}, msg.node_id)
        ctx.effect(
            Console(
                f"node {msg.node_id} waits for its worker: copy {msg.launch} to its machine (mode 0600) and run "
                "`mvp-worker-node --launch launch.json` there"
            )
        )

    def node_failed(self, msg: NodeFailed, ctx: Ctx) -> None:
        """S1 10.6: the workers that were started before it are stopped by the shutdown sequence."""
        worker = self.worker_of(msg.stage_index, msg.node_id)
        if worker is not None and worker.attempt == msg.attempt:
            self.thwarted(ctx, f"node {msg.node_id} did not start: {msg.error}", worker)
