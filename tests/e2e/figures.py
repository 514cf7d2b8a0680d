"""The membership figures of issue 5, measured on real processes: used by tests/e2e/test_real_figures.py with generous
limits and by `./dev bench sim`, which prints them."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

from tests.e2e.stack import Record, Stack, StackError, wait_for
from tests.e2e.witness import Witness
from tests.support.socket_proxy import SocketProxy

CONFIG = '[relay]\nmode = "default"\n'
NOTICE_LIMIT_S = 60.0
PLANES = ("control", "prompt", "edge", "stream")
PARTIES_MIN = 5  # orchestrator, five services and the worker dial; one may have been faster than the test
TRIES = 5  # where more of them were
FAILED_STATES = ("dead", "left")


def serving() -> Stack:
    """A run with a relay; start it as a context manager, then `served`."""
    return Stack(config=CONFIG)


def served(stack: Stack) -> None:
    """Until it serves."""
    stack.wait_record("serve_prompts", "started")


def transitions(stack: Stack, node_id: int = 1) -> list[Record]:
    """SWIM's transitions of a worker, as recorded (S1 8.3)."""
    found = [record for record in stack.archive.records() if record.channel == "mvp.swim.membership"]
    return [record for record in found if record.body["node_id"] == node_id and record.detail.get("logical_id")]


def exit_noticed_s(part: str) -> float:
    """From SIGKILL of the agent or the engine to the run's record that it has failed. The record's clock is the
    collector's, at most a batch (20 ms) late."""
    with serving() as stack:
        served(stack)
        time.sleep(0.5)
        at_ms = time.time_ns() // 1_000_000
        stack.kill(part)
        record = stack.wait_record("serve_prompts", "failed", NOTICE_LIMIT_S)
        return (record.unix_ms - at_ms) / 1000


def silent_noticed_s(stack: Stack, seconds: float = 20.0) -> tuple[float, float]:
    """SIGSTOP of the agent: seconds to "dead" on record, and from SIGCONT to an answered prompt.

    Raises StackError when it does not come back."""
    before = len(transitions(stack))
    at_ms, began = time.time_ns() // 1_000_000, time.monotonic()
    pid = stack.kill("agent", signal.SIGSTOP)
    try:

        def dead() -> Record | None:
            return next((found for found in transitions(stack)[before:] if found.detail["to"] in FAILED_STATES), None)

        record = wait_for("dead on record", dead, NOTICE_LIMIT_S)
        time.sleep(max(0.0, seconds - (time.monotonic() - began)))
    finally:
        os.kill(pid, signal.SIGCONT)
    assert isinstance(record, Record)
    return (record.unix_ms - at_ms) / 1000, answers_s(stack, NOTICE_LIMIT_S)


def answers_s(stack: Stack, limit_s: float) -> float:
    """Seconds until a prompt is answered. Raises StackError."""
    began = time.monotonic()
    while time.monotonic() - began < limit_s:
        with contextlib.suppress(Exception):
            stack.ask("hello", max_tokens=2)
            return time.monotonic() - began
        time.sleep(0.1)
    raise StackError(f"no answer within {limit_s:g} s: {stack.archive.lifecycle()[-3:]}")


def rejoin_s(stack: Stack, witness: Witness) -> float:
    """SIGKILL of the router: seconds until the new one routes every actor that the old one did."""
    before, boot = witness.routes(), witness.router_boot
    stack.kill("router")
    began = time.monotonic()
    witness.wait(
        "everybody at the new router",
        lambda: witness.router_boot not in (0, boot) and before <= witness.routes(),
        NOTICE_LIMIT_S,
    )
    return time.monotonic() - began


def unroutable_s(stack: Stack, witness: Witness) -> tuple[float, float]:
    """SIGKILL of the agent: seconds until none of its actors is routed, and until a message that was sent to one of
    them right after the kill came back as undeliverable."""
    agent = witness.agent
    assert agent is not None
    actors = [entry.address for entry in witness.routes_of(agent.node)]
    assert actors
    stack.kill("agent")
    began = time.monotonic()
    witness.send(actors[0])
    witness.wait("no route of the dead worker", lambda: not witness.routes_of(agent.node), NOTICE_LIMIT_S)
    unrouted = time.monotonic() - began
    witness.wait("the message's failure", lambda: witness.failures, NOTICE_LIMIT_S)
    return unrouted, witness.failures[0][0] - began


def healed_s() -> float:
    """Every party loses its connections to the router, which keeps its ends and is not told: seconds until all are
    connected again and a prompt is answered. Raises StackError."""
    for _ in range(TRIES):
        if (seconds := _healed_s()) is not None:
            return seconds
    raise StackError(f"{TRIES} times fewer than {PARTIES_MIN} connections of {', '.join(PLANES)} went through the test")


def _healed_s() -> float | None:
    """None where too few connections go through the test."""
    stack = Stack()
    with contextlib.ExitStack() as ends:
        proxies = [ends.enter_context(SocketProxy(stack.run_dir / f"router-{plane}.sock")) for plane in PLANES]
        ends.enter_context(stack)
        served(stack)
        stack.ask("hello", max_tokens=2)
        before = [proxy.connections for proxy in proxies]
        if min(before) < PARTIES_MIN:
            return None
        began = time.monotonic()
        for proxy in proxies:
            proxy.abandon()

        def again() -> bool:
            return all(proxy.connections >= had for proxy, had in zip(proxies, before, strict=True))

        wait_for("connected again", again, NOTICE_LIMIT_S)
        answers_s(stack, NOTICE_LIMIT_S)
        return time.monotonic() - began


@contextlib.contextmanager
def saturated_cores() -> Iterator[None]:
    """Every core of this machine busy, at the priority of everybody."""
    burn = "while True: pass"
    burners = [subprocess.Popen([sys.executable, "-c", burn]) for _ in os.sched_getaffinity(0)]
    try:
        yield
    finally:
        for burner in burners:
            burner.kill()
            burner.wait()


def false_deaths(stack: Stack, seconds: float) -> int:
    """Transitions to dead or left while all cores are saturated for so long."""
    before = len(transitions(stack))
    with saturated_cores():
        time.sleep(seconds)
    return sum(record.detail["to"] in FAILED_STATES for record in transitions(stack)[before:])
