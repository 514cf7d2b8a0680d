"""RunActor: one run from the services' readiness to the exit status (S1 4, 9, 10).

The dispatch table of everything that a run hears; what it does about it stands in startup.py (phases up to the open
RPC), serving.py (supervision) and closing.py (shutdown). State and helpers: base.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from common.actors import Ctx
from common.addresses import Role
from common.effects import SendFailed, StopSignal, ViewChanged
from common.limits import SERVICE_READY_MS
from common.messages.config import ConfigFailed, ConfigSlice
from common.messages.member import MemberChanged
from common.messages.provision import (
    BootstrapCompleted,
    NodeExited,
    NodeFailed,
    NodesStopped,
    NodeStarted,
    NodeStopped,
    ProviderPrepared,
    ProviderPrepareFailed,
)
from common.messages.report import (
    Command,
    Lifecycle,
    NodeRuntimeReady,
    NodeRuntimeReadyAck,
    StageFault,
    StageProgress,
    StageReady,
    StageStopped,
    WeightsReady,
)
from common.messages.serve import PromptRpcFailed, PromptRpcReady, RpcClosed, ServingFailed, ShutdownRequested
from common.messages.service import ServiceFailed, ServiceReady
from common.messages.stream import Flushed
from common.records import CHANNEL_STDERR, CHANNEL_STDOUT, LogStream, log_record
from services.orchestrator.actor import OrchestratorActor, ReportInbox, ReportsPending
from services.orchestrator.base import LIMIT_TIMER
from services.orchestrator.closing import CLOSING, STEP_TIMER
from services.orchestrator.serving import LEASE_TIMER, SILENT_TIMER
from services.orchestrator.startup import ACK_TIMER, STAGE_TIMER, StartUp

SERVICES_TIMER = "run:services"


@dataclass(frozen=True, slots=True)
class StopLine:
    """Event: a stop word on standard input (S1 7.16, 9.17)."""

    word: str


@dataclass(frozen=True, slots=True)
class StdioLine:
    """Event: a captured line (S1 7.14). stream: "stdout" | "stderr"; service: "" for the orchestrator's own."""

    stream: str
    text: str
    service: str = ""


@dataclass(frozen=True, slots=True)
class ServiceLost:
    """Event of the launcher: a service ended and is not restarted. how: e.g. "ended with status 1"."""

    role: Role
    how: str


@dataclass(frozen=True, slots=True)
class ServiceRestarted:
    """Event of the launcher: a service ended and runs again."""

    role: Role
    how: str


