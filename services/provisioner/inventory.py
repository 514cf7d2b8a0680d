"""What this user owns, where it runs, and how all that nobody needs any more is stopped (design.md 2; S1 9.16).

Two sources that must agree: the ledgers, and the providers' own listings by the fleet's mark. The listing is always
read first: a worker is in its ledger before it exists, so whoever is listed and in no ledger read later is nobody's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from common.config_slices import ProvisionerSlice
from services.provisioner import processes
from services.provisioner.external_provider import NAME as EXTERNAL
from services.provisioner.ledger import (
    FLEET_FILE,
    SINGLE_GPU_FOLDER,
    LedgerError,
    LedgerRecord,
    OpenEntry,
    Reconciled,
    fleet_id,
    ledger_folder,
    open_entries,
    reconcile,
)
from services.provisioner.plugin import LeftBehind, Listed, Listing, NotHere, Owner, ProviderError, ProvisionPlugin
from services.provisioner.registry import ProviderInputs, make_provider, provider_names


@dataclass(frozen=True, slots=True)
class Owned:
    """One worker. entry: None if no ledger names it; listed: None if its provider's listing does not show it.

    asked: there was a listing to look at.
    """

    id: str
    provider: str
    entry: OpenEntry | None = None
    listed: Listed | None = None
    asked: bool = True

    @property
    def in_use(self) -> bool:
        """It belongs to an orchestrator that runs."""
        return self.entry is not None and self.entry.alive

    @property
    def state(self) -> str:
        """The listing's word; without one: starting, external, unknown or gone."""
        if self.listed is not None:
            return self.listed.state
        if self.provider == EXTERNAL:
            return "external"
        if not self.asked:
            return "unknown"
        return "starting" if self.in_use and self.entry is not None and self.entry.handle is None else "gone"

    @property
    def where(self) -> str:
        """For people: the listing's words, else the ledger's."""
        if self.listed is not None:
            return self.listed.where
        return "" if self.entry is None else _where(self.entry)

    @property
    def since_unix_ms(self) -> int:
        """When it was begun, 0 if nobody knows."""
        if self.entry is not None and self.entry.intent.at_unix_ms:
            return self.entry.intent.at_unix_ms
        return 0 if self.listed is None else self.listed.since_unix_ms

    @property
    def price(self) -> float | None:
        """US dollars an hour, None where nothing is charged or nobody says."""
        if self.listed is not None:
            return self.listed.price
        said = (
            self.entry.handle.facts.get("price") if self.entry is not None and self.entry.handle is not None else None
        )
        return None if said is None else float(said)


@dataclass(slots=True)
class Stock:
    """What `take_stock` found. notes: providers that were not asked, and need not be; problems: what is unknown."""

    owned: list[Owned] = field(default_factory=list)
    foreign: dict[str, int] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    all_ledgers_read: bool = True
    """Else a listed worker may be in the one that was not, and nobody may be called an orphan."""


@dataclass(slots=True)
class Cleared:
    """What `clear` did. orphans: workers of ours that no ledger named, now stopped."""

    done: Reconciled
    orphans: list[Owned]
    stock: Stock


class Providers:
    """Plugins made on demand, for looking and stopping. config: this run's, for its own provider."""

    def __init__(
        self, environment: Mapping[str, str], config: ProvisionerSlice | None = None, owner: Owner | None = None
    ) -> None:
        self._environment, self._config = environment, config
        self.folder = ledger_folder(environment)
        # Looking must not make a fleet: who has none owns nothing.
        known = (self.folder.parent / FLEET_FILE).exists()
        self.owner = owner or Owner(fleet_id(environment) if known else "")
        self._made: dict[str, ProvisionPlugin] = {}

    def get(self, name: str) -> ProvisionPlugin:
        """Raises ProviderError."""
        if name not in self._made:
            own = self._config is not None and self._config.provider == name
            chosen = self._config if own and self._config is not None else ProvisionerSlice(provider=name)
            inputs = ProviderInputs(chosen, self._environment, owner=self.owner, state=self.folder.parent)
            self._made[name] = make_provider(name, inputs)
        return self._made[name]

    def stop(self, left: LeftBehind) -> bool:
        """`stop_left_behind` of its provider."""
        return self.get(left.provider).stop_left_behind(left)

    @property
    def folders(self) -> tuple[Path, Path]:
        """Where ledgers lie: the provisioners', and those of single-gpu-inference."""
        return self.folder, self.folder.with_name(SINGLE_GPU_FOLDER)


