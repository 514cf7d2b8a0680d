"""`./dev soak --minutes N`: a run under a prompt each second and a fault every 20 s, watched for what grows or is lost.

Faults that end a run by design (a lost worker, gateway or provisioner) are drawn in the first half only; the run is
then started again, as an operator would. In the second half one run has to live through everything that heals.
Status 1 when a request did not end once, a process grew without bound, or something was left.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections import Counter
from typing import Any

from tests.e2e.stack import Stack, StackError, wait_for
from tests.soak.faults import commit, draw
from tests.soak.prompts import Prompter
from tests.soak.watch import Watch

FAULT_S = 20.0
LOOK_S = 5.0
RUN_END_S = 90.0
CONFIG = '[relay]\nmode = "default"\n'
RSS_GROWTH_BYTES_MAX = 16 * 1024 * 1024  # over what a life shows after it has settled: allocators breathe, leaks grow
FDS_GROWTH_MAX = 8
THREADS_GROWTH_MAX = 4
ARCHIVE_RATE_RATIO_MAX = 1.5  # bytes a minute, second half over first


class Soak:
    """One soak."""

    def __init__(self, minutes: float, seed: int) -> None:
        self._minutes, self._seed = minutes, seed
        self._rng = random.Random(seed)
        self._stack = Stack(config=CONFIG)
        self._addr = ""
        self.faults: Counter[str] = Counter()
        self.runs = 0
        self.run_ends: list[str] = []
        self.unplanned: list[str] = []
        self.archive_bytes: list[tuple[float, int]] = []
        self.watch = Watch()

    def run(self) -> dict[str, Any]:
        """Returns the figures."""
        began = time.monotonic()
        with self._stack:
            self._serving()
            prompter = Prompter(lambda: self._addr, self._seed)
            next_fault, next_look = began + FAULT_S, began
            ending = ""
            while (now := time.monotonic()) - began < self._minutes * 60:
                time.sleep(0.2)
                if self._has_ended():
                    self._ended(ending)
                    ending = ""
                    self._again()
                if now >= next_look:
                    next_look += LOOK_S
                    self._look(now - began)
                if now >= next_fault:
                    next_fault += FAULT_S
                    fault = draw(self._rng, may_end=(now - began) < self._minutes * 30)
                    if commit(fault, self._stack):
                        self.faults[fault.name] += 1
                        ending = fault.name if fault.ends else ending
                        say(f"{now - began:7.1f} s  {fault.name}")
            prompter.stop()
            self._stack.say("stop\n")
            status = self._stack.wait(RUN_END_S)
            if status:
                self.unplanned.append(f"the last run ended with {status}: {self._stack.stderr.strip()}")
            self._stack.assert_nothing_left(2.0)
            records = self._prompts_on_record()
        return self._figures(prompter.tally.as_dict(), records)

    def _serving(self) -> None:
        self.runs += 1
        done = len([record for record in self._stack.archive.lifecycle() if record.step == ("prompt_rpc", "ready")])

        def ready() -> str:
            found = [record for record in self._stack.archive.lifecycle() if record.step == ("prompt_rpc", "ready")]
            if len(found) == done and self._has_ended():
                raise StackError(f"ended before it served: {self._stack.stderr}")
            return str(found[-1].detail["addr"]) if len(found) > done else ""

        self._addr = str(wait_for("serving", ready, 150))

    def _has_ended(self) -> bool:
        return self._stack.process is not None and self._stack.process.poll() is not None

    def _ended(self, ending: str) -> None:
        self._addr = ""
        self._stack.assert_nothing_left(15.0)
        what = f"{ending or 'no fault that ends a run'}: {self._stack.stderr.strip()}"
        (self.run_ends if ending else self.unplanned).append(what)
        say(f"run {self.runs} ended after {what}")

    def _again(self) -> None:
        assert self._stack.process is not None and self._stack.process.stdin is not None
        self._stack.process.stdin.close()
        self._stack.start()
        self._serving()

    def _look(self, at_s: float) -> None:
        self.watch.look(self._stack.left(), at_s)
        if self._stack.archive.path.exists():
            self.archive_bytes.append((at_s, self._stack.archive.path.stat().st_size))

    def _prompts_on_record(self) -> dict[str, int]:
        """By the archive: prompts of a run that have no end, or several. A prompt's id is unique within its run."""
        run, begun, ended = 0, Counter[tuple[int, Any]](), Counter[tuple[int, Any]]()
        for record in self._stack.archive.records():
            if record.step == ("config", "ready"):
                run += 1
            if record.channel == "mvp.orch.prompt":
                if record.phase == "prompt_complete":
                    ended[run, record.detail.get("prompt_id")] += 1
                elif record.phase == "prompt_work":
                    begun[run, record.detail.get("prompt_id")] += 1
        return {
            "prompts_on_record": len(ended),
            "ended_twice_on_record": sum(count > 1 for count in ended.values()),
            "unended_on_record": len(begun.keys() - ended.keys()),
        }

    def _figures(self, tally: dict[str, Any], records: dict[str, int]) -> dict[str, Any]:
        half = self._minutes * 30
        sizes = self.archive_bytes
        middle = next((size for at, size in sizes if at >= half), sizes[-1][1])
        return {
            "minutes": self._minutes,
            "seed": self._seed,
            "requests": tally,
            **records,
            "faults": dict(self.faults),
            "runs": self.runs,
            "run_ends": self.run_ends,
            "unplanned_ends": self.unplanned,
            "archive_bytes": sizes[-1][1],
            "archive_bytes_per_minute_halves": [
                round((middle - sizes[0][1]) / (half / 60)),
                round((sizes[-1][1] - middle) / (half / 60)),
            ],
            "processes": self.watch.figures(),
        }


