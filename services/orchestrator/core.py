"""RunActor: one run from the services' readiness to the exit status (S1 4, 9, 10).

The dispatch table of everything that a run hears; what it does about it stands in startup.py, readiness.py,
stages.py, serving.py (supervision) and closing.py (shutdown). State and helpers: base.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from common.actors import Ctx
from common.addresses import Role
from common.effects import SendFailed, StopSignal, ViewChanged
from common.limits import SERVICE_READY_MS
from common.messages.config import ConfigFailed, ConfigGet, ConfigSlice
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
    WorkerAwaited,
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
from common.messages.serve import (
    PromptActive,
    PromptRpcFailed,
    PromptRpcReady,
    RpcClosed,
    ServingDisturbed,
    ServingFailed,
    ServingRestored,
    ShutdownRequested,
)
from common.messages.service import LeaseKept, ServiceFailed, ServiceReady
from common.messages.stream import DatastreamSubscribe, ExpectFlow, Flushed
from common.records import CHANNEL_STDERR, CHANNEL_STDOUT, LogStream, log_record
from services.orchestrator.actor import ReportsPending
from services.orchestrator.base import LIMIT_TIMER, SERVICES_OF_A_RUN, Phase, Worker
from services.orchestrator.closing import LEASE_TIMER, STEP_TIMER
from services.orchestrator.reaching import FINAL_REASONS, UNREACHED_TIMER
from services.orchestrator.readiness import ACK_TIMER
from services.orchestrator.restart import RESTART_TIMER, RestartingRun
from services.orchestrator.serving import SILENT_TIMER
from services.orchestrator.stages import STAGE_TIMER

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
    """Event of the launcher: a service (or an optional process, by its module) ended and runs again."""

    role: str
    how: str


class RunActor(RestartingRun):
    """Spawn it with name="orchestrator"; it spawns the orchestrator actor and its report inbox."""

    Incoming: ClassVar[tuple[type, ...]] = (
        *RestartingRun.SERVICE_INCOMING,
        *RestartingRun.PLANNED_INCOMING,
        *RestartingRun.RESTART_INCOMING,
        ServiceReady,
        ServiceFailed,
        ProviderPrepared,
        ProviderPrepareFailed,
        NodeStarted,
        WorkerAwaited,
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
        PromptActive,
        LeaseKept,
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
        super().__init__(nonce)
        self._held_failure: ServiceFailed | None = None

    # --- life -------------------------------------------------------------------------------------------------
    def on_start(self, ctx: Ctx) -> None:
        """Wait for the services, at most SERVICE_READY_MS."""
        super().on_start(ctx)
        ctx.watch("members")
        ctx.timer(SERVICES_TIMER, SERVICE_READY_MS)
        self.begin_if_complete(ctx)

    def on_config_failed(self, error: str, ctx: Ctx) -> None:
        """Hosted mode: the resolver serves its error; no worker was started (S1 9.1)."""
        self.fail(ctx, error, phase="config")

    def on_timer(self, key: str, ctx: Ctx) -> None:
        """Every timer of a run."""
        match key:
            case _ if key == SERVICES_TIMER:
                if (held := self._held_failure) is not None:
                    self.fail(ctx, f"{held.service}: {held.error}", phase=held.phase, service=held.service)
                self.services_timed_out(ctx)
            case _ if key == LIMIT_TIMER:
                self.thwarted(ctx, self.limit_error(ctx))
            case _ if key == RESTART_TIMER:
                self.restart_due(ctx)
            case _ if key == LEASE_TIMER:
                self.renew_lease(ctx)
            case _ if key == SILENT_TIMER:
                self.check_silent(ctx)
            case _ if key == ACK_TIMER:
                self.send_acks(ctx)
            case _ if key == STAGE_TIMER:
                self.provision_stage(ctx)
            case _ if key == STEP_TIMER:
                self.step_timed_out(ctx)
            case _ if key == UNREACHED_TIMER:
                self.reach_again(ctx)
            case _:
                super().on_timer(key, ctx)

    def on_view(self, view: str, ctx: Ctx) -> None:
        """Routes and members are two of the three readiness facts, and tell of losses."""
        if view == "members":
            self.members_changed(ctx)
        if view in ("members", "routes"):
            self.routes_changed(ctx)
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
            case ServiceFailed() if msg.service == Role.ORCHESTRATOR and Role.COLLECTOR not in self.services:
                # Of the launcher, before anybody could archive why: told as soon as somebody can (S1 10.3).
                self._held_failure = msg
            case ServiceFailed():
                self.fail(ctx, f"{msg.service}: {msg.error}", phase=msg.phase, service=msg.service)
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
            case LeaseKept():
                self.lease_kept(ctx)
            case _:
                self._provider_or_gateway(msg, ctx)

    def _provider_or_gateway(self, msg: Any, ctx: Ctx) -> None:
        match msg:
            case ProviderPrepared():
                self.provider_prepared(msg.reconciled, ctx)
            case ProviderPrepareFailed():
                self.provider_failed(msg.error, ctx)
            case NodeStarted():
                self.node_started(msg, ctx)
            case WorkerAwaited():
                self.worker_awaited(msg, ctx)
            case NodeFailed():
                self.node_failed(msg, ctx)
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
                self.rpc_closed(ctx)
            case PromptActive():
                self.prompt_active(msg, ctx)
            case ServingFailed():
                self.fail(ctx, f"prompt serving failed: {msg.error}")
            case Flushed():
                self.flushed(ctx)
            case ServingDisturbed() | ServingRestored():
                self.restart_message(msg, ctx)
            case _:
                self.planned_message(msg, ctx)

    def _drain_reports(self, ctx: Ctx) -> None:
        """S1 6.3: everything pending in the report inbox."""
        for _, report in self.inbox.drain() if self.inbox else []:
            match report:
                case StageStopped():
                    self.stage_stopped(report.stage_index, ctx)
                case Lifecycle():
                    self.record(ctx, "run_lifecycle", "observed", {"event": report.event, "reason": report.reason})
                case Command():
                    detail = {"command": report.command.kind, "stage_index": report.command.stage_index}
                    self.record(ctx, "run_command", "observed", detail)
                case _ if not self.active or report.stage_index not in self.workers:
                    continue  # a worker that the placement has left out may still have a word on its way
                case NodeRuntimeReady():
                    self.runtime_ready(report, ctx)
                case NodeRuntimeReadyAck():
                    self.acknowledged(report.stage_index, report.readiness_id, ctx)
                case WeightsReady():
                    self.weights_ready(report.stage_index, ctx)
                case StageReady():
                    self.stage_is_ready(report.stage_index, report.generation, ctx)
                case StageProgress():
                    self.stage_progress(report, ctx)
                case StageFault():
                    self.stage_faulted(report, ctx)

    def _service_ready(self, msg: ServiceReady, ctx: Ctx) -> None:
        if msg.service not in SERVICES_OF_A_RUN:
            return
        role = Role(msg.service)
        _, known_boot = self.services.get(role, (b"", msg.boot))
        self.services[role] = (ctx.sender, msg.boot)
        if role is Role.COLLECTOR and self._held_failure is not None:
            self.receive(self._held_failure, ctx)
            return
        if known_boot != msg.boot and self.phase is not Phase.SERVICES:
            # Only these two hold state of the run that nobody can give back to them (design.md 2).
            if role in (Role.GATEWAY, Role.PROVISIONER):
                self.service_lost(role, "was restarted in the middle of the run", ctx)
            elif role is Role.COLLECTOR:
                self.subscribe_again(ctx)
        self.begin_if_complete(ctx)

    def _send_failed(self, msg: SendFailed, ctx: Ctx) -> None:
        """S1 10.12: the error belongs to the phase that attempted the send. What is repeated anyway, or what the run
        can do without, is none, and nobody is lost before his silence limit (reaching.py)."""
        if not self.active:
            self.step_undelivered(msg.message, msg.dst, msg.reason, ctx)
            return
        reason = msg.reason.replace("_", " ")
        worker = next((worker for worker in self.workers.values() if msg.dst == worker.node_actor), None)
        role = next((role for role in self.services if msg.dst == self.service(ctx, role)), None)
        if isinstance(msg.message, DatastreamSubscribe | ExpectFlow):
            self.record(ctx, "datastream_subscribe", "failed", {"error": reason})
        elif isinstance(msg.message, ConfigGet) or (worker is None and role is None):
            pass  # it asks again; a worker that was replaced or left out is missed by nobody
        elif worker is not None and (worker.exited or worker.dead_since_ms is not None):
            pass  # how long a dead worker may stay away is SWIM's limit (row 22)
        else:
            what = type(msg.message).__name__ + (f" to {self.name_of(worker)}" if worker else "")
            error = f"{what} could not be delivered: {reason}"
            if msg.reason in FINAL_REASONS:
                self.undeliverable(ctx, error, worker, self.phase)
            elif worker is not None:
                self.not_reached(worker, msg, error, ctx)
            elif role is not None:
                error = f"the {str(role).replace('_', ' ')} did not answer: {error}"
                self.not_reached(role, msg, error, ctx)

    def undeliverable(self, ctx: Ctx, error: str, worker: Worker | None, phase: Phase) -> None:
        """The phase that attempted the send fails; or the next attempt to replace this worker begins."""
        if worker is not None and self.restarting:
            self.thwarted(ctx, error, worker)
        else:
            self.fail(ctx, error, phase=phase, worker=worker)

    def _stdio(self, msg: StdioLine, ctx: Ctx) -> None:
        stream = LogStream.STDOUT if msg.stream == "stdout" else LogStream.STDERR
        channel = CHANNEL_STDOUT if msg.stream == "stdout" else CHANNEL_STDERR
        text = f"{msg.service}: {msg.text}" if msg.service else msg.text
        ctx.observe(channel, log_record(self.run_id, self.node_id, stream, text))

    def check(self) -> None:
        """Invariants: nothing advances past the barrier without its facts (S1 9.4-9.7)."""
        super().check()
        workers = self.workers.values()
        if self.phase in (Phase.BOOTSTRAP, Phase.WEIGHTS, Phase.RPC, Phase.SERVING):
            assert all(worker.ready and worker.acked for worker in workers), "a stage before its acknowledgement"
        if self.phase in (Phase.RPC, Phase.SERVING):
            assert all(worker.weights and worker.stage_ready for worker in workers), "prompt RPC before the weights"
        assert self.phase is not Phase.SERVING or self.rpc_open
