"""The blocking work of the provisioner, on job threads: secrets, files, ledger, plugins. The core decides, these do.

The order of start_node is the point: intent in the ledger, then the worker, then the handle in the ledger. Dying
anywhere in between leaves enough on disk to find and stop it.
"""

from __future__ import annotations

import contextlib
import secrets
import shutil
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from common.addresses import Plane
from common.bus import mint_keypair
from common.config_slices import ProvisionerSlice
from common.launch_file import LAUNCH_FILE_NAME, LaunchFile
from common.limits import network_profile
from common.messages.provision import NodeProvisionSpec
from common.security import planes_to_json, read_secret_file
from services.provisioner import processes
from services.provisioner.inventory import Providers, clear
from services.provisioner.ledger import (
    Ledger,
    LedgerError,
    LedgerRecord,
    fleet_id,
    ledger_folder,
    remove_launch_file,
)
from services.provisioner.plugin import LeftBehind, MayBeLeft, Owner, PluginNodeHandle, ProviderError, ProvisionPlugin
from services.provisioner.registry import ProviderInputs, make_provider
from services.provisioner.sink import NodeSink
from services.provisioner.state import Minted, Prepared, Rechecked

OWED_LIMIT_MS = 600_000  # a worker that no look has found so long after its start went unanswered was never started


@dataclass(frozen=True, slots=True)
class _Owed:
    """A worker that may be left: its start was not answered (then handle is None), or its stop was not confirmed.

    since_unix_ms: of that, not of the intent: a start may have taken a quarter of an hour before.
    """

    intent: LedgerRecord
    handle: PluginNodeHandle | None
    since_unix_ms: int


@dataclass(slots=True)
class _Ticket:
    """A start and its result. abandoned: nobody waits for it any more; whoever finishes it also stops it."""

    minted: Minted
    sink: NodeSink
    handle: PluginNodeHandle | None = None
    running: bool = False
    abandoned: bool = False
    intent: LedgerRecord | None = None


@dataclass(frozen=True, slots=True)
class Surroundings:
    """Where this provisioner stands. add_secret: from now on no record of this process may contain it."""

    environment: Mapping[str, str]
    nodes_dir: Path
    worker_key: bytes
    worker_endpoints: dict[Plane, str]
    make_sink: Callable[[str], NodeSink]
    door: Mapping[Plane, str] = field(default_factory=dict)
    redact: Callable[[bytes], bytes] = bytes
    add_secret: Callable[[str], None] = lambda _: None


