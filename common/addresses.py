"""The identities of the bus: node keys, actor addresses, run nonces, planes and roles.

A node is its CURVE public key (`NodeKey`, Swactor's NodeId): the source of each message is known from the key of
its connection. An actor is 32 random bytes (`ActorAddress`); a node's own mailbox has the node's key as address,
as in Swactor (rust-swactor.md 3).
"""

from __future__ import annotations

from enum import IntEnum, StrEnum
from typing import Annotated

from msgspec import Meta

KEY_BYTES = 32
NONCE_BYTES = 16

NodeKey = Annotated[bytes, Meta(min_length=KEY_BYTES, max_length=KEY_BYTES)]
ActorAddress = Annotated[bytes, Meta(min_length=KEY_BYTES, max_length=KEY_BYTES)]
RunNonce = Annotated[bytes, Meta(min_length=NONCE_BYTES, max_length=NONCE_BYTES)]
Token = Annotated[bytes, Meta(max_length=64)]
U32 = Annotated[int, Meta(ge=0, le=0xFFFF_FFFF)]
U64 = Annotated[int, Meta(ge=0)]

NO_RUN: bytes = bytes(NONCE_BYTES)
"""The run of messages that belong to no run (Hello, Register, membership of services)."""


class Plane(IntEnum):
    """One socket each at every broker, drained in this order (design.md 3)."""

    # Enum hashes by name, in Python: five times a forwarded envelope, a tenth of its cost.
    __hash__ = int.__hash__

    CONTROL = 0
    PROMPT = 1
    EDGE = 2
    STREAM = 3


class Role(StrEnum):
    """What a key is allowed to be; fixed at admission, never claimed by the peer."""

    # As its text, which it equals.
    __hash__ = str.__hash__

    ROUTER = "router"
    RELAY = "relay"
    RESOLVER = "config_resolver"
    PROVISIONER = "provisioner"
    MEMBERSHIP = "membership"
    ORCHESTRATOR = "orchestrator"
    GATEWAY = "prompt_gateway"
    COLLECTOR = "datastream_collector"
    AGENT = "agent"
    TAP = "tap"


SERVICES: frozenset[Role] = frozenset(
    {
        Role.ROUTER,
        Role.RELAY,
        Role.RESOLVER,
        Role.PROVISIONER,
        Role.MEMBERSHIP,
        Role.ORCHESTRATOR,
        Role.GATEWAY,
        Role.COLLECTOR,
    }
)
BROKERS: frozenset[Role] = frozenset({Role.ROUTER, Role.RELAY})
ANYONE: frozenset[Role] = SERVICES | {Role.AGENT}


def short(key: bytes) -> str:
    """The first 8 bytes as hex: how keys and addresses are shown to people."""
    return key[:8].hex() if key else "-"
