"""Where the workers of each provider are let in (design.md 3, relay), decided by the launcher before any bus file."""

from __future__ import annotations

from collections.abc import Mapping

from common.door import Door, DoorError, free_ports, remote_door
from common.messages.config import ConfigResolved

TUNNEL_PORT = 19_840
"""What a rented worker dials on its own loopback: the far end of the ssh tunnel. Its machine is its own."""


def choose_door(resolved: ConfigResolved, environ: Mapping[str, str]) -> Door | None:
    """None: workers use the run directory's ipc sockets. Raises DoorError with one sentence."""
    if resolved.relay_url:
        return remote_door(resolved.relay_url)
    bind, advertise = resolved.relay_bind, resolved.relay_advertise
    match resolved.provider:
        case "docker" if not bind:
            gateway = _gateway(environ)
            bind = f"{gateway}:{free_ports(gateway)}"
        case "vastai":
            bind = bind or f"127.0.0.1:{free_ports('127.0.0.1')}"
            advertise = f"127.0.0.1:{TUNNEL_PORT}"
        case "external" | "swarm" if not bind:
            raise DoorError(
                f"provider {resolved.provider} needs an address at which workers on other machines reach this one; set "
                '[relay] bind_addr to one of this machine\'s addresses, as "10.0.0.5:19800"'
            )
    return Door(bind=bind, advertise=advertise or bind) if bind else None


def _gateway(environ: Mapping[str, str]) -> str:
    # Here: the SDK costs a tenth of a second that other providers should not pay.
    from services.provisioner.docker_engine import bridge_gateway
    from services.provisioner.plugin import ProviderError

    try:
        return bridge_gateway(environ)
    except ProviderError as error:
        raise DoorError(str(error)) from None
