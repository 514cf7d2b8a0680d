"""Provider observations as datastream records (S1 2.7, 8.9). Pure; observational only (S1 9.18)."""

from __future__ import annotations

from dataclasses import dataclass

from common.records import (
    CHANNEL_EVENTS,
    SOURCE_NODE_STDIO,
    EventKind,
    LogStream,
    event_record,
    log_channel,
    log_record,
)
from services.provisioner.plugin import (
    DatastreamFrame,
    Exited,
    Failed,
    PluginObservation,
    ProviderLine,
    StderrLine,
    StdoutLine,
)

FROM_PROVISIONER = ""
"""Source of what the provisioner itself says; the collector reads it as the orchestrator's."""


@dataclass(frozen=True, slots=True)
class Record:
    """What ctx.observe takes."""

    channel: str
    payload: bytes
    source: str


def record_of(observation: PluginObservation, run_id: int, node_id: int, provider: str) -> Record:
    """The one record of one observation, by the rules of S1 8.9."""
    match observation:
        case StdoutLine(line):
            return _line(run_id, node_id, LogStream.STDOUT, line, SOURCE_NODE_STDIO)
        case StderrLine(line):
            return _line(run_id, node_id, LogStream.STDERR, line, SOURCE_NODE_STDIO)
        case ProviderLine(line):
            return _line(run_id, node_id, LogStream.PROVIDER, line, FROM_PROVISIONER)
        case DatastreamFrame(channel, payload):
            return Record(channel, payload, SOURCE_NODE_STDIO)
        case Exited(_, reason):
            return event(EventKind.NODE_STOPPED, run_id, node_id, provider, reason)
        case Failed(reason):
            return event(EventKind.PROVISION_FAILED, run_id, node_id, provider, reason)


def event(kind: EventKind, run_id: int, node_id: int, provider: str, message: str | None = None) -> Record:
    """A lifecycle event (S1 8.6)."""
    return Record(CHANNEL_EVENTS, event_record(kind, run_id, node_id, provider, message), FROM_PROVISIONER)


def _line(run_id: int, node_id: int, stream: LogStream, line: str, source: str) -> Record:
    return Record(log_channel(node_id, stream), log_record(run_id, node_id, stream, line), source)
