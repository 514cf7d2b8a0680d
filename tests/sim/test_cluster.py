"""The whole cluster under faults on virtual time: it serves or it ends with one sentence, whatever happens.

`./dev sim --seeds N` runs more of the same; a failing seed prints the one command that replays it and what is left of
its plan once every fault that does not matter is left out.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

from common.limits import RELAY_UNCONFIRMED_MS
from tests.sim.cluster_clients import Script
from tests.sim.cluster_faults import DEADLY, PROVIDER, SERVICE_DEATHS, SURVIVED, FaultAt, Plan, draw
from tests.sim.cluster_main import report_failure
from tests.sim.cluster_run import play, shrink

ROOT = Path(__file__).parents[2]
SEEDS = 500
TWICE_EVERY = 25


def plan(*faults: FaultAt, clients: list[Script] | None = None, **changes: object) -> Plan:
    """A plan by hand; it is light unless told otherwise: the run has to survive it."""
    values: dict[str, object] = {
        "seed": 1,
        "light": True,
        "embedded": True,
        "relay": True,
        "hwm": 2000,
        "delay_ms": (0, 3),
        "skew": False,
        "second_run": False,
        "safety_ms": 20_000,
    }
    one = Script(at_ms=0, prompts=3, tokens=20, size=1, habit="normal", after_ms=0)
    return Plan(**{**values, **changes}, clients=[one] if clients is None else clients, faults=list(faults))  # type: ignore[arg-type]


@pytest.mark.spec(
    "S1 9.4",
    "S1 9.5",
    "S1 9.6",
    "S1 9.7",
    "S1 9.10",
    "S1 9.14",
    "S1 9.15",
    "S1 9.16",
    "S1 9.18",
    "S1 9.19",
    "S1 9.20",
    "S1 10.7",
    "S1 10.12",
    "S1 10.13",
)
def test_whatever_happens_the_run_serves_or_ends_with_one_sentence() -> None:
    """Every TWICE_EVERYth seed twice, with the same digest."""
    began = time.process_time()
    facts: Counter[str] = Counter()
    statuses: Counter[int] = Counter()
    for seed in range(1, SEEDS + 1):
        try:
            outcome = play(draw(seed))
            if seed % TWICE_EVERY == 0:
                assert play(draw(seed)).digest == outcome.digest, "the same seed gave another run"
        except Exception as error:
            pytest.fail(report_failure(seed, error))
        facts.update(outcome.facts)
        statuses.update(status for status, _ in outcome.ended)
    print(f"{SEEDS} seeds in {time.process_time() - began:.0f} s: {dict(facts)}, exit statuses {dict(statuses)}")
    # The seeds do reach what they are there for.
    assert facts["done"] > SEEDS and facts["fault"] > SEEDS // 10 and facts["rpc_opened"] > SEEDS // 2
    assert statuses[0] > SEEDS // 3 and statuses[1] > SEEDS // 10 and facts["converged"]


def test_another_hash_seed_gives_the_same_runs() -> None:
    command = [sys.executable, "-P", "-m", "tests.sim", "--digest", "--seeds", "6", "--seed", "40"]
    outputs = []
    for hash_seed in ("0", "4711"):
        environ = {**os.environ, "PYTHONHASHSEED": hash_seed}
        done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=120, check=True)
        outputs.append(done.stdout)
    assert outputs[0] == outputs[1] and len(outputs[0].splitlines()) == 6


@pytest.mark.spec("S1 9.10", "S1 9.17")
def test_without_faults_every_prompt_is_answered_and_the_end_is_clean() -> None:
    outcome = play(plan())
    assert outcome.ended == [(0, "")] and outcome.served
    assert outcome.facts["done"] == 4 and "fault" not in outcome.facts
    assert outcome.verdicts.keys() <= {"forwarded", "local", "reintroduce", "refused", "gone", "unbound"}


@pytest.mark.parametrize("kind", SURVIVED)
@pytest.mark.parametrize("at_ms", [600, 6000])
def test_what_a_run_survives(kind: str, at_ms: int) -> None:
    """One by one, in start-up, while loading and while serving; both with and without relay and launcher."""
    for number in range(2):
        fault = FaultAt(at_ms, kind, (number + 0.5) / 2, 0.9)
        play(plan(fault, embedded=number == 0, relay=number == 1, seed=number))


def test_text_on_its_way_is_neither_lost_nor_doubled_by_stalls() -> None:
    """Both ends repeat what the other one has: the client checks each character."""
    long = Script(at_ms=6000, prompts=1, tokens=600, size=1, habit="normal", after_ms=0)
    for seed in range(3):
        stalls = [FaultAt(6300 + 2600 * at, "prompt_stall", at % 2 * 0.9, 0.9) for at in range(4)]
        outcome = play(plan(*stalls, clients=[long], seed=seed))
        assert outcome.facts["done"] >= 2 and "fault" not in outcome.facts  # the long one, and the probes at the end


@pytest.mark.spec("S1 6.11")
@pytest.mark.parametrize(("tokens", "size"), [(4000, 1), (40, 20_000)])
def test_what_a_stall_holds_up_waits_within_the_windows(tokens: int, size: int) -> None:
    """Of messages and of bytes; the rest waits at its sender, and the client gets all of it."""
    stall, long = FaultAt(6000, "prompt_stall", 0.9, 0.99), Script(6100, 1, tokens, size, "normal", 0)
    for seed in range(2):
        outcome = play(plan(stall, clients=[long], seed=seed, safety_ms=20_000))
        assert outcome.facts["window full"] and outcome.facts["done"] == 2


@pytest.mark.parametrize("stages", [1, 2])
def test_a_run_over_a_relay_goes_on_for_minutes(stages: int) -> None:
    """The relay threw out its router and all workers RELAY_UNCONFIRMED_MS after the start, or after a break."""
    asks = [Script(at, 1, 20, 1, "normal", 0) for at in (7000, RELAY_UNCONFIRMED_MS + 20_000)]
    for kind in ("cut", "crash"):
        fault = FaultAt(9000, kind, 0.999, 0.5)
        outcome = play(plan(fault, stages=stages, clients=asks, safety_ms=RELAY_UNCONFIRMED_MS + 30_000))
        assert outcome.ended == [(0, "")] and outcome.facts["done"] == 3 and "fault" not in outcome.facts


@pytest.mark.spec("S1 10.12")
@pytest.mark.parametrize("stages", [1, 2])
def test_a_silent_worker_is_known_to_the_run_and_one_that_stays_silent_ends_it(stages: int) -> None:
    """No process ended and no connection broke: only membership can say so."""
    asks = Script(9000, 4, 5, 1, "normal", 0)
    once = FaultAt(8000, "long_freeze", 0.999, 0.7)
    outcome = play(plan(once, light=False, stages=stages, clients=[asks], safety_ms=30_000))
    assert outcome.facts["worker dead"] == 1 and outcome.served and outcome.ended == [(0, "")]
    again = [FaultAt(8000 + 15_000 * at, "long_freeze", 0.999, 0.99) for at in range(8)]
    outcome = play(plan(*again, light=False, stages=stages, clients=[asks], safety_ms=140_000))
    assert outcome.ended[0][0] == 1 and "dead in SWIM" in outcome.ended[0][1] and outcome.virtual_ms < 140_000


@pytest.mark.spec("S1 9.15", "S1 10.6", "S1 10.13")
@pytest.mark.parametrize("kind", [*DEADLY, *PROVIDER, *SERVICE_DEATHS])
@pytest.mark.parametrize("at_ms", [2600, 6000])
def test_what_may_end_a_run_ends_it_with_one_sentence(kind: str, at_ms: int) -> None:
    fault = FaultAt(at_ms, kind, 0.3, 0.9)
    for embedded in (True, False):
        play(plan(fault, light=False, embedded=embedded, second_run=True))


@pytest.mark.spec("S1 9.10", "S1 9.13")
@pytest.mark.parametrize("stages", [2, 3])
def test_a_cancelled_prompt_leaves_nothing_in_the_pipeline_for_the_next(stages: int) -> None:
    """Its objects are under way on every edge; what comes of them must not count for the prompts behind it."""
    for seed in range(4):
        leaves = [Script(6000 + 400 * at, 1, 60, 1, "abort", 20 + 45 * at) for at in range(4)]
        asks = Script(at_ms=6100, prompts=4, tokens=20, size=1, habit="normal", after_ms=0)
        outcome = play(plan(stages=stages, clients=[*leaves, asks], seed=seed))
        assert outcome.ended == [(0, "")] and outcome.facts["done"] == 5 and "fault" not in outcome.facts


# --- what the simulation found ------------------------------------------------------------------------------------
def test_the_run_hears_that_serving_failed_even_if_the_bus_was_down_then() -> None:
    """The gateway could not reach the worker and said so once, on a bus that was down: the run went on for ever and
    every prompt was faulted."""
    apart = FaultAt(6000, "gateway_apart", 0.0, 0.5)  # until 18 s
    # Before the gateway knows that it is cut off: from then on prompts wait.
    asks = Script(at_ms=6100, prompts=1, tokens=3, size=1, habit="normal", after_ms=0)
    outcome = play(plan(apart, light=False, clients=[asks]))
    assert len(outcome.ended) == 1 and "prompt serving failed" in outcome.ended[0][1]


def test_frames_of_a_worker_are_not_lost_on_a_collector_that_is_gone() -> None:
    """Sent to the old collector's actor they waited for a route; a worker that ended meanwhile left a silent hole."""
    busy = Script(at_ms=4000, prompts=300, tokens=1, size=1, habit="normal", after_ms=0)
    for number in range(4):
        crash = FaultAt(18_000 + 150 * number, "crash", 0.7, 0.4)
        play(plan(crash, relay=False, delay_ms=(30, 100), clients=[busy], seed=number))


