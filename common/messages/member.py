"""Membership: SWIM between members, names and transitions (S1 4.6, 7.7, S2 6.2; anchors.md C).

SWIM messages are datagrams (plane_seq 0) sent to the member's own SWIM actor; the piggyback is gossip.
"""

from __future__ import annotations

from typing import ClassVar

import msgspec

from common.addresses import U32, U64, ActorAddress, NodeKey, Role
from common.codec import Message

_MEMBERS = frozenset({Role.MEMBERSHIP, Role.AGENT})
_MEMBERSHIP = frozenset({Role.MEMBERSHIP})


class MemberId(msgspec.Struct, frozen=True, kw_only=True, order=True):
    """One incarnation of a process: the node key and its boot. A new boot is a new member that supersedes the old."""

    node: NodeKey
    boot: U64


class MemberUpdate(msgspec.Struct, frozen=True, kw_only=True):
    """One rumour. state: "alive" | "suspect" | "dead" | "left"; by: who accuses (suspect, dead)."""

    member: MemberId
    state: str
    incarnation: U64
    swim_actor: ActorAddress
    logical_id: str = ""
    role: str = ""
    metadata: dict[str, str] = {}
    by: bytes = b""


class NameUpdate(msgspec.Struct, frozen=True, kw_only=True):
    """One entry of the name registry: last writer wins by (timestamp_ms, generation, node).

    boot: the incarnation of `node` that hosts the address (0: unknown); the name is buried when that incarnation ends.
    """

    name: str
    address: ActorAddress
    node: NodeKey
    timestamp_ms: U64
    generation: U64
    tombstone: bool = False
    boot: U64 = 0


class SwimPing(Message, frozen=True, kw_only=True, tag=200):
    """Member → member each probe interval; answered by SwimAck. target guards against a changed incarnation."""

    FROM: ClassVar[frozenset[Role]] = _MEMBERS
    DATAGRAM: ClassVar[bool] = True
    sequence: U64
    sender: MemberUpdate
    target: MemberId
    updates: list[MemberUpdate] = []
    names: list[NameUpdate] = []


class SwimAck(Message, frozen=True, kw_only=True, tag=201):
    """Member → the sender of SwimPing, or a helper → the asker. target: who is alive."""

    FROM: ClassVar[frozenset[Role]] = _MEMBERS
    DATAGRAM: ClassVar[bool] = True
    sequence: U64
    target: MemberId
    incarnation: U64
    updates: list[MemberUpdate] = []
    names: list[NameUpdate] = []


class SwimPingReq(Message, frozen=True, kw_only=True, tag=202):
    """Member → helper: ping `target` for me. Answered by SwimAck, or SwimNack at 0.8 of the probe timeout."""

    FROM: ClassVar[frozenset[Role]] = _MEMBERS
    DATAGRAM: ClassVar[bool] = True
    sequence: U64
    sender: MemberUpdate
    target: MemberUpdate
    updates: list[MemberUpdate] = []


class SwimNack(Message, frozen=True, kw_only=True, tag=203):
    """Helper → asker: I am well, but the target has not answered yet (Lifeguard)."""

    FROM: ClassVar[frozenset[Role]] = _MEMBERS
    DATAGRAM: ClassVar[bool] = True
    sequence: U64


class SwimGossip(Message, frozen=True, kw_only=True, tag=204):
    """Member → member between probes: rumours with budget left; accuser → accused each period. Never answered."""

    FROM: ClassVar[frozenset[Role]] = _MEMBERS
    DATAGRAM: ClassVar[bool] = True
    updates: list[MemberUpdate] = []
    names: list[NameUpdate] = []


class SwimPushPull(Message, frozen=True, kw_only=True, tag=205):
    """Member → member every 30 s: the whole table. Answered by SwimPushPull with reply=True.

    A joiner sends it to the main actor of the membership service, each second until answered, and again when that
    service has a new boot.
    """

    FROM: ClassVar[frozenset[Role]] = _MEMBERS
    DATAGRAM: ClassVar[bool] = True
    sender: MemberUpdate
    updates: list[MemberUpdate]
    names: list[NameUpdate] = []
    reply: bool = False


class NameRegister(Message, frozen=True, kw_only=True, tag=206):
    """Any node → membership: name → address. Answered by NameRegistered."""

    name: str
    address: ActorAddress


class NameRegistered(Message, frozen=True, kw_only=True, tag=207):
    """Membership → the asker."""

    FROM: ClassVar[frozenset[Role]] = _MEMBERSHIP
    name: str


class NameResolve(Message, frozen=True, kw_only=True, tag=208):
    """Any node → membership. Answered by NameResolved; an empty address: no such name."""

    name: str


class NameResolved(Message, frozen=True, kw_only=True, tag=209):
    """Membership → the asker."""

    FROM: ClassVar[frozenset[Role]] = _MEMBERSHIP
    name: str
    address: bytes = b""


class MemberChanged(Message, frozen=True, kw_only=True, tag=210):
    """Membership → the orchestrator: a transition seen (S1 8.3, mvp.swim.membership). from/to: states or "unknown"."""

    FROM: ClassVar[frozenset[Role]] = _MEMBERSHIP
    peer: NodeKey
    boot: U64
    logical_id: str
    from_state: str
    to_state: str
    reason: str
    incarnation: U32 = 0
