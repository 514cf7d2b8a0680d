"""The agent's part of a pipeline stage: edges and sequences between the orchestrator, the gateway and the engine.

Pure bookkeeping of NodeAgentActor (S1 6.5, 6.10; design.md 4). The engine moves the bytes; an edge that can only
go over the bus is carried by common/edges/carrier.py.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from common.actors import Ctx
from common.codec import BadEnvelope
from common.edges.carrier import carrier_address
from common.edges.frames import decode_stream_message
from common.messages import engine as wire
from common.messages.edge import BeginSequence, SequenceBegun
from common.messages.node_agent import StageInboundEdgeWire, StageOutboundEdgeWire, StageProvisionWire
from common.messages.prompt import TokenizerFault
from worker.agent.events import EngineSend


@dataclass(slots=True)
class StageEdges:
    """Which edges the engine was told of, and who waits for a sequence to begin."""

    inbound: StageInboundEdgeWire | None = None
    outbound: StageOutboundEdgeWire | None = None
    is_open: bool = False
    generation: int = 0
    _beginners: dict[int, bytes] = field(default_factory=dict)

    def open(self, provision: StageProvisionWire, ctx: Ctx) -> None:
        """Both edges at once, as soon as the second one is known."""
        if self.inbound is None or self.outbound is None or self.is_open:
            return
        self._order(provision, ctx)

    def renew(self, provision: StageProvisionWire, ctx: Ctx) -> None:
        """These in place of those that are open; nobody waits for a sequence of theirs any more."""
        self.inbound, self.outbound = provision.inbound_edge, provision.outbound_edge
        self._beginners.clear()
        self._order(provision, ctx)

    def _order(self, provision: StageProvisionWire, ctx: Ctx) -> None:
        self.is_open, self.generation = True, provision.generation
        assert self.inbound is not None and self.outbound is not None
        order = wire.OpenEdges(
            orchestrator=provision.authorized_orchestrator,
            run_id=provision.run_id,
            node_id=provision.node_id,
            stage_index=provision.stage_index,
            stage_count=provision.stage_count,
            inbound=self.inbound,
            outbound=self.outbound,
            generation=provision.generation,
            feedback_in=provision.feedback_in,
            feedback_out=provision.feedback_out,
        )
        ctx.effect(EngineSend(order))

    def begin(self, msg: BeginSequence, refusal: str, ctx: Ctx) -> None:
        """A prompt is about to come; refusal: why this stage cannot take it, or empty."""
        if refusal:
            ctx.send(msg.reply_to, TokenizerFault(request_id=msg.request_id, error=refusal, lost=True))
            return
        self._beginners = {msg.request_id: msg.reply_to}
        order = wire.EngineBegin(
            request_id=msg.request_id,
            first_object_id=msg.first_object_id,
            sampling=msg.sampling,
            recent=msg.recent,
        )
        ctx.effect(EngineSend(order))

    def begun(self, request_id: int, stage_index: int, ctx: Ctx) -> None:
        """The engine waits for the sequence."""
        if (reply_to := self._beginners.pop(request_id, None)) is not None:
            ctx.send(reply_to, SequenceBegun(request_id=request_id, stage_index=stage_index))

    def refused(self, msg: wire.EngineFault, ctx: Ctx) -> bool:
        """Whether this fault of the engine was the answer to a begin."""
        reply_to = self._beginners.pop(msg.request_id, None)
        if reply_to is None:
            return False
        ctx.send(reply_to, TokenizerFault(request_id=msg.request_id, error=msg.error))
        return True


def carry(msg: wire.EdgeCarry, ctx: Ctx) -> None:
    """A stream message of the engine for the other end, over the bus."""
    try:
        message = decode_stream_message(msg.frame)
    except BadEnvelope:
        return
    ctx.send(carrier_address(msg.peer), message)
