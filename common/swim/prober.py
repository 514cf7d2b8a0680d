"""Failure detection: one probe a period, indirect ones when it is not answered, and probes on behalf of others."""

from __future__ import annotations

from common.messages.member import MemberUpdate, NameUpdate, SwimAck, SwimNack, SwimPing, SwimPingReq
from common.swim.config import RELAYS_MAX
from common.swim.judge import Judge
from common.swim.local import FRAME_OVERHEAD_BYTES, Local, wire_size
from common.swim.probe import Relay, Round
from common.swim.table import ALIVE, LIVE


class Prober:
    """At most one round of our own at a time. Times are protocol ms."""

    def __init__(self, local: Local, judge: Judge, now: int) -> None:
        self._local, self._judge = local, judge
        self.round: Round | None = None
        self.relays: dict[int, Relay] = {}
        self._next_at = now + local.rng.randrange(local.config.probe_interval_ms)

    # --- time -------------------------------------------------------------------------------------------------
    def tick(self, now: int) -> None:
        """Advance our round and the relays."""
        for sequence, relay in list(self.relays.items()):
            if relay.nack_at <= now and not relay.nacked:
                relay.nacked = True
                self._local.send(relay.asker, SwimNack(sequence=relay.asker_sequence))
            if relay.ends_at <= now:
                del self.relays[sequence]
        if self.round is not None and not self.round.asked and self.round.ask_at <= now:
            self._ask_helpers(self.round)
        if self.round is not None and self.round.ends_at <= now:
            self._failed(self.round, now)
        if self.round is None and self._next_at <= now and not self._local.leaving:
            self._begin(now)

    def deadline(self) -> int | None:
        """When tick has something to do; None while leaving with nothing pending."""
        times = [relay.ends_at if relay.nacked else relay.nack_at for relay in self.relays.values()]
        if self.round is not None:
            times.append(self.round.ends_at if self.round.asked else self.round.ask_at)
        elif not self._local.leaving:
            times.append(self._next_at)
        return min(times, default=None)

    def void(self, now: int) -> None:
        """We were cut off: what is under way proves nothing. The next probe comes within a period."""
        self.round = None
        self.relays.clear()
        self._next_at = now + self._local.rng.randrange(self._local.config.probe_interval_ms)

    # --- our own round ----------------------------------------------------------------------------------------
    def _begin(self, now: int) -> None:
        local, config = self._local, self._local.config
        self._next_at = now + config.probe_interval_ms
        node = local.probe_list.next(self._is_live)
        member = local.table.get(node) if node is not None else None
        if member is None:
            return
        update = member.update
        self.round = Round(
            sequence=local.next_sequence(),
            target=update.member,
            actor=update.swim_actor,
            ask_at=now + config.probe_timeout_ms,
            ends_at=now + local.awareness.scale(config.probe_interval_ms),
        )
        self._ping(self.round.sequence, update)

    def _is_live(self, node: bytes) -> bool:
        member = self._local.table.get(node)
        return member is not None and member.state in LIVE

    def _ping(self, sequence: int, target: MemberUpdate) -> None:
        local = self._local
        accusation = local.accusation_of(target.member, 0)
        first = [] if accusation is None else [accusation]
        updates, names = self._rumours(wire_size(local.own), first)
        ping = SwimPing(sequence=sequence, sender=local.own, target=target.member, updates=updates, names=names)
        local.send(target.swim_actor, ping)

    def _ask_helpers(self, round: Round) -> None:
        local = self._local
        round.asked = True
        member = local.table.get(round.target.node)
        if member is None or member.update.member != round.target:
            return  # superseded in the meantime; the round ends without a verdict
        others = [
            other for other in local.table if other.state == ALIVE and other.update.member.node != round.target.node
        ]
        for helper in local.pick(local.config.indirect_probes, others):
            round.helpers.append(helper.update.swim_actor)
            updates, _ = self._rumours(wire_size(local.own) + wire_size(member.update), [])
            ask = SwimPingReq(sequence=round.sequence, sender=local.own, target=member.update, updates=updates)
            local.send(helper.update.swim_actor, ask)

    def _failed(self, round: Round, now: int) -> None:
        """Nobody reached the target in time. Missing nacks mean that it may be us (Lifeguard)."""
        local = self._local
        self.round = None
        missing = len(round.helpers) - len(round.nacks)
        local.awareness.apply(missing if round.helpers else 1)
        member = local.table.get(round.target.node)
        if member is not None and member.state in LIVE and member.update.member == round.target:
            self._judge.hear(member.accusation(local.node), now, "no answer to a probe")

    # --- answers ----------------------------------------------------------------------------------------------
    def on_ack(self, ack: SwimAck, sender: bytes) -> None:
        """An answer to our probe or to one for somebody else. A stale, foreign or doubled one changes nothing."""
        round = self.round
        if round is not None and ack.sequence == round.sequence and ack.target == round.target:
            if sender == round.actor or sender in round.helpers:
                self.round = None
                self._local.awareness.apply(-1)
            return
        relay = self.relays.get(ack.sequence)
        if relay is not None and ack.target == relay.target and sender == relay.actor:
            del self.relays[ack.sequence]
            updates, names = self._rumours(0, [update for update in ack.updates if update.member == ack.target][:1])
            answer = SwimAck(
                sequence=relay.asker_sequence,
                target=ack.target,
                incarnation=ack.incarnation,
                updates=updates,
                names=names,
            )
            self._local.send(relay.asker, answer)

    def on_nack(self, nack: SwimNack, sender: bytes) -> None:
        """A helper is well but got no answer yet; each counts once."""
        round = self.round
        if (
            round is not None
            and nack.sequence == round.sequence
            and sender in round.helpers
            and sender not in round.nacks
        ):
            round.nacks.append(sender)

    # --- requests ---------------------------------------------------------------------------------------------
    def on_ping(self, ping: SwimPing, sender: bytes) -> None:
        """Answer for ourselves; say first what the other has to know about itself or believes wrongly about us."""
        local = self._local
        first: list[MemberUpdate] = []
        accusation = local.accusation_of(ping.sender.member, ping.sender.incarnation)
        if accusation is not None:
            first.append(accusation)
        if any(update.member.node == local.node for update in ping.updates):
            first.append(local.own)
        updates, names = self._rumours(0, first)
        ack = SwimAck(
            sequence=ping.sequence,
            target=local.me,
            incarnation=local.own.incarnation,
            updates=updates,
            names=names,
        )
        local.send(sender, ack)

    def on_ping_req(self, ask: SwimPingReq, sender: bytes, now: int) -> None:
        """Probe for somebody else. Beyond RELAYS_MAX the request is dropped: the asker then doubts itself, rightly."""
        local, config = self._local, self._local.config
        if len(self.relays) >= RELAYS_MAX:
            return
        sequence = local.next_sequence()
        self.relays[sequence] = Relay(
            asker=sender,
            asker_sequence=ask.sequence,
            target=ask.target.member,
            actor=ask.target.swim_actor,
            nack_at=now + config.nack_ms,
            ends_at=now + config.probe_interval_ms,
        )
        self._ping(sequence, ask.target)

    def _rumours(self, used: int, first: list[MemberUpdate]) -> tuple[list[MemberUpdate], list[NameUpdate]]:
        """Rumours beside `used` bytes, `first` in front and not twice."""
        size = used + FRAME_OVERHEAD_BYTES + sum(wire_size(update) for update in first)
        updates, names = self._local.piggyback(size)
        return first + [update for update in updates if update not in first], names
