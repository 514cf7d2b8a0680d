"""The faults of a soak, drawn by a seed: those that heal, and few that end the run."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import threading
from dataclasses import dataclass

from tests.e2e.stack import Stack, StackError


@dataclass(frozen=True, slots=True)
class Fault:
    """stop_s 0: the signal; else SIGSTOP, and SIGCONT after so long. ends: the run ends by it (S1 9.15)."""

    part: str
    number: signal.Signals
    weight: int
    stop_s: float = 0.0
    ends: bool = False

    @property
    def name(self) -> str:
        """As "router SIGKILL", "agent SIGSTOP 8 s"."""
        return f"{self.part} {self.number.name}" + (f" {self.stop_s:g} s" if self.stop_s else "")


def _stop(part: str, seconds: float, weight: int = 2) -> Fault:
    return Fault(part, signal.SIGSTOP, weight, seconds)


FAULTS: tuple[Fault, ...] = (
    *(Fault(part, signal.SIGKILL, 3) for part in ("router", "relay", "membership", "datastream_collector")),
    *(Fault(part, signal.SIGTERM, 1) for part in ("router", "relay", "membership", "datastream_collector")),
    *(_stop(part, 3) for part in ("router", "relay", "membership", "datastream_collector", "prompt_gateway")),
    _stop("provisioner", 4),
    _stop("orchestrator", 4),
    _stop("engine", 4),
    _stop("agent", 3),
    _stop("agent", 15, 3),
    *(Fault(part, signal.SIGKILL, 1, ends=True) for part in ("agent", "engine", "prompt_gateway", "provisioner")),
    Fault("orchestrator", signal.SIGTERM, 1, ends=True),
)


def draw(rng: random.Random, *, may_end: bool) -> Fault:
    """One of them."""
    choice = [fault for fault in FAULTS if may_end or not fault.ends]
    return rng.choices(choice, [fault.weight for fault in choice])[0]


def commit(fault: Fault, stack: Stack) -> bool:
    """Do it. False when the part is not there just now."""
    try:
        pid = stack.kill(fault.part, fault.number)
    except (StackError, ProcessLookupError):
        return False
    if fault.stop_s:
        timer = threading.Timer(fault.stop_s, _continue, (pid,))
        timer.daemon = True
        timer.start()
    return True


def _continue(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGCONT)
