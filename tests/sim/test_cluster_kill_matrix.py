"""tests/kill_matrix.toml: every cell is decided, and holds on virtual time (real processes have their own run).

A cell that the program is known not to hold is in KNOWN, with why; it has to fail, so that the list stays true.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest

from common.addresses import Role
from services.orchestrator.base import CLOSING, Phase
from services.prompt_gateway.core import GatewayActor
from tests.kill_matrix import MATRIX, WORKER, cells, rule_of
from tests.sim.cluster_clients import Client, Script
from tests.sim.cluster_faults import Plan
from tests.sim.cluster_run import Cluster
from tests.sim.cluster_world import Violation

PHASES: dict[str, tuple[Phase, ...]] = {
    "services": (Phase.SERVICES,),
    "start": (Phase.PROVIDER, Phase.START),
    "readiness": (Phase.READINESS, Phase.ACK),
    "weights": (Phase.BOOTSTRAP, Phase.WEIGHTS),
    "idle": (Phase.SERVING,),
    "prompt": (Phase.SERVING,),
    "closing": CLOSING[:-1],
}
KNOWN: dict[tuple[str, str, str], str] = {}
PROMPT_MS = 10_000  # what the prompt under way may still take: others wait behind it


def test_every_cell_is_decided() -> None:
    assert [cell for cell in cells() if rule_of(*cell) is None] == []
    assert set(PHASES) == set(MATRIX["phases"])


def reach(cluster: Cluster, process: str, phase: str) -> Client:
    """Run until the phase; the client whose prompt is under way then, if it is that phase."""
    tokens = 40 if phase == "prompt" else 3
    client = cluster.client("first", Script(4000 if phase == "prompt" else 0, 1, tokens, 1, "normal", 0))

    def there() -> bool:
        if not cluster.started or cluster.run.phase not in PHASES[phase]:
            return False
        if process in WORKER and not any(worker.engine.running for worker in cluster.provider.living()):
            return False
        gateway = cluster.actors.get(Role.GATEWAY)
        if phase == "prompt":
            return bool(client.asked and client.asked[0].got)
        if phase == "idle":
            return client.is_over and isinstance(gateway, GatewayActor) and gateway.loop is not None
        return True

    if phase == "services":
        assert cluster.world.run(10_000, lambda: len(cluster.hosts) == 6)
    if phase == "closing":
        assert cluster.world.run(30_000, lambda: cluster.started and cluster.run.phase is Phase.SERVING)
        cluster.world.run(500)
        cluster.stop_line()
    assert cluster.world.run(60_000, there), f"phase {phase} was not reached"
    return client


def act(cluster: Cluster, process: str, signal: str) -> None:
    stop_ms = MATRIX["stop_s"] * 1000
    if process in WORKER:
        for worker in cluster.provider.living():
            if process == "agent" and signal == "KILL":
                worker.host.end(-9)
            elif process == "agent" and signal == "TERM":
                worker.host.signal()
            elif process == "agent":
                cluster.world.freeze(worker.host, stop_ms)
            elif signal == "STOP":
                worker.engine.pause(stop_ms)
            else:
                status = -9 if signal == "KILL" else -15
                worker.engine.die(f"the engine was killed by SIG{signal}", status)
        return
    role = Role(process)
    if role in cluster.world.doors:
        door = cluster.world.doors[role]
        cluster.world.freeze(door, stop_ms) if signal == "STOP" else cluster.crash(role, 300)
    elif signal == "KILL":
        cluster.crash(role, 300)
    elif signal == "TERM":
        cluster.hosts[role].signal()
    else:
        cluster.world.freeze(cluster.hosts[role], stop_ms)


def holds(cluster: Cluster, rule: dict[str, Any], client: Client, phase: str) -> None:
    """Raises Violation where the outcome is another one."""
    world, until_ms = cluster.world, rule["within_s"] * 1000 + (PROMPT_MS if phase == "prompt" else 0)
    outcome = rule["outcome"]
    begin = world.now

    def is_over() -> bool:
        return not cluster.hosts[Role.ORCHESTRATOR].alive

    def ended() -> tuple[int, str]:
        return (cluster.results[-1].status, cluster.results[-1].error) if cluster.results else (-9, "no result")

    if rule.get("quiet"):
        world.run(MATRIX["stop_s"] * 1000)
    may_end = outcome.endswith("exit_1")
    if outcome.startswith("goes_on"):
        served = False
        while not served and not is_over() and world.now - begin < until_ms:
            probe = cluster.client(f"probe{world.now}", Script(world.now, 1, 3, 1, "normal", 0))
            world.run(until_ms - (world.now - begin), lambda probe=probe: is_over() or probe.is_over)
            served = bool(probe.asked) and probe.asked[0].terminal == "done"
        if is_over() and may_end:
            check_error(ended(), rule)
        elif not served:
            raise Violation(f"does not go on: {ended() if is_over() else cluster.run.phase}")
    elif outcome != "lost":
        if not world.run(until_ms, is_over):
            raise Violation(f"has not ended: {cluster.run.phase}")
        status, _ = ended()
        if outcome == "exit_1" or (may_end and status):
            check_error(ended(), rule)
        elif status:
            raise Violation(f"ended with {ended()}")
    if phase == "prompt" and "prompt" in rule:
        world.run(1000)
        got = client.asked[0].terminal or "closed"
        if got not in rule["prompt"].split("_or_"):
            raise Violation(f"the client gets {got}, not {rule['prompt']}")


def check_error(ended: tuple[int, str], rule: dict[str, Any]) -> None:
    if ended[0] != 1 or not re.search(rule["says"], ended[1]):
        raise Violation(f"ended with {ended}")


def play_cell(process: str, signal: str, phase: str) -> None:
    rule = rule_of(process, signal, phase)
    assert rule is not None
    plan = Plan(7, light=False, embedded=True, relay=True, hwm=2000, delay_ms=(0, 3), skew=False, second_run=False)
    cluster = Cluster(plan)
    client = reach(cluster, process, phase)
    act(cluster, process, signal)
    holds(cluster, rule, client, phase)
    run = cluster.hosts[Role.ORCHESTRATOR]
    if run.alive:
        cluster.stop_line()
        if not cluster.world.run(75_000, lambda: not run.alive):
            raise Violation("does not stop")
    cluster.close()
    cluster.world.run(5_000)
    if left := [worker.host.name for worker in cluster.provider.living()]:
        raise Violation(f"left running: {left}")


def failing(cell: tuple[str, str, str], play: Callable[..., None] = play_cell) -> str:
    try:
        play(*cell)
    except AssertionError as error:
        return f"{' '.join(cell)}: {error}"
    return ""


@pytest.mark.spec("S1 9.15", "S1 9.16", "S1 10.14")
@pytest.mark.parametrize("process", MATRIX["processes"])
def test_the_matrix_holds_on_virtual_time(process: str) -> None:
    failed = {cell: why for cell in cells() if cell[0] == process and (why := failing(cell))}
    assert [why for cell, why in failed.items() if cell not in KNOWN] == []
    assert [cell for cell in KNOWN if cell[0] == process and cell not in failed] == [], (
        "holds now: take it out of KNOWN"
    )
