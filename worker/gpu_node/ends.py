"""The two ends of S2's bus: one of them is the broker of both, the other dials it (S2 1, 8; design.md 6 row 38).

On one machine gpu-node is the broker; with a rented node it is the client, because only the client's side of the tunnel
is reachable. Either way the broker's end is the SWIM seed, and both hold the same membership and the same names.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from common import door
from common.actors import Inbox
from common.addresses import Plane, Role
from common.broker_host import BrokerHost
from common.bus import BindError, KeyPair
from common.codec import Message
from common.effects import Exit, SendFailed, StopSignal
from common.host import BaseHost, Host, new_boot
from common.messages.bus import Admit, Admitted, NameEntry, Revoke, Revoked
from common.messages.member import NameRegister, NameRegistered
from common.node import Identity
from common.security import BusFile
from common.swim.actor import Leave, SwimActor
from common.swim.config import PROFILES
from services.router.core import RouterActor
from worker.gpu_node.limits import LEAVE_MS

LOOPBACK = "127.0.0.1"


class EndError(Exception):
    """The bus cannot be set up; one sentence."""


def plane_endpoints(host: str, base: int) -> dict[Plane, str]:
    """The four ports of a door, base+0 to base+3 (design.md 3)."""
    return {plane: f"tcp://{host}:{base + int(plane)}" for plane in Plane}


def free_ports() -> int:
    """A base whose four ports are free now. Raises EndError."""
    try:
        return door.free_ports(LOOPBACK)
    except door.DoorError:
        raise EndError(f"no four free ports in a row on {LOOPBACK}") from None


class End:
    """One end: its host, its SWIM member, and an inbox of what its main program wants to hear."""

    def __init__(self, host: BaseHost, member: SwimActor, inbox: Inbox) -> None:
        self.host, self.member, self.inbox = host, member, inbox
        host.on_effect(Exit, lambda _address, _effect: None)  # the main program ends it, in its own order
        host.pump()  # actors read the clock when they start
        self.inbox_addr = host.spawn(inbox)
        self.swim = host.spawn(member, name=Role.MEMBERSHIP if isinstance(host, BrokerHost) else "")

    @property
    def key(self) -> bytes:
        """This end's node key."""
        return self.host.node_key

    @property
    def now_ms(self) -> int:
        """Monotonic."""
        return self.host.loop.now_ms()

    def state(self, node: bytes) -> str:
        """What SWIM believes of a node: "alive", "suspect", "dead", "left" or "unknown"."""
        member = self.member.host.core.member(node)
        return member.state if member else "unknown"

    def resolve(self, name: str) -> NameEntry | None:
        """Where a name leads, as the registry has it by gossip (S2 6.2)."""
        return self.member.host.core.resolve_name(name)

    def register(self, name: str, address: bytes) -> None:
        """Bind a name to an actor of ours."""
        self.host.node.system.post(self.swim, NameRegister(name=name, address=address), src=self.inbox_addr)

    def send(self, node: bytes, dst: bytes, message: Message) -> None:
        """From the inbox to an actor on that node."""
        self.host.node.system.post(dst, message, src=self.inbox_addr, node=node)

    def admit(self, key: bytes, logical_id: str) -> None:
        """The broker's end: let a node in."""
        self._tell_router(Admit(key=key, role=Role.AGENT, run=bytes(16), node_id=1, logical_id=logical_id))

    def revoke(self, key: bytes) -> None:
        """The broker's end: out with it."""
        self._tell_router(Revoke(key=key))

    def _tell_router(self, message: Message) -> None:
        self.host.node.system.post(self.key, message, src=self.inbox_addr)

    def turn_until(self, fact: Callable[[], object], limit_ms: int) -> bool:
        """Run the loop until the fact holds. False: the time is over."""
        until = time.monotonic() + limit_ms / 1000
        while not fact():
            if time.monotonic() >= until:
                return False
            self.host.turn()
        return True

    def close(self, leave_ms: int = LEAVE_MS) -> None:
        """Leave the cluster, so that nobody counts us among the dead, then close."""
        self.host.deliver(self.swim, Leave())
        self.turn_until(lambda: self.member.host.core.has_left, leave_ms)
        self.host.close()


def main_inbox(*accepts: Any) -> Inbox:
    """What every main program of this example hears, and `accepts` besides."""
    return Inbox(StopSignal, NameRegistered, Admitted, Revoked, SendFailed, *accepts)


def dial_end(
    inbox: Inbox,
    *,
    broker_key: bytes,
    endpoints: Mapping[Plane, str],
    keys: KeyPair,
    logical_id: str,
    profile: str = "lan",
) -> End:
    """The end that dials, as an agent."""
    identity = Identity(keys.public, Role.AGENT, new_boot(), logical_id)
    host = Host(identity, broker_key=broker_key, endpoints=endpoints, keys=keys)
    return End(host, SwimActor(logical_id=logical_id, config=PROFILES[profile]), inbox)


def broker_end(
    inbox: Inbox,
    *,
    keys: KeyPair,
    base: int,
    admitted: list[bytes],
    logical_id: str,
    profile: str = "lan",
) -> End:
    """The end that is the broker, on four loopback ports. Raises EndError if they are taken.

    It is its own membership service: the one route by that name is its SWIM actor's, where the other end joins.
    """
    bus_file = BusFile(
        role=Role.ROUTER,
        logical_id=logical_id,
        run_dir=Path(),
        broker_key=keys.public,
        endpoints=plane_endpoints(LOOPBACK, base),
        keys=keys,
        tap=f"tcp://{LOOPBACK}:*",
        allow={keys.public: Role.MEMBERSHIP, **dict.fromkeys(admitted, Role.AGENT)},
    )
    try:
        host = BrokerHost(bus_file, Role.ROUTER, lambda broker, relay: RouterActor(broker, relay=relay))
    except BindError as error:
        raise EndError(str(error)) from None
    member = SwimActor(logical_id=logical_id, config=PROFILES[profile], role=Role.MEMBERSHIP)
    return End(host, member, inbox)
