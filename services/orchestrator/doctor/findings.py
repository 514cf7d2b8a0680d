"""What a check says, and running checks within their limits."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

Status = Literal["ok", "warn", "fail", "skip"]
"""warn: it works, but worse than it could; fail: the configured run cannot work; skip: not needed by it."""


@dataclass(frozen=True, slots=True)
class Finding:
    """The outcome of a check. do: the way out, "" where none is needed."""

    status: Status
    says: str
    do: str = ""


@dataclass(frozen=True, slots=True)
class Check:
    """A check by name. run: may block; whatever it raises is a failure. slow: the way out after limit_s."""

    name: str
    run: Callable[[], Finding | Sequence[Finding]]
    limit_s: float = 10.0
    slow: str = "try again when the machine is less busy"


@dataclass(frozen=True, slots=True)
class Result:
    """A finding with the name of its check."""

    name: str
    finding: Finding
    elapsed_ms: int


def ok(says: str) -> Finding:
    """As it should be."""
    return Finding("ok", says)


def warn(says: str, do: str) -> Finding:
    """It will work, but."""
    return Finding("warn", says, do)


def fail(says: str, do: str) -> Finding:
    """It will not work."""
    return Finding("fail", says, do)


def skip(says: str) -> Finding:
    """Not needed."""
    return Finding("skip", says)


def results(checks: Sequence[Check]) -> Iterator[Result]:
    """The results in the order of the checks, which all run at once. A hung one is left on its daemon thread."""
    began = time.monotonic()
    waiting = [(check, _begin(check)) for check in checks]
    for check, done in waiting:
        try:
            findings, ended = done.get(timeout=max(0.0, began + check.limit_s - time.monotonic()))
        except queue.Empty:
            findings = [fail(f"no answer within {check.limit_s:g} s", check.slow)]
            ended = time.monotonic()
        for finding in findings:
            yield Result(check.name, finding, round((ended - began) * 1000))


def _begin(check: Check) -> queue.Queue[tuple[list[Finding], float]]:
    done: queue.Queue[tuple[list[Finding], float]] = queue.Queue(1)

    def run() -> None:
        try:
            found = check.run()
        except Exception as error:  # a check that breaks must not hide what the others say
            text = str(error) or type(error).__name__
            found = fail(f"the check itself failed: {type(error).__name__}: {text}", "report this as a defect")
        done.put(([found] if isinstance(found, Finding) else list(found), time.monotonic()))

    threading.Thread(target=run, name=f"doctor-{check.name}", daemon=True).start()
    return done