def test_frames_are_not_sent_to_a_collector_that_only_old_routes_name() -> None:
    """Collector and relay died one after the other: a worker that was back before the routes sent its frames to the
    old collector, where they waited for a way until the run had ended; what it said later left a silent hole."""
    for seed in (6, 10, 17, 20):
        faults = [
            FaultAt(2200 + 13 * seed, "crash", 0.613, 0.607),
            FaultAt(3183, "crash", 0.935, 0.478),
            FaultAt(4000 + 61 * seed, "worker_exit", 0.075, 0.2),
        ]
        play(plan(*faults, light=False, stages=2, hwm=50, seed=seed, clients=[]))


def test_positions_go_on_when_the_collector_dies_before_the_orchestrator_has_said_anything() -> None:
    """Only the router stood in the archive: the restarted collector took the run for another one."""
    frozen, crash = FaultAt(876, "freeze", 0.41, 0.95), FaultAt(1915, "crash", 0.744, 0.8)
    play(plan(frozen, crash, light=False, hwm=50, delay_ms=(10, 80), seed=3173, skew=True, clients=[]))


def test_a_token_edge_that_failed_while_the_bus_was_down_does_not_open_for_prompts() -> None:
    """The gateway said once that token-in had failed, on a bus that was down; then it opened, and prompts hung."""
    faults = [FaultAt(1523, "gateway_apart", 0.65, 0.66), FaultAt(1895, "edge_blocked", 0.61, 0.021)]
    outcome = play(plan(*faults, light=False, stages=3, seed=497, clients=[]))
    assert len(outcome.ended) == 1


