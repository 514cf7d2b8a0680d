"""The provisioner's actor: the run's workers from StartNode to NodesStopped (S1 4.5, 4.12, 4.13, 7.6; design.md 2).

Pure: job functions (`jobs.py`) do the work on threads, plugins report through NodeObserved events. Per worker:
mint (keypair, launch file) → admit at the router → start (ledger first) → live → stop. Whoever is owned by the guard
is stopped, last started first: when asked, when the run ends, when the lease or the owner is lost, on SIGTERM.
"""

from __future__ import annotations

from typing import Any, ClassVar

from common.actors import Ctx
from common.addresses import Role, short
from common.config_slices import ProvisionerSlice
from common.effects import Exit, JobDone, Log, RunJob, SendFailed, StopSignal
from common.limits import OWNER_GONE_EXIT_MS, provider_start_ms, provider_stop_ms
from common.messages.bus import Admit, Admitted, Revoked
from common.messages.provision import (
    BootstrapCompleted,
    CompleteBootstrap,
    NodeExited,
    NodesStopped,
    NodeStarted,
    NodeStopped,
    PrepareProvider,
    ProviderPrepared,
    ProviderPrepareFailed,
    StartNode,
    StopNodes,
    WorkerAwaited,
)
from common.messages.service import RunEnded
from common.records import EventKind
from common.service_actor import ServiceActor
from services.provisioner.admission import ADMISSION_TIMER, Admissions, not_admitted
from services.provisioner.conversion import Record, event, record_of
from services.provisioner.external_provider import GOODBYE_MS, GOODBYE_TIMER, PRESENCE_TIMER, Presence
from services.provisioner.external_provider import NAME as EXTERNAL
from services.provisioner.plugin import Exited, Failed, PluginNodeHandle, StderrLine
from services.provisioner.replacing import Replacing, failed
from services.provisioner.state import Minted, NodeObserved, NodeState, Prepared, Rechecked, Run, Stopping, WorkerNode
from services.provisioner.unsaid import UNSAID_TIMER, Unsaid

PREPARE_LIMIT_MS = 110_000  # stopping leftovers of an earlier run may take a while
OWNER_GONE_FAST_MS = 8_000  # of the 15 s: time for a graceful stop of a few workers, then the rest at once
OWNER_GONE_MARGIN_MS = 1_000
CANCELLABLE = frozenset({"vastai"})
"""Providers whose start takes minutes and can be given up."""
AWAITED = frozenset({EXTERNAL, "vastai"})
"""Providers whose worker has started when it is on the bus: somebody walks there first, or it is installed first."""
RECHECK_INTERVAL_MS = 20_000  # between two looks for a worker whose start or stop nobody has confirmed
_RECHECK = "recheck"
_OWNER_FAST = "owner:fast"
_OWNER_EXIT = "owner:exit"


