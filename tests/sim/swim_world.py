"""A cluster of SWIM cores on virtual time: seeded delays, loss, freezes, crashes, outages of the one relay.

The network is ZeroMQ's where it matters: first in, first out per pair of members; a frozen member's messages wait;
what is on its way when the relay dies is lost. `loss` models the datagram network of anchors.md C5.
"""

from __future__ import annotations

import heapq
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from common.codec import Message
from common.messages.member import MemberId, MemberUpdate
from common.swim.config import LAN, SwimConfig
from common.swim.core import SwimCore
from common.swim.outputs import Output, Send, Transition
from common.swim.queue import Rumours
from common.swim.spreader import Seed
from common.swim.table import DEAD, Member

FIRST_BOOT = 1000


def node_key(index: int) -> bytes:
    return b"node" + index.to_bytes(28, "big")


def actor_of(node: bytes, boot: int) -> bytes:
    return b"swim" + node[24:] + boot.to_bytes(20, "big")


@dataclass(slots=True)
class Host:
    core: SwimCore
    node: bytes
    actor: bytes
    up: bool = True
    frozen_until: int = 0
    linked: bool = True
    inbox: list[tuple[bytes, Message]] = field(default_factory=list)
    wake_at: int = -1


@dataclass(frozen=True, slots=True)
class Seen:
    at: int
    by: bytes
    transition: Transition


