"""Dissemination: gossip between probes, exchange of whole tables, the way in (join) and out (leave)."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from common.messages.member import SwimGossip, SwimPushPull
from common.swim.formulas import push_pull_period_ms
from common.swim.judge import Judge
from common.swim.local import FRAME_OVERHEAD_BYTES, Local
from common.swim.outputs import Left, Transition
from common.swim.table import ALIVE, DEAD, LEFT, LIVE


@dataclass(frozen=True, slots=True)
class Seed:
    """Where a member asks its way in: the membership service's main actor, which is its SWIM actor too."""

    node: bytes
    boot: int
    actor: bytes


class Spreader:
    """Times are protocol ms."""

    def __init__(self, local: Local, judge: Judge, now: int) -> None:
        self._local, self._judge = local, judge
        self._gossip_at = now
        self._push_pull_at = now + local.rng.randrange(1, local.config.push_pull_ms)
        self._seed: Seed | None = None
        self._join_at: int | None = None
        self._leave_by: int | None = None
        self.has_left = False

    @property
    def joined(self) -> bool:
        """Whether the seed has answered with its table."""
        return self._seed is not None and self._join_at is None

    # --- time -------------------------------------------------------------------------------------------------
    def tick(self, now: int) -> None:
        """Gossip, exchange, ask again to join, end the leave: whatever is due."""
        local, config = self._local, self._local.config
        if self._gossip_at <= now and self._has_rumours():
            self._gossip_at = now + config.gossip_interval_ms
            self._gossip(now)
        if self._leave_by is not None:
            if now >= self._leave_by or not self._has_rumours():
                self.finish_leave()
            return
        if self._join_at is not None and self._join_at <= now and self._seed is not None:
            self._join_at = now + config.join_resend_ms
            self._offer(self._seed.actor)
        if self._push_pull_at <= now:
            self._push_pull_at = now + push_pull_period_ms(config.push_pull_ms, local.cluster)
            self._exchange(now)

    def deadline(self) -> int | None:
        """When tick has something to do."""
        times = [self._gossip_at] if self._has_rumours() else []
        if self._leave_by is not None:
            times.append(self._leave_by)
        elif not self.has_left:
            times.append(self._push_pull_at)
            if self._join_at is not None:
                times.append(self._join_at)
        return min(times, default=None)

    def resume(self, now: int) -> None:
        """The link is back: say at once what waited."""
        self._gossip_at = min(self._gossip_at, now)

    # --- gossip -----------------------------------------------------------------------------------------------
    def _has_rumours(self) -> bool:
        return len(self._local.rumours) > 0 or len(self._local.name_rumours) > 0

    def _gossip(self, now: int) -> None:
        """To the next few of a shuffled list: in a small cluster a rumour's budget reaches everyone, which independent
        random picks (memberlist's) do not."""
        local = self._local
        since = now - local.config.gossip_to_dead_ms
        told: list[bytes] = []
        for _ in range(local.config.gossip_fanout):
            node = local.gossip_list.next(lambda node: self._listens(node, since))
            member = local.table.get(node) if node is not None and node not in told else None
            if node is None or member is None:
                return
            updates, names = local.piggyback(FRAME_OVERHEAD_BYTES)
            if not updates and not names:
                return
            told.append(node)
            local.send(member.update.swim_actor, SwimGossip(updates=updates, names=names))

    def _listens(self, node: bytes, since: int) -> bool:
        """The living, and those dead so recently that they may be alive and have to hear that they are not."""
        member = self._local.table.get(node)
        return member is not None and (member.state in LIVE or member.since >= since)

    # --- whole tables -----------------------------------------------------------------------------------------
    def _exchange(self, now: int) -> None:
        local = self._local
        for member in local.pick(1, local.live_members()):
            self._offer(member.update.swim_actor)
        # Two halves that hold each other dead would never speak again (serf's reconnect).
        for member in local.pick(1, [member for member in local.table if member.state == DEAD]):
            self._offer(member.update.swim_actor)
        self._judge.forget(now - local.config.forget_dead_ms)
        local.names.purge(now - local.config.name_tombstone_ms)

    def _offer(self, actor: bytes, reply: bool = False) -> None:
        local = self._local
        table = [member.update for member in local.table]
        local.send(actor, SwimPushPull(sender=local.own, updates=table, names=list(local.names), reply=reply))

    def on_push_pull(self, offer: SwimPushPull, now: int) -> None:
        """Merge the other's table and, unless it is an answer, send ours."""
        accusation = self._local.accusation_of(offer.sender.member, offer.sender.incarnation)
        self._judge.hear_table(offer.updates, now, offer.sender.member.node)
        for name in offer.names:
            self._judge.hear_name(name, now)
        if not offer.reply:
            self._offer(offer.sender.swim_actor, reply=True)
        elif self._seed is not None and (self._seed.node, self._seed.boot) == (
            offer.sender.member.node,
            offer.sender.member.boot,
        ):
            self._join_at = None
        if accusation is not None and offer.reply:
            self._local.send(offer.sender.swim_actor, SwimGossip(updates=[accusation]))

    # --- in and out -------------------------------------------------------------------------------------------
    def set_seed(self, seed: Seed | None, now: int) -> None:
        """The seed is known, is a new one (it restarted with an empty table), or is gone."""
        if seed != self._seed:
            self._seed = seed
            self._local.publisher = seed.actor if seed is not None else b""
            self._join_at = now if seed is not None else None

    def rejoin_if_lost(self, now: int) -> None:
        """We hold the seed for dead although it is routed: ask it each second, so that both learn better."""
        if self._seed is None or self._join_at is not None:
            return
        member = self._local.table.get(self._seed.node)
        if member is None or (member.state not in LIVE and member.update.member.boot == self._seed.boot):
            self._join_at = now + self._local.config.join_resend_ms

    def leave(self, now: int) -> None:
        """Say that we go: at once to the seed and some others, then by gossip until the rumour's budget is spent."""
        local = self._local
        if local.leaving:
            return
        local.leaving = True
        local.own = msgspec.structs.replace(local.own, state=LEFT, by=local.node)
        local.spread(local.own)
        local.out.append(Transition(local.me, ALIVE, LEFT, "leaves", local.own))
        self._leave_by = now + local.config.leave_ms
        self._gossip_at = now + local.config.gossip_interval_ms
        word = SwimGossip(updates=[local.own])
        others = local.live_members()
        seed = [member for member in others if self._seed and member.update.member.node == self._seed.node]
        some = local.pick(local.config.gossip_fanout, [member for member in others if member not in seed])
        for member in seed + some:
            local.send(member.update.swim_actor, word)
        if not others:
            self.finish_leave()

    def finish_leave(self) -> None:
        """Nobody hears it any more, or everybody has: out."""
        self._leave_by = None
        if not self.has_left:
            self.has_left = True
            self._local.out.append(Left())
