"""Another attempt at a node ([runtime] on_worker_loss = "restart"): first the old worker goes, whatever state it is in,
so that there are never two of a stage. Part of the provisioner's actor.
"""

from __future__ import annotations

from common.actors import Ctx
from common.effects import JobDone, Log, RunJob
from common.limits import provider_stop_ms
from common.messages.provision import NodeFailed, NodeProvisionSpec
from common.records import EventKind
from common.service_actor import ServiceActor
from services.provisioner.admission import Admissions
from services.provisioner.conversion import Record, event
from services.provisioner.state import NodeState, Run, Stopping, WorkerNode


class Replacing(ServiceActor):
    """What it needs of the actor, and the replacement itself; check() and the rest are the actor's."""

    _run: Run
    _stopping: Stopping | None
    _admissions: Admissions

    def _begin(self, node: WorkerNode, ctx: Ctx) -> None:
        raise NotImplementedError

    def _fail(self, node: WorkerNode, error: str, ctx: Ctx) -> None:
        raise NotImplementedError

    def _pump_stop(self, ctx: Ctx) -> None:
        raise NotImplementedError

    def _emit(self, record: Record, ctx: Ctx) -> None:
        raise NotImplementedError

    def _key(self, node: WorkerNode) -> str:
        return f"{self._run.epoch}/{node.spec.node_id}"

    def _replace(self, node: WorkerNode, successor: WorkerNode, ctx: Ctx) -> None:
        """First the old worker goes, whatever state it is in: there are never two of a stage."""
        node.successor = successor
        match node.state:
            case NodeState.LIVE if node.handle is not None:
                if node.minted is not None:
                    self._admissions.revoke(node.minted.public_key, ctx)
                args = {"handle": node.handle, "fast": True}
                limit_ms = provider_stop_ms(self.config.provider)
                ctx.effect(RunJob("replace_node", self._key(node), args, limit_ms=limit_ms, pool="stop"))
            case NodeState.ADMITTING:
                self._fail(node, "another attempt takes its place", ctx)
            case NodeState.FAILED | NodeState.STOPPED:
                self._begin(successor, ctx)
            case _:
                pass  # its start is under way and only its end can be waited for

    def _replaced(self, node: WorkerNode, done: JobDone, ctx: Ctx) -> None:
        spec, successor = node.spec, node.successor
        if successor is None or node.state is not NodeState.LIVE:
            return
        if done.error:
            # It stays the guard's, which tries once more at the end of the run.
            node.successor = None
            ctx.effect(Log("error", f"node {spec.node_id} is not stopped: {done.error}"))
            error = f"the worker that it replaces could not be stopped: {done.error}"
            ctx.send(self._run.owner, failed(successor.spec, error))
            return
        self._run.guard.release(spec.node_id)
        node.state = NodeState.STOPPED
        if not node.stop_said:
            node.stop_said = True
            self._emit(event(EventKind.NODE_STOPPED, spec.run_id, spec.node_id, self.config.provider, "replaced"), ctx)
        if self._stopping is None:
            self._begin(successor, ctx)
        else:
            self._pump_stop(ctx)


def failed(spec: NodeProvisionSpec, error: str) -> NodeFailed:
    """The answer to a StartNode that came to nothing."""
    return NodeFailed(node_id=spec.node_id, stage_index=spec.stage_index, error=error, attempt=spec.attempt)
