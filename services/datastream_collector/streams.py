"""The two kinds of streams at the collector (S1 2.8, 8.2, 8.10). Pure.

`OwnStream` is the orchestrator's stream, whose positions are assigned here; `Flows` are the workers' streams, which
keep what their producers gave them: identity, channel ids, positions and payload bytes.
"""

from __future__ import annotations

import hmac
from collections import OrderedDict, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from common.addresses import short
from common.datastream import SeqRanges, orchestrator_stream, stream_text, worker_stream
from common.messages.stream import ChannelDeclaration, ExpectFlow, Observation, StreamFrames
from common.records import CORE_CHANNELS, SOURCE_NODE_CLUSTER, SOURCE_NODE_STDIO, SOURCE_ORCHESTRATOR
from services.datastream_collector.frames import CollectedFrame, Recovered, RecoveredStream

CHANNEL_GAP = "mvp.datastream.gap"
"""Explicit losses, in the orchestrator's stream: {type: "DatastreamGap", stream, producer, first, last, lost, reason}.

first and last count producer_seq of `producer` in the orchestrator's stream, positions in a worker's stream.
reason: "overrun" (a producer's ring) or "collector_restart".
"""

PRODUCERS_MAX = 4096  # one per process incarnation; the longest silent is forgotten
FLOWS_MAX = 1024
CHANNELS_MAX = 65_536
EARLY_MS = 5000  # frames may overtake their ExpectFlow, which comes from somebody else
EARLY_BYTES_MAX = 4 * 1024 * 1024
RECOVERED_IDS_APART = 1000  # of an archive that was not read whole, lower channel ids may be unknown

_SOURCES = frozenset({SOURCE_ORCHESTRATOR, SOURCE_NODE_STDIO, SOURCE_NODE_CLUSTER})


@dataclass(slots=True)
class Producer:
    """What was seen of one observer actor. recovered: known from the archive only, so far."""

    seen: SeqRanges = field(default_factory=SeqRanges)
    recovered: bool = False