class SwimWorld:
    """Member 0 is the membership service: everyone's seed. Times are ms from 0."""

    def __init__(
        self,
        members: int,
        seed: int,
        *,
        config: SwimConfig = LAN,
        loss: float = 0.0,
        delay_ms: tuple[float, float] = (0.5, 2.0),
        notice_ms: tuple[int, int] = (0, 3000),
        pauses: bool = True,
        validate: bool = False,
        formed: bool = False,
    ) -> None:
        """formed: everyone knows everyone from the start, for clusters too large to watch them join."""
        self.rng = random.Random(seed)
        self.now = 0
        self.config, self.loss, self.delay_ms = config, loss, delay_ms
        self.notice_ms, self.pauses, self.validate = notice_ms, pauses, validate
        self.relay_up = True
        self.seen: list[Seen] = []
        self.sent: Counter[str] = Counter()
        self.sent_by_kind: Counter[str] = Counter()
        self.hosts: dict[bytes, Host] = {}
        self._by_actor: dict[bytes, Host] = {}
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0
        self._free_at: dict[tuple[bytes, bytes], float] = {}
        self._epoch = 0
        for index in range(members):
            self.start(index, joins=not formed)
        if formed:
            self._form()

    # --- what happens -----------------------------------------------------------------------------------------
    def start(
        self, index: int, boot: int = FIRST_BOOT, metadata: dict[str, str] | None = None, *, joins: bool = True
    ) -> Host:
        """A member (re)starts: a fresh core that knows only where the seed is."""
        node = node_key(index)
        actor = actor_of(node, boot)
        own = MemberUpdate(
            member=MemberId(node=node, boot=boot),
            state="alive",
            incarnation=0,
            swim_actor=actor,
            logical_id=f"node {index}",
            role="agent" if index else "membership",
            metadata=metadata or {},
        )
        core = SwimCore(own, self.config, random.Random(self.rng.getrandbits(64)), self.now)
        host = Host(core, node, actor)
        self.hosts[node] = self._by_actor[actor] = host
        seed = self.hosts[node_key(0)]
        if not joins:
            return host
        if index:
            self._do(host, core.set_seed(Seed(seed.node, seed.core.own.member.boot, seed.actor), self.now))
        else:
            for other in self.hosts.values():
                if other is not host and other.up:
                    # The route view shows the new membership service to everyone.
                    self._do(other, other.core.set_seed(Seed(node, boot, actor), self.now))
        self._do(host, core.tick(self.now))
        return host

    def _form(self) -> None:
        everyone = {node: Member(host.core.own, 0, "formed") for node, host in self.hosts.items()}
        for node, host in self.hosts.items():
            local = host.core._local
            local.table._members = {other: member for other, member in everyone.items() if other != node}
            local.table.live = len(everyone) - 1
            local.rumours = Rumours()
            for other in local.table._members:
                local.probe_list.add(other)
                local.gossip_list.add(other)
            # As spread over a period as those of members that joined one after the other.
            self.at(self.rng.randrange(self.config.probe_interval_ms), partial(self._begin, host))

    def _begin(self, host: Host) -> None:
        self._do(host, host.core.tick(self.now))

    def crash(self, index: int) -> None:
        """A process is gone; what is on its way to it is lost."""
        host = self.hosts[node_key(index)]
        host.up = False
        del self._by_actor[host.actor]

    def leave(self, index: int) -> None:
        host = self.hosts[node_key(index)]
        self._do(host, host.core.leave(self.now))

    def freeze(self, index: int, ms: int) -> None:
        """SIGSTOP or a held GIL: neither timers nor messages are handled; they wait."""
        host = self.hosts[node_key(index)]
        host.frozen_until = self.now + ms
        self.at(host.frozen_until, lambda: self._thaw(host))

    def _thaw(self, host: Host) -> None:
        waiting, host.inbox = host.inbox, []
        if not host.up:
            return
        # The loop drains its sockets before it looks at its timers, but some timers may come first.
        cut = self.rng.randrange(len(waiting) + 1)
        for sender, message in waiting[:cut]:
            self._do(host, host.core.on_message(message, sender, self.now))
        self._do(host, host.core.tick(self.now))
        for sender, message in waiting[cut:]:
            self._do(host, host.core.on_message(message, sender, self.now))

    def outage(self, ms: int) -> None:
        """The relay dies and comes back. Each member notices on its own, between notice_ms[0] and notice_ms[1]."""
        self.relay_up = False
        self._epoch += 1
        back = self.now + ms
        self.at(back, self._relay_back)
        for host in list(self.hosts.values()):
            down_at = self.now + self.rng.randint(*self.notice_ms)
            up_at = back + self.rng.randint(0, 500)
            if self.pauses and down_at < back:
                self.at(down_at, lambda host=host: host.up and self._do(host, host.core.pause(self.now)))
                self.at(up_at, lambda host=host: host.up and self._do(host, host.core.resume(self.now)))

    def _relay_back(self) -> None:
        self.relay_up = True

    # --- the world --------------------------------------------------------------------------------------------
    def at(self, when: float, call: Callable[[], object]) -> None:
        self._count += 1
        heapq.heappush(self._heap, (when, self._count, call))  # type: ignore[arg-type]

    def run(self, ms: int) -> None:
        """Let virtual time pass."""
        end = self.now + ms
        while self._heap and self._heap[0][0] <= end:
            when, _, call = heapq.heappop(self._heap)
            self.now = max(self.now, int(when))
            call()
        self.now = end

    def run_until(self, done: Callable[[], bool], limit_ms: int, step_ms: int = 100) -> int:
        """Let time pass until done() or the limit; returns the ms that passed."""
        begin = self.now
        while not done() and self.now - begin < limit_ms:
            self.run(step_ms)
        return self.now - begin

    def _do(self, host: Host, outputs: list[Output]) -> None:
        for output in outputs:
            if isinstance(output, Send):
                self._post(host, output)
            elif isinstance(output, Transition):
                self.seen.append(Seen(self.now, host.node, output))
        if self.validate:
            host.core.check()
        due = host.core.next_deadline()
        if due is not None and due != host.wake_at:
            host.wake_at = due
            self.at(max(due, self.now), lambda: self._wake(host, due))

    def _wake(self, host: Host, due: int) -> None:
        if host.wake_at != due:
            return
        host.wake_at = -1
        if host.up and host.frozen_until <= self.now:
            self._do(host, host.core.tick(self.now))

    def _post(self, host: Host, send: Send) -> None:
        self.sent["all"] += 1
        self.sent_by_kind[type(send.message).__name__] += 1
        if not self.relay_up or (self.loss and self.rng.random() < self.loss):
            return
        arrives = self.now + self.rng.uniform(*self.delay_ms)
        pair = (host.actor, send.dst)
        arrives = self._free_at[pair] = max(arrives, self._free_at.get(pair, 0.0))
        epoch = self._epoch
        self.at(arrives, lambda: self._arrive(epoch, host.actor, send))

    def _arrive(self, epoch: int, sender: bytes, send: Send) -> None:
        host = self._by_actor.get(send.dst)
        if host is None or epoch != self._epoch:
            return
        if host.frozen_until > self.now:
            host.inbox.append((sender, send.message))
        else:
            self._do(host, host.core.on_message(send.message, sender, self.now))

    # --- what is seen -----------------------------------------------------------------------------------------
    def live(self) -> list[Host]:
        return [host for host in self.hosts.values() if host.up and not host.core.has_left]

    def states(self, index: int) -> list[str]:
        """What each other live member believes of one."""
        node = node_key(index)
        return [
            member.state if (member := host.core.member(node)) else "unknown"
            for host in self.live()
            if host.node != node
        ]

    def buried(self, index: int) -> bool:
        """Everyone holds it for dead."""
        return set(self.states(index)) == {DEAD}

    def agreed(self) -> bool:
        """Everyone holds everyone for alive, and nobody else."""
        everyone = {host.core.own.member for host in self.live()}
        return all(
            {update.member for update in host.core.members() if update.state == "alive"} == everyone
            for host in self.live()
        )

    def deaths(self, since: int = 0) -> list[Seen]:
        return [seen for seen in self.seen if seen.at >= since and seen.transition.to_state == DEAD]

    def settle(self) -> None:
        """Everybody joined and the rumours of it have died away."""
        passed = self.run_until(self.agreed, 30_000)
        assert passed < 30_000, "the cluster did not form"
        self.run(5_000)

    def digest(self) -> str:
        """Everything that was seen, for comparing two runs of one seed."""
        return repr([(seen.at, seen.by, seen.transition.peer, seen.transition.to_state) for seen in self.seen])
