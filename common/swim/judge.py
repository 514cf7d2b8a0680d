"""Verdicts: what a rumour changes, when a suspicion becomes a death, how we answer rumours about ourselves."""

from __future__ import annotations

import msgspec

from common.addresses import short
from common.messages.member import MemberId, MemberUpdate, NameUpdate, SwimGossip
from common.swim.config import MEMBERS_MAX
from common.swim.formulas import confirmations_wanted, suspicion_min_ms
from common.swim.local import Local
from common.swim.outputs import Forgotten, NameChanged, Superseded, Transition, Updated
from common.swim.suspicion import Suspicion
from common.swim.table import ALIVE, DEAD, LEFT, LIVE, SUSPECT, UNKNOWN, Member, admissible


class Judge:
    """All changes of the member table and the name registry go through here. Times are protocol ms."""

    def __init__(self, local: Local) -> None:
        self._local = local

    # --- members ----------------------------------------------------------------------------------------------
    def hear(self, update: MemberUpdate, now: int, reason: str) -> None:
        """One rumour, as gossip or our own finding. What is no news changes nothing."""
        local = self._local
        if not admissible(update):
            return
        if update.member.node == local.node:
            self._about_us(update)
            return
        known = local.table.get(update.member.node)
        if known is None and len(local.table) >= MEMBERS_MAX:
            return
        if update.state == SUSPECT and self._confirms(known, update):
            self._confirm(update, now)
        elif local.table.merge(update, now, reason):
            local.spread(update)
            if update.by == local.node and local.publisher:
                # A rumour's few random sends can miss the one member whose view the orchestrator reads
                # (1 of 600 simulated crashes at n = 5: known there 8 s late).
                local.send(local.publisher, SwimGossip(updates=[update]))
            self._changed(known, update, now, reason)

    def hear_table(self, updates: list[MemberUpdate], now: int, told_by: bytes) -> None:
        """Another member's whole table. Its dead are only suspects to us: they get the chance to answer ourselves."""
        for update in updates:
            if update.state == DEAD:
                update = msgspec.structs.replace(update, state=SUSPECT, by=self._local.node)
                self.hear(update, now, f"dead to {short(told_by)}")
            else:
                self.hear(update, now, f"{update.state} to {short(told_by)}")

    @staticmethod
    def _confirms(known: Member | None, update: MemberUpdate) -> bool:
        return (
            known is not None
            and known.state == SUSPECT
            and known.update.member == update.member
            and known.update.incarnation == update.incarnation
        )

    def _confirm(self, update: MemberUpdate, now: int) -> None:
        suspicion = self._local.suspicions[update.member.node]
        if update.by == self._local.node and suspicion.tell_at is None:
            suspicion.tell_at = now
        if suspicion.confirm(update.by):
            self._local.spread(update)  # with the new accuser: that is what confirms it elsewhere

    def _changed(self, known: Member | None, update: MemberUpdate, now: int, reason: str) -> None:
        local, node = self._local, update.member.node
        before = known.state if known else UNKNOWN
        if known is not None and known.update.member != update.member:
            local.suspicions.pop(node, None)
            self._ended(known.update, f"superseded by boot {update.member.boot}", now)
            before = UNKNOWN
        if update.state == SUSPECT:
            local.suspicions[node] = self._suspicion(update.by, now)
        else:
            local.suspicions.pop(node, None)
        if update.state in LIVE:
            local.probe_list.add(node)
            local.gossip_list.add(node)
        if before == update.state:
            local.out.append(Updated(update))
            return
        local.out.append(Transition(update.member, before, update.state, reason, update))
        if update.state not in LIVE:
            self._bury(update.member, now)

    def _ended(self, last: MemberUpdate, reason: str, now: int) -> None:
        """An older boot is over; if it was still believed to live, that is a death of its own."""
        if last.state in LIVE:
            self._local.out.append(Transition(last.member, last.state, DEAD, reason, last))
            self._bury(last.member, now)

    def _suspicion(self, accuser: bytes, now: int) -> Suspicion:
        local, config = self._local, self._local.config
        shortest = suspicion_min_ms(config.suspicion_mult, local.cluster, config.probe_interval_ms)
        suspicion = Suspicion(
            accuser,
            now,
            wanted=confirmations_wanted(config.confirmations_wanted, local.cluster),
            min_ms=shortest,
            max_ms=shortest * config.suspicion_max_mult,
        )
        if accuser == local.node:
            suspicion.tell_at = now
        return suspicion

    def _about_us(self, update: MemberUpdate) -> None:
        local = self._local
        if update.member.boot > local.me.boot:
            if not local.superseded:
                local.superseded = True
                local.out.append(Superseded(update.member.boot))
        elif update.member.boot < local.me.boot:
            local.spread_own()
        elif local.leaving:
            if update.state != LEFT:
                local.spread_own()
        elif update.incarnation < local.own.incarnation:
            if update.state != ALIVE:
                local.spread_own()  # refuted before, but the teller does not know (memberlist #311)
        elif update.state != ALIVE or update.incarnation > local.own.incarnation:
            local.own = msgspec.structs.replace(local.own, incarnation=update.incarnation + 1)
            local.awareness.apply(1)
            local.spread(local.own)
            local.out.append(Updated(local.own))

    # --- time -------------------------------------------------------------------------------------------------
    def tick(self, now: int) -> None:
        """Suspicions that ran out, and the repeated word to those we accuse."""
        local = self._local
        for node in list(local.suspicions):
            suspicion, member = local.suspicions[node], local.table.get(node)
            assert member is not None
            if suspicion.deadline <= now:
                dead = msgspec.structs.replace(member.update, state=DEAD, by=local.node)
                self.hear(dead, now, f"silent for {now - suspicion.started} ms after suspicion")
            elif suspicion.tell_at is not None and suspicion.tell_at <= now:
                # Gossip spends its few sends within a second; behind a stalled link the accused would never hear.
                suspicion.tell_at = now + local.config.probe_interval_ms
                local.send(member.update.swim_actor, SwimGossip(updates=[member.update]))

    def deadline(self) -> int | None:
        """When tick has something to do."""
        times = [suspicion.deadline for suspicion in self._local.suspicions.values()]
        times += [suspicion.tell_at for suspicion in self._local.suspicions.values() if suspicion.tell_at is not None]
        return min(times, default=None)

    def doubt(self, now: int) -> None:
        """We were cut off: suspicions of the time before begin anew, and everyone hears of them again."""
        local = self._local
        for node, suspicion in local.suspicions.items():
            if now - suspicion.started <= local.config.dubious_ms:
                suspicion.restart(now)
                if suspicion.tell_at is not None:
                    suspicion.tell_at = now
                if member := local.table.get(node):
                    local.spread(member.update)

    def forget(self, older_than: int) -> None:
        """Drop the dead and the left of before a protocol time."""
        local = self._local
        for member in [member for member in local.table if member.state not in LIVE and member.since < older_than]:
            local.table.forget(member.update.member.node)
            local.rumours.drop(member.update.member.node)
            local.out.append(Forgotten(member.update.member))

    # --- names ------------------------------------------------------------------------------------------------
    def hear_name(self, update: NameUpdate, now: int) -> None:
        """One entry of somebody's name registry."""
        local = self._local
        ours = update.node == local.node and update.boot in (0, local.me.boot)
        if ours and update.tombstone and not local.leaving and update.name not in local.withdrawn:
            known = local.names.get(update.name)
            if known is None or known.node == local.node:
                # Buried with us while we were thought dead: we live, so it lives.
                update = msgspec.structs.replace(update, generation=update.generation + 1, tombstone=False)
        self.set_name(update, now)

    def set_name(self, update: NameUpdate, now: int) -> None:
        """Merge an entry; if it is news, pass it on."""
        local = self._local
        before = local.names.resolve(update.name)
        if not local.names.merge(update, now):
            return
        local.spread_name(update)
        after = local.names.resolve(update.name)
        if after != before:
            local.out.append(NameChanged(update.name, after))

    def _bury(self, member: MemberId, now: int) -> None:
        """Names of the dead resolve to nothing (rust-swactor.md 3.2)."""
        for entry in self._local.names.of(member.node, member.boot):
            self.set_name(self._local.names.tombstone(entry), now)
