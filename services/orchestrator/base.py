"""What all phases of a run share: facts, records, limits and the one way to fail (S1 4, 9, 10)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from common.actors import Ctx
from common.addresses import Role, short
from common.config_slices import OrchestratorSlice
from common.effects import Effect
from common.messages.orchestrator import EndpointWire
from common.records import CHANNEL_BOOTSTRAP, CHANNEL_STAGE_ROUTE, bootstrap_record
from common.service_actor import ServiceActor

LIMIT_TIMER = "run:limit"

SERVICES_OF_A_RUN: tuple[Role, ...] = (
    Role.RESOLVER,
    Role.PROVISIONER,
    Role.MEMBERSHIP,
    Role.GATEWAY,
    Role.COLLECTOR,
)
"""Who must say ServiceReady. Router and relay are the bus itself: without them nobody could say anything."""


class Phase(StrEnum):
    """Where a run stands, in this order; up to SERVING also the phase of its records (rust-swactor.md 2.7)."""

    SERVICES = "services"
    PLAN = "run_plan"
    PROVIDER = "node_provisioner"
    START = "provider_start"
    READINESS = "node_runtime_ready"
    ACK = "runtime_ready_ack"
    BOOTSTRAP = "complete_bootstrap"
    WEIGHTS = "weights_loaded"
    RPC = "prompt_rpc"
    SERVING = "serve_prompts"
    RESTART = "worker_restart"
    """Back-off before a lost worker is started again; then START and on (restart.py)."""
    CLOSING_RPC = "closing_rpc"
    STOPPING_STAGES = "stopping_stages"
    STOPPING_NODES = "provider_stop"
    FLUSHING = "flushing"
    OVER = "over"


CLOSING = (Phase.CLOSING_RPC, Phase.STOPPING_STAGES, Phase.STOPPING_NODES, Phase.FLUSHING, Phase.OVER)
WHEN = {
    Phase.WEIGHTS: "while loading weights",
    Phase.RPC: "while the prompt RPC was opened",
    Phase.SERVING: "while serving prompts",
}
"""How an error says when a worker was lost; in all earlier phases it was "before ready"."""


@dataclass(frozen=True, slots=True)
class RunOver(Effect):
    """The run's result for the shell: exit status, and the error of `mvp-orchestrator: <error>` (empty on success)."""

    status: int
    error: str


@dataclass(frozen=True, slots=True)
class Console(Effect):
    """A line for the user's terminal: something that only he can do, or that he waits for."""

    text: str


@dataclass(slots=True)
class Worker:
    """One expected worker and what is known of it."""

    node_id: int
    stage_index: int
    attempt: int = 0
    """How often it was restarted."""
    node_key: bytes = b""
    endpoint: EndpointWire | None = None
    node_actor: bytes = b""
    publisher: bytes = b""
    readiness_id: int = 0
    alive: bool = False
    routed: bool = False
    acked: bool = False
    acks_sent: int = 0
    subscribed: bool = False
    weights: bool = False
    stage_ready: bool = False
    exited: bool = False
    memory_bytes: int = 0
    bytes_per_s: int = 0
    """What its engine measured, 0 if nothing."""
    dead_since_ms: int | None = None
    """Since when SWIM has been calling it dead or left."""

    @property
    def ready(self) -> bool:
        """S1 9.5: the report, SWIM's Alive and the route owner, all three."""
        return self.endpoint is not None and self.alive and self.routed


@dataclass(slots=True)
class Result:
    """What the process exits with: the first prompt-serving or start-up error, then the first provider-stop error."""

    error: str = ""
    stop_error: str = ""
    shutdown_source: str = ""
    faulted_phase: str = ""
    stderr_tail: list[str] = field(default_factory=list)

    @property
    def status(self) -> int:
        """S1 3.1, 10.1."""
        return 1 if self.error or self.stop_error else 0

    @property
    def text(self) -> str:
        """The one error line: serving's error first (S1 10.13)."""
        return self.error or self.stop_error


