"""Wiring of the router: the broker core with the route view and admission beside it."""

from __future__ import annotations

from common.addresses import Role
from common.broker_host import BrokerHost
from common.host import run_main
from services.router.core import RouterActor, UplinkChanged


def main(argv: list[str] | None = None) -> int:
    """Run until stopped. Returns the exit status."""
    return run_main(
        Role.ROUTER,
        lambda bus, owner_fd: BrokerHost(
            bus,
            Role.ROUTER,
            lambda broker, relay: RouterActor(broker, relay=relay),
            owner_fd=owner_fd,
            uplink_event=UplinkChanged,
        ),
        argv,
    )
