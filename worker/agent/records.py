"""NodeEvent: the records of a worker's own datastream, one JSON text each (S1 8.10).

They carry no authority (S1 9.18), and never a prompt's or an answer's text.
"""

from __future__ import annotations

from typing import Any

import msgspec

from common.actors import Ctx
from common.messages.engine import EdgeMoved
from worker.agent.events import WorkerIdentity

BOOTSTRAP = "mvp.node.bootstrap"
STAGE = "mvp.node.stage"
PROMPT = "mvp.node.prompt"
SHUTDOWN = "mvp.node.shutdown"
ENGINE = "mvp.worker.engine"
EDGE = "mvp.node.edge"
CHANNELS = (BOOTSTRAP, STAGE, PROMPT, SHUTDOWN, ENGINE, EDGE)


def edge_detail(moved: EdgeMoved) -> dict[str, Any]:
    """The detail of an EDGE record: {edge_id, records, bytes, latency_ms?, held_ms?}, as the message has them."""
    detail = {"edge_id": moved.edge_id, "records": moved.records, "bytes": moved.bytes}
    times = {"latency_ms": moved.latency_ms, "held_ms": moved.held_ms}
    return {**detail, **{name: value for name, value in times.items() if value is not None}}


def node_event(
    ctx: Ctx, identity: WorkerIdentity, channel: str, phase: str, status: str, detail: dict[str, Any]
) -> None:
    """Emit one record. status: started, ready, observed, done, failed, cancelled, refused,
    dropped."""
    record = {
        "type": "NodeEvent",
        "phase": phase,
        "status": status,
        "run_id": identity.run_id,
        "node_id": identity.node_id,
        "stage_index": identity.stage_index,
        "detail": detail,
    }
    ctx.observe(channel, msgspec.json.encode(record))
