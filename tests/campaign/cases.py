"""The table of the fault campaign: who is hurt, where, how, and what else goes wrong meanwhile."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

START = ("mint:after", "ledger-intent:before", "ledger-intent:after")
HANDLE = ("ledger-handle:before", "ledger-handle:after")
SERVE = ("live", "completed")
STOP = ("stop_node:before", "ledger-stopped:before", "ledger-stopped:after", "close:before")
STOPPING = frozenset(
    {
        *(*STOP, "docker-remove:before", "docker-remove:after", "vast-destroy:before", "vast-destroy:after"),
        *("swarm-remove:before", "swarm-remove:after", "swarm-unsecret:before", "swarm-unsecret:after"),
    }
)
"""Points that are only reached when the orchestrator has said StopNodes."""

POINTS: dict[str, tuple[str, ...]] = {
    "process": (*START, "follow:before", *HANDLE, *SERVE, *STOP),
    "external": (*START, *HANDLE, "live", "came", *STOP),
    "docker": (
        *(*START, "docker-create:before", "docker-create:after", "follow:before", *HANDLE, *SERVE),
        *("stop_node:before", "docker-remove:before", "docker-remove:after", "ledger-stopped:before"),
        *("ledger-stopped:after", "close:before"),
    ),
    "vastai": (
        *(*START, "vast-search:before", "ledger-attempt:before", "ledger-attempt:after", "vast-create:before"),
        *(
            "vast-create:after",
            "deploy:before",
            "deploy:after",
            *HANDLE,
            *SERVE,
            "stop_node:before",
            "vast-destroy:before",
            "vast-destroy:after",
            "ledger-stopped:before",
        ),
        *("ledger-stopped:after", "close:before"),
    ),
    "swarm": (
        *(*START, "swarm-secret:before", "swarm-secret:after", "swarm-service:before", "swarm-service:after"),
        *("follow:before", *HANDLE, *SERVE, "stop_node:before", "swarm-remove:before", "swarm-remove:after"),
        *("swarm-unsecret:before", "swarm-unsecret:after", "ledger-stopped:before", "ledger-stopped:after"),
        "close:before",
    ),
}
WITH_ENGINE = frozenset({"docker", "swarm"})
"""Providers that need an engine, which is in another tier of tests."""
EVENTS = ("kill", "gone", "term", "int", "stop", "gone+kill")
"""What happens while the provisioner stands at the point.

kill: SIGKILL of the provisioner. gone: SIGKILL of the orchestrator (its pipe ends). term, int: that signal to the
provisioner. stop: SIGINT of the orchestrator, which says StopNodes. gone+kill: the orchestrator's death, and the
provisioner's as soon as its ledger says the next thing.
"""

WRONGS: dict[str, tuple[str, ...]] = {
    "process": ("stubborn worker",),
    "external": (),
    "docker": ("engine killed", "engine restarted"),
    "vastai": (
        *("ambiguous create", "ambiguous create, late", "429 storm", "list broken", "page 2", "sold twice"),
        *("destroy fails", "tunnel half-open", "create with contract"),
    ),
    "swarm": ("engine killed", "engine restarted"),
}
AFTER = ("cleanup", "reconcile", "start")
"""What follows: the launcher's `--cleanup`, `mvp-orchestrator reconcile`, or the next start's PrepareProvider."""


@dataclass(frozen=True, slots=True)
class Case:
    """One of the campaign. wrong: "" if nothing else goes wrong."""

    number: int
    provider: str
    point: str
    event: str
    after: str
    wrong: str = ""

    def __str__(self) -> str:
        return f"{self.number:03} {self.provider} {self.point} {self.event} {self.wrong or '-'} {self.after}"


def _rows() -> Iterator[tuple[str, str, str, str]]:
    for provider in ("process", "external", "docker", "vastai"):
        yield from _plain(provider)
    for point in POINTS["process"]:
        for event in ("kill", "gone", "stop"):
            if event != "stop" or point not in STOPPING:
                yield "process", point, event, "stubborn worker"
    for wrong in WRONGS["docker"]:
        for point in ("docker-create:after", "ledger-handle:before", "live", "docker-remove:before"):
            for event in ("kill", "gone"):
                yield "docker", point, event, wrong
    for wrong in WRONGS["vastai"]:
        for point in ("vast-create:after", "ledger-handle:before", "live", "vast-destroy:before"):
            if wrong == "tunnel half-open" and point == "vast-create:after":
                continue
            for event in ("kill", "gone"):
                yield "vastai", point, event, wrong
    # Last, so that the cases above keep their numbers.
    yield from _plain("swarm")
    for wrong in WRONGS["swarm"]:
        for point in ("swarm-secret:after", "swarm-service:after", "live", "swarm-remove:before"):
            for event in ("kill", "gone"):
                yield "swarm", point, event, wrong


def _plain(provider: str) -> Iterator[tuple[str, str, str, str]]:
    """Each event at each point of this provider, where nothing else goes wrong."""
    events = ("kill", "gone", "term", "stop") if provider != "process" else EVENTS
    for point in POINTS[provider]:
        # Where it is stopping already, another request to stop is none.
        for event in events:
            if event != "stop" or point not in STOPPING:
                yield provider, point, event, ""


def cases() -> list[Case]:
    """All, in an order that does not change."""
    found = []
    for number, (provider, point, event, wrong) in enumerate(_rows()):
        # Before the intent is written only the next start in the same run directory knows of the launch file.
        early = point in ("mint:after", "ledger-intent:before")
        after = "start" if early else AFTER[number % len(AFTER)]
        if provider == "external" and after == "cleanup":
            after = "reconcile"
        found.append(Case(number, provider, point, event, after, wrong))
    return found


def sample(count: int = 12) -> list[Case]:
    """A few of each provider that needs no engine; the same ones each time."""
    wanted = [case for case in cases() if case.provider not in WITH_ENGINE]
    return [wanted[(2 * index + 1) * len(wanted) // (2 * count)] for index in range(count)]