def take_stock(providers: Providers, names: Iterable[str] | None = None) -> Stock:
    """Look at everything, change nothing. names: whose listings are read, all if None."""
    stock = Stock()
    wanted = list(provider_names() if names is None else names)
    listings = _listings(providers, wanted, stock)
    entries: list[OpenEntry] = []
    for folder in providers.folders:
        try:
            entries += open_entries(folder)
        except LedgerError as error:
            stock.problems.append(str(error))
            stock.all_ledgers_read = False
    named = {entry.intent.id for entry in entries}
    for entry in entries:
        name = entry.intent.provider
        seen = listings.get(name, {}).pop(entry.intent.id, None)
        stock.owned.append(Owned(entry.intent.id, name, entry, seen, name in listings))
    for name, rest in listings.items():
        # One whose entry says another provider is no orphan either: a swarm's tasks are containers, too.
        stock.owned += [Owned(id, name, None, listed) for id, listed in rest.items() if id not in named]
    return stock


def _listings(providers: Providers, wanted: list[str], stock: Stock) -> dict[str, dict[str, Listed]]:
    found: dict[str, dict[str, Listed]] = {}
    for name in wanted:
        try:
            listing = providers.get(name).list_owned() if providers.owner.fleet else Listing()
        except NotHere as error:
            stock.notes.append(f"{name} was not looked at: {error}")
            continue
        except ProviderError as error:
            stock.problems.append(f"what is owned at {name} is unknown: {error}")
            continue
        found[name] = {item.id: item for item in listing.owned}
        stock.foreign[name] = listing.foreign
    return found


def clear(providers: Providers, names: Iterable[str] | None = None) -> Cleared:
    """Stop what dead instances left, by their ledgers and by the listings; what living ones own is left alone.

    names: whose listings are read, all if None; entries of the ledgers are settled whatever their provider.
    """
    stock = take_stock(providers, names)
    result = Reconciled()
    for folder in providers.folders:
        done = reconcile(folder, providers.stop)
        result.settled += done.settled
        result.problems += done.problems
    orphans = []
    for item in stock.owned if stock.all_ledgers_read else []:
        if item.entry is not None:
            continue
        left = LeftBehind(item.id, item.provider, "", 0, processes.boot_id())
        try:
            providers.stop(left)
            orphans.append(item)
        except ProviderError as error:
            result.problems.append(f"{item.provider}: {item.where} is not stopped: {error}")
    return Cleared(result, orphans, stock)


def _where(entry: OpenEntry) -> str:
    facts: Mapping[str, str | int] = {} if entry.handle is None else entry.handle.facts
    words: dict[str, Callable[[LedgerRecord], str]] = {
        "process": lambda intent: f"pid {facts['pid']}" if "pid" in facts else "",
        "swarm": lambda intent: f"service {str(facts['service'])[:12]}" if "service" in facts else "",
        "docker": lambda intent: f"container {str(facts['container'])[:12]}" if "container" in facts else "",
        "vastai": lambda intent: f"instance {facts.get('instance') or facts.get('contract') or '?'}",
        "external": lambda intent: f"launch file {intent.launch}",
    }
    named = words.get(entry.intent.provider)
    return named(entry.intent) if named is not None else " ".join(f"{key} {value}" for key, value in facts.items())
