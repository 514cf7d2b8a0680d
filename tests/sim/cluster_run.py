"""One seed: the cluster starts, its clients ask, the faults happen; then all heals and the run has to serve or to end.

`play(seed)` returns an Outcome or raises Violation (or whatever a core raised); `shrink` leaves faults out while the
failure stays. design.md 2's launcher is here too: restarts, ServiceLost, the order of the end.
"""

from __future__ import annotations

import gc
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from common.actors import Actor
from common.addresses import Role
from common.config_slices import (
    CollectorSlice,
    GatewaySlice,
    MembershipSlice,
    OrchestratorSlice,
    ProvisionerSlice,
    encode_slice,
)
from common.effects import Exit, RunJob
from common.limits import (
    BROKER_SILENT_MS,
    LEASE_TTL_MS,
    OWNER_GONE_EXIT_MS,
    SERVICE_RESTART_WINDOW_MS,
    SERVICE_RESTARTS_MAX,
    SERVICE_STOP_MS,
)
from common.messages.node_agent import EmbeddedGguf, LocalPath
from services.config_resolver.core import ConfigResolverActor
from services.datastream_collector.core import CollectorActor
from services.membership.core import MembershipActor
from services.orchestrator.base import Phase, RunOver
from services.orchestrator.children import FATAL, STOP_MS, STOP_ORDER
from services.orchestrator.core import RunActor, ServiceLost, ServiceRestarted, StopLine
from services.prompt_gateway.core import GatewayActor
from services.provisioner.core import ProvisionerActor
from tests.sim.cluster_archive import SimDisk
from tests.sim.cluster_clients import Client, Script, SimTcp
from tests.sim.cluster_engine import SimWorker, answer
from tests.sim.cluster_faults import Plan, do, draw, prepare
from tests.sim.cluster_provider import ProviderFaults, SimProvider
from tests.sim.cluster_stage import GatewayEdges, Vocabulary, plan_job
from tests.sim.cluster_watch import Watch
from tests.sim.cluster_world import ClusterWorld, SimHost, Violation
from tests.sim.edge_net import EdgeNet

LIVENESS_MS = 420_000  # above the sum of all silence limits that one fault can cause one after the other
CONVERGED_MS = BROKER_SILENT_MS + 35_000  # beyond a push-pull of SWIM and every silence of a link
DEATH_SEEN_MS = 30_000  # three times SWIM's slowest with the LAN profile, and links that have to come back first
STOP_MS_MAX = 75_000  # CloseRpc, StopRun, StopNodes (40 s), Flush, and the drain
RUN_ID, NODE_ID = 1, 1


@dataclass(slots=True)
class Outcome:
    """What became of a seed. ended: the runs' (status, error)."""

    seed: int
    served: bool
    ended: list[tuple[int, str]]
    digest: str
    virtual_ms: int
    turns: int
    verdicts: dict[str, int] = field(default_factory=dict)
    facts: dict[str, int] = field(default_factory=dict)


