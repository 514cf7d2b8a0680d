"""Wiring of the relay: the broker core as the workers' door, beside its operator's router or by itself elsewhere."""

from __future__ import annotations

import sys

from common.addresses import Role
from common.broker_host import BrokerHost
from common.host import run_main
from common.security import read_bus_file
from services.relay import remote
from services.relay.core import RelayActor


def main(argv: list[str] | None = None) -> int:
    """Run until stopped. Returns the exit status."""
    args = sys.argv[1:] if argv is None else argv
    if "--bus" not in args:
        return remote.main(args)
    return run_main(
        Role.RELAY,
        lambda bus, owner_fd: BrokerHost(
            read_bus_file(bus), Role.RELAY, lambda broker, _: RelayActor(broker), owner_fd=owner_fd
        ),
        args,
    )
