"""A node agent under the harness: what the engine says goes in, what it was told and what was sent come out."""

from __future__ import annotations

import json
from typing import Any

import msgspec

from common.codec import Message
from common.messages.engine import EngineReady, WeightsLoaded
from common.messages.node_agent import (
    EmbeddedGguf,
    InferPrompt,
    LocalPath,
    ProvisionStage,
    RuntimeReadyAck,
    StageProvisionWire,
)
from tests.support.harness import Harness
from worker.agent.core import NodeAgentActor
from worker.agent.events import EngineEvent, EngineSend, WorkerIdentity

ORCHESTRATOR = b"o" * 32
PUBLISHER = b"p" * 32
SWIM = b"s" * 32
GATEWAY_INBOX = b"g" * 32
RUN, NODE_ID, STAGE = 1, 4, 3

WIRE = StageProvisionWire(
    run_id=RUN,
    authorized_orchestrator=ORCHESTRATOR,
    node_id=NODE_ID,
    stage_index=STAGE,
    stage_count=1,
    layer_start=0,
    inbound_edge_id=1,
    outbound_edge_id=2,
    model_id="smol",
    gguf_source=LocalPath(path="/m.gguf"),
    tokenizer=EmbeddedGguf(),
)
ENGINE_READY = EngineReady(pid=77, backend="tinygrad CPU", elapsed_ms=900)
WEIGHTS = WeightsLoaded(weights_bytes=10, kv_bytes=2, layers=30, max_context=512, elapsed_ms=5)
ACK = RuntimeReadyAck(run_id=RUN, node_id=NODE_ID, stage_index=STAGE, readiness_id=1)


def provision(**changes: Any) -> ProvisionStage:
    return ProvisionStage(provision=msgspec.structs.replace(WIRE, **changes))


def prompt(request_id: int, **fields: Any) -> InferPrompt:
    return InferPrompt(request_id=request_id, prompt="hi", reply_to=GATEWAY_INBOX, **fields)


class Agent(Harness):
    """`engine(...)`: the engine says; `told()`: what it was told; `sent_to(dst)`; `events()`: NodeEvents."""

    actor: NodeAgentActor

    def __init__(self, report_to: bytes | None = None, *, measure: bool = False) -> None:
        identity = WorkerIdentity(RUN, NODE_ID, STAGE, ORCHESTRATOR, device="CPU", threads=2, measure=measure)
        super().__init__(NodeAgentActor(identity, PUBLISHER, SWIM, report_to))

    def engine(self, *messages: Message) -> None:
        for message in messages:
            self.tell(EngineEvent(message))

    def told(self) -> list[Message]:
        """Messages to the engine; other effects stay."""
        mine = [effect.message for _, effect in self.system.effects if isinstance(effect, EngineSend)]
        self.system.effects = [item for item in self.system.effects if not isinstance(item[1], EngineSend)]
        return mine

    def sent_to(self, dst: bytes) -> list[Message]:
        """Messages to one receiver; the others stay."""
        mine = [out.message for out in self.system.outbound if out.dst == dst]
        self.system.outbound[:] = [out for out in self.system.outbound if out.dst != dst]
        return mine

    def events(self) -> list[tuple[str, str, str]]:
        """(channel, phase, status) of the records since the last call, each of this context."""
        found = []
        for observed in self.observed():
            record = json.loads(observed.payload)
            assert record["type"] == "NodeEvent"
            assert (record["run_id"], record["node_id"], record["stage_index"]) == (RUN, NODE_ID, STAGE)
            found.append((observed.channel.removeprefix("mvp.node."), record["phase"], record["status"]))
        return found

    def quiet(self) -> Agent:
        """Forget what was said so far."""
        self.system.outbound.clear()
        self.system.effects.clear()
        return self


def ready_agent() -> Agent:
    """Engine up, acknowledged, weights loaded, stage ready."""
    agent = Agent()
    agent.engine(ENGINE_READY)
    agent.tell(ACK)
    agent.tell(provision())
    agent.engine(WEIGHTS)
    return agent.quiet()