class Cluster:
    """Every process of a run (design.md 2), started, restarted and ended as launcher or supervisor would."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.world = world = ClusterWorld(plan.seed, relay=plan.relay, hwm=plan.hwm)
        world.delay_ms = plan.delay_ms
        self.hosts: dict[Role, SimHost] = {}
        self.actors: dict[Role, Actor] = {}
        self.results: list[RunOver] = []
        self.stop_asked = False
        self.tcp, self.disk = SimTcp(world), SimDisk()
        self.edges, self.vocabulary = EdgeNet(world), Vocabulary(answer)
        self.gateway_edges: GatewayEdges | None = None
        self.plan_error = ""
        """What the next planning fails with."""
        self.provider = SimProvider(self._start_worker, plan.rented)
        self.clients: list[Client] = []
        self.launcher_gone = False
        self.closed = self.healed = False
        self._lost: set[Role] = set()
        self._ends: dict[Role, deque[int]] = {}
        self._addresses: dict[Role, bytes] = {}
        self._skew: dict[Role, int] = {}
        self._provisioner_died = False
        self.watch = Watch(self)
        self.tcp.on_open = self.watch.rpc_opened
        world.watchers.append(self.watch.after_turn)
        for role in (Role.ROUTER, *((Role.RELAY,) if plan.relay else ())):
            world.start_door(role)
        for role in (Role.MEMBERSHIP, Role.PROVISIONER, Role.GATEWAY, Role.COLLECTOR, Role.RESOLVER):
            world.at(world.rng.randint(0, 300), lambda role=role: self.start(role))
        world.at(world.rng.randint(0, 300), lambda: self.start(Role.ORCHESTRATOR))

    # --- starting -------------------------------------------------------------------------------------------------
    def start(self, role: Role) -> None:
        """A new process of a service, or of the run."""
        if self.closed:
            return
        self.watch.had_other_gateway |= role is Role.GATEWAY and role in self.hosts
        skew = self._skew.setdefault(role, self.world.rng.randint(-90_000, 90_000) if self.plan.skew else 0)
        host = self.world.start_host(role, role, Role.ROUTER, skew)
        actor = self._actor(role)
        address = host.node.spawn(actor, role)
        self.hosts[role], self.actors[role], self._addresses[role] = host, actor, address
        match role:
            case Role.PROVISIONER:
                self.provider.attach(host, address)
            case Role.GATEWAY:
                self.tcp.attach(host, address)
                self.gateway_edges = GatewayEdges(host, address, self.edges)
            case Role.COLLECTOR:
                self.disk.attach(host)
            case Role.ORCHESTRATOR:
                assert isinstance(actor, RunActor)
                host.node.run = actor.nonce
                self.disk.runs += 1
                host.perform(RunOver, lambda _, effect: self._over(host, effect))
                host.perform(RunJob, lambda actor, job: self._plan_run(host, actor, job))
                host.on_exit.append(self._orchestrator_gone)
        if role is not Role.ORCHESTRATOR:
            host.on_exit.append(lambda gone: self._service_gone(role, gone))
        host.wake(self.world.now)
        if self.launcher_gone:  # forked before its death, and only now up
            host.owner_gone()

    def _actor(self, role: Role) -> Actor:
        match role:
            case Role.RESOLVER:
                return ConfigResolverActor(digest="d", slices=_slices(self.plan))
            case Role.MEMBERSHIP:
                return MembershipActor()
            case Role.PROVISIONER:
                return ProvisionerActor()
            case Role.GATEWAY:
                return GatewayActor()
            case Role.COLLECTOR:
                return CollectorActor()
            case _:
                return RunActor(self.world.rng.randbytes(16))

    def _start_worker(self, name: str, run: bytes, spec: Any, orchestrator: bytes) -> SimWorker:
        host = self.world.start_host(name, Role.AGENT, Role.RELAY if self.plan.relay else Role.ROUTER)
        return SimWorker(
            host,
            run,
            spec,
            orchestrator,
            net=self.edges,
            vocabulary=self.vocabulary,
            is_stage=self.plan.stages > 1,
        )

    def _plan_run(self, host: SimHost, actor: bytes, job: RunJob) -> None:
        error, self.plan_error = self.plan_error, ""
        plan_job(host, actor, job, self.plan.stages, error)

    def client(self, name: str, script: Script) -> Client:
        client = Client(self.tcp, name, script)
        self.clients.append(client)
        return client

    def address(self, role: Role) -> bytes:
        """The main actor of a service's latest incarnation."""
        return self._addresses.get(role, b"")

    @property
    def run(self) -> RunActor:
        actor = self.actors[Role.ORCHESTRATOR]
        assert isinstance(actor, RunActor)
        return actor

    @property
    def started(self) -> bool:
        return Role.ORCHESTRATOR in self.hosts

    @property
    def reply_inbox(self) -> bytes:
        gateway = self.actors.get(Role.GATEWAY)
        return gateway._inboxes["direct"][0] if isinstance(gateway, GatewayActor) else b""

    # --- ends -----------------------------------------------------------------------------------------------------
    def stop_line(self) -> None:
        self.stop_asked = True
        self.hosts[Role.ORCHESTRATOR].deliver(self.address(Role.ORCHESTRATOR), StopLine("stop"))

    def crash(self, role: Role, back_ms: int) -> None:
        """SIGKILL; back after `back_ms` where launcher or supervisor start it again."""
        if role in self.world.doors:
            if self.world.doors[role].alive:
                self.world.crash_door(role)
                self._ended(role, "was killed by SIGKILL", back_ms, lambda: self.world.start_door(role))
            return
        host = self.hosts.get(role)
        if host is None or not host.alive:
            return
        host.back_ms = back_ms
        host.end(-9)

    def _service_gone(self, role: Role, host: SimHost) -> None:
        if self.closed or self.launcher_gone or self.hosts.get(role) is not host:
            return
        status = host.status or 0
        how = f"was killed by signal {-status}" if status < 0 else f"ended with status {status}"
        self._ended(role, how, host.back_ms, lambda: self.start(role))

    def _ended(self, role: Role, how: str, back_ms: int, again: Callable[[], object]) -> None:
        """The launcher's _service_ended; a supervisor starts everything again and says nothing."""
        if self.plan.embedded:
            self._provisioner_died = self._provisioner_died or role is Role.PROVISIONER
            ends = self._ends.setdefault(role, deque())
            ends.append(self.world.now)
            while self.world.now - ends[0] > SERVICE_RESTART_WINDOW_MS:
                ends.popleft()
            lost = role in FATAL or len(ends) > SERVICE_RESTARTS_MAX
            event = ServiceLost(role, how) if lost else ServiceRestarted(role, how)
            served = role is Role.RESOLVER and self._is_served()
            if served or lost:
                self._lost.add(role)
            if Role.ORCHESTRATOR in self.hosts and not served:
                self.hosts[Role.ORCHESTRATOR].deliver(self.address(Role.ORCHESTRATOR), event)
            if role in self._lost:
                return
        self.world.at(self.world.now + back_ms, lambda: None if self.closed or self.launcher_gone else again())

    def _is_served(self) -> bool:
        """The launcher's: nobody needs the resolver once every service has its slice."""
        if Role.ORCHESTRATOR not in self.hosts:
            return True
        run = self.hosts[Role.ORCHESTRATOR].node.system.actor(self.address(Role.ORCHESTRATOR))
        return isinstance(run, RunActor) and run.phase is not Phase.SERVICES

    def _over(self, host: SimHost, effect: RunOver) -> None:
        self.world.note(f"run over {effect.status} {effect.error}")
        self.world.emitted(effect.error.encode(), "the error line")
        self.watch.run_over(effect)
        self.results.append(effect)
        host.node.system.effects.append((self.address(Role.ORCHESTRATOR), Exit(effect.status)))

    def _orchestrator_gone(self, host: SimHost) -> None:
        if self.plan.embedded and (host.status or 0) < 0:
            self.launcher_gone = True
            for service in self.hosts.values():
                if service.alive:
                    service.owner_gone()
            for role, door in self.world.doors.items():  # the brokers see it, too, and have nothing to finish
                self.world.at(
                    self.world.now + self.world.rng.randint(1, 2000),
                    lambda role=role, door=door: self.world.crash_door(role) if door.alive else None,
                )

    def close(self) -> None:
        """The launcher's end, or the supervisor's: TERM in STOP_ORDER, each step bounded (services/orchestrator)."""
        if self.launcher_gone:
            self.closed = True
            self.world.run(OWNER_GONE_EXIT_MS)
            self.watch.alone()
            return
        if self._provisioner_died:
            self.provider.clean_up()
        self.closed = True
        for group in STOP_ORDER:
            for role in group:
                host = self.hosts.get(role)
                if host is None or not host.alive:
                    continue
                host.signal()
                limit_ms = STOP_MS.get(role, SERVICE_STOP_MS)
                self.world.run(limit_ms, lambda host=host: not host.alive)
                if host.alive:
                    self.watch.killed.append(role)
                    host.end(-9)


