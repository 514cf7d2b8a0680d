"""One SWIM member as a pure machine: messages and time in, outputs out (anchors.md C3, C6, C7; S1 7.7, S2 6.2).

Every method that can change something returns the list of outputs. Real times are monotonic milliseconds.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from common.codec import Message
from common.messages.bus import NameEntry
from common.messages.member import (
    MemberUpdate,
    SwimAck,
    SwimGossip,
    SwimNack,
    SwimPing,
    SwimPingReq,
    SwimPushPull,
)
from common.swim.clock import ProtocolClock
from common.swim.config import MEMBERS_MAX, NAMES_MAX, SwimConfig
from common.swim.judge import Judge
from common.swim.local import Local
from common.swim.outputs import Output, Transition, Updated
from common.swim.prober import Prober
from common.swim.spreader import Seed, Spreader
from common.swim.table import ALIVE, LIVE, SUSPECT, UNKNOWN, Member, admissible, metadata_fits

if TYPE_CHECKING:
    import random

SWIM_MESSAGES = (SwimPing, SwimAck, SwimPingReq, SwimNack, SwimGossip, SwimPushPull)


class SwimCore:
    """`own`: state "alive", incarnation 0, the address of the actor that hosts this core. Raises ValueError for more
    than METADATA_BYTES_MAX of metadata."""

    def __init__(self, own: MemberUpdate, config: SwimConfig, rng: random.Random, now_ms: int) -> None:
        if not admissible(own) or own.state != ALIVE:
            raise ValueError("own facts are not those of a new live member, or the metadata is too large")
        self._local = Local(own, config, rng)
        self._clock = ProtocolClock()
        now = self._clock.at(now_ms)
        self._judge = Judge(self._local)
        self._prober = Prober(self._local, self._judge, now)
        self._spreader = Spreader(self._local, self._judge, now)
        self._highest_incarnation = own.incarnation
        self._now = now
        self._promised: int | None = None
        self._local.spread(own)
        self._local.out.append(Transition(own.member, UNKNOWN, ALIVE, "started", own))
        self._promised = self._due()

    # --- what is believed -------------------------------------------------------------------------------------
    @property
    def own(self) -> MemberUpdate:
        """Our own facts as others shall hold them."""
        return self._local.own

    @property
    def joined(self) -> bool:
        """Whether the seed has answered with its table."""
        return self._spreader.joined

    @property
    def has_left(self) -> bool:
        """Whether our leave has been said as often as it will be."""
        return self._spreader.has_left

    @property
    def paused(self) -> bool:
        """Whether the protocol clock stands."""
        return self._clock.paused

    @property
    def health(self) -> int:
        """Lifeguard's local health multiplier: 0 is well."""
        return self._local.awareness.score

    def member(self, node: bytes) -> Member | None:
        """What is believed of another node."""
        return self._local.table.get(node)

    def members(self) -> list[MemberUpdate]:
        """Everyone known, ourselves first."""
        return [self._local.own, *(member.update for member in self._local.table)]

    def resolve_name(self, name: str) -> NameEntry | None:
        """Where a registered name leads (S2 6.2)."""
        return self._local.names.resolve(name)

    def names(self) -> list[NameEntry]:
        """All names that resolve."""
        found = (self._local.names.resolve(update.name) for update in self._local.names)
        return [entry for entry in found if entry is not None]

    # --- events -----------------------------------------------------------------------------------------------
    def on_message(self, message: Message, sender: bytes, now_ms: int) -> list[Output]:
        """A SWIM message from the actor `sender`. The host has checked that its node is the one that it names."""
        now = self._enter(now_ms)
        if self._local.superseded:
            return self._take()
        match message:
            case SwimPing():
                self._on_ping(message, sender, now)
            case SwimPingReq():
                self._hear_sender(message.sender, now)
                self._hear(message.updates, now)
                self._prober.on_ping_req(message, sender, now)
            case SwimAck():
                self._hear(message.updates, now)
                self._hear_names(message, now)
                self._prober.on_ack(message, sender)
            case SwimNack():
                self._prober.on_nack(message, sender)
            case SwimGossip():
                self._hear(message.updates, now)
                self._hear_names(message, now)
            case SwimPushPull():
                self._hear_sender(message.sender, now)
                self._spreader.on_push_pull(message, now)
            case _:
                pass
        return self._take()

    def tick(self, now_ms: int) -> list[Output]:
        """Do what is due. Calling it early, late or twice is harmless."""
        now = self._enter(now_ms)
        if not self._clock.paused and not self._local.superseded:
            self._spreader.rejoin_if_lost(now)
            self._prober.tick(now)
            self._judge.tick(now)
            self._spreader.tick(now)
        return self._take()

    def next_deadline(self) -> int | None:
        """The real time of the next tick; None while paused, superseded or gone."""
        if self._clock.paused or self._local.superseded or self._spreader.has_left:
            return None
        return None if self._promised is None else self._clock.real(self._promised)

    def pause(self, now_ms: int) -> list[Output]:
        """Our own link is down: nothing heard or unheard from now on proves anything (anchors.md C6.3)."""
        now = self._enter(now_ms)
        self._clock.pause(now_ms)
        self._prober.void(now)
        if self._local.leaving:
            self._spreader.finish_leave()
        return self._take()

    def resume(self, now_ms: int) -> list[Output]:
        """The link is back; deadlines move by the length of the pause, probes that overlapped it are void."""
        if self._clock.paused:
            self._clock.resume(now_ms)
            self._now = self._clock.at(now_ms)
            self._after_gap(self._now)
        return self._take()

    def set_seed(self, seed: Seed | None, now_ms: int) -> list[Output]:
        """Where to join. A seed with another boot has an empty table and is joined again."""
        self._spreader.set_seed(seed, self._enter(now_ms))
        return self._take()

    def leave(self, now_ms: int) -> list[Output]:
        """Go: state "left". `Left` comes out when the rumour is spent, at latest after config.leave_ms."""
        now = self._enter(now_ms)
        self._spreader.leave(now)
        if self._clock.paused:
            self._spreader.finish_leave()
        return self._take()

    def set_metadata(self, metadata: dict[str, str], now_ms: int) -> list[Output]:
        """Replace our metadata; a new incarnation carries it. Raises ValueError beyond METADATA_BYTES_MAX."""
        if not metadata_fits(metadata):
            raise ValueError("metadata is too large")
        self._enter(now_ms)
        own = self._local.own
        self._local.own = msgspec.structs.replace(own, metadata=metadata, incarnation=own.incarnation + 1)
        self._local.spread(self._local.own)
        self._local.out.append(Updated(self._local.own))
        return self._take()

    def register_name(
        self, name: str, address: bytes, wall_ms: int, now_ms: int, *, node: bytes = b"", boot: int = 0
    ) -> list[Output]:
        """Bind a name to an actor of ours, or of `node` (in its incarnation `boot`) on whose behalf we speak."""
        now = self._enter(now_ms)
        local = self._local
        owner = node or local.node
        incarnation = boot if node else local.me.boot
        known = local.names.get(name)
        if known is None or known.tombstone or (known.address, known.node) != (address, owner):
            local.withdrawn.pop(name, None)
            self._judge.set_name(local.names.claim(name, address, owner, incarnation, wall_ms), now)
        return self._take()

    def unregister_name(self, name: str, now_ms: int) -> list[Output]:
        """Give up a name of ours; unknown and foreign names are left alone."""
        now = self._enter(now_ms)
        known = self._local.names.get(name)
        if known is not None and known.node == self._local.node and not known.tombstone:
            tombstone = self._local.names.tombstone(known)
            self._local.withdrawn[name] = tombstone
            self._judge.set_name(tombstone, now)
        return self._take()

    def forget_departed(self, now_ms: int) -> list[Output]:
        """The run is over: the dead and the left of it are of no more interest."""
        now = self._enter(now_ms)
        self._judge.forget(now + 1)
        return self._take()

    # --- parts ------------------------------------------------------------------------------------------------
    def _enter(self, now_ms: int) -> int:
        """Protocol time. A process that did not run for more than a period (SIGSTOP, swap) was as good as cut off."""
        if not self._clock.paused and self._promised is not None:
            late = self._clock.at(now_ms) - self._promised
            if late > self._local.config.probe_interval_ms:
                self._clock.skip(late)
                self._after_gap(self._clock.at(now_ms))
        self._now = self._clock.at(now_ms)
        return self._now

    def _after_gap(self, now: int) -> None:
        self._prober.void(now)
        self._judge.doubt(now)
        self._spreader.resume(now)

    def _due(self) -> int | None:
        times = (self._prober.deadline(), self._judge.deadline(), self._spreader.deadline())
        return min((time for time in times if time is not None), default=None)

    def _take(self) -> list[Output]:
        """The outputs of this call. Remember what next_deadline promises: a much later call means that we stood still.

        Something may be due since long before (a suspicion that a confirmation cut short): that is not standing still.
        """
        due = self._due()
        self._promised = None if due is None else max(due, self._now)
        out, self._local.out = self._local.out, []
        return out

    def _on_ping(self, ping: SwimPing, sender: bytes, now: int) -> None:
        self._hear_sender(ping.sender, now)
        if ping.target == self._local.me:
            self._hear(ping.updates, now)
            self._hear_names(ping, now)
            self._prober.on_ping(ping, sender)
        elif ping.target.node == self._local.node and ping.target.boot < self._local.me.boot:
            # Somebody looks for our predecessor: no answer in its name, but the word that it has a successor.
            self._local.send(sender, SwimGossip(updates=[self._local.own]))

    def _hear_sender(self, update: MemberUpdate, now: int) -> None:
        if update.state == ALIVE:
            self._judge.hear(update, now, "joined" if self._local.table.get(update.member.node) is None else "answers")

    def _hear(self, updates: list[MemberUpdate], now: int) -> None:
        for update in updates:
            self._judge.hear(update, now, reason_of(update))

    def _hear_names(self, message: SwimPing | SwimAck | SwimGossip, now: int) -> None:
        for name in message.names:
            self._judge.hear_name(name, now)

    # --- invariants -------------------------------------------------------------------------------------------
    def check(self) -> None:
        """Raise AssertionError if the state contradicts itself."""
        local = self._local
        assert local.own.incarnation >= self._highest_incarnation, "own incarnation went down"
        self._highest_incarnation = local.own.incarnation
        assert local.table.get(local.node) is None, "we are in our own table"
        assert len(local.table) <= MEMBERS_MAX and len(local.names) <= NAMES_MAX, "a table is over its limit"
        assert len(local.rumours) <= len(local.table) + 1, "rumours about nobody"
        suspects = [member.update.member.node for member in local.table if member.state == SUSPECT]
        assert sorted(suspects) == sorted(local.suspicions), "suspects and suspicions differ"
        live = [member.update.member.node for member in local.table if member.state in LIVE]
        assert len(live) == local.table.live, "the count of live members is wrong"
        assert all(node in local.probe_list for node in live), "a live member is not probed"
        assert all(node in local.gossip_list for node in live), "a live member hears no gossip"
        if self._clock.paused:
            assert self._prober.round is None, "a probe is under way during a pause"


def reason_of(update: MemberUpdate) -> str:
    """Why a rumour's subject came to be so, in the words of a record."""
    match update.state:
        case "suspect":
            return f"suspected by {update.by[:8].hex()}"
        case "dead":
            return f"declared dead by {update.by[:8].hex()}"
        case "left":
            return "left"
        case _:
            return "refuted" if update.incarnation else "joined"