class OwnStream:
    """The stream (mvp-orchestrator, run_id): core channels from id 1, others on first use, gap-free positions."""

    def __init__(self, run_id: int, recovered: Recovered | None = None) -> None:
        self.name = stream_text(orchestrator_stream(run_id))
        self.channels: dict[str, int] = {name: at for at, name in enumerate(CORE_CHANNELS, 1)}
        self.next_position = 0
        self.started = False
        self.run_boot = 0
        """Of the orchestrator whose run this is; 0 before the first one."""
        self._recovered = recovered or Recovered()
        # What is below the lowest number that the archive's tail shows was archived before.
        self._producers: OrderedDict[str, Producer] = OrderedDict(
            (name, Producer(SeqRanges([(1, ranges[0][0]), *ranges]), recovered=True))
            for name, ranges in self._recovered.producers.items()
            if ranges
        )
        self._next_channel = len(self.channels) + 1

    def ingest(self, records: list[Observation], sender: bytes, wall_ms: int) -> list[CollectedFrame]:
        """Frames for the records that are new; a hole that a restart of the collector left becomes a gap frame."""
        name = short(sender)
        producer = self._producer(name)
        frames: list[CollectedFrame] = []
        for record in records:
            seq = record.producer_seq
            if seq in producer.seen:
                continue
            if producer.recovered:
                # The producer has sent its whole tail again, from its oldest record on: what is before it is lost.
                producer.recovered = False
                first = producer.seen.last + 1
                if seq > first:
                    producer.seen.add(first, seq - 1)
                    frames.append(self.gap(self.name, name, first, seq - 1, "collector_restart", wall_ms))
            producer.seen.add(seq)
            source = record.source if record.source in _SOURCES else SOURCE_ORCHESTRATOR
            frames.append(self._frame(source, record.channel, record.payload, wall_ms, name, seq))
        return frames

    def lost(self, first: int, last: int, sender: bytes, wall_ms: int) -> list[CollectedFrame]:
        """A producer's Gap: explicit, once, and only for what is really missing."""
        name = short(sender)
        producer = self._producer(name)
        holes = producer.seen.holes(first, last)
        producer.seen.add(first, last)
        return [self.gap(self.name, name, low, high, "overrun", wall_ms) for low, high in holes]

    def begin(self, boot: int, actors: Iterable[bytes]) -> bool:
        """An orchestrator is there, beside these actors: its run, or after a restart of the collector the one that the
        archive ends with, goes on; else positions and channels start again, which is True. What was seen of each
        producer stays seen."""
        if boot == self.run_boot:
            return False
        old = self._recovered.streams.get(self.name)
        if old is not None and (old.run_boot == boot or (not old.run_boot and self._is_of_now(old, boot, actors))):
            self._resume()
        is_next, self.run_boot = self.run_boot not in (0, boot), boot
        if is_next:
            self._start_again()
        return is_next

    def _start_again(self) -> None:
        self.channels = {name: at for at, name in enumerate(CORE_CHANNELS, 1)}
        self._next_channel = len(self.channels) + 1
        self.next_position = 0

    def gap(self, stream: str, producer: str, first: int, last: int, reason: str, wall_ms: int) -> CollectedFrame:
        """The frame that says what is missing (CHANNEL_GAP)."""
        payload = (
            f'{{"type":"DatastreamGap","stream":"{stream}","producer":"{producer}","first":{first},"last":{last},'
            f'"lost":{last - first + 1},"reason":"{reason}"}}'
        )
        return self._frame(SOURCE_ORCHESTRATOR, CHANNEL_GAP, payload.encode(), wall_ms)

    def declarations(self) -> list[ChannelDeclaration]:
        """The channel list, for late subscribers."""
        return [ChannelDeclaration(channel_id=at, name=name) for name, at in self.channels.items()]

    def _frame(
        self, source: str, channel: str, payload: bytes, wall_ms: int, producer: str = "", seq: int = 0
    ) -> CollectedFrame:
        self.started = True
        position = self.next_position
        self.next_position += 1
        return CollectedFrame(
            source,
            self.name,
            channel,
            self._channel(channel),
            position,
            payload,
            wall_ms,
            producer,
            seq,
            self.run_boot,
        )

    def _channel(self, name: str) -> int:
        known = self.channels.get(name)
        if known is None:
            if len(self.channels) >= CHANNELS_MAX:
                return 0
            known = self.channels[name] = self._next_channel
            self._next_channel += 1
        return known

    def _producer(self, name: str) -> Producer:
        known = self._producers.get(name)
        if known is None:
            known = self._producers[name] = Producer()
            if len(self._producers) > PRODUCERS_MAX:
                self._producers.popitem(last=False)
        elif known.recovered and self._may_resume(self.run_boot):
            self._resume()
        self._producers.move_to_end(name)
        return known

    def resume_if_archived(self, actors: Iterable[bytes]) -> None:
        """These are there, and no orchestrator: if the archive names one of them, this is still its last run."""
        if self._recovered.knows_one(actors):
            self._resume()

    def _is_of_now(self, old: RecoveredStream, boot: int, actors: Iterable[bytes]) -> bool:
        """Whether a run whose orchestrator has said nothing yet is this one: it began before the last record, its boot
        being a wall-clock time, or somebody who has spoken is still there."""
        return boot <= old.unix_ms or self._recovered.knows_one(actors)

    def _may_resume(self, boot: int) -> bool:
        old = self._recovered.streams.get(self.name)
        # Where the archive knows of no orchestrator, the first one after it is that run's.
        return old is not None and not self.started and (not boot or old.run_boot in (0, boot))

    def _resume(self) -> None:
        """This is the archived run, after a restart of the collector. Nothing happens once there is a frame."""
        old = self._recovered.streams.get(self.name)
        if old is None or self.started:
            return
        self.run_boot = old.run_boot or self.run_boot
        self.next_position = old.position + 1
        self.channels.update(old.channels)
        self._next_channel = max(self.channels.values()) + 1
        if not self._recovered.whole:
            self._next_channel += RECOVERED_IDS_APART


@dataclass(slots=True)
class WorkerStream:
    """What a publisher actor has said of its stream."""

    name: str
    channels: dict[int, ChannelDeclaration] = field(default_factory=dict)
    seen: SeqRanges = field(default_factory=SeqRanges)
    ended: bool = False

    def name_of(self, channel_id: int) -> str:
        """The channel's name, or a stand-in for one that was never declared."""
        declared = self.channels.get(channel_id)
        return declared.name if declared else f"channel#{channel_id}"


@dataclass(slots=True)
class _Flow:
    token: bytes
    stream: str
    sender: bytes = b""


@dataclass(slots=True)
class Accepted:
    """What came of one StreamFrames: frames for the sinks, lost positions, or why it was refused."""

    stream: str = ""
    frames: list[CollectedFrame] = field(default_factory=list)
    gaps: list[tuple[int, int]] = field(default_factory=list)
    refused: str = ""
    malformed: int = 0
    duplicates: int = 0
    opened: bool = False
    ended: bool = False


@dataclass(slots=True)
class _Early:
    until_ms: int
    message: StreamFrames
    sender: bytes


