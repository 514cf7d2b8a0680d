"""What holds inside of the processes after each of their turns: foreign ids advance nothing, SWIM only climbs, bounds.

Beside cluster_watch, which sees a run as its user does. Everything is compared with what the simulation itself knows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from common.addresses import Role
from common.limits import (
    MAILBOX_MESSAGES_MAX,
    PROMPT_QUEUE_LEN_MAX,
    SESSION_WINDOW_BYTES,
    SESSION_WINDOW_MESSAGES,
)
from common.swim.core import SwimCore
from common.swim.table import DEAD, RANK, precedence
from services.membership.core import MembershipActor
from services.orchestrator.base import CLOSING, Phase
from services.prompt_gateway.core import GatewayActor
from tests.sim.cluster_world import SimHost, Violation

if TYPE_CHECKING:
    from tests.sim.cluster_engine import SimWorker
    from tests.sim.cluster_run import Cluster

BOUNDS_EVERY = 8
"""Turns of a process between two looks at its queues."""
AFTER_ACK = (Phase.ACK, Phase.BOOTSTRAP, Phase.WEIGHTS, Phase.RPC, Phase.SERVING, *CLOSING)
AGAIN = (Phase.RESTART, Phase.START, Phase.READINESS)
"""Phases that a run with restarts goes through again, while the workers that live are acknowledged."""


class DeepWatch:
    """One per cluster; `after_turn` is called by Watch."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self._heights: dict[tuple[bytes, int], dict[bytes, tuple[int, int, int]]] = {}
        self._turns = 0

    def after_turn(self, host: SimHost) -> None:
        """After a turn of this process."""
        self._turns += 1
        if host.role is Role.AGENT:
            worker = next((one for one in self.cluster.provider.workers() if one.host is host), None)
            if worker is not None:
                self._agent(worker)
                if (swim := worker.swim.host) is not None:
                    self._lattice(host, swim.core)
        elif host.role is Role.MEMBERSHIP:
            actor = self.cluster.actors[Role.MEMBERSHIP]
            if isinstance(actor, MembershipActor) and actor.host is not None:
                self._lattice(host, actor.host.core)
        if self._turns % BOUNDS_EVERY == 0:
            self._bounds(host)

    # --- foreign ids (S1 6.12, 9.6, 9.19) -----------------------------------------------------------------------
    def _agent(self, worker: SimWorker) -> None:
        mine, agent = worker.identity, worker.actor
        provision = agent.core.provision
        if provision is not None:
            asked = (provision.run_id, provision.node_id, provision.stage_index)
            if asked != (mine.run_id, mine.node_id, mine.stage_index):
                raise Violation(f"{worker.host.name} took a provision for {asked}")
        is_current = self.cluster.started and self.cluster.run.actor_address == mine.orchestrator
        if is_current:
            phase = self.cluster.run.phase
            after_ack = (*AFTER_ACK, *AGAIN) if self.cluster.plan.restart else AFTER_ACK
            if agent.core.stopping_run is not None and phase not in CLOSING:
                raise Violation(f"{worker.host.name} stops its stage in phase {phase}")
            if agent.readiness.acknowledged and phase not in after_ack:
                raise Violation(f"{worker.host.name} was acknowledged in phase {phase}")
            if provision is not None and phase not in after_ack:
                raise Violation(f"{worker.host.name} was provisioned in phase {phase}")
        gateway = self.cluster.actors.get(Role.GATEWAY)
        loop = gateway.loop if isinstance(gateway, GatewayActor) and not self.cluster.watch.had_other_gateway else None
        if agent.desk.active is not None and loop is not None and agent.desk.active.request_id >= loop.next_id:
            raise Violation(f"{worker.host.name} answers request {agent.desk.active.request_id}, which nobody has made")

    # --- SWIM (anchors.md C7 8, 9) ------------------------------------------------------------------------------
    def _lattice(self, host: SimHost, core: SwimCore) -> None:
        known = self._heights.setdefault((host.node.identity.key, host.boot), {})
        seen = set()
        for update in core.members():
            node = update.member.node
            height, before = precedence(update), known.get(node)
            if before is not None and height < before:
                raise Violation(f"{host.name}: member {update.logical_id} goes down from {before} to {height}")
            known[node] = height
            seen.add(node)
        for node in known.keys() - seen:
            # It may have died and been forgotten within one turn.
            if known[node][2] < RANK[DEAD] and self._lives(node):
                raise Violation(f"{host.name} forgot a living member that was neither dead nor left to it")
            del known[node]

    def _lives(self, node: bytes) -> bool:
        """A worker that has not said that it leaves, or the membership service."""
        for worker in self.cluster.provider.living():
            if worker.host.node.identity.key == node and worker.swim.host.core._local.leaving:
                return False
        return any(one.alive and one.node.identity.key == node for one in self.cluster.world.members.values())

    # --- limits (S1 6.11) ---------------------------------------------------------------------------------------
    def _bounds(self, host: SimHost) -> None:
        for slot in host.node.system._slots.values():
            if slot.queued > MAILBOX_MESSAGES_MAX:
                raise Violation(f"{host.name}: a mailbox holds {slot.queued} messages")
        for session in host.node._sessions._stirred.values():
            count, size = len(session._unacked), session._unacked_bytes
            # One message goes whatever its size.
            if count > SESSION_WINDOW_MESSAGES or (count > 1 and size > SESSION_WINDOW_BYTES):
                raise Violation(f"{host.name}: {count} messages of {size} bytes are on their way in one session")
            if session._queued:
                self.cluster.watch.facts["window full"] += 1
        if host.role is Role.GATEWAY:
            gateway = self.cluster.actors[Role.GATEWAY]
            assert isinstance(gateway, GatewayActor)
            if gateway.loop is not None and len(gateway.loop.queue) > PROMPT_QUEUE_LEN_MAX:
                raise Violation(f"{len(gateway.loop.queue)} prompts wait")


__all__ = ["DeepWatch"]