class ProvisionerActor(Replacing):
    """Main actor of the provisioner, spawned with name="provisioner"."""

    ROLE = Role.PROVISIONER
    SLICE = ProvisionerSlice
    Incoming: ClassVar[tuple[type, ...]] = (
        *ServiceActor.SERVICE_INCOMING,
        PrepareProvider,
        StartNode,
        CompleteBootstrap,
        StopNodes,
        Admitted,
        Revoked,
        JobDone,
        NodeObserved,
        SendFailed,
    )

    def __init__(self) -> None:
        super().__init__()
        self._run = Run(epoch=1)
        self._stopping: Stopping | None = None
        self._exiting = False
        """All is stopped and the process ends: what comes while its last words leave starts nothing any more."""
        self._held: tuple[bytes, PrepareProvider] | None = None
        """A PrepareProvider that has to wait: for the config slice, or for the end of the run before."""
        self._admissions = Admissions()
        self._presence = Presence()
        self._unsaid = Unsaid()
        self._goodbye_over = False
        self._recheck_problems: tuple[str, ...] = ()

    # --- messages ---------------------------------------------------------------------------------------------
    def receive(self, msg: Any, ctx: Ctx) -> None:
        """One message; see `Incoming`."""
        match msg:
            case PrepareProvider():
                self._prepare(ctx.sender, msg, ctx)
            case StartNode():
                self._start(msg, ctx)
            case CompleteBootstrap():
                self._complete(ctx)
            case StopNodes():
                self._stop_all(Stopping(fast=msg.fast, reply_to=ctx.sender), ctx)
            case Admitted():
                self._admitted(msg.key, ctx)
            case Revoked():
                self._admissions.revoked(msg.key)
            case JobDone():
                self._job_done(msg, ctx)
            case NodeObserved():
                self._observed(msg, ctx)
            case SendFailed():
                super().receive(msg, ctx)
                self._unsaid.failed(msg, self._run.owner, ctx)
            case _:
                super().receive(msg, ctx)

    def on_timer(self, key: str, ctx: Ctx) -> None:
        """Repeats towards the router, and the limits after the owner's end."""
        match key:
            case _ if key == ADMISSION_TIMER:
                self._admit_again(ctx)
            case _ if key == UNSAID_TIMER:
                self._unsaid.again(self._run.owner, ctx)
            case _ if key == PRESENCE_TIMER:
                self._look_for_workers(ctx)
            case _ if key == GOODBYE_TIMER:
                self._goodbye_over = True
                self._pump_stop(ctx)
            case _ if key == _RECHECK:
                ctx.effect(RunJob("recheck", "0/0", {}, limit_ms=PREPARE_LIMIT_MS, pool="stop"))
            case _ if key == _OWNER_FAST:
                self._stop_all(Stopping(fast=True), ctx)
            case _ if key == _OWNER_EXIT:
                self._exiting = True
                ctx.effect(Exit(1, "workers may be left; the next start stops them by the ledger"))
            case _:
                super().on_timer(key, ctx)

    def on_config(self, config: Any, ctx: Ctx) -> None:
        """Ready: providers are only built when the orchestrator says PrepareProvider."""
        self.ready(ctx)
        self._resume_held(ctx)

    def on_view(self, view: str, ctx: Ctx) -> None:
        """A router that restarted has forgotten whom it admitted."""
        if view == "routes":
            self._admit_again(ctx)
            self._look_for_workers(ctx)

    def on_lease_lost(self, ctx: Ctx) -> None:
        """The guard's drop, while the process lives on for the next run."""
        self._stop_all(Stopping(reason="the orchestrator's lease ended", clear_after=True), ctx)

    def on_run_ended(self, msg: RunEnded, ctx: Ctx) -> None:
        """Whatever is left of it is stopped, then forgotten."""
        self._stop_all(Stopping(reason="the run ended", clear_after=True), ctx)

    def on_owner_gone(self, ctx: Ctx) -> None:
        """The guard's drop: by local handles, without needing the bus, and gone within OWNER_GONE_EXIT_MS."""
        ctx.timer(_OWNER_FAST, OWNER_GONE_FAST_MS)
        ctx.timer(_OWNER_EXIT, OWNER_GONE_EXIT_MS - OWNER_GONE_MARGIN_MS)
        self._stop_all(Stopping(reason="the orchestrator is gone", exit_after=True), ctx)

    def on_stop_signal(self, signal: StopSignal, ctx: Ctx) -> None:
        """SIGTERM: nothing that we started may outlive us. The second one skips the grace."""
        why = f"the provisioner got {signal.name}"
        self._stop_all(Stopping(fast=signal.count > 1, reason=why, exit_after=True), ctx)

    # --- prepare ----------------------------------------------------------------------------------------------
    def _prepare(self, sender: bytes, msg: PrepareProvider, ctx: Ctx) -> None:
        if self._stopping is not None or self._exiting or self.config is None:
            self._held = (sender, msg)
            return
        run = self._run
        if run.owner and (run.owner != sender or run.guard.stopped or run.guard.first_error):
            # Another orchestrator, or the same one after it stopped everything: a new run.
            self._held = (sender, msg)
            self._stop_all(Stopping(reason="another run begins", clear_after=True), ctx)
            return
        if run.preparing:
            return
        if run.answer is not None:
            ctx.send(sender, run.answer)
            return
        run.owner = sender
        if msg.provider != self.config.provider:
            error = f"provider {msg.provider} is asked for, the configuration says {self.config.provider}"
            run.answer = ProviderPrepareFailed(error=error)
            ctx.send(sender, run.answer)
            return
        run.preparing = True
        args = {"config": self.config}
        ctx.effect(RunJob("prepare", f"{run.epoch}/0", args, limit_ms=PREPARE_LIMIT_MS, pool="start"))

    def _prepared(self, done: JobDone, ctx: Ctx) -> None:
        run = self._run
        run.preparing = False
        if done.error:
            run.answer = ProviderPrepareFailed(error=done.error)
        else:
            result: Prepared = done.result
            for problem in result.problems:
                ctx.effect(Log("warning", problem))
                ctx.timer(_RECHECK, RECHECK_INTERVAL_MS)
            run.answer = ProviderPrepared(provider=self.config.provider, reconciled=result.reconciled)
        ctx.send(run.owner, run.answer)
        self._pump_stop(ctx)

    def _resume_held(self, ctx: Ctx) -> None:
        if self._held is not None:
            (sender, msg), self._held = self._held, None
            self._prepare(sender, msg, ctx)

    # --- start ------------------------------------------------------------------------------------------------
    def _start(self, msg: StartNode, ctx: Ctx) -> None:
        run, spec = self._run, msg.spec
        known = run.nodes.get(spec.node_id)
        if self._exiting:
            ctx.reply(failed(spec, "the provisioner ends"))
            return
        if known is not None and run.nonce == msg.run:
            if spec.attempt > (known.successor or known).spec.attempt and self._stopping is None:
                self._replace(known, WorkerNode(spec, msg.orchestrator, ctx.sender_node), ctx)
            elif spec.attempt == known.spec.attempt:
                self._answer_again(known, ctx)
            return
        if not run.prepared or ctx.sender != run.owner:
            refusal = "the provider is not prepared"
        elif self._stopping is not None or run.guard.stopped or run.guard.first_error:
            refusal = "the workers are being stopped"
        elif run.nonce and run.nonce != msg.run:
            refusal = f"run {short(run.nonce)} is active, not {short(msg.run)}"
        else:
            run.nonce = msg.run
            self._begin(WorkerNode(spec, msg.orchestrator, ctx.sender_node), ctx)
            return
        ctx.reply(failed(spec, refusal))

    def _begin(self, node: WorkerNode, ctx: Ctx) -> None:
        run, spec = self._run, node.spec
        run.nodes[spec.node_id] = node
        self._emit(event(EventKind.PROVISION_START, spec.run_id, spec.node_id, self.config.provider), ctx)
        args = {
            "spec": spec,
            "run": run.nonce,
            "orchestrator": node.orchestrator,
            "orchestrator_node": node.orchestrator_node,
        }
        ctx.effect(RunJob("mint", self._key(node), args, pool="start"))

    def _answer_again(self, node: WorkerNode, ctx: Ctx) -> None:
        spec = node.spec
        match node.state:
            case NodeState.LIVE if node.ended is not None:
                self._say_exited(node, ctx)
            case NodeState.LIVE if not self._awaited(node, ctx):
                self._say_started(node, ctx)
            case NodeState.FAILED:
                ctx.reply(failed(spec, node.error))
            case NodeState.STOPPED:
                ctx.reply(failed(spec, "the worker was stopped already"))
            case _:
                pass  # the answer is on its way

    def _minted(self, node: WorkerNode, done: JobDone, ctx: Ctx) -> None:
        if done.error:
            self._fail(node, done.error, ctx)
            return
        minted: Minted = done.result
        node.minted = minted
        node.state = NodeState.ADMITTING
        if self._stopping is not None:
            self._fail(node, "stopped before it was started", ctx)
            return
        spec = node.spec
        admit = Admit(
            key=minted.public_key,
            role=Role.AGENT,
            run=self._run.nonce,
            node_id=spec.node_id,
            stage_index=spec.stage_index,
            logical_id=f"node {spec.node_id}",
        )
        self._admissions.admit(admit, ctx)

    def _admit_again(self, ctx: Ctx) -> None:
        for key in self._admissions.repeat(ctx):
            for node in list(self._run.nodes.values()):
                if node.state is NodeState.ADMITTING and node.minted is not None and node.minted.public_key == key:
                    self._fail(node, not_admitted(self.config.relay, ctx), ctx)

    def _admitted(self, key: bytes, ctx: Ctx) -> None:
        if not self._admissions.admitted(key, ctx):
            return
        for node in self._run.nodes.values():
            if node.state is NodeState.ADMITTING and node.minted is not None and node.minted.public_key == key:
                # Only now: a worker that dials before it is admitted is refused, and libzmq does not dial again.
                node.state = NodeState.STARTING
                args = {"minted": node.minted, "spec": node.spec, "run": self._run.nonce}
                limit_ms = provider_start_ms(self.config.provider)
                job = RunJob("start_node", self._key(node), args, limit_ms=limit_ms, pool="start")
                ctx.effect(job)

    def _started(self, node: WorkerNode, done: JobDone, ctx: Ctx) -> None:
        if done.error:
            self._fail(node, done.error, ctx)
            return
        if node.ended is not None:
            self._fail(node, node.cause(f"worker {node.ended.reason} before it was ready"), ctx)
            return
        handle: PluginNodeHandle = done.result
        node.handle, node.state = handle, NodeState.LIVE
        self._run.guard.own(node.spec.node_id, handle)
        if node.successor is not None:
            self._replace(node, node.successor, ctx)
            return
        if not self._awaited(node, ctx):
            self._say_started(node, ctx)
        elif self._external and node.minted is not None:
            spec = node.spec
            awaited = WorkerAwaited(node_id=spec.node_id, stage_index=spec.stage_index, launch=node.minted.launch)
            ctx.send(self._run.owner, awaited)
        self._pump_stop(ctx)

    # --- workers that somebody else starts --------------------------------------------------------------------
    @property
    def _external(self) -> bool:
        return self.config is not None and self.config.provider == EXTERNAL

    def _awaited(self, node: WorkerNode, ctx: Ctx) -> bool:
        awaited = self.config is not None and self.config.provider in AWAITED
        return awaited and node.minted is not None and not self._presence.came(node.minted.public_key, ctx)

    def _look_for_workers(self, ctx: Ctx) -> None:
        """A worker that is awaited has come; at provider external, one may have gone, too."""
        if self.config is None or self.config.provider not in AWAITED:
            return
        for node in self._run.nodes.values():
            if node.state is not NodeState.LIVE or node.minted is None or node.ended is not None:
                continue
            waited = not node.came
            node.came = not self._awaited(node, ctx)
            if waited and node.came:
                self._say_started(node, ctx)
            elif self._external and self._stopping is None and self._presence.lost(node.minted.public_key, ctx):
                self._ended(node, Exited(None, "left the bus"), ctx)
        self._pump_stop(ctx)

    def _taking_leave(self, node_id: int, fast: bool, ctx: Ctx) -> bool:
        """Provider external: it was told to stop and gets a moment to go by itself."""
        node = self._run.nodes[node_id]
        if not self._external or fast or self._goodbye_over or node.minted is None:
            return False
        if not self._presence.here(node.minted.public_key, ctx):
            return False
        ctx.timer(GOODBYE_TIMER, GOODBYE_MS)
        return True

    def _say_started(self, node: WorkerNode, ctx: Ctx) -> None:
        assert node.handle is not None and node.minted is not None
        started = NodeStarted(
            node_id=node.spec.node_id,
            stage_index=node.spec.stage_index,
            handle=node.handle.id,
            node_key=node.minted.public_key,
            attempt=node.spec.attempt,
            dph_total=float(node.handle.facts.get("price") or 0),
        )
        ctx.send(self._run.owner, started)

    def _fail(self, node: WorkerNode, error: str, ctx: Ctx) -> None:
        """S1 10.6. The discard also ends a start that timed out and may still succeed."""
        spec = node.spec
        node.state, node.error = NodeState.FAILED, error
        ctx.timer(_RECHECK, RECHECK_INTERVAL_MS)
        if not isinstance(node.ended, Failed):
            self._emit(event(EventKind.PROVISION_FAILED, spec.run_id, spec.node_id, self.config.provider, error), ctx)
        if node.minted is not None:
            self._admissions.revoke(node.minted.public_key, ctx)
            ctx.effect(RunJob("discard", self._key(node), {"minted": node.minted}, pool="stop"))
        if node.successor is not None and self._stopping is None:
            self._begin(node.successor, ctx)
            return
        ctx.send(self._run.owner, failed(spec, error))
        self._pump_stop(ctx)

    # --- complete_bootstrap -----------------------------------------------------------------------------------
    def _complete(self, ctx: Ctx) -> None:
        run = self._run
        if run.completing or ctx.sender != run.owner:
            return
        run.completing = True
        handles = tuple(handle for _, handle in run.guard.handles)
        ctx.effect(RunJob("complete_bootstrap", f"{run.epoch}/0", {"handles": handles}, pool="start"))

    def _completed(self, done: JobDone, ctx: Ctx) -> None:
        run = self._run
        run.completing = False
        for node in run.nodes.values():
            if not done.error and node.state is NodeState.LIVE and node.ended is None and not node.live_said:
                node.live_said = True
                spec = node.spec
                self._emit(event(EventKind.NODE_LIVE, spec.run_id, spec.node_id, self.config.provider), ctx)
        ctx.send(run.owner, BootstrapCompleted(error=done.error))

    # --- stop -------------------------------------------------------------------------------------------------
    def _stop_all(self, wanted: Stopping, ctx: Ctx) -> None:
        """Begin to stop everything, or let a stop under way become faster and do more at its end."""
        now = self._stopping
        if now is None:
            self._stopping = now = wanted
        else:
            hurry = wanted.fast and not now.fast
            now.fast = now.fast or wanted.fast
            now.reply_to = now.reply_to or wanted.reply_to
            now.clear_after = now.clear_after or wanted.clear_after
            now.exit_after = now.exit_after or wanted.exit_after
            current = self._run.guard.current()
            if hurry and current is not None:
                self._stop_job("hurry", *current, fast=True, ctx=ctx)
        for node in list(self._run.nodes.values()):
            if node.state is NodeState.ADMITTING:
                self._fail(node, "stopped before it was started", ctx)
            elif node.state is NodeState.STARTING and self.config.provider in CANCELLABLE:
                ctx.effect(RunJob("cancel", self._key(node), {"minted": node.minted}, pool="stop"))
        self._pump_stop(ctx)

    def _pump_stop(self, ctx: Ctx) -> None:
        """The next step of a stop. A start under way is waited for: only then it can be stopped, and it is the last."""
        run, stopping = self._run, self._stopping
        if stopping is None or run.starting or run.preparing or run.guard.stopping is not None:
            return
        if run.guard.handles and self._taking_leave(run.guard.handles[-1][0], stopping.fast, ctx):
            return
        following = run.guard.next_to_stop()
        if following is None:
            self._stopped_all(stopping, ctx)
            return
        self._stop_job("stop_node", *following, fast=stopping.fast, ctx=ctx)

    def _stop_job(self, kind: str, node_id: int, handle: PluginNodeHandle, *, fast: bool, ctx: Ctx) -> None:
        args = {"handle": handle, "fast": fast}
        limit_ms = provider_stop_ms(self.config.provider)
        ctx.effect(RunJob(kind, f"{self._run.epoch}/{node_id}", args, limit_ms=limit_ms, pool="stop"))

    def _node_stopped(self, node: WorkerNode, done: JobDone, ctx: Ctx) -> None:
        run, spec = self._run, node.spec
        if run.guard.stopping != spec.node_id:
            return
        run.guard.settle(done.error)
        node.state = NodeState.STOPPED
        if not done.error and not node.stop_said:
            node.stop_said = True
            self._emit(event(EventKind.NODE_STOPPED, spec.run_id, spec.node_id, self.config.provider, "stopped"), ctx)
        if done.error:
            ctx.effect(Log("error", f"node {spec.node_id} is not stopped: {done.error}"))
            ctx.timer(_RECHECK, RECHECK_INTERVAL_MS)
        stopping = self._stopping
        if stopping is not None and stopping.reason and not stopping.reply_to and not node.exit_said:
            # Nobody asked for it: should the orchestrator still live, it must not take the worker for a running one.
            self._say_exited(node, ctx, f"stopped by the provisioner: {stopping.reason}")
        if node.minted is not None:
            self._admissions.revoke(node.minted.public_key, ctx)
        ctx.send(run.owner, NodeStopped(node_id=spec.node_id, error=done.error))
        self._pump_stop(ctx)

    def _stopped_all(self, stopping: Stopping, ctx: Ctx) -> None:
        run = self._run
        self._stopping = None
        self._goodbye_over = False
        if stopping.reply_to:
            answer = NodesStopped(stopped=list(run.guard.stopped), first_error=run.guard.first_error)
            ctx.send(stopping.reply_to, answer)
        if stopping.clear_after:
            self._run = Run(epoch=run.epoch + 1)
        if stopping.exit_after:
            self._exiting = True
            ctx.effect(Exit(1 if run.guard.first_error else 0, run.guard.first_error))
        else:
            self._resume_held(ctx)

    # --- what the plugins see ---------------------------------------------------------------------------------
    def _observed(self, batch: NodeObserved, ctx: Ctx) -> None:
        node = next((n for n in self._run.nodes.values() if n.minted and n.minted.handle_id == batch.handle_id), None)
        if node is None:
            return
        for item in batch.observations:
            if not isinstance(item, Exited) or not node.stop_said:
                self._emit(record_of(item, node.spec.run_id, node.spec.node_id, self.config.provider), ctx)
            if isinstance(item, StderrLine):
                node.tail.append(item.line)
            elif isinstance(item, Exited | Failed):
                node.stop_said = node.stop_said or isinstance(item, Exited)
                self._ended(node, item, ctx)

    def _ended(self, node: WorkerNode, item: Exited | Failed, ctx: Ctx) -> None:
        if node.ended is not None:
            return
        node.ended = item
        if node.state is NodeState.LIVE and self._stopping is None and node.successor is None:
            # The handle stays the guard's: stop_node cleans up after a dead worker, too. Said first: once the key is
            # revoked everybody hears that the worker cannot be reached, which says less than how it ended.
            self._say_exited(node, ctx)
            if node.minted is not None:
                self._admissions.revoke(node.minted.public_key, ctx)

    def _say_exited(self, node: WorkerNode, ctx: Ctx, reason: str = "") -> None:
        node.exit_said = True
        exited = NodeExited(
            node_id=node.spec.node_id,
            stage_index=node.spec.stage_index,
            status=node.ended.status if isinstance(node.ended, Exited) else None,
            reason=reason or (node.ended.reason if node.ended is not None else ""),
            stderr_tail=list(node.tail),
            attempt=node.spec.attempt,
        )
        ctx.send(self._run.owner, exited)

    def _emit(self, record: Record, ctx: Ctx) -> None:
        ctx.observe(record.channel, record.payload, record.source)

    # --- jobs and revocation ----------------------------------------------------------------------------------
    def _job_done(self, done: JobDone, ctx: Ctx) -> None:
        if done.kind == "recheck":
            self._rechecked(done, ctx)
            return
        epoch, _, node_id = done.key.partition("/")
        if int(epoch) != self._run.epoch:
            return
        node = self._run.nodes.get(int(node_id))
        match done.kind:
            case "prepare" if self._run.preparing:
                self._prepared(done, ctx)
            case "complete_bootstrap" if self._run.completing:
                self._completed(done, ctx)
            case "mint" if node is not None and node.state is NodeState.MINTING:
                self._minted(node, done, ctx)
            case "start_node" if node is not None and node.state is NodeState.STARTING:
                self._started(node, done, ctx)
            case "replace_node" if node is not None:
                self._replaced(node, done, ctx)
            case "stop_node" if node is not None:
                self._node_stopped(node, done, ctx)
            case _ if done.error:
                ctx.effect(Log("warning", f"{done.kind} of node {node_id}: {done.error}"))
            case _:
                pass

    def _rechecked(self, done: JobDone, ctx: Ctx) -> None:
        """Of whatever run: money does not end with it."""
        if done.error:
            failed = f"the look for workers that may be left failed ({done.error}); it is repeated"
            problems: tuple[str, ...] = (f"{failed}, and `mvp-orchestrator workers` names them",)
            owed = 1
        else:
            result: Rechecked = done.result
            owed, problems = result.owed, result.problems
        # Each of them once, not at every look.
        for problem in problems:
            if problem not in self._recheck_problems:
                ctx.effect(Log("warning", problem))
        self._recheck_problems = problems
        if owed:
            ctx.timer(_RECHECK, RECHECK_INTERVAL_MS)

    def check(self) -> None:
        """Invariants: the guard owns exactly the live workers; nothing is half stopped while no stop is under way."""
        run = self._run
        live = {node_id for node_id, node in run.nodes.items() if node.state is NodeState.LIVE}
        assert live == {node_id for node_id, _ in run.guard.handles}, (live, run.guard.handles)
        assert self._stopping is not None or run.guard.stopping is None
        assert all(node.minted is not None for node in run.nodes.values() if node.state is NodeState.LIVE)
