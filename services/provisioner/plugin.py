"""What a provider is: the contract ProvisionPlugin, what it hands out and what it observes (S1 5.4, 7.5, 8.9).

Pure types, so that the core may speak of them. A new provider is one file with such a class and one line in
`registry.py`. All methods run on job threads and may block; observations may come from any thread.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from common.messages.provision import NodeProvisionSpec


class ProviderError(Exception):
    """A provider could not do what it was asked; str() is one sentence without secrets for the run's error line."""


class NotHere(ProviderError):
    """The provider cannot be asked on this machine, and nothing says that it should be: no engine, no key."""


class MayBeLeft(ProviderError):
    """A start failed and it is not certain that nothing of it is left: its ledger entry stays open."""


@dataclass(frozen=True, slots=True)
class StdoutLine:
    """A line of the worker's stdout, without its newline."""

    line: str


@dataclass(frozen=True, slots=True)
class StderrLine:
    """A line of the worker's stderr, without its newline."""

    line: str


@dataclass(frozen=True, slots=True)
class ProviderLine:
    """A line of the provider itself: what it does, what its API said."""

    line: str


@dataclass(frozen=True, slots=True)
class DatastreamFrame:
    """A frame that the worker sent over its stdout before the network was up."""

    channel: str
    payload: bytes


@dataclass(frozen=True, slots=True)
class Exited:
    """The worker ended. status: exit code, negative for a signal, None if the provider cannot tell."""

    status: int | None
    reason: str


@dataclass(frozen=True, slots=True)
class Failed:
    """The provider lost the worker or its own footing: fatal like an exit (S1 9.15)."""

    reason: str


PluginObservation = StdoutLine | StderrLine | ProviderLine | DatastreamFrame | Exited | Failed
Sink = Callable[[PluginObservation], None]
"""Thread-safe. The last observation of a worker is Exited or Failed; nothing comes after it."""


@dataclass(frozen=True, slots=True)
class PluginNodeHandle:
    """What stop_node needs. id: unique for ever (the ledger's key), also shown to people.

    facts: what a later process needs to find the worker again, as plain JSON values, e.g. pid and start time.
    """

    id: str
    provider_process_id: int | None = None
    facts: Mapping[str, str | int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class LeftBehind:
    """An entry of a dead instance's ledger, or a worker of ours that no ledger names (then run is "").

    handle: None if it died between intent and handle; at_unix_ms: when it was last asked for, 0 if unknown.
    """

    id: str
    provider: str
    run: str
    node_id: int
    boot_id: str
    handle: PluginNodeHandle | None = None
    at_unix_ms: int = 0


@dataclass(frozen=True, slots=True)
class Listed:
    """A worker as its provider's own listing shows it. id: the handle id it is marked with; where: for people.

    since_unix_ms: 0 if the listing does not say; price: US dollars an hour, None where nothing is charged.
    """

    id: str
    where: str
    state: str
    since_unix_ms: int = 0
    price: float | None = None


@dataclass(frozen=True, slots=True)
class Listing:
    """What a provider's listing shows of one fleet. foreign: how many workers of others stand beside them."""

    owned: tuple[Listed, ...] = ()
    foreign: int = 0


@dataclass(frozen=True, slots=True)
class Owner:
    """Whose workers these are: this user's fleet here, and this provisioner instance (design.md 6 row 32)."""

    fleet: str = ""
    instance: str = ""


class ProvisionPlugin(Protocol):
    """A provider. Methods raise ProviderError; anything else is a bug and is reported as such."""

    name: str

    def prepare(self) -> None:
        """Check everything that can be checked before a worker is started (S1 10.5)."""

    def start_node(self, handle_id: str, spec: NodeProvisionSpec, launch_file: Path, sink: Sink) -> PluginNodeHandle:
        """Start one worker and return when the provider says that it runs.

        On an error nothing is left running; if that is not certain, the error is MayBeLeft.

        handle_id: already in the ledger; the provider marks with it whatever it creates, so that it can be found.
        """

    def complete_bootstrap(self, handle: PluginNodeHandle) -> None:
        """The worker was acknowledged: what only its start needed may go (S1 7.6)."""

    def stop_node(self, handle: PluginNodeHandle, fast: bool) -> None:
        """Stop it; returns when it is gone. fast: without grace. Stopping twice, also at once, is fine."""

    def stop_left_behind(self, left: LeftBehind) -> bool:
        """Stop what an earlier process started, only if it is provably that. True if something was stopped."""

    def list_owned(self) -> Listing:
        """Whatever bears this fleet's mark, by the provider's own listing. Raises NotHere, or ProviderError when the
        listing cannot be read: that is never an empty one."""