class Flows:
    """The announced flows and their streams. Nothing that a worker sends can raise here (S1 10.11)."""

    def __init__(self) -> None:
        self._flows: OrderedDict[bytes, _Flow] = OrderedDict()
        self._streams: OrderedDict[bytes, WorkerStream] = OrderedDict()
        self._early: deque[_Early] = deque()
        self._early_bytes = 0
        self._recovered: Mapping[tuple[str, str], list[tuple[int, int]]] = {}

    def recover(self, recovered: Recovered) -> None:
        """What a collector before this one has archived is not taken again: a batch may be written and yet come again,
        because the death came between the write and its acknowledgement."""
        self._recovered = recovered.positions

    def expect(self, msg: ExpectFlow) -> list[tuple[StreamFrames, bytes]]:
        """Announce a flow; returns the (message, sender) that came too early for it, in order."""
        stream = stream_text(worker_stream(msg.node_id, msg.run_id))
        known = self._flows.get(msg.flow_id)
        if known is None or known.token != msg.token or known.stream != stream:
            self._flows[msg.flow_id] = _Flow(msg.token, stream)
            if len(self._flows) > FLOWS_MAX:
                self._flows.popitem(last=False)
        ready = [(early.message, early.sender) for early in self._early if early.message.flow_id == msg.flow_id]
        self._early = deque(early for early in self._early if early.message.flow_id != msg.flow_id)
        self._early_bytes = sum(_size(early.message) for early in self._early)
        return ready

    def hold(self, msg: StreamFrames, sender: bytes, now_ms: int) -> int:
        """Keep a message of an unknown flow for 5 s; returns how many had to be refused for want of room."""
        self._early.append(_Early(now_ms + EARLY_MS, msg, sender))
        self._early_bytes += _size(msg)
        refused = 0
        while self._early_bytes > EARLY_BYTES_MAX:
            self._early_bytes -= _size(self._early.popleft().message)
            refused += 1
        return refused

    def expired(self, now_ms: int) -> int:
        """How many held messages nobody announced in time; they are gone."""
        count = 0
        while self._early and self._early[0].until_ms <= now_ms:
            self._early_bytes -= _size(self._early.popleft().message)
            count += 1
        return count

    def next_deadline(self) -> int | None:
        """When `expired` has something to do, monotonic ms."""
        return self._early[0].until_ms if self._early else None

    def knows(self, flow_id: bytes) -> bool:
        """Whether the flow is announced."""
        return flow_id in self._flows

    def accept(self, msg: StreamFrames, sender: bytes, wall_ms: int) -> Accepted:
        """Take the frames of an announced flow, each position once."""
        flow = self._flows.get(msg.flow_id)
        if flow is None:
            return Accepted(refused="unknown flow")
        out = Accepted(stream=flow.stream)
        if not hmac.compare_digest(bytes(flow.token), bytes(msg.token)):
            out.refused = "wrong token"
        elif flow.sender not in (b"", sender):
            out.refused = "another publisher"
        elif msg.stream is not None and stream_text(msg.stream) != flow.stream:
            out.refused = "another stream"
        if out.refused:
            return out
        out.opened = not flow.sender
        flow.sender = sender
        stream = self._stream(sender, flow.stream)
        if stream.ended and (msg.frames or msg.channels):
            out.refused = "the stream has ended"
            return out
        for declared in msg.channels:
            if stream.channels.setdefault(declared.channel_id, declared) != declared:
                out.malformed += 1
        if msg.gap and msg.gap[0] <= msg.gap[1]:
            out.gaps = stream.seen.holes(*msg.gap)
            stream.seen.add(*msg.gap)
        for frame in msg.frames:
            if frame.position in stream.seen:
                out.duplicates += 1
                continue
            stream.seen.add(frame.position)
            out.frames.append(
                CollectedFrame(
                    SOURCE_NODE_CLUSTER,
                    stream.name,
                    stream.name_of(frame.channel_id),
                    frame.channel_id,
                    frame.position,
                    frame.payload,
                    wall_ms,
                    short(sender),
                )
            )
        out.ended = msg.end and not stream.ended
        stream.ended = stream.ended or msg.end
        return out

    def declarations(self) -> list[tuple[str, list[ChannelDeclaration]]]:
        """(stream, channel list) of every worker stream, for late subscribers."""
        return [(stream.name, list(stream.channels.values())) for stream in self._streams.values()]

    def _stream(self, sender: bytes, name: str) -> WorkerStream:
        """Streams belong to a publisher actor: a new flow of the same worker goes on where the old one was."""
        stream = self._streams.get(sender)
        if stream is None or stream.name != name:
            archived = self._recovered.get((short(sender), name), [])
            # Positions come in order: what is below the lowest that the archive's tail shows was archived before.
            seen = SeqRanges([(0, archived[0][0]), *archived] if archived else [])
            stream = self._streams[sender] = WorkerStream(name, seen=seen)
            if len(self._streams) > FLOWS_MAX:
                self._streams.popitem(last=False)
        return stream


def _size(message: StreamFrames) -> int:
    return 64 + sum(len(frame.payload) + 32 for frame in message.frames) + 64 * len(message.channels)
