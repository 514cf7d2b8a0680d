"""What the parts of one SWIM member share: who we are, what we believe, what waits to be said."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec

from common.codec import Message
from common.messages.member import MemberId, MemberUpdate, NameUpdate
from common.swim.awareness import Awareness
from common.swim.config import SwimConfig
from common.swim.formulas import retransmit_limit
from common.swim.names import NameRegistry
from common.swim.outputs import Output, Send
from common.swim.probe import ProbeList
from common.swim.queue import Rumours
from common.swim.suspicion import Suspicion
from common.swim.table import ALIVE, LIVE, Member, MemberTable

if TYPE_CHECKING:
    import random

FRAME_OVERHEAD_BYTES = 120  # sequence, ids and the map around the rumours of a ping


def wire_size(item: MemberUpdate | NameUpdate) -> int:
    """Bytes of a rumour on the wire."""
    return len(msgspec.msgpack.encode(item))


@dataclass(slots=True)
class Local:
    """Our own member is never in the table: what others say of it is answered, not believed."""

    own: MemberUpdate
    config: SwimConfig
    rng: random.Random
    table: MemberTable = field(default_factory=MemberTable)
    names: NameRegistry = field(default_factory=NameRegistry)
    rumours: Rumours[MemberUpdate] = field(default_factory=Rumours)
    name_rumours: Rumours[NameUpdate] = field(default_factory=Rumours)
    suspicions: dict[bytes, Suspicion] = field(default_factory=dict)
    out: list[Output] = field(default_factory=list)
    withdrawn: dict[str, NameUpdate] = field(default_factory=dict)
    """Names that we gave up ourselves: their tombstones are not contradicted."""
    leaving: bool = False
    superseded: bool = False
    sequence: int = 0
    awareness: Awareness = field(init=False)
    publisher: bytes = b""
    """SWIM actor of the membership service, whose view the run acts on; empty for the service itself."""
    probe_list: ProbeList = field(init=False)
    gossip_list: ProbeList = field(init=False)

    def __post_init__(self) -> None:
        self.awareness = Awareness(self.config.awareness_max)
        self.probe_list = ProbeList(self.rng)
        self.gossip_list = ProbeList(self.rng)

    @property
    def me(self) -> MemberId:
        """Our own identity."""
        return self.own.member

    @property
    def node(self) -> bytes:
        """Our own node key."""
        return self.own.member.node

    @property
    def cluster(self) -> int:
        """n of the formulas: everyone alive or suspect, with us."""
        return self.table.live + 1

    def send(self, actor: bytes, message: Message) -> None:
        """Hand a datagram to the host."""
        self.out.append(Send(actor, message))

    def spread(self, update: MemberUpdate) -> None:
        """Queue a rumour; an older one about the same node is dropped."""
        self.rumours.put(update.member.node, update, wire_size(update))

    def spread_own(self) -> None:
        """Queue our own state, unless it waits already: an accuser's repetition must not renew the budget."""
        if self.node not in self.rumours:
            self.spread(self.own)

    def spread_name(self, update: NameUpdate) -> None:
        """Queue a name."""
        self.name_rumours.put(update.name.encode(), update, wire_size(update))

    def piggyback(self, used: int) -> tuple[list[MemberUpdate], list[NameUpdate]]:
        """Rumours that fit beside `used` bytes; each is counted as passed on."""
        limit = retransmit_limit(self.config.retransmit_mult, self.cluster)
        budget = max(0, self.config.packet_bytes - used)
        updates, taken = self.rumours.take(budget, limit)
        names, _ = self.name_rumours.take(budget - taken, limit)
        return updates, names

    def next_sequence(self) -> int:
        """Numbers of our probes, never reused within a boot."""
        self.sequence += 1
        return self.sequence

    def accusation_of(self, member: MemberId, incarnation: int) -> MemberUpdate | None:
        """What we hold against this incarnation, so that it hears of it and can refute (Lifeguard's buddy)."""
        known = self.table.get(member.node)
        if known is None or known.update.member != member or known.state == ALIVE:
            return None
        return known.update if known.update.incarnation >= incarnation else None

    def pick(self, count: int, candidates: list[Member]) -> list[Member]:
        """Up to `count` of them at random, without repetition."""
        return self.rng.sample(candidates, min(count, len(candidates)))

    def live_members(self) -> list[Member]:
        """Everyone else who is alive or suspect."""
        return [member for member in self.table if member.state in LIVE]