def _slices(plan: Plan) -> dict[str, bytes]:
    orchestrator = OrchestratorSlice(
        provider="process",
        image="",
        run_id=RUN_ID,
        node_id=NODE_ID,
        model_id="sim",
        gguf_source=LocalPath(path="/m.gguf"),
        tokenizer=EmbeddedGguf(),
        rpc_bind="127.0.0.1:19777",
        detail_json='{"provider":"process","hf_token":"set"}',
        pipeline_stages=plan.stages,
        pipeline_edges=plan.edges,
        pipeline_feedback=plan.feedback,
        on_worker_loss="restart" if plan.restart else "fail",
    )
    slices = {
        Role.ORCHESTRATOR: orchestrator,
        Role.PROVISIONER: ProvisionerSlice(provider="process", worker_bin="/w", hf_token_file="/secrets/hf_token"),
        Role.GATEWAY: GatewaySlice(rpc_bind="127.0.0.1:19777"),
        Role.COLLECTOR: CollectorSlice(frame_log="/archive.jsonl"),
        Role.MEMBERSHIP: MembershipSlice(),
    }
    return {str(role): encode_slice(value) for role, value in slices.items()}


# --- a whole seed -------------------------------------------------------------------------------------------------
def play(plan: Plan) -> Outcome:
    """Safety phase, heal, liveness phase, end. Raises Violation."""
    # The cycles of a cluster are garbage only once it is over; looking for them before costs a sixth of the time.
    gc.disable()
    try:
        return _play(Cluster(plan))
    finally:
        gc.enable()


