"""The door for workers that are not on this machine's ipc sockets: four TCP ports, one per plane (design.md 3, relay).

Written into bus files by `common.security.init`: what the broker binds, what workers dial, or whose relay it is.
"""

from __future__ import annotations

import errno
import random
import re
import socket
from dataclasses import dataclass

from common.addresses import Plane

PORTS = len(Plane)
TRIES = 64
FIRST_PORT, LAST_PORT = 20_000, 31_900  # below the kernel's ephemeral ports, which come and go under us
RELAY_URL = re.compile(r"curve://([0-9a-f]{64})@(.+):([0-9]{1,5})")


class DoorError(ValueError):
    """No door can be made; one sentence."""


@dataclass(frozen=True, slots=True)
class Door:
    """host:port each, the first of four ports. bind: "" when the relay is elsewhere, then key is that relay's."""

    bind: str = ""
    advertise: str = ""
    key: bytes = b""

    @property
    def remote(self) -> bool:
        """The relay is somebody else's process."""
        return bool(self.key)

    def bound(self) -> dict[Plane, str]:
        """What a broker of ours binds."""
        return tcp_endpoints(self.bind) if self.bind else {}

    def dialled(self) -> dict[Plane, str]:
        """What workers dial."""
        return tcp_endpoints(self.advertise or self.bind)


def tcp_endpoints(address: str) -> dict[Plane, str]:
    """ZeroMQ endpoints by plane from host:port, port being the first of four."""
    host, _, port = address.rpartition(":")
    return {plane: f"tcp://{host}:{int(port) + plane}" for plane in Plane}


def remote_door(url: str) -> Door:
    """curve://<server key>@host:port. Raises DoorError."""
    matched = RELAY_URL.fullmatch(url)
    if matched is None:
        raise DoorError(f"{url} is no relay: it must look like curve://<64 hex digits>@host:port")
    key, host, port = matched.groups()
    return Door(advertise=f"{host}:{port}", key=bytes.fromhex(key))


def free_ports(host: str) -> int:
    """The first of four neighbouring free ports on an address of this machine. Raises DoorError."""
    for _ in range(TRIES):
        first = random.randrange(FIRST_PORT, LAST_PORT, PORTS)
        try:
            for port in range(first, first + PORTS):
                with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
                    probe.bind((host.strip("[]"), port))
        except OSError as error:
            if error.errno in _NOT_OURS:
                raise DoorError(
                    f"{host} is no address of this machine, so workers cannot be let in there; set [relay] bind_addr "
                    "to one of this machine's addresses, and advertise_addr to what workers dial"
                ) from None
            continue
        return first
    raise DoorError(f"no four free ports were found on {host}; set [relay] bind_addr")


_NOT_OURS = frozenset({errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT})
