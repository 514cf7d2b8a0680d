"""What a seed draws: the shape of the cluster, its clients, and a list of faults; and how each fault is done.

A fault carries its own random numbers, so that leaving one out changes none of the others (the shrinking in
cluster_run). kind "light" plans hold only what a run has to survive (the table of design.md 2), one at a time.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from common.addresses import Plane, Role
from common.limits import LEASE_TTL_MS
from tests.sim.bus_world import Connection
from tests.sim.cluster_clients import Script
from tests.sim.cluster_forge import forge
from tests.sim.cluster_world import SimHost, Violation
from tests.sim.edge_net import EdgeLink

if TYPE_CHECKING:
    from tests.sim.cluster_engine import SimWorker
    from tests.sim.cluster_run import Cluster

FAULTS_MS = 22_000
STARTED_MS = 4_000  # by then most runs serve
LIGHT_APART_MS = 9_000
LONG_MS = 2 * LEASE_TTL_MS
"""Some seeds last beyond every lease, confirmation and push-pull, before all heals."""
FOR_EVER_MS = 10**9
STOP_KINDS = ("stop_word", "sigterm")
SURVIVED = (
    "stall",
    "prompt_stall",
    "cut",
    "half_open",
    "nat_lost",
    "freeze",
    "crash",
    "slow_disk",
    "delays",
    "forge",
    "engine_fault",
)
DEADLY = (
    "engine_death",
    "engine_fatal",
    "worker_exit",
    "worker_stall",
    "partition",
    "gateway_apart",
    "long_freeze",
    "long_stall",
)
HARMLESS = frozenset({"stall", "prompt_stall", "cut", "slow_disk", "delays", "forge", "edge_cut", "edge_stall"})
"""Faults that no prompt may notice."""
SURVIVED_STAGES = ("edge_cut", "edge_stall")
DEADLY_STAGES = ("edge_blocked", "step_fault", "plan_error")
PROVIDER = ("prepare_error", "start_error", "start_slow", "complete_error", "stop_error", "stop_slow")
SERVICE_DEATHS = ("crash_gateway", "crash_provisioner", "crash_orchestrator")


@dataclass(frozen=True, slots=True)
class FaultAt:
    """One fault. a, b: its random numbers in [0, 1)."""

    at_ms: int
    kind: str
    a: float
    b: float

    def __str__(self) -> str:
        return f"{self.at_ms} ms {self.kind}({self.a:.3f}, {self.b:.3f})"


@dataclass(slots=True)
class Plan:
    """All that a seed decides; together with the seed it is the whole run."""

    seed: int
    light: bool
    embedded: bool
    relay: bool
    hwm: int
    delay_ms: tuple[int, int]
    skew: bool
    second_run: bool
    stages: int = 1
    """1: direct mode, one worker; else a pipeline of so many workers."""
    edges: str = "auto"
    feedback: str = "gateway"
    rented: bool = False
    """The workers do not notice the provisioner's end."""
    restart: bool = False
    """[runtime] on_worker_loss = "restart"."""
    safety_ms: int = 0
    """How long the safety phase lasts at least; else it ends soon after the last fault and client."""
    clients: list[Script] = field(default_factory=list)
    faults: list[FaultAt] = field(default_factory=list)