def _play(cluster: Cluster) -> Outcome:
    plan = cluster.plan
    world = cluster.world
    for at, script in enumerate(plan.clients):
        cluster.client(f"c{at}", script)
    for fault in plan.faults:
        prepare(cluster, fault)
        world.at(fault.at_ms, lambda fault=fault: do(cluster, fault))
    until = max([plan.safety_ms, *(one.at_ms for one in plan.faults), *(one.at_ms for one in plan.clients)]) + 2000

    def is_over() -> bool:
        return cluster.started and not cluster.hosts[Role.ORCHESTRATOR].alive

    world.run(until, is_over)
    _heal(cluster)
    served = _liveness(cluster, is_over)
    if plan.second_run and not plan.embedded and is_over():
        _second_run(cluster)
        served = True
    if not is_over() and plan.seed % 8 == 0:
        world.run(CONVERGED_MS, is_over)
        cluster.watch.converged()
    if not is_over():
        _stop(cluster, is_over)
    cluster.watch.runs_ended()
    if plan.seed % 8 == 1:
        world.run(DEATH_SEEN_MS)
        cluster.watch.departed()
    cluster.close()
    world.run(3000)
    cluster.watch.finish()
    if left := cluster.provider.living():
        cluster.watch.facts["left to its lease"] += len(left)
        world.run(LEASE_TTL_MS + STOP_MS_MAX)
        cluster.watch.leases()
    ended = [(over.status, over.error) for over in cluster.results]
    return Outcome(
        plan.seed, served, ended, world.digest(), world.now, world.turns, world.verdicts, cluster.watch.facts
    )


def _heal(cluster: Cluster) -> None:
    world = cluster.world
    world.note("heal")
    cluster.healed = True
    world.delay_ms = (0, 3)
    world.partitioned.clear()
    world._stalls.clear()
    cluster.disk.slow_until = cluster.edges.blocked_until = 0
    for link in cluster.edges.links():
        link.stalled_until = 0
    for process in world.processes():
        process.frozen_until = min(process.frozen_until, world.now)


def _liveness(cluster: Cluster, is_over: Callable[[], bool]) -> bool:
    """Within LIVENESS_MS a prompt is answered, or the run has ended and says why."""
    world, begin, tries = cluster.world, cluster.world.now, 0
    while world.now - begin < LIVENESS_MS:
        tries += 1
        client = cluster.client(f"probe{tries}", Script(world.now, 1, 5, 1, "normal", 0))
        world.run(30_000, lambda client=client: is_over() or client.is_over)
        if is_over():
            return False
        if client.asked and client.asked[-1].terminal == "done":
            return True
        world.run(500, is_over)
    gateway = cluster.actors[Role.GATEWAY]
    state = f"{gateway.state} {gateway.loop and gateway.loop.active}" if isinstance(gateway, GatewayActor) else ""
    raise Violation(f"neither served nor ended: phase {cluster.run.phase}, gateway {state}")


def _stop(cluster: Cluster, is_over: Callable[[], bool]) -> None:
    cluster.stop_line()
    if not cluster.world.run(STOP_MS_MAX, is_over):
        raise Violation(f"not stopped within {STOP_MS_MAX} ms: phase {cluster.run.phase}")


def _second_run(cluster: Cluster) -> None:
    """Hosted services wait for the next run: another orchestrator serves, whatever became of the first."""
    cluster.watch.runs_ended()
    cluster.stop_asked = False
    # What the first run never came to ask of the provider is not planted in the next one.
    cluster.provider.faults = ProviderFaults()
    cluster.world.run(5_000)
    cluster.start(Role.ORCHESTRATOR)
    cluster.watch.new_run()

    def is_over() -> bool:
        return not cluster.hosts[Role.ORCHESTRATOR].alive

    # Until then the first run's gateway may still serve, if nobody told it that its orchestrator is no more.
    cluster.world.run(LIVENESS_MS, lambda: is_over() or cluster.run.phase is Phase.SERVING)
    if not _liveness(cluster, is_over):
        over = cluster.results[-1] if cluster.results else None
        if over is not None and not over.status:
            return  # a client asked for its end
        raise Violation(f"the second run on the same services does not serve: {over}")


def shrink(plan: Plan, fails: Callable[[Plan], str]) -> tuple[Plan, str]:
    """Leave out one fault or client after the other as long as it still fails. fails(plan): the failure, or empty."""
    why = fails(plan)
    changed = True
    while changed and why:
        changed = False
        for kind in ("faults", "clients"):
            items = getattr(plan, kind)
            for at in range(len(items)):
                smaller = replace(plan, **{kind: items[:at] + items[at + 1 :]})
                if again := fails(smaller):
                    plan, why, changed = smaller, again, True
                    break
            if changed:
                break
    return plan, why


def failure_of(plan: Plan) -> str:
    """The first line of what goes wrong, or empty."""
    try:
        play(plan)
    except AssertionError as error:
        return f"{type(error).__name__}: {error}".splitlines()[0]
    except Exception as error:
        return f"{type(error).__name__}: {error}".splitlines()[0]
    return ""


__all__ = ["Cluster", "Outcome", "Phase", "Plan", "draw", "failure_of", "play", "shrink"]
