"""The cluster proven: seeds on virtual time, and the membership figures on real processes with the real model.

Each seed runs twice and must give the same digest. The figures of real processes are the worst of all rounds; they are
times of this machine, so what else runs on it stands in them.
"""

from __future__ import annotations

import argparse
import sys
import time

from tests.e2e.figures import (
    answers_s,
    exit_noticed_s,
    false_deaths,
    healed_s,
    rejoin_s,
    served,
    serving,
    silent_noticed_s,
    unroutable_s,
)
from tests.e2e.stack import model_file
from tests.e2e.witness import Witness
from tests.sim.cluster_main import run_seed
from tools.fetch_model import fetch_default

ROUNDS = 3
SEEDS = 500
STOPPED_S = 20.0
SATURATED_S = 60.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of this bench."""
    parser.add_argument("--seeds", type=int, default=SEEDS, help="seeds on virtual time (%(default)s)")
    parser.add_argument("--first", type=int, default=1, metavar="SEED", help="the first of them (%(default)s)")
    parser.add_argument("--saturated", type=float, default=SATURATED_S, help="seconds of saturation (%(default)s)")


def simulated(first: int, count: int) -> dict[str, object]:
    """Seeds on virtual time."""
    began, failed = time.monotonic(), []
    for seed in range(first, first + count):
        try:
            run_seed(seed, twice=True)
        except Exception as error:
            failed.append(seed)
            print(f"seed {seed}: {type(error).__name__}: {error}", file=sys.stderr)
    return {
        "seeds": count,
        "failures": len(failed),
        "seconds": round(time.monotonic() - began, 1),
        "failed_seeds": failed[:20],
    }


def one_round(saturated_s: float) -> dict[str, float]:
    """Every figure of real processes once."""
    figures = {f"exit_noticed_{part}": exit_noticed_s(part) for part in ("agent", "engine")}
    with serving() as stack:
        served(stack)
        figures["silent_noticed"], figures["back"] = silent_noticed_s(stack, STOPPED_S)
        with Witness(stack) as witness:
            figures["rejoin"] = rejoin_s(stack, witness)
        answers_s(stack, 30)
        figures["deaths"] = false_deaths(stack, saturated_s)
        answers_s(stack, 30)
        with Witness(stack) as witness:
            figures["unrouted"], figures["told"] = unroutable_s(stack, witness)
    figures["healed"] = healed_s()
    return figures


def run(arguments: argparse.Namespace) -> dict[str, object]:
    """See the module."""
    if not model_file().exists():
        fetch_default(model_file().parent)
    rounds = []
    for number in range(arguments.rounds):
        rounds.append(one_round(arguments.saturated))
        print(f"round {number + 1}: {rounds[-1]}", file=sys.stderr)

    def worst(*names: str) -> float:
        return round(max(found[name] for found in rounds for name in names), 3)

    return {
        **simulated(arguments.first, arguments.seeds),
        "rejoin_max_s": worst("rejoin"),
        "exit_noticed_max_s": worst("exit_noticed_agent", "exit_noticed_engine"),
        "silent_noticed_max_s": worst("silent_noticed"),
        "false_deaths_saturated": sum(int(found["deaths"]) for found in rounds),
        "saturated_s": arguments.saturated * arguments.rounds,
        "back_after_stop_max_s": worst("back"),
        "unroutable_max_s": worst("unrouted", "told"),
        "half_open_healed_max_s": worst("healed"),
    }