class ProvisionerJobs:
    """State shared by job threads; `lock` guards all of it, and is never held during blocking work."""

    def __init__(self, here: Surroundings) -> None:
        self._here = here
        self._lock = threading.Lock()
        self._files = threading.Lock()
        """An attempt is cleaned up beside the next one's mint, at the same path."""
        self._config: ProvisionerSlice | None = None
        self._plugin: ProvisionPlugin | None = None
        self._ledger: Ledger | None = None
        self._hf_token = ""
        self._instance = secrets.token_hex(8)
        self._tickets: dict[str, _Ticket] = {}
        self._owed: dict[str, _Owed] = {}
        self._left_before = False
        """An entry of a dead instance could not be settled: what it names may still appear."""

    def table(self) -> dict[str, Callable[..., Any]]:
        """The kinds of RunJob that the core uses."""
        return {
            "prepare": self.prepare,
            "mint": self.mint,
            "start_node": self.start_node,
            "complete_bootstrap": self.complete_bootstrap,
            "stop_node": self.stop_node,
            "replace_node": self.stop_node,
            "hurry": self.hurry,
            "discard": self.discard,
            "cancel": self.cancel,
            "recheck": self.recheck,
        }

    # --- jobs -------------------------------------------------------------------------------------------------
    def prepare(self, config: ProvisionerSlice) -> Prepared:
        """Build and check the provider (S1 7.5, 10.5), open the ledger, stop what dead instances left."""
        owner = Owner(fleet_id(self._here.environment), self._instance)
        folder = ledger_folder(self._here.environment)
        here = self._here
        forwards = self._forwards()
        inputs = ProviderInputs(config, here.environment, here.redact, owner, folder.parent, forwards, self._attempted)
        if config.vastai is not None:
            here.add_secret(read_secret_file(Path(config.vastai.api_key_file)).decode().strip())
        plugin = make_provider(config.provider, inputs)
        plugin.prepare()
        if config.hf_token_file:
            self._hf_token = read_secret_file(Path(config.hf_token_file)).decode().strip()
            self._here.add_secret(self._hf_token)
        with self._lock:
            if self._ledger is None:
                self._ledger = Ledger(folder, self._instance)
                # What a predecessor in this run directory minted and never wrote down: keys that nobody needs.
                shutil.rmtree(here.nodes_dir, ignore_errors=True)
            # A provider that still has workers of ours keeps them: another instance would not know them.
            if self._plugin is None or self._config != config:
                self._plugin, self._config = plugin, config
        with contextlib.suppress(ProviderError):
            self.recheck()
        cleared = clear(Providers(here.environment, config, owner), [config.provider])
        problems = [*cleared.stock.problems, *cleared.done.problems]
        self._left_before = bool(cleared.done.problems)
        if config.provider not in cleared.stock.foreign:
            # Nothing is started, least of all rented, while nobody knows what there is already.
            raise ProviderError(problems[0] if problems else f"what is owned at {config.provider} is unknown")
        return Prepared(cleared.done.stopped + len(cleared.orphans), tuple(problems))

    def mint(self, spec: NodeProvisionSpec, run: bytes, orchestrator: bytes, orchestrator_node: bytes) -> Minted:
        """The worker's keypair and launch file. The secret key goes nowhere else."""
        assert self._config is not None
        keys = mint_keypair()
        folder = self._here.nodes_dir / str(spec.node_id)
        path = folder / LAUNCH_FILE_NAME
        launch = LaunchFile(
            run_id=spec.run_id,
            run=run.hex(),
            node_id=spec.node_id,
            stage_index=spec.stage_index,
            endpoints=planes_to_json(self._here.worker_endpoints),
            broker_public_key=self._here.worker_key.hex(),
            public_key=keys.public.hex(),
            secret_key=keys.secret.hex(),
            orchestrator=orchestrator.hex(),
            orchestrator_node=orchestrator_node.hex(),
            hf_token=self._hf_token,
            device=spec.env.get("DEV") or self._here.environment.get("DEV", ""),
            profile=network_profile(self._config.provider),
            measure=spec.measure,
        )
        with self._files:
            try:
                folder.mkdir(mode=0o700, parents=True, exist_ok=True)
                # An earlier run of ours that was cut short; the run directory's lock says that it is nobody else's.
                path.unlink(missing_ok=True)
            except OSError as error:
                raise ProviderError(f"cannot make a place for the launch file in {folder}: {error.strerror}") from None
            launch.write(path)
        minted = Minted(keys.public, f"{run.hex()[:8]}-{spec.node_id}-{secrets.token_hex(12)}", str(path))
        with self._lock:
            self._tickets[minted.handle_id] = _Ticket(minted, self._here.make_sink(minted.handle_id))
        return minted

    def start_node(self, minted: Minted, spec: NodeProvisionSpec, run: bytes) -> PluginNodeHandle:
        """Ledger, worker, ledger. On any error nothing of the worker is left."""
        plugin, ledger, config = self._parts()
        with self._lock:
            ticket = self._tickets.get(minted.handle_id)
            if ticket is None or ticket.abandoned:
                raise ProviderError("the start was abandoned")
            ticket.running = True
        intent = LedgerRecord(
            op="intent",
            id=minted.handle_id,
            provider=config.provider,
            run=run.hex(),
            run_id=spec.run_id,
            node_id=spec.node_id,
            stage_index=spec.stage_index,
            boot_id=processes.boot_id(),
            launch=minted.launch,
            public_key=minted.public_key.hex(),
            at_unix_ms=_unix_ms(),
        )
        ticket.intent = intent
        try:
            handle = self._start(plugin, ledger, intent, spec, ticket.sink)
        finally:
            with self._lock:
                ticket.running = False
        with self._lock:
            ticket.handle = handle
            abandoned = ticket.abandoned
        if abandoned:
            self._stop(ticket, handle, fast=True)
            raise ProviderError("the start was abandoned")
        return handle

    def complete_bootstrap(self, handles: tuple[PluginNodeHandle, ...]) -> None:
        """All of them, also after an error; raises the first (S1 7.6)."""
        plugin, _, _ = self._parts()
        first: Exception | None = None
        for handle in handles:
            try:
                plugin.complete_bootstrap(handle)
            except Exception as error:
                first = first or error
        if first is not None:
            raise first

    def stop_node(self, handle: PluginNodeHandle, fast: bool) -> None:
        """Stop one worker; settles its ledger entry and removes its launch file."""
        with self._lock:
            ticket = self._tickets.get(handle.id)
        if ticket is None:
            return
        self._stop(ticket, handle, fast)

    def hurry(self, handle: PluginNodeHandle, fast: bool) -> None:
        """A stop is under way elsewhere and shall end at once."""
        self._parts()[0].stop_node(handle, fast)

    def cancel(self, minted: Minted) -> None:
        """A start under way shall end as soon as it can (a rented machine may take minutes to come up)."""
        cancel = getattr(self._parts()[0], "cancel_start", None)
        if cancel is not None:
            cancel(minted.handle_id)

    def discard(self, minted: Minted) -> None:
        """A start that failed or that nobody waits for: whatever there is of it goes, now or when the start ends."""
        with self._lock:
            ticket = self._tickets.get(minted.handle_id)
            if ticket is None:
                return
            ticket.abandoned = True
            handle = ticket.handle
            if ticket.running:
                return
        if handle is not None:
            self._stop(ticket, handle, fast=True)
        else:
            self._forget(ticket)

    def recheck(self) -> Rechecked:
        """Look again for what may be left, and stop it; of those still owed the next start is told."""
        plugin, ledger, config = self._parts()
        before: list[str] = []
        if self._left_before:
            owner = Owner(fleet_id(self._here.environment), self._instance)
            before = clear(Providers(self._here.environment, config, owner), []).done.problems
            self._left_before = bool(before)
        with self._lock:
            owed = list(self._owed.items())
        problems = [f"{problem}; it is tried again, or run `mvp-orchestrator reconcile`" for problem in before]
        for id, item in owed:
            intent = item.intent
            left = LeftBehind(id, intent.provider, intent.run, intent.node_id, intent.boot_id, item.handle)
            try:
                found = plugin.stop_left_behind(left)
            except Exception as error:  # a plugin's bug with one worker must not keep us from the others
                why = str(error) or type(error).__name__
                problems.append(
                    f"worker {id} (node {intent.node_id}) may be left and could not be stopped: {why}; it is tried "
                    "again, or run `mvp-orchestrator reconcile` when this run has ended"
                )
                continue
            if found or item.handle is not None or _unix_ms() - item.since_unix_ms > OWED_LIMIT_MS:
                self._remove(intent.launch, intent.public_key)
                _settle(ledger, id)
                with self._lock:
                    self._owed.pop(id, None)
        with self._lock:
            return Rechecked(len(self._owed) + len(before), tuple(problems))

    def _attempted(self, handle_id: str) -> None:
        self._parts()[1].append(LedgerRecord(op="attempt", id=handle_id))

    def _owe(self, intent: LedgerRecord, handle: PluginNodeHandle | None) -> None:
        with self._lock:
            self._owed[intent.id] = _Owed(intent, handle, _unix_ms())

    def close(self) -> None:
        """At the end of the process: the ledger goes if everything in it is settled."""
        with self._lock:
            if self._ledger is not None:
                self._ledger.close()

    def _forwards(self) -> tuple[tuple[int, str], ...]:
        """For tunnels: what a worker dials on its own loopback, and where that leads to here."""
        return tuple(
            (
                int(dialled.rpartition(":")[2]),
                self._here.door[plane].removeprefix("tcp://").replace("0.0.0.0", "127.0.0.1"),
            )
            for plane, dialled in self._here.worker_endpoints.items()
            if plane in self._here.door
        )

    # --- parts ------------------------------------------------------------------------------------------------
    def _parts(self) -> tuple[ProvisionPlugin, Ledger, ProvisionerSlice]:
        with self._lock:
            if self._plugin is None or self._ledger is None or self._config is None:
                raise ProviderError("the provider is not prepared")
            return self._plugin, self._ledger, self._config

    def _start(
        self, plugin: ProvisionPlugin, ledger: Ledger, intent: LedgerRecord, spec: NodeProvisionSpec, sink: NodeSink
    ) -> PluginNodeHandle:
        ledger.append(intent)
        try:
            handle = plugin.start_node(intent.id, spec, Path(intent.launch), sink)
        except MayBeLeft as error:
            _settle(ledger, intent.id, str(error))
            self._owe(intent, None)
            raise
        except Exception:
            self._remove(intent.launch, intent.public_key)
            _settle(ledger, intent.id)
            raise
        try:
            record = LedgerRecord(
                op="handle", id=intent.id, process_id=handle.provider_process_id, facts=dict(handle.facts)
            )
            ledger.append(record)
        except LedgerError:
            # Unwritten it could outlive us unnoticed: then rather not at all.
            plugin.stop_node(handle, True)
            raise
        return handle

    def _stop(self, ticket: _Ticket, handle: PluginNodeHandle, fast: bool) -> None:
        plugin, ledger, _ = self._parts()
        try:
            plugin.stop_node(handle, fast)
        except Exception as error:
            _settle(ledger, handle.id, str(error) or type(error).__name__)
            if ticket.intent is not None:
                self._owe(ticket.intent, handle)
            raise
        # Before it is settled: afterwards nobody would know of the key if we died here.
        self._remove(ticket.minted.launch, ticket.minted.public_key.hex())
        _settle(ledger, handle.id)
        # Its last lines and its exit come before the news that it is stopped.
        ticket.sink.wait_empty()
        self._forget(ticket)

    def _remove(self, launch: str, public_key: str) -> None:
        """This attempt's launch file, and its folder if no other attempt's is in it."""
        with self._files:
            remove_launch_file(launch, public_key)
            with contextlib.suppress(OSError):
                Path(launch).parent.rmdir()

    def _forget(self, ticket: _Ticket) -> None:
        with self._lock:
            self._tickets.pop(ticket.minted.handle_id, None)
        self._remove(ticket.minted.launch, ticket.minted.public_key.hex())


def _unix_ms() -> int:
    return time.time_ns() // 1_000_000


def _settle(ledger: Ledger, handle_id: str, error: str = "") -> None:
    # The worker's fate is decided; a full disk now only means that the next start looks for it once more.
    with contextlib.suppress(LedgerError):
        ledger.append(LedgerRecord(op="stopped", id=handle_id, error=error))
