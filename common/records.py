"""The records of the orchestrator's datastream: channel names and payload builders (S1 3.9, 8.3-8.9).

Pure. Every builder returns one compact JSON text as bytes; `ctx.observe(channel, payload, source)` takes it from there.
Records carry no authority (S1 9.18), and callers never put a secret into `detail`, `message` or `line` (S1 9.20).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from enum import StrEnum
from typing import Any

import msgspec

CHANNEL_BOOTSTRAP = "mvp.orch.bootstrap"
CHANNEL_PROMPT = "mvp.orch.prompt"
CHANNEL_SWIM = "mvp.swim.membership"
CHANNEL_STAGE_ROUTE = "mvp.orch.stage_route"
CHANNEL_EVENTS = "mvp.provisioning.events"
CHANNEL_STDOUT = "mvp.orch.stdio.stdout"
CHANNEL_STDERR = "mvp.orch.stdio.stderr"
CHANNEL_ENVELOPES = "mvp.bus.envelopes"
"""The router's counts since its start, each BUS_COUNTS_MS: {"broker", "passed": {plane: {verdict: envelopes}}}."""

CORE_CHANNELS = (
    CHANNEL_EVENTS,
    CHANNEL_BOOTSTRAP,
    CHANNEL_PROMPT,
    CHANNEL_SWIM,
    CHANNEL_STAGE_ROUTE,
    CHANNEL_STDOUT,
    CHANNEL_STDERR,
)
"""Registered when a run starts; the log channels of nodes come with their first line (rust-swactor.md 2.7)."""

SOURCE_ORCHESTRATOR = "orchestrator"
SOURCE_NODE_STDIO = "node_bootstrap_stdio"
SOURCE_NODE_CLUSTER = "node_cluster"
"""The archive's source field (S1 8.12, design.md 6 row 5)."""


class LogStream(StrEnum):
    """S1 8.7: the accepted log streams."""

    STDOUT = "Stdout"
    STDERR = "Stderr"
    PROVIDER = "Provider"


class EventKind(StrEnum):
    """S1 8.6: the accepted event kinds."""

    PROVISION_START = "ProvisionStart"
    NODE_LIVE = "NodeLive"
    PROVISION_FAILED = "ProvisionFailed"
    NODE_STOPPED = "NodeStopped"


def log_channel(node_id: int, stream: LogStream | str) -> str:
    """The channel of a node's log lines: stream is a LogStream or its lower-case name. Raises ValueError for others."""
    return f"mvp.provisioning.logs.node.{node_id}.{LogStream(stream.capitalize()).lower()}"


def bootstrap_record(
    phase: str, status: str, run_id: int, node_id: int, detail: Mapping[str, Any] | None = None
) -> bytes:
    """OrchBootstrap (S1 8.4). status: started, ready, failed, sent, observed. Also the records of
    CHANNEL_SWIM and CHANNEL_STAGE_ROUTE."""
    return _json(
        {
            "type": "OrchBootstrap",
            "phase": phase,
            "status": status,
            "run_id": run_id,
            "node_id": node_id,
            "detail": dict(detail or {}),
        }
    )


def prompt_record(
    phase: str,
    status: str,
    run_id: int,
    node_id: int,
    request_id: int | str,
    detail: Mapping[str, Any] | None = None,
) -> bytes:
    """OrchPromptEvent (S1 8.5). request_id: the client's id (design.md 6 row 24); never the prompt's text."""
    return _json(
        {
            "type": "OrchPromptEvent",
            "phase": phase,
            "status": status,
            "run_id": run_id,
            "node_id": node_id,
            "request_id": request_id,
            "detail": dict(detail or {}),
        }
    )


def event_record(
    kind: EventKind | str, run_id: int, node_id: int, provider: str | None = None, message: str | None = None
) -> bytes:
    """MvpProvisionEventRecord (S1 8.6), for CHANNEL_EVENTS. Raises ValueError for a kind that is none."""
    return _json(
        {
            "event": {
                "run_id": run_id,
                "node_id": node_id,
                "kind": EventKind(kind).value,
                "provider": provider,
                "message": message,
            }
        }
    )


def log_record(run_id: int, node_id: int, stream: LogStream | str, line: str) -> bytes:
    """MvpProvisionLogRecord (S1 8.7): one line, without its newline. Raises ValueError for a stream that is none."""
    return _json(
        {
            "line": {
                "run_id": run_id,
                "node_id": node_id,
                "stream": LogStream(stream.capitalize()).value,
                "line": line,
            }
        }
    )


def _json(record: dict[str, Any]) -> bytes:
    try:
        return msgspec.json.encode(record)
    except UnicodeEncodeError:
        # A path that is no UTF-8 reaches us with lone surrogates; a record must still be readable JSON.
        return json.dumps(record, separators=(",", ":"), ensure_ascii=False).encode("utf-8", "replace")
