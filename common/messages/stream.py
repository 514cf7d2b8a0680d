"""Stream: observations on their way to the collector (S1 2.7, 2.8, 3.9, 6.7, 8). Never carries authority (S1 9.18)."""

from __future__ import annotations

from typing import ClassVar

import msgspec

from common.addresses import SERVICES, U32, U64, ActorAddress, Plane, Role, Token
from common.codec import Message

_ORCHESTRATOR = frozenset({Role.ORCHESTRATOR})
_COLLECTOR = frozenset({Role.COLLECTOR})
_AGENT = frozenset({Role.AGENT})


class Observation(msgspec.Struct, frozen=True, kw_only=True):
    """One record of a producer for the orchestrator's stream. payload: JSON text, or raw bytes.

    producer_seq counts from 1 per (producer, boot); source: "" (orchestrator) or "node_bootstrap_stdio".
    """

    producer_seq: U64
    channel: str
    payload: bytes
    source: str = ""


class Observe(Message, frozen=True, kw_only=True, tag=220):
    """Any service → collector: a batch, at most 64 KiB or 20 ms. Acknowledged by the session; producers never block."""

    PLANE: ClassVar[Plane] = Plane.STREAM
    FROM: ClassVar[frozenset[Role]] = SERVICES
    records: list[Observation]


class Gap(Message, frozen=True, kw_only=True, tag=221):
    """Any producer → collector: its ring was overrun; these producer_seq (first..last) are lost for good."""

    PLANE: ClassVar[Plane] = Plane.STREAM
    channel: str = ""
    first: U64
    last: U64


class StreamId(msgspec.Struct, frozen=True, kw_only=True):
    """Identity of a stream: ("mvp-orchestrator", run_id) or (node_id, run_id)."""

    node: str
    life: U64


class ChannelDeclaration(msgspec.Struct, frozen=True, kw_only=True):
    """channel_id counts from 1 in its stream. content: "bytes" | "text" | "json"."""

    channel_id: U32
    name: str
    content: str = "json"


class Frame(msgspec.Struct, frozen=True, kw_only=True):
    """position: one counter per stream. payload: opaque bytes (S1 2.8)."""

    channel_id: U32
    position: U64
    payload: bytes


class SubscribeRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Which channels: names by prefix; empty = all."""

    channel_prefixes: list[str] = []


class DatastreamSubscribe(Message, frozen=True, kw_only=True, tag=222):
    """Orchestrator → datastream publisher actor with each acknowledgement round (S1 6.7): stream to `collector`.

    A repeat with the same flow_id is answered by nothing and changes nothing.
    """

    FROM: ClassVar[frozenset[Role]] = _ORCHESTRATOR
    collector: ActorAddress
    request: SubscribeRequest = SubscribeRequest()
    flow_id: bytes
    token: Token


class ExpectFlow(Message, frozen=True, kw_only=True, tag=223):
    """Orchestrator → collector: frames of this flow will come with this token; others are refused."""

    FROM: ClassVar[frozenset[Role]] = _ORCHESTRATOR
    flow_id: bytes
    token: Token
    node_id: U64
    run_id: U64


class StreamFrames(Message, frozen=True, kw_only=True, tag=224):
    """Worker's publisher → collector: header (first message), declarations, frames, end (S1 2.8, 8.10)."""

    PLANE: ClassVar[Plane] = Plane.STREAM
    FROM: ClassVar[frozenset[Role]] = _AGENT
    flow_id: bytes
    token: Token
    stream: StreamId | None = None
    channels: list[ChannelDeclaration] = []
    frames: list[Frame] = []
    gap: tuple[U64, U64] | None = None
    end: bool = False


class Flush(Message, frozen=True, kw_only=True, tag=225):
    """Orchestrator → collector at the end: answered by Flushed when everything received so far is in the sinks."""

    FROM: ClassVar[frozenset[Role]] = _ORCHESTRATOR


class Flushed(Message, frozen=True, kw_only=True, tag=226):
    """Collector → orchestrator."""

    FROM: ClassVar[frozenset[Role]] = _COLLECTOR
    archived: U64 = 0
    error: str = ""