class RunActor(StartUp):
    """Spawn it with name="orchestrator"; it spawns the orchestrator actor and its report inbox."""

    Incoming: ClassVar[tuple[type, ...]] = (
        *StartUp.SERVICE_INCOMING,
        ServiceReady,
        ServiceFailed,
        ProviderPrepared,
        ProviderPrepareFailed,
        NodeStarted,
        NodeFailed,
        NodeExited,
        NodeStopped,
        NodesStopped,
        BootstrapCompleted,
        PromptRpcReady,
        PromptRpcFailed,
        RpcClosed,
        ShutdownRequested,
        ServingFailed,
        MemberChanged,
        Flushed,
        SendFailed,
        ReportsPending,
        StopLine,
        StdioLine,
        ServiceLost,
        ServiceRestarted,
    )

    def __init__(self, nonce: bytes) -> None:
        super().__init__()
        self.nonce = nonce
        self._inbox: ReportInbox | None = None

    # --- life -------------------------------------------------------------------------------------------------
    def on_start(self, ctx: Ctx) -> None:
        """Wait for the services, at most SERVICE_READY_MS."""
        super().on_start(ctx)
        ctx.watch("members")
        ctx.timer(SERVICES_TIMER, SERVICE_READY_MS)

    def on_config(self, config: Any, ctx: Ctx) -> None:
        """The run id is known: spawn the actors that carry it."""
        self._inbox = ReportInbox(ctx.address)
        self.actor_address = ctx.spawn(OrchestratorActor(config.run_id, ctx.spawn(self._inbox)))
        self.renew_lease(ctx)
        self.begin_if_complete(ctx)

    def on_config_failed(self, error: str, ctx: Ctx) -> None:
        """Hosted mode: the resolver serves its error; no worker was started (S1 9.1)."""
        if self.phase == "services":
            self.fail(ctx, error, phase="config")

    def on_timer(self, key: str, ctx: Ctx) -> None:
        """Every timer of a run."""
        match key:
            case _ if key == SERVICES_TIMER:
                if self.phase == "services":
                    self.fail(ctx, f"not all services were ready within 60 s: still waiting for {self.waiting_for}")
            case _ if key == LIMIT_TIMER:
                if self.active:
                    self.fail(ctx, self._limit_error)
            case _ if key == LEASE_TIMER:
                self.renew_lease(ctx)
            case _ if key == SILENT_TIMER:
                self.check_silent(ctx)
            case _ if key == ACK_TIMER:
                if self.phase == "runtime_ready_ack":
                    self.send_acks(ctx)
            case _ if key == STAGE_TIMER:
                self.provision_stage(ctx)
            case _ if key == STEP_TIMER:
                self.step_timed_out(ctx)
            case _:
                super().on_timer(key, ctx)

    def on_view(self, view: str, ctx: Ctx) -> None:
        """Routes and members are two of the three readiness facts, and tell of losses."""
        if view == "members":
            self.members_changed(ctx)
        self.check_barrier(ctx)

    def on_stop_signal(self, signal: StopSignal, ctx: Ctx) -> None:
        """SIGINT, SIGTERM; the second one skips the grace."""
        self.stop_requested(signal.name, ctx)

    # --- messages ---------------------------------------------------------------------------------------------
    def receive(self, msg: Any, ctx: Ctx) -> None:
        """One message; see `Incoming`."""
        match msg:
            case ConfigSlice() | ConfigFailed() | StopSignal() | ViewChanged():
                super().receive(msg, ctx)
            case ServiceReady():
                self._service_ready(msg, ctx)
            case ServiceFailed():
                self.fail(ctx, f"{msg.service}: {msg.error}", phase=msg.phase)
            case ReportsPending():
                self._drain_reports(ctx)
            case StdioLine():
                self._stdio(msg, ctx)
            case StopLine():
                self.stop_requested("stdin", ctx)
            case ShutdownRequested():
                self.stop_requested(msg.source, ctx)
            case ServiceLost():
                self.service_lost(msg.role, msg.how, ctx)
            case ServiceRestarted():
                self.record(ctx, "service_restart", "observed", {"service": msg.role, "how": msg.how})
            case SendFailed():
                self._send_failed(msg, ctx)
            case MemberChanged():
                self.members_changed(ctx)
            case _:
                self._provider_or_gateway(msg, ctx)

    def _provider_or_gateway(self, msg: Any, ctx: Ctx) -> None:
        match msg:
            case ProviderPrepared():
                self.provider_prepared(msg.reconciled, ctx)
            case ProviderPrepareFailed():
                if self.active:
                    self.fail(ctx, f"provider {self.config.provider}: {msg.error}", phase="node_provisioner")
            case NodeStarted():
                self.node_started(msg, ctx)
            case NodeFailed():
                if self.active:
                    detail = {"node_id": msg.node_id, "stage_index": msg.stage_index}
                    self.fail(
                        ctx, f"node {msg.node_id} did not start: {msg.error}", phase="provider_start", detail=detail
                    )
            case NodeExited():
                self.node_exited(msg, ctx)
            case NodeStopped():
                self.node_stopped(msg, ctx)
            case NodesStopped():
                self.nodes_stopped(msg, ctx)
            case BootstrapCompleted():
                self.bootstrap_completed(msg.error, ctx)
            case PromptRpcReady():
                self.rpc_ready(msg.addr, ctx)
            case PromptRpcFailed():
                self.rpc_failed(msg.error, ctx)
            case RpcClosed():
                if self.phase == "closing rpc":
                    self.stop_stages(ctx)
            case ServingFailed():
                if self.active:
                    self.fail(ctx, f"prompt serving failed: {msg.error}", phase="serve_prompts")
            case Flushed():
                self.flushed(msg.error, ctx)
            case _:
                pass

    def _drain_reports(self, ctx: Ctx) -> None:
        """S1 6.3: everything pending in the report inbox."""
        for _, report in self._inbox.drain() if self._inbox else []:
            match report:
                case StageStopped():
                    self.stage_stopped(report.stage_index, ctx)
                case Lifecycle():
                    self.record(ctx, "run_lifecycle", "observed", {"event": report.event, "reason": report.reason})
                case Command():
                    detail = {"command": report.command.kind, "stage_index": report.command.stage_index}
                    self.record(ctx, "run_command", "observed", detail)
                case _ if not self.active:
                    continue
                case NodeRuntimeReady():
                    self.runtime_ready(report, ctx)
                case NodeRuntimeReadyAck():
                    self.acknowledged(report.stage_index, report.readiness_id, ctx)
                case WeightsReady():
                    self.weights_ready(report.stage_index, ctx)
                case StageReady():
                    self.stage_is_ready(report.stage_index, ctx)
                case StageProgress():
                    self.stage_progress(report, ctx)
                case StageFault():
                    self._stage_fault(report, ctx)

    def _stage_fault(self, report: StageFault, ctx: Ctx) -> None:
        node_id = self.workers[report.stage_index].node_id
        when = "while serving prompts" if self.phase == "serving" else "while loading weights"
        phase = "serve_prompts" if self.phase == "serving" else "weights_loaded"
        error = f"node {node_id} stage {report.stage_index} faulted {when}: {report.reason}"
        self.fail(ctx, error, phase=phase, detail={"node_id": node_id, "stage_index": report.stage_index})

    def _service_ready(self, msg: ServiceReady, ctx: Ctx) -> None:
        known = self.services_ready.get(msg.service)
        self.services_ready[msg.service] = msg.boot
        if known is not None and known != msg.boot:
            # Only these two hold state of the run that nobody can give back to them (design.md 2).
            if msg.service in (Role.GATEWAY, Role.PROVISIONER):
                self.service_lost(Role(msg.service), "was restarted in the middle of the run", ctx)
            elif msg.service == Role.COLLECTOR:
                self.subscribe_again(ctx)
        self.begin_if_complete(ctx)

    def _send_failed(self, msg: SendFailed, ctx: Ctx) -> None:
        """S1 10.12: the error belongs to the phase that attempted the send."""
        what = type(msg.message).__name__
        if not self.active or what in ("ExpectFlow", "DatastreamSubscribe", "SuspendServing", "ResumeServing"):
            if what == "DatastreamSubscribe":
                self.record(ctx, "datastream_subscribe", "failed", {"error": msg.reason})
            return
        self.fail(ctx, f"{what} could not be delivered: {msg.reason.replace('_', ' ')}")

    def _stdio(self, msg: StdioLine, ctx: Ctx) -> None:
        stream = LogStream.STDOUT if msg.stream == "stdout" else LogStream.STDERR
        channel = CHANNEL_STDOUT if msg.stream == "stdout" else CHANNEL_STDERR
        text = f"{msg.service}: {msg.text}" if msg.service else msg.text
        ctx.observe(channel, log_record(self.run_id, self.node_id, stream, text))

    def check(self) -> None:
        """Invariants: nothing advances past the barrier without its facts (S1 9.5-9.7)."""
        if self.phase in ("stage", "rpc", "serving"):
            assert all(worker.acked for worker in self.workers.values())
        if self.phase in ("rpc", "serving"):
            assert all(worker.weights and worker.stage_ready for worker in self.workers.values())
        assert self.phase != "over" or self.result.status in (0, 1)
        assert self.phase not in CLOSING or not self._limit_error
