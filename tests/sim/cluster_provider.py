"""The provisioner's jobs on virtual time: a process provider whose workers are simulated processes.

It knows the truth about every worker that was ever started, whatever the provisioner believes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from common.effects import JobDone, RunJob
from common.limits import PROCESS_STOP_GRACE_MS
from common.redact import Redactor
from services.provisioner.plugin import Exited, PluginNodeHandle, PluginObservation, StderrLine, StdoutLine
from services.provisioner.state import Minted, NodeObserved, Prepared, Rechecked
from tests.sim.bus_world import key_of
from tests.sim.cluster_engine import SimWorker
from tests.sim.cluster_world import SECRET, SimHost

StartWorker = Callable[[str, bytes, Any, bytes], SimWorker]
"""(name, run nonce, spec, orchestrator's actor) → the process."""


@dataclass(slots=True)
class Ticket:
    """As services/provisioner/jobs.py keeps it, and the process itself."""

    minted: Minted
    spec: Any
    run: bytes
    orchestrator: bytes
    worker: SimWorker | None = None
    running: bool = False
    abandoned: bool = False
    stop_failed: bool = False


@dataclass(slots=True)
class ProviderFaults:
    """What goes wrong from now on; each once."""

    prepare: str = ""
    start: str = ""
    start_slow_ms: int = 0
    complete: str = ""
    stop: str = ""
    stop_slow_ms: int = 0


@dataclass(slots=True)
class SimProvider:
    """One per machine: it outlives provisioner processes, as workers do."""

    start_worker: StartWorker
    is_rented: bool = False
    """The workers' machines are somebody else's: no standard input ends with the provisioner."""
    tickets: dict[str, Ticket] = field(default_factory=dict)
    faults: ProviderFaults = field(default_factory=ProviderFaults)
    host: SimHost | None = None
    actor: bytes = b""
    _minted: int = 0

    def attach(self, host: SimHost, actor: bytes) -> None:
        """A new provisioner process."""
        self.host, self.actor = host, actor
        host.redactor = Redactor([SECRET])
        host.perform(RunJob, self._run)
        host.on_exit.append(self._provisioner_gone)

    def workers(self) -> list[SimWorker]:
        """Every worker that was ever started."""
        return [ticket.worker for ticket in self.tickets.values() if ticket.worker is not None]

    def living(self) -> list[SimWorker]:
        return [worker for worker in self.workers() if worker.host.alive]

    def _provisioner_gone(self, _: SimHost) -> None:
        for worker in () if self.is_rented else self.living():
            worker.stop("standard input is closed")

    def clean_up(self) -> None:
        """`--cleanup`: what the ledger of a dead provisioner names."""
        for worker in self.living():
            worker.host.end(-9)

    # --- jobs -----------------------------------------------------------------------------------------------------
    def _run(self, address: bytes, job: RunJob) -> None:
        host, settled = self.host, False
        assert host is not None

        def settle(result: Any, error: str) -> None:
            nonlocal settled
            if not settled:
                settled = True
                host.deliver(address, JobDone(job.kind, job.key, result, error))

        host.later(job.limit_ms, lambda: settle(None, f"timed out after {job.limit_ms} ms"))
        getattr(self, f"_{job.kind}")(host, dict(job.args), settle)

    def _prepare(self, host: SimHost, args: dict[str, Any], settle: Callable[[Any, str], None]) -> None:
        error, self.faults.prepare = self.faults.prepare, ""
        host.later(host.world.rng.randint(1, 60), lambda: settle(None if error else Prepared(0), error))

    def _mint(self, host: SimHost, args: dict[str, Any], settle: Callable[[Any, str], None]) -> None:
        self._minted += 1
        name = f"worker {self._minted}"
        minted = Minted(key_of(name), name, f"/nodes/{self._minted}/launch.json")
        self.tickets[name] = Ticket(minted, args["spec"], args["run"], args["orchestrator"])
        host.later(host.world.rng.randint(1, 20), lambda: settle(minted, ""))

    def _start_node(self, host: SimHost, args: dict[str, Any], settle: Callable[[Any, str], None]) -> None:
        ticket = self.tickets[args["minted"].handle_id]
        if ticket.abandoned:
            host.later(1, lambda: settle(None, "the start was abandoned"))
            return
        ticket.running = True
        faults, self.faults = self.faults, ProviderFaults(stop=self.faults.stop, stop_slow_ms=self.faults.stop_slow_ms)
        self.faults.complete = faults.complete

        def started() -> None:
            ticket.running = False
            if not faults.start:
                ticket.worker = self.start_worker(ticket.minted.handle_id, ticket.run, ticket.spec, ticket.orchestrator)
                ticket.worker.host.on_exit.append(lambda worker: self._exited(ticket, worker))
                self._tell(ticket, StdoutLine("starting"))
                self._tell(ticket, StderrLine(f"token {SECRET} accepted"))
                ticket.worker.leak()
            if ticket.abandoned:
                self._kill(ticket)
                settle(None, "the start was abandoned")
            elif faults.start:
                settle(None, faults.start)
            else:
                settle(PluginNodeHandle(ticket.minted.handle_id, self._minted), "")

        host.later(faults.start_slow_ms or host.world.rng.randint(5, 400), started)

    def _complete_bootstrap(self, host: SimHost, args: dict[str, Any], settle: Callable[[Any, str], None]) -> None:
        error, self.faults.complete = self.faults.complete, ""
        host.later(host.world.rng.randint(1, 30), lambda: settle(None, error))

    def _replace_node(self, host: SimHost, args: dict[str, Any], settle: Callable[[Any, str], None]) -> None:
        self._stop_node(host, args, settle)

    def _stop_node(self, host: SimHost, args: dict[str, Any], settle: Callable[[Any, str], None]) -> None:
        ticket = self.tickets[args["handle"].id]
        error, self.faults.stop = self.faults.stop, ""
        slow_ms, self.faults.stop_slow_ms = self.faults.stop_slow_ms, 0
        if error:
            ticket.stop_failed = True
            host.later(slow_ms + 1, lambda: settle(None, error))
        else:
            host.later(slow_ms, lambda: self._stop(host, ticket, args["fast"], settle))

    def _stop(self, host: SimHost, ticket: Ticket, fast: bool, settle: Callable[[Any, str], None]) -> None:
        worker = ticket.worker
        assert worker is not None
        until = host.world.now + PROCESS_STOP_GRACE_MS
        if fast:
            self._kill(ticket)
        elif worker.host.alive:
            worker.stop("standard input said shutdown")

        def look() -> None:
            if not worker.host.alive:
                # Its last lines and its exit come before the news that it is stopped.
                host.later(5, lambda: settle(None, ""))
                return
            if host.world.now >= until:
                self._kill(ticket)
            host.later(20, look)

        look()

    def _hurry(self, host: SimHost, args: dict[str, Any], settle: Callable[[Any, str], None]) -> None:
        self._kill(self.tickets[args["handle"].id])
        host.later(1, lambda: settle(None, ""))

    def _discard(self, host: SimHost, args: dict[str, Any], settle: Callable[[Any, str], None]) -> None:
        ticket = self.tickets[args["minted"].handle_id]
        ticket.abandoned = True
        if not ticket.running:
            self._kill(ticket)
        host.later(1, lambda: settle(None, ""))

    def _recheck(self, host: SimHost, args: dict[str, Any], settle: Callable[[Any, str], None]) -> None:
        """Whom an earlier stop or an abandoned start left behind is ended now."""
        for ticket in self.tickets.values():
            if ticket.stop_failed or ticket.abandoned:
                self._kill(ticket)
        host.later(1, lambda: settle(Rechecked(), ""))

    # --- processes ------------------------------------------------------------------------------------------------
    @staticmethod
    def _kill(ticket: Ticket) -> None:
        if ticket.worker is not None:
            ticket.worker.host.end(-9)

    def _exited(self, ticket: Ticket, worker: SimHost) -> None:
        status = worker.status if worker.status is not None else -9
        how = f"was killed by signal {-status}" if status < 0 else f"exited with status {status}"
        if worker.error:
            self._tell(ticket, StderrLine(worker.error))
        self._tell(ticket, Exited(status, how))

    def _tell(self, ticket: Ticket, seen: PluginObservation) -> None:
        """The follower thread of a process provider: it redacts each line before anybody sees it."""
        host = self.host
        if host is None:
            return
        if isinstance(seen, StdoutLine | StderrLine):
            seen = type(seen)(host.redactor.redact(seen.line))
        event = NodeObserved(ticket.minted.handle_id, (seen,))
        host.later(1, lambda: host.deliver(self.actor, event))


def new_provider(start_worker: StartWorker) -> SimProvider:
    return SimProvider(start_worker)
