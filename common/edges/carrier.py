"""Edges over the bus: stream messages as envelopes on the edge plane, between two nodes that cannot dial each other.

Router and relay forward them like any other envelope, within one operator's nodes only (design.md 3); the sessions
below keep them in order and whole, the edge's own offsets stay the same.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any, ClassVar

from common.actors import Actor, Ctx
from common.addresses import KEY_BYTES
from common.codec import encode_body
from common.edges.frames import STREAM_MESSAGES


def carrier_address(node_key: bytes) -> bytes:
    """Where a node takes stream messages: every peer can derive it from the node's key."""
    return hashlib.blake2b(node_key, digest_size=KEY_BYTES, person=b"smq-edge-carrier").digest()


@dataclass(frozen=True, slots=True)
class Carried:
    """Event: a stream message came over the bus from node `peer`, as the broker has verified."""

    peer: bytes
    frame: bytes


class EdgeCarrierActor(Actor):
    """Spawn it at carrier_address(own node key); owner: the actor that gets Carried."""

    Incoming: ClassVar[tuple[type, ...]] = STREAM_MESSAGES

    def __init__(self, owner: bytes) -> None:
        self._owner = owner

    def receive(self, msg: Any, ctx: Ctx) -> None:
        """Hand it to the owner of this node's edges."""
        ctx.send(self._owner, Carried(ctx.sender_node, encode_body(msg)))