def verdict(figures: dict[str, Any]) -> list[str]:
    """What is wrong, empty if nothing is."""
    wrong = [f"{key}: {figures['requests'][key]}" for key in ("unended", "doubled") if figures["requests"][key]]
    wrong += [f"{key}: {figures[key]}" for key in ("ended_twice_on_record", "unended_on_record") if figures[key]]
    wrong += figures["unplanned_ends"]
    asked = sum(figures["requests"][key] for key in ("done", "fault", "refused"))
    if 2 * figures["requests"]["done"] < asked or not asked:
        wrong.append(f"answered: {figures['requests']['done']} of {asked} prompts whose client stayed")
    if figures["requests"]["closed"] > 3 * len(figures["run_ends"]):
        wrong.append(f"closed without a terminal: {figures['requests']['closed']}")
    first, second = figures["archive_bytes_per_minute_halves"]
    if second > first * ARCHIVE_RATE_RATIO_MAX:
        wrong.append(f"the archive grows faster and faster: {first}, then {second} bytes a minute")
    limits = (("rss_bytes", RSS_GROWTH_BYTES_MAX), ("fds", FDS_GROWTH_MAX), ("threads", THREADS_GROWTH_MAX))
    for part, held in figures["processes"].items():
        wrong += [
            f"{part}: {name} grew by {held[f'{name}_growth']:.0f} in {held['life_s']:.0f} s"
            for name, most in limits
            if held.get(f"{name}_growth", 0) > most
        ]
    return wrong


def unjudged(figures: dict[str, Any]) -> list[str]:
    """Parts none of whose lives was long enough to tell whether it grows."""
    return [part for part, held in figures["processes"].items() if "rss_bytes_growth" not in held]


def say(text: str) -> None:
    """Progress, beside the figures."""
    print(text, file=sys.stderr, flush=True)


def main(argv: list[str] | None = None) -> int:
    """See the module."""
    parser = argparse.ArgumentParser(prog="./dev soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=30.0, help="default: %(default)s")
    parser.add_argument("--seed", type=int, default=1, help="of prompts and faults (%(default)s)")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout and nothing else there")
    arguments = parser.parse_args(argv)
    figures = Soak(arguments.minutes, arguments.seed).run()
    wrong = verdict(figures)
    figures["wrong"] = wrong
    print(json.dumps(figures) if arguments.json else json.dumps(figures, indent=2))
    for line in wrong:
        say(f"soak: {line}")
    if parts := unjudged(figures):
        say(f"soak: no life was long enough to tell whether these grow: {', '.join(parts)}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