@pytest.mark.parametrize("stages", [1, 2, 3])
def test_another_run_takes_the_prompt_rpc_over(stages: int) -> None:
    """An orchestrator was killed: the next one had to wait for the first one's lease, or failed at its very end; a
    pipeline's token edges were closed by the end of the run before it."""
    crash = FaultAt(6000 if stages == 1 else 8000, "crash_orchestrator", 0.3, 0.1)
    outcome = play(plan(crash, light=False, embedded=False, second_run=True, stages=stages))
    assert outcome.ended == [(0, "")] and outcome.facts["rpc_opened"] == 2


@pytest.mark.spec("S1 10.12")
@pytest.mark.parametrize("stages", [1, 2])
def test_a_rented_worker_whose_orchestrator_and_provisioner_died_ends_itself(stages: int) -> None:
    """Nobody is left to stop it or to pay for it: only its lease can end it."""
    deaths = FaultAt(8000, "crash_provisioner", 0.3, 0.9), FaultAt(8100, "crash_orchestrator", 0.3, 0.9)
    outcome = play(plan(*deaths, light=False, embedded=False, rented=True, stages=stages))
    assert outcome.facts["left to its lease"] == stages


@pytest.mark.parametrize("stages", [1, 2, 3])
@pytest.mark.parametrize("kind", ["worker_exit", "engine_death", "worker_stall", "edge_blocked"])
def test_a_run_that_restarts_lost_workers_goes_on(stages: int, kind: str) -> None:
    """[runtime] on_worker_loss = "restart": clients lose and repeat no character, also when a second worker goes."""
    if stages == 1 and kind == "edge_blocked":
        return
    for seed in range(4):
        long = Script(at_ms=6000, prompts=1, tokens=60, size=1, habit="normal", after_ms=0)
        others = [Script(6100, 3, 20, 1, "normal", 0), Script(6050, 2, 60, 1, "abort", 200 + seed)]
        faults = [FaultAt(6000 + 370 * seed, kind, seed * 0.37 % 1, 0.5)]
        if seed % 2:
            faults.append(FaultAt(6500 + 1310 * seed % 4000, "worker_exit", 0.1, 0.5))
        outcome = play(
            plan(
                *faults, light=False, restart=True, stages=stages, seed=seed, clients=[long, *others], safety_ms=30_000
            )
        )
        assert outcome.ended == [(0, "")] and outcome.served