class RunBase(ServiceActor):
    """State and helpers. The phases build on each other, the later ones below: closing.py, serving.py, stages.py,
    readiness.py, startup.py; core.py dispatches."""

    ROLE = Role.ORCHESTRATOR
    SLICE = OrchestratorSlice

    def __init__(self) -> None:
        super().__init__()
        self.phase = Phase.SERVICES
        self.waiting_for = "services"
        """What a stop in this phase interrupts (S1 10.14): "shutdown requested while waiting for <this>"."""
        self.services: dict[Role, tuple[bytes, int]] = {}
        """Who said ServiceReady: address and boot."""
        self.workers: dict[int, Worker] = {}
        """Expected workers by stage index."""
        self.result = Result()
        self.actor_address = b""
        self.provider_touched = False
        """PrepareProvider was sent: StopNodes is owed whatever happens."""
        self.rpc_open = False
        """OpenPromptRpc was sent: CloseRpc is owed."""
        self.generation = 0
        """Of the stages' provisions: counts the worker restarts (restart.py)."""
        self._limit_error = ""
        self._limit_ms = 0

    @property
    def active(self) -> bool:
        """S1 9.15: the phases in which a loss is fatal; from the first reason to end on nothing is."""
        return self.phase not in CLOSING

    # --- records ----------------------------------------------------------------------------------------------
    @property
    def run_id(self) -> int:
        """The configured run id (1 until the configuration is here)."""
        return self.config.run_id if self.config else 1

    @property
    def node_id(self) -> int:
        """The orchestrator's own logical id."""
        return self.config.node_id if self.config else 1

    @property
    def provider(self) -> str | None:
        """The configured provider (None until the configuration is here)."""
        return self.config.provider if self.config else None

    def record(
        self, ctx: Ctx, phase: str, status: str, detail: Mapping[str, Any] | None = None, node_id: int | None = None
    ) -> None:
        """A bootstrap record (S1 8.4)."""
        payload = bootstrap_record(phase, status, self.run_id, self.node_id if node_id is None else node_id, detail)
        ctx.observe(CHANNEL_BOOTSTRAP, payload)

    def record_route(self, ctx: Ctx, worker: Worker, attempt: int) -> None:
        """A stage route check (S1 8.3; rust-swactor.md 2.7)."""
        owner = ctx.views.routes.owner(worker.node_actor)
        stream = ctx.views.routes.owner(worker.publisher)
        detail = {
            "attempt": attempt,
            "stage_index": worker.stage_index,
            "stage_node_id": worker.node_id,
            "node_actor": short(worker.node_actor),
            "datastream_publisher": short(worker.publisher),
            "swim_node_id": short(worker.node_key),
            "member_state": ctx.views.members.state(worker.node_key),
            "route_owner": short(owner.node) if owner else None,
            "datastream_route_owner": short(stream.node) if stream else None,
            "route_matches_ready": bool(owner and owner.node == worker.node_key),
        }
        ctx.observe(
            CHANNEL_STAGE_ROUTE,
            bootstrap_record("stage_route_check", "observed", self.run_id, worker.node_id, detail),
        )

    def config_detail(self) -> dict[str, Any]:
        """The config record's detail, as the resolver made it: no secret, only presence (S1 8.14)."""
        detail: dict[str, Any] = json.loads(self.config.detail_json)
        return detail

    # --- limits -----------------------------------------------------------------------------------------------
    def limit(self, ctx: Ctx, limit_ms: int, error: str) -> None:
        """Fail with `error` unless this phase makes progress within limit_ms (design.md 6 row 14)."""
        self._limit_ms, self._limit_error = limit_ms, error
        ctx.timer(LIMIT_TIMER, limit_ms)

    def limit_error(self, ctx: Ctx) -> str:
        """What to say when the limit is over; phases that know better at that time override it."""
        return self._limit_error

    def progress(self, ctx: Ctx) -> None:
        """Progress extends the silence limit of the phase."""
        if self._limit_error:
            ctx.timer(LIMIT_TIMER, self._limit_ms)

    def no_limit(self, ctx: Ctx) -> None:
        """The phase may last as long as it likes (serving)."""
        self._limit_error = ""
        ctx.cancel(LIMIT_TIMER)

    # --- failing ----------------------------------------------------------------------------------------------
    def fail(self, ctx: Ctx, error: str, *, phase: str = "", worker: Worker | None = None, **detail: Any) -> None:
        """The run ends with this error; a failure record names the phase (S1 10.15). The first error counts (10.1)."""
        if not self.active:
            return
        failed_phase = phase or self.phase
        full = {"provider": self.provider, "error": error, **detail}
        node_id = None
        if worker is not None:
            node_id = worker.node_id
            full |= {"node_id": worker.node_id, "stage_index": worker.stage_index}
        self.record(ctx, failed_phase, "failed", full, node_id)
        self.result.error, self.result.faulted_phase = error, failed_phase
        self.close(ctx)

    def lost(self, ctx: Ctx, error: str, worker: Worker, **detail: Any) -> None:
        """A worker serves no more (S1 9.15): the end of the run, where restart.py cannot mend it."""
        self.fail(ctx, error, worker=worker, **detail)

    def thwarted(self, ctx: Ctx, error: str, worker: Worker | None = None) -> None:
        """A step towards serving failed: the end of the run, where restart.py has no further attempt."""
        self.fail(ctx, error, worker=worker)

    def close(self, ctx: Ctx) -> None:
        """Begin the shutdown sequence (closing.py)."""
        raise NotImplementedError

    # --- who is there -----------------------------------------------------------------------------------------
    def service(self, ctx: Ctx, role: Role) -> bytes:
        """The main actor of a service, b"" if it never came or is gone for good. While the route view is away (a
        router restart), the address that the service itself gave still holds."""
        if route := ctx.views.routes.named(role):
            return route.address
        return self.services.get(role, (b"", 0))[0]

    def name_of(self, worker: Worker) -> str:
        """For messages: the node, and its stage where there are several."""
        return f"node {worker.node_id}" + (f" stage {worker.stage_index}" if len(self.workers) > 1 else "")

    def worker_of(self, stage_index: int, node_id: int) -> Worker | None:
        """The expected worker of this stage and node (S1 9.19), None for anything else."""
        worker = self.workers.get(stage_index)
        return worker if worker is not None and worker.node_id == node_id else None
