"""What must hold at each event and at the end of a cluster run, against the simulation's own knowledge of the truth.

The cores' check() hooks run beside this after every message (validate=True in every node).
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from common.addresses import Role
from common.messages.bus import MemberEntry
from services.datastream_collector.core import CollectorActor
from services.datastream_collector.frames import RING_BYTES_MAX
from services.membership.core import MembershipActor
from services.orchestrator.base import CLOSING, Phase, RunOver
from services.orchestrator.core import RunActor
from services.prompt_gateway.core import GatewayActor, RpcState
from tests.sim.bus_world import key_of
from tests.sim.cluster_deep import DeepWatch
from tests.sim.cluster_faults import HARMLESS, SERVICE_DEATHS
from tests.sim.cluster_world import FORGED, SimHost, Violation
from worker.stage_controller import StageState

if TYPE_CHECKING:
    from tests.sim.cluster_run import Cluster

ORDER = {phase: at for at, phase in enumerate(Phase)}


class Watch:
    """One per cluster."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.facts: Counter[str] = Counter()
        self.killed: list[Role] = []
        self._phase = Phase.SERVICES
        self._overs = 0
        self._was_alive: set[bytes] = set()
        self._was_ready: set[bytes] = set()
        self._said_dead: set[bytes] = set()
        self._is_left_said = False
        """A run has recorded that it could not stop its workers; its one error line may name what went wrong before."""
        self._accepted: dict[tuple[int, int], bool] = {}
        """(connection, client's request id) of prompts that the gateway took; whether it still owes."""
        self.had_other_gateway = False
        """A gateway died: the next one counts prompts from 1 again."""
        self.deep = DeepWatch(cluster)

    def new_run(self) -> None:
        self._phase, self._overs = Phase.SERVICES, 0

    # --- after each turn ------------------------------------------------------------------------------------------
    def after_turn(self, host: SimHost) -> None:
        """Called after each turn of each process."""
        self.deep.after_turn(host)
        match host.role:
            case Role.ORCHESTRATOR:
                self._run()
            case Role.GATEWAY:
                self._gateway()
            case Role.MEMBERSHIP:
                self._membership()
            case Role.AGENT:
                for worker in self.cluster.provider.workers():
                    if worker.host is host and worker.actor.core.state is StageState.READY_IDLE:
                        self._was_ready.add(host.node.identity.key)
            case Role.COLLECTOR:
                collector = self.cluster.actors[Role.COLLECTOR]
                assert isinstance(collector, CollectorActor)
                if collector.ring._bytes > RING_BYTES_MAX:
                    raise Violation("the collector's ring is over its bytes")

    def _membership(self) -> None:
        actor = self.cluster.actors[Role.MEMBERSHIP]
        assert isinstance(actor, MembershipActor)
        for key, item in actor._tables["members"].items.items():
            if isinstance(item, MemberEntry) and item.state == "alive":
                self._was_alive.add(key)

    def _run(self) -> None:
        """The run's facts are true ones, and its phases go one way (S1 9.4-9.7, 9.19)."""
        run = self.cluster.actors[Role.ORCHESTRATOR]
        assert isinstance(run, RunActor)
        is_again = run.restarting or self._phase is Phase.RESTART
        if ORDER[run.phase] < ORDER[self._phase] and not is_again:
            raise Violation(f"the run goes back from {self._phase} to {run.phase}")
        self._phase = run.phase
        truth = {worker.host.node.identity.key: worker for worker in self.cluster.provider.workers()}
        for worker in run.workers.values():
            if not worker.node_key:
                continue
            real = truth.get(worker.node_key)
            if real is None:
                raise Violation("a worker is started that the provider does not know")
            if worker.readiness_id not in (0, 1):
                raise Violation(f"readiness {worker.readiness_id} was never reported by the worker")
            if worker.node_actor and worker.node_actor != real.agent:
                raise Violation("the node actor is not the worker's")
            is_dead = worker.dead_since_ms is not None and run.phase not in CLOSING
            if is_dead and worker.node_key not in self._said_dead:
                self._said_dead.add(worker.node_key)
                self.facts["worker dead"] += 1
            if worker.acked and not real.actor.readiness.acknowledged:
                raise Violation("acknowledged, but the worker never was")
            if worker.alive and worker.node_key not in self._was_alive:
                raise Violation("alive, but membership never said so")
            is_routed = (worker.node_actor, worker.node_key) in self.cluster.world.ever_routed
            if worker.routed and not is_routed:
                raise Violation("routed, but no router ever had its route")
            if worker.acks_sent and (worker.node_key not in self._was_alive or not is_routed or not worker.node_actor):
                raise Violation("acknowledged before all three facts of readiness")
            if worker.weights and not real.engine.loaded:
                raise Violation("weights ready, but the engine never loaded them")
            # A stage may become ready and fault in one turn, which nobody sees here.
            if worker.stage_ready and worker.node_key not in self._was_ready and not real.actor.core.weights_ready:
                raise Violation("stage ready, but its stage never was")

    def _gateway(self) -> None:
        gateway = self.cluster.actors[Role.GATEWAY]
        assert isinstance(gateway, GatewayActor)
        for connection in gateway.connections.values():
            if (work := connection.in_flight) is not None:
                self._accepted[work.conn, work.client_id] = True
            if connection.held_bytes > 1024 * 1024:
                raise Violation("a line longer than its limit is held")

    def rpc_opened(self) -> None:
        """S1 9.4: every prerequisite, by the truth and not by what the run believes. At the moment of the bind: its
        end may be said in the same turn."""
        run = self.cluster.run
        self.facts["rpc_opened"] += 1
        workers = list(run.workers.values())
        if not workers or not all(
            worker.ready and worker.acked and worker.weights and worker.stage_ready for worker in workers
        ):
            raise Violation("the prompt RPC is open without all readiness facts")
        edges = self.cluster.gateway_edges
        if self.cluster.plan.stages > 1 and (edges is None or not edges.were_open):
            raise Violation("the prompt RPC is open without both token endpoints")

    def departed(self) -> None:
        """Long after the run: who was killed is not alive to membership, whether or not anybody told it so."""
        host, actor = self.cluster.hosts.get(Role.MEMBERSHIP), self.cluster.actors.get(Role.MEMBERSHIP)
        if host is None or not host.alive or not isinstance(actor, MembershipActor) or actor.host is None:
            return
        alive = {update.member.node for update in actor.host.core.members() if update.state == "alive"}
        for worker in self.cluster.provider.workers():
            if not worker.host.alive and worker.host.node.identity.key in alive:
                raise Violation(f"{worker.host.name} is dead, and membership has not noticed")
        self.facts["departed"] += 1

    def converged(self) -> None:
        """Long after the faults everybody knows the same routes, and who lives is alive to everybody."""
        cluster = self.cluster
        routes = cluster.world.doors[Role.ROUTER].broker.owners
        hosts = [host for host in cluster.world.members.values() if isinstance(host, SimHost) and host.alive]
        workers = [host.node.identity.key for host in hosts if host.role is Role.AGENT]
        for host in hosts:
            seen = {route.address: route.node for route in host.node.views.routes.entries()}
            if seen != routes:
                raise Violation(f"{host.name} does not know the routes that the router knows")
            if missing := [one for one, _, _ in host.node.system.addresses() if routes.get(one) != key_of(host.name)]:
                raise Violation(f"{len(missing)} actors of {host.name} have no route")
            if host.role in (Role.GATEWAY, Role.ORCHESTRATOR):
                for worker in workers:
                    if (state := host.node.views.members.state(worker)) != "alive":
                        raise Violation(f"a living worker is {state} to {host.name}")
        for one in cluster.provider.living():
            core = one.swim.host.core
            believed = {update.member.node for update in core.members() if update.state == "alive"}
            if believed != {*workers, key_of(Role.MEMBERSHIP)}:
                raise Violation(f"{one.host.name} believes other members alive than those that are")
        self.facts["converged"] += 1

    # --- the ends -------------------------------------------------------------------------------------------------
    def run_over(self, over: RunOver) -> None:
        """One result a run, with one sentence where it failed (S1 10.1)."""
        self._overs += 1
        if self._overs > 1:
            raise Violation("a run is over twice")
        if (over.status != 0) != bool(over.error):
            raise Violation(f"status {over.status} with error {over.error!r}")
        if over.error and ("\n" in over.error or not over.error.strip()):
            raise Violation(f"the error is no sentence: {over.error!r}")
        if FORGED in over.error:
            raise Violation(f"the run ended for the word of somebody else: {over.error!r}")
        if over.status not in (0, 1):
            raise Violation(f"exit status {over.status}")
        left = [worker.host.name for worker in self.cluster.provider.living()]
        self._is_left_said |= bool(self.cluster.run.result.stop_error)
        if left and not self.cluster.run.result.stop_error:
            raise Violation(f"the run is over, but {', '.join(left)} lives and nobody says so")

    def runs_ended(self) -> None:
        """A run that was not killed has had its result."""
        host = self.cluster.hosts[Role.ORCHESTRATOR]
        killed = (host.status or 0) < 0
        if self._overs != (0 if killed else 1) and not (killed and self._overs <= 1):
            raise Violation(f"{self._overs} results, exit status {host.status}")

    def alone(self) -> None:
        """The launcher was killed: every service is gone of itself within OWNER_GONE_EXIT_MS (design.md 2)."""
        left = [host.name for host in self.cluster.hosts.values() if host.alive]
        if left:
            raise Violation(f"still there long after the launcher's death: {', '.join(left)}")
        self.facts["owner gone"] += 1

    def leases(self) -> None:
        """Whom nobody could stop has had no lease for longer than one lasts: it has stopped itself (S1 10.12)."""
        if left := [worker.host.name for worker in self.cluster.provider.living()]:
            raise Violation(f"lives on without a lease: {', '.join(left)}")

    def finish(self) -> None:
        """After the launcher's end nothing is left, and everybody has got what was owed."""
        cluster = self.cluster
        died = {fault.kind for fault in cluster.plan.faults if fault.kind in SERVICE_DEATHS}
        left = [worker.host.name for worker in cluster.provider.living()]
        reported = self._is_left_said or any("stop" in over.error for over in cluster.results)
        is_alone = cluster.plan.rented and {"crash_provisioner", "crash_orchestrator"} <= died  # see `leases`
        if left and not (reported or is_alone):
            raise Violation(f"workers are left and nobody says so: {', '.join(left)}")
        for client in cluster.clients:
            for asked in client.asked:
                self._check_asked(client, asked, "crash_gateway" in died)
        if "crash_provisioner" not in died and (holes := cluster.disk.holes()):
            raise Violation(f"lost without a gap record: {'; '.join(holes)}")
        if self.killed and not died:
            raise Violation(f"had to be killed at the end: {', '.join(self.killed)}")
        gateway = cluster.actors.get(Role.GATEWAY)
        if isinstance(gateway, GatewayActor) and gateway.state is not RpcState.CLOSED and not died:
            raise Violation(f"the prompt RPC is {gateway.state} at the end")
        if cluster.plan.light:
            self._light()

    def _check_asked(self, client: object, asked: object, died: bool) -> None:
        from tests.sim.cluster_clients import Asked, Client

        assert isinstance(client, Client) and isinstance(asked, Asked)
        self.facts[asked.terminal or "no terminal"] += 1
        if asked.terminal or client.left or died:
            return
        if (asked.conn, asked.request_id) in self._accepted:
            raise Violation(f"{client.name}: request {asked.request_id} was accepted and got no terminal event")

    def _light(self) -> None:
        """Only what a run has to survive happened, one at a time: it ends well, and no prompt failed but by fault."""
        for over in self.cluster.results:
            if over.status:
                raise Violation(f"the run did not survive: {over.error}")
        if not {fault.kind for fault in self.cluster.plan.faults} <= HARMLESS:
            return
        for client in self.cluster.clients:
            faults = [asked.error for asked in client.asked if asked.terminal == "fault" and not client.left]
            if faults and "shutting down" not in faults[0]:  # the run was stopped before the client was done
                raise Violation(f"{client.name}: a prompt failed for no reason: {faults[0]}")


__all__ = ["CLOSING", "Watch"]
