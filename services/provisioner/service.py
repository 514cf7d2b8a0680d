"""Wiring of the provisioner: its actor, its jobs, and the way back from plugin threads into the loop."""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Mapping

from common.addresses import Role
from common.host import Host
from common.redact import Redactor
from services.provisioner.core import ProvisionerActor
from services.provisioner.inventory import Providers, clear
from services.provisioner.jobs import ProvisionerJobs, Surroundings
from services.provisioner.ledger import LedgerError
from services.provisioner.sink import NodeSink


def build(host: Host) -> None:
    """Spawn the actor and register its jobs."""
    bus_file = host.bus_file
    address = host.spawn(ProvisionerActor(), name=Role.PROVISIONER)

    def make_sink(handle_id: str) -> NodeSink:
        return NodeSink(handle_id, host.call_soon, lambda event: host.deliver(address, event))

    known: list[str] = []

    def add_secret(secret: str) -> None:
        # HF_TOKEN and the provider's key. Replaced, not changed, because job and loop threads read it.
        if secret and secret not in known:
            known.append(secret)
            host.redactor = Redactor(known)

    here = Surroundings(
        environment=dict(os.environ),
        nodes_dir=bus_file.nodes_dir,
        worker_key=bus_file.worker_key,
        worker_endpoints=bus_file.worker_endpoints,
        make_sink=make_sink,
        door=bus_file.door,
        redact=lambda data: host.redactor.redact(data),
        add_secret=add_secret,
    )
    jobs = ProvisionerJobs(here)
    host.jobs.update(jobs.table())
    # After the loop ended: by then every worker is stopped, or the file has to stay.
    atexit.register(jobs.close)


def cleanup(environment: Mapping[str, str]) -> int:
    """`--cleanup`, without a bus: the provisioner died; stop all that the ledgers of dead instances name.

    Returns the exit status: 0 when nothing is left.
    """
    try:
        # Not the listings: it runs at the end of a launch, which has 15 seconds; the next start reads them.
        done = clear(Providers(environment), []).done
    except LedgerError as error:
        sys.stderr.write(f"provisioner: {error}\n")
        return 1
    for problem in done.problems:
        sys.stderr.write(f"provisioner: {problem}\n")
    sys.stderr.write(
        f"provisioner: {done.stopped} worker{'' if done.stopped == 1 else 's'} of an earlier run stopped\n"
    )
    return 1 if done.problems else 0
