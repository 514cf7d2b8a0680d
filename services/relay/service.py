"""Wiring of the relay: the broker core as the workers' door."""

from __future__ import annotations

from common.addresses import Role
from common.broker_host import BrokerHost
from common.host import run_main
from services.relay.core import RelayActor


def main(argv: list[str] | None = None) -> int:
    """Run until stopped. Returns the exit status."""
    return run_main(
        Role.RELAY,
        lambda bus, owner_fd: BrokerHost(bus, Role.RELAY, lambda broker, _: RelayActor(broker), owner_fd=owner_fd),
        argv,
    )
