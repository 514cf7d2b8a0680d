"""`./dev sim`: seeds of the whole cluster on virtual time, each twice with the same digest; a failure is shortened.

./dev sim --seeds N [--seed S]    N seeds from S on (default: from 1)
./dev sim --seed S                this one, with its plan
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from collections.abc import Callable

from tests.sim.cluster_run import Outcome, Plan, draw, failure_of, play, shrink


def replay_command(seed: int) -> str:
    return f"./dev sim --seed {seed}"


def run_seed(seed: int, *, twice: bool) -> Outcome:
    """Raises what went wrong."""
    outcome = play(draw(seed))
    if twice and play(draw(seed)).digest != outcome.digest:
        raise AssertionError("the same seed gave another run")
    return outcome


def describe(plan: Plan) -> str:
    """What a person needs to see of a plan."""
    how = f"{'light' if plan.light else 'heavy'}, {'embedded' if plan.embedded else 'hosted'}"
    how += ", relay" if plan.relay else ""
    how += ", rented" if plan.rented else ""
    how += ", lost workers are replaced" if plan.restart else ""
    how += f", {plan.stages} stages with edges {plan.edges}, feedback {plan.feedback}" if plan.stages > 1 else ""
    lines = [f"  {how}, delays {plan.delay_ms} ms, high-water mark {plan.hwm}, second run {plan.second_run}"]
    lines += [f"  client {script}" for script in plan.clients]
    lines += [f"  fault  {fault}" for fault in plan.faults]
    return "\n".join(lines)


def report_failure(seed: int, error: BaseException, fails: Callable[[Plan], str] = failure_of) -> str:
    """The failure, the one command that replays it, and the shortest list of faults that still fails."""
    text = f"seed {seed}: {type(error).__name__}: {error}\nreplay: {replay_command(seed)}\n"
    plan, why = shrink(draw(seed), fails)
    if not why:
        return text + "  (it does not fail again with the same plan: not deterministic?)"
    return f"{text}shortened ({why}):\n{describe(plan)}"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="./dev sim", description="The cluster on virtual time.")
    parser.add_argument("--seeds", type=int, metavar="N", help="how many seeds (default 100; 1 with --seed alone)")
    parser.add_argument("--seed", type=int, metavar="S", help="the first seed (default 1)")
    parser.add_argument("--once", action="store_true", help="do not run each seed a second time")
    parser.add_argument("--digest", action="store_true", help="print each seed's digest and nothing else")
    args = parser.parse_args(argv)
    count = args.seeds or (1 if args.seed is not None else 100)
    first = 1 if args.seed is None else args.seed
    began, failed, virtual_ms = time.process_time(), 0, 0
    ends: Counter[str] = Counter()
    facts: Counter[str] = Counter()
    for seed in range(first, first + count):
        if count == 1 and not args.digest:
            print(describe(draw(seed)))
        try:
            outcome = run_seed(seed, twice=not args.once and not args.digest)
        except Exception as error:
            failed += 1
            print(report_failure(seed, error), flush=True)
            continue
        if args.digest:
            print(seed, outcome.digest)
            continue
        virtual_ms += outcome.virtual_ms
        facts.update(outcome.facts)
        ends.update("served and stopped" if not status else "ended with an error" for status, _ in outcome.ended)
        if count == 1:
            seconds = outcome.virtual_ms / 1000
            print(f"  ended {outcome.ended}, digest {outcome.digest[:16]}, {seconds:.0f} s of virtual time")
    if args.digest:
        return int(bool(failed))
    took = time.process_time() - began
    print(f"{count} seeds, {failed} failed, {virtual_ms / 3_600_000:.1f} h of virtual time in {took:.0f} s of CPU")
    if ends:
        print("runs: " + ", ".join(f"{number} {what}" for what, number in sorted(ends.items())))
        print("facts: " + ", ".join(f"{number} {what}" for what, number in sorted(facts.items())))
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
