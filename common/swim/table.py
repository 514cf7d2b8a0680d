"""The member table and its lattice: (boot, incarnation, state) per node key, the larger wins (anchors.md C1).

Merging is a join: commutative, associative, idempotent. Facts (actor, logical id, metadata) belong to one
(boot, incarnation), because only the member itself changes them, and with a new incarnation.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import msgspec

from common.messages.member import MemberUpdate
from common.swim.config import INCARNATION_MAX, METADATA_BYTES_MAX

ALIVE, SUSPECT, DEAD, LEFT = "alive", "suspect", "dead", "left"
UNKNOWN = "unknown"
RANK: dict[str, int] = {ALIVE: 0, SUSPECT: 1, DEAD: 2, LEFT: 3}
LIVE = (ALIVE, SUSPECT)


def precedence(update: MemberUpdate) -> tuple[int, int, int]:
    """The order: a new boot beats all of an older one; then incarnation; then left > dead > suspect > alive."""
    return update.member.boot, update.incarnation, RANK[update.state]


def admissible(update: MemberUpdate) -> bool:
    """Whether a peer's rumour is within the limits; others are ignored, a peer cannot break the table."""
    return update.state in RANK and update.incarnation <= INCARNATION_MAX and metadata_fits(update.metadata)


def metadata_fits(metadata: dict[str, str]) -> bool:
    """Whether metadata is within METADATA_BYTES_MAX as UTF-8."""
    return sum(len(key.encode()) + len(value.encode()) for key, value in metadata.items()) <= METADATA_BYTES_MAX


@dataclass(slots=True)
class Member:
    """What is believed of a node, since which protocol millisecond, and why."""

    update: MemberUpdate
    since: int
    reason: str

    @property
    def state(self) -> str:
        """ "alive" | "suspect" | "dead" | "left"."""
        return self.update.state

    def accusation(self, by: bytes) -> MemberUpdate:
        """The same incarnation, suspected by `by`."""
        return msgspec.structs.replace(self.update, state=SUSPECT, by=by)


class MemberTable:
    """All members by node key, in the order in which they became known; knows nothing of timers."""

    def __init__(self) -> None:
        self._members: dict[bytes, Member] = {}
        self.live = 0
        """How many are alive or suspect."""

    def __len__(self) -> int:
        return len(self._members)

    def __iter__(self) -> Iterator[Member]:
        return iter(self._members.values())

    def get(self, node: bytes) -> Member | None:
        """The member of a node key, or None."""
        return self._members.get(node)

    def beats(self, update: MemberUpdate) -> bool:
        """Whether the rumour is news."""
        known = self._members.get(update.member.node)
        return known is None or precedence(update) > precedence(known.update)

    def merge(self, update: MemberUpdate, now: int, reason: str) -> bool:
        """Join the rumour in; False when nothing is different."""
        if not self.beats(update):
            return False
        node = update.member.node
        known = self._members.get(node)
        self.live += (update.state in LIVE) - (known is not None and known.state in LIVE)
        same_state = known is not None and known.state == update.state and known.update.member == update.member
        since = known.since if known is not None and same_state else now
        self._members[node] = Member(update, since, known.reason if known and same_state else reason)
        return True

    def forget(self, node: bytes) -> None:
        """Remove a member; it may become known again."""
        gone = self._members.pop(node)
        self.live -= gone.state in LIVE