def draw(seed: int) -> Plan:
    """The plan of a seed."""
    rng = random.Random(seed * 9973 + 5)
    light = seed % 3 == 0
    plan = Plan(
        seed,
        light=light,
        embedded=rng.random() < 0.6,
        relay=rng.random() < 0.5,
        hwm=2000 if light else rng.choice([50, 300, 2000]),
        delay_ms=rng.choice([(0, 1), (0, 3), (1, 15)] if light else [(0, 1), (0, 3), (1, 20), (10, 80)]),
        skew=rng.random() < 0.5,
        second_run=rng.random() < 0.25,
        stages=rng.choice([1, 1, 1, 2, 3]),
        edges=rng.choice(["auto", "auto", "relay"]),
    )
    is_staged = plan.stages > 1
    plan.clients = [_client(rng, light, is_staged) for _ in range(rng.randint(1, 4))]
    # Its own generator: known seeds stay what they are in all else.
    more = random.Random(seed * 7919 + 3)
    plan.feedback = more.choice(["gateway", "direct"]) if is_staged else "gateway"
    plan.rented = more.random() < 0.25
    for script in plan.clients:
        script.max_tokens = more.choice([0, 0, max(1, script.tokens // 2)])
    plan.restart = not light and more.random() < 0.25
    is_long, late_ms = more.random() < 0.06, more.randint(LEASE_TTL_MS, LONG_MS)
    if is_long:
        plan.safety_ms = LONG_MS
        plan.clients[-1].at_ms = more.randint(LEASE_TTL_MS, LONG_MS)
    survived = (*SURVIVED, *SURVIVED_STAGES, *SURVIVED_STAGES) if is_staged else SURVIVED
    deadly = (*DEADLY, *DEADLY_STAGES) if is_staged else DEADLY
    if light:
        at = rng.randint(0, 6000)
        for _ in range(rng.randint(1, 3)):
            plan.faults.append(FaultAt(at, rng.choice(survived), rng.random(), rng.random()))
            at += LIGHT_APART_MS + rng.randint(0, 4000)
        if is_long:
            plan.faults[-1] = replace(plan.faults[-1], at_ms=late_ms)
        return plan
    kinds = list(rng.sample(survived, rng.randint(1, 5)))
    kinds += rng.sample(deadly, rng.choice([0, 1, 1, 2]))
    if rng.random() < 0.25:
        kinds += rng.sample(PROVIDER, rng.randint(1, 2))
    if rng.random() < 0.2:
        kinds += rng.sample(SERVICE_DEATHS, 1)
    if rng.random() < 0.35:
        kinds += rng.sample(STOP_KINDS, rng.randint(1, 2))
    for _ in range(rng.randint(1, 12)):
        kind = rng.choice(kinds)
        at = 0 if kind in (*PROVIDER, "plan_error") else rng.randint(0, rng.choice([STARTED_MS, FAULTS_MS]))
        plan.faults.append(FaultAt(at, kind, rng.random(), rng.random()))
    if is_long and plan.faults[-1].at_ms:
        plan.faults[-1] = replace(plan.faults[-1], at_ms=late_ms)
    plan.faults.sort(key=lambda fault: fault.at_ms)
    # Long faults need their time before all heals.
    plan.safety_ms = max(plan.safety_ms, plan.faults[-1].at_ms + rng.choice([0, 0, 8000, 20_000]))
    return plan


def _client(rng: random.Random, light: bool, is_staged: bool) -> Script:
    habits = ["normal"] * 5 + ["disconnect", "abort", "second", "half_close", "slow", "linger", "garbage"]
    if not light:
        habits += ["stuck", "shutdown"]
    habit = rng.choice(habits)
    big = habit in ("slow", "stuck") and rng.random() < 0.5
    return Script(
        at_ms=rng.randint(0, rng.choice([STARTED_MS, FAULTS_MS // 2, FAULTS_MS])),
        prompts=rng.randint(1, 4),
        tokens=rng.choice([1, 5, 20, 60, 60 if is_staged else 600]) if not big else 40,
        size=20_000 if big else rng.choice([1, 1, 50]),
        habit=habit,
        after_ms=rng.choice([0, 1, 20, 200, 1500]),
    )


# --- doing it -----------------------------------------------------------------------------------------------------
def _pick(cluster: Cluster, a: float, names: list[str]) -> str:
    return names[int(a * len(names))] if names else ""


def _connection(cluster: Cluster, a: float, only: str = "") -> Connection | None:
    found = [
        connection
        for dialler in cluster.world.diallers()
        if not only or dialler.owner.name == only
        for _, connection in sorted(dialler.connections.items())
        if connection.established and not connection.cut
    ]
    return found[int(a * len(found))] if found else None


def _stall(cluster: Cluster, fault: FaultAt, low: int = 50, high: int = 2500) -> None:
    if (connection := _connection(cluster, fault.a)) is not None:
        cluster.world.stall(connection, int(low + fault.b * (high - low)))


def _as_soon_as(cluster: Cluster, fact: Callable[[], bool], then: Callable[[], None], tries: int = 200) -> None:
    """Now, or within four seconds."""
    if cluster.healed or tries == 0:
        return
    if fact():
        then()
    else:
        cluster.world.at(cluster.world.now + 20, lambda: _as_soon_as(cluster, fact, then, tries - 1))


def _when_busy(cluster: Cluster, then: Callable[[], None]) -> None:
    """As soon as a prompt is being answered: what a fault does to text on its way is seen at no other time."""

    def is_busy() -> bool:
        return any(worker.actor.desk.active or worker.engine.computes for worker in cluster.provider.living())

    _as_soon_as(cluster, is_busy, then)


def prepare(cluster: Cluster, fault: FaultAt) -> None:
    """At the start: forged acknowledgements have to meet a worker that nobody has acknowledged yet."""

    def is_unready() -> bool:
        return any(not worker.actor.readiness.acknowledged for worker in cluster.provider.living())

    if fault.kind == "forge":
        _as_soon_as(cluster, is_unready, lambda: forge(cluster, fault.a, fault.b), tries=500)


def _prompt_stall(cluster: Cluster, fault: FaultAt) -> None:
    """The text's own way: long enough that both ends repeat what the other one has."""
    only = Role.GATEWAY if fault.a < 0.5 else ""

    def stall() -> None:
        for dialler in cluster.world.diallers():
            connection = dialler.connections.get(Plane.PROMPT)
            is_worker = isinstance(dialler.owner, SimHost) and dialler.owner.role is Role.AGENT
            if connection is not None and (dialler.owner.name == only if only else is_worker):
                cluster.world.stall(connection, int(600 + fault.b * 1800))

    _when_busy(cluster, stall)


def _long_stall(cluster: Cluster, fault: FaultAt) -> None:
    _stall(cluster, fault, 3000, 12_000)


def _cut(cluster: Cluster, fault: FaultAt) -> None:
    if (connection := _connection(cluster, fault.a)) is not None:
        cluster.world.cut(connection)


def _half_open(cluster: Cluster, fault: FaultAt) -> None:
    if (connection := _connection(cluster, fault.a)) is not None:
        cluster.world.cut(connection, door_notices_ms=int(200 + fault.b * 10_000))


def _nat_lost(cluster: Cluster, fault: FaultAt) -> None:
    """A process's connections are gone and both ends take them for standing: the application's ping has to find out."""
    diallers = cluster.world.diallers()
    for _, connection in sorted(diallers[int(fault.a * len(diallers))].connections.items()):
        if connection.established and not connection.cut:
            cluster.world.cut(connection, door_notices_ms=FOR_EVER_MS, silently_ms=FOR_EVER_MS)


def _freeze(cluster: Cluster, fault: FaultAt, low: int = 50, high: int = 2500) -> None:
    processes = cluster.world.processes()
    process = processes[int(fault.a * len(processes))]
    cluster.world.freeze(process, int(low + fault.b * (high - low)))


def _long_freeze(cluster: Cluster, fault: FaultAt) -> None:
    _freeze(cluster, fault, 3500, 20_000)


def _partition(cluster: Cluster, fault: FaultAt) -> None:
    names = [process.name for process in cluster.world.processes()]
    cluster.world.partition(_pick(cluster, fault.a, names), int(500 + fault.b * 15_000))


def _crash(cluster: Cluster, fault: FaultAt) -> None:
    names: list[str] = [Role.ROUTER, Role.MEMBERSHIP, Role.COLLECTOR]
    if cluster.plan.relay:
        names.append(Role.RELAY)
    cluster.crash(Role(_pick(cluster, fault.a, names)), int(50 + fault.b * 1500))


def _gateway_apart(cluster: Cluster, fault: FaultAt) -> None:
    cluster.world.partition(Role.GATEWAY, int(6000 + fault.b * 12_000))


def _delays(cluster: Cluster, fault: FaultAt) -> None:
    low = int(fault.a * 30)
    cluster.world.delay_ms = (low, low + int(fault.b * 100))


def _slow_disk(cluster: Cluster, fault: FaultAt) -> None:
    cluster.disk.slow_until = cluster.world.now + int(500 + fault.a * 6000)
    cluster.disk.slow_ms = int(5 + fault.b * 300)


def _victims(cluster: Cluster, fault: FaultAt) -> list[SimWorker]:
    """One of the workers."""
    living = cluster.provider.living()
    return [living[int(fault.a * len(living))]] if living else []


def _engine_fault(cluster: Cluster, fault: FaultAt) -> None:
    for worker in _victims(cluster, fault):
        worker.engine.fault_next = "the prompt does not fit the context"


def _engine_death(cluster: Cluster, fault: FaultAt) -> None:
    for worker in _victims(cluster, fault):
        worker.engine.die("the engine was killed by SIGKILL", -9)


def _engine_fatal(cluster: Cluster, fault: FaultAt) -> None:
    from common.messages.engine import Fatal
    from worker.agent.events import EngineEvent

    for worker in _victims(cluster, fault):
        if worker.engine.running:
            worker.host.deliver(worker.agent, EngineEvent(Fatal(error="out of memory")))
            worker.engine.die("the engine ended with status 1", 1)


def _worker_exit(cluster: Cluster, fault: FaultAt) -> None:
    for worker in _victims(cluster, fault):
        worker.host.end(-9)


def _worker_stall(cluster: Cluster, fault: FaultAt) -> None:
    """The engine says nothing any more: its agent has to notice."""
    for worker in _victims(cluster, fault):
        worker.engine.hang = True


def _forge(cluster: Cluster, fault: FaultAt) -> None:
    """Now, and in the middle of a prompt; see also `prepare`."""
    forge(cluster, fault.a, fault.b)
    _when_busy(cluster, lambda: forge(cluster, fault.a, fault.b))


def _link(cluster: Cluster, fault: FaultAt) -> EdgeLink | None:
    links = cluster.edges.links()
    return links[int(fault.a * len(links))] if links else None


def _edge_cut(cluster: Cluster, fault: FaultAt) -> None:
    def cut() -> None:
        if (link := _link(cluster, fault)) is not None:
            cluster.edges.cut(link)

    _when_busy(cluster, cut)


def _edge_stall(cluster: Cluster, fault: FaultAt) -> None:
    def stall() -> None:
        if (link := _link(cluster, fault)) is not None:
            link.stalled_until = cluster.world.now + int(50 + fault.b * 2500)

    _when_busy(cluster, stall)


def _edge_blocked(cluster: Cluster, fault: FaultAt) -> None:
    """A firewall between the workers: what stands breaks, and nothing new comes about for a while."""
    cluster.edges.blocked_until = cluster.world.now + int(200 + fault.b * 15_000)
    for link in cluster.edges.links():
        cluster.edges.cut(link)


def _step_fault(cluster: Cluster, fault: FaultAt) -> None:
    for worker in _victims(cluster, fault):
        if worker.engine.stage is not None:
            worker.engine.stage.step_fault = "the kernel failed"


def _plan_error(cluster: Cluster, fault: FaultAt) -> None:
    cluster.plan_error = "the model file is broken"


def _provider_fault(name: str, error: str) -> Callable[[Cluster, FaultAt], None]:
    def do(cluster: Cluster, fault: FaultAt) -> None:
        setattr(cluster.provider.faults, name, error)

    return do


def _start_slow(cluster: Cluster, fault: FaultAt) -> None:
    cluster.provider.faults.start_slow_ms = int(1000 + fault.a * 130_000 * fault.b)


def _stop_slow(cluster: Cluster, fault: FaultAt) -> None:
    cluster.provider.faults.stop_slow_ms = int(500 + fault.a * 12_000)


def _stop_word(cluster: Cluster, fault: FaultAt) -> None:
    cluster.stop_line()


def _sigterm(cluster: Cluster, fault: FaultAt) -> None:
    cluster.hosts[Role.ORCHESTRATOR].signal("SIGTERM")


def _die(role: Role) -> Callable[[Cluster, FaultAt], None]:
    return lambda cluster, fault: cluster.crash(role, int(50 + fault.b * 1500))


DOING: dict[str, Callable[[Cluster, FaultAt], None]] = {
    "stall": _stall,
    "prompt_stall": _prompt_stall,
    "long_stall": _long_stall,
    "cut": _cut,
    "half_open": _half_open,
    "nat_lost": _nat_lost,
    "freeze": _freeze,
    "long_freeze": _long_freeze,
    "partition": _partition,
    "gateway_apart": _gateway_apart,
    "crash": _crash,
    "delays": _delays,
    "slow_disk": _slow_disk,
    "engine_fault": _engine_fault,
    "engine_death": _engine_death,
    "engine_fatal": _engine_fatal,
    "worker_exit": _worker_exit,
    "worker_stall": _worker_stall,
    "forge": _forge,
    "edge_cut": _edge_cut,
    "edge_stall": _edge_stall,
    "edge_blocked": _edge_blocked,
    "step_fault": _step_fault,
    "plan_error": _plan_error,
    "prepare_error": _provider_fault("prepare", "the worker binary does not exist"),
    "start_error": _provider_fault("start", "exec format error"),
    "start_slow": _start_slow,
    "complete_error": _provider_fault("complete", "the provider forgot the worker"),
    "stop_error": _provider_fault("stop", "the worker is stuck in the kernel"),
    "stop_slow": _stop_slow,
    "stop_word": _stop_word,
    "sigterm": _sigterm,
    "crash_gateway": _die(Role.GATEWAY),
    "crash_provisioner": _die(Role.PROVISIONER),
    "crash_orchestrator": _die(Role.ORCHESTRATOR),
}


def do(cluster: Cluster, fault: FaultAt) -> None:
    """The fault happens now; it does nothing once the run is over or all is healed."""
    if cluster.healed or cluster.hosts.get(Role.ORCHESTRATOR) is None or not cluster.hosts[Role.ORCHESTRATOR].alive:
        return
    cluster.world.note(str(fault))
    DOING[fault.kind](cluster, fault)


__all__ = ["FaultAt", "Plan", "Violation", "do", "draw", "prepare"]
