"""Wiring of the router: the broker core with the route view and admission beside it."""

from __future__ import annotations

from pathlib import Path

from common.addresses import Role
from common.broker_host import BrokerHost
from common.host import run_main
from common.operator_key import hold
from common.security import read_bus_file
from services.router.core import RouterActor, UplinkChanged


def main(argv: list[str] | None = None) -> int:
    """Run until stopped. Returns the exit status."""
    return run_main(
        Role.ROUTER,
        _make,
        argv,
    )


def _make(bus: Path, owner_fd: int | None) -> BrokerHost:
    bus_file = read_bus_file(bus)
    if bus_file.operator_key_file:
        # For the life of this process: not closed by anybody.
        hold(Path(bus_file.operator_key_file))
    return BrokerHost(
        bus_file,
        Role.ROUTER,
        lambda broker, relay: RouterActor(broker, relay=relay),
        owner_fd=owner_fd,
        uplink_event=UplinkChanged,
    )