def test_a_worker_that_is_lost_while_the_gateway_is_frozen_is_not_served_with() -> None:
    """Both attempts' RestoreServing came at once: the gateway kept to the first one's worker, which was dead."""
    deaths = FaultAt(9761, "engine_death", 0, 0.5), FaultAt(14_950, "engine_death", 0, 0.5)
    frozen = FaultAt(10_211, "long_freeze", 0.5, 0.434)  # the gateway
    outcome = play(plan(*deaths, frozen, light=False, embedded=False, restart=True, safety_ms=23_000))
    assert outcome.served and outcome.ended == [(0, "")]


@pytest.mark.parametrize("stages", [1, 2])
def test_services_that_are_up_only_after_the_launchers_death_end_as_well(stages: int) -> None:
    """Forked before it, they find their owner gone as the first thing they see; the brokers may be gone before them."""
    death = FaultAt(200, "crash_orchestrator", 0.5, 0.5)
    ends = [play(plan(death, light=False, stages=stages, seed=seed)) for seed in range(6)]
    assert sum(outcome.facts["owner gone"] for outcome in ends) >= 3  # in the others the launcher is up later


@pytest.mark.spec("S1 4.11")
def test_a_gateway_out_of_reach_when_a_worker_comes_back_serves_again() -> None:
    """It had heard that the worker was dead, and the run's word that it is alive was lost: suspended for ever."""
    frozen, apart = FaultAt(6000, "long_freeze", 0.999, 0.9), FaultAt(17_000, "gateway_apart", 0.5, 0.99)
    outcome = play(plan(frozen, apart, light=False, safety_ms=35_000))
    assert outcome.facts["worker dead"] == 1 and outcome.served and outcome.ended == [(0, "")]


@pytest.mark.spec("S1 6.11", "S1 9.10")
def test_a_prompt_ends_although_its_worker_was_out_of_reach_for_a_while() -> None:
    """Too short for a death, too long for the bus: the worker dropped the request in silence, and the prompt and all
    behind it waited for ever."""
    long = Script(at_ms=6000, prompts=1, tokens=600, size=1, habit="normal", after_ms=0)
    for ms in (7500, 9500):
        fault = FaultAt(7000, "partition", 0.97, (ms - 500) / 15_000)
        outcome = play(plan(fault, light=False, clients=[long], safety_ms=28_000))
        assert outcome.ended == [(0, "")] and outcome.facts["fault"] == 1 and outcome.facts["done"] == 1


# --- the simulation itself ----------------------------------------------------------------------------------------
def test_nobody_hears_that_words_forged_in_his_name_could_not_be_delivered() -> None:
    """Runs ended for acknowledgements that the simulation had sent for them to a worker out of reach."""
    forged, apart = FaultAt(2500, "forge", 0.5, 0.5), FaultAt(1000, "partition", 0.97, 0.99)
    outcome = play(plan(apart, forged, light=False, clients=[], safety_ms=30_000))
    assert outcome.served and outcome.ended == [(0, "")]


def test_a_failing_plan_is_shortened_to_the_faults_that_matter() -> None:
    faults = [FaultAt(at, "stall", 0.1, 0.1) for at in range(5)]
    faults[3] = FaultAt(3, "crash", 0.5, 0.5)

    def fails(candidate: Plan) -> str:
        return "broken" if any(fault.kind == "crash" for fault in candidate.faults) else ""

    short, why = shrink(plan(*faults), fails)
    assert why == "broken" and short.faults == [faults[3]] and short.clients == []
