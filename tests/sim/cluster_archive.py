"""The collector's disk on virtual time: what is written survives the collector, a slow disk stops its process alone."""

from __future__ import annotations

import json

from common.datastream import SeqRanges
from services.datastream_collector.core import (
    ArchiveAppend,
    ArchiveOpen,
    ArchiveOpened,
    ArchiveWritten,
    FramesCollected,
)
from services.datastream_collector.frames import CollectedFrame, Recovered, RecoveredStream
from services.datastream_collector.streams import CHANNEL_GAP
from tests.sim.cluster_world import PROMPT_MARK, SimHost, Violation

OWN_STREAMS = "mvp-orchestrator/"


class SimDisk:
    """The archive file, and what holds for it at each write."""

    def __init__(self) -> None:
        self.frames: list[CollectedFrame] = []
        self.slow_until = 0
        self.slow_ms = 0
        self._ends: dict[str, int] = {}
        self._seen: set[tuple[str, int]] = set()
        self._positions: dict[tuple[str, str], dict[int, tuple[int, bytes]]] = {}
        self._completed: dict[tuple[str, int], set[int]] = {}
        self._lives = 0
        """How many collectors have written here."""
        self.gaps = self.repeats = 0
        self.runs = 0
        """How many orchestrators have been started."""
        self._begun = 0
        """How often positions began; a collector that is started again goes on where the one before it was."""

    def attach(self, host: SimHost) -> None:
        """A new collector process."""
        self._lives += 1
        host.perform(ArchiveOpen, lambda actor, _: host.deliver(actor, ArchiveOpened(self.recovered())))
        host.perform(ArchiveAppend, lambda actor, effect: self._append(host, actor, effect))
        host.perform(FramesCollected, lambda _, __: None)

    def _append(self, host: SimHost, actor: bytes, effect: ArchiveAppend) -> None:
        world = host.cluster
        for frame in effect.frames:
            self._check(frame)
            self.frames.append(frame)
            world.note_bytes(f"archive {frame.stream} {frame.position} {frame.channel}", frame.payload)
        if world.now < self.slow_until:
            # write() hangs in the loop's own thread (services/datastream_collector/service.py).
            host.frozen_until = max(host.frozen_until, world.now + self.slow_ms)
        host.deliver(actor, ArchiveWritten(len(effect.frames)))

    def _check(self, frame: CollectedFrame) -> None:
        if PROMPT_MARK.encode() in frame.payload:
            raise Violation(f"a prompt's text is in a record of {frame.channel}")
        if b'"prompt_complete"' in frame.payload:
            # The gateway's own word of a prompt's end, whether or not its client still listens (S1 9.10).
            key = (frame.producer, json.loads(frame.payload)["detail"]["prompt_id"])
            if frame.producer_seq not in self._completed.setdefault(key, {frame.producer_seq}):
                raise Violation(f"prompt {key[1]} is complete twice")
        if frame.channel == CHANNEL_GAP:
            self.gaps += 1
        if frame.producer_seq:
            key = (frame.producer, frame.producer_seq)
            if key in self._seen:
                raise Violation(f"record {key} is archived twice")
            self._seen.add(key)
        if frame.stream.startswith(OWN_STREAMS):
            last = self._ends.get(frame.stream, -1)
            self._begun += frame.position == 0
            if frame.position not in (last + 1, 0) or self._begun > self.runs:
                raise Violation(f"stream {frame.stream} jumps from position {last} to {frame.position}")
            self._ends[frame.stream] = frame.position
            return
        positions = self._positions.setdefault((frame.stream, frame.producer), {})
        life, payload = positions.get(frame.position, (0, frame.payload))
        if life == self._lives:
            raise Violation(f"position {frame.position} of {frame.stream} is archived twice")
        if payload != frame.payload:
            raise Violation(f"position {frame.position} of {frame.stream} has two payloads")
        # A collector that dies between its write and its ack gets the frame again in its next life: at least once, and
        # the position tells readers that it is the same.
        self.repeats += bool(life)
        positions[frame.position] = (self._lives, frame.payload)

    def holes(self) -> list[str]:
        """Positions of worker streams that are missing in between; without a gap record there may be none."""
        found = []
        for (stream, producer), positions in self._positions.items():
            missing = max(positions) - min(positions) + 1 - len(positions)
            if missing:
                found.append(f"{missing} positions of {stream} by {producer}")
        return [] if self.gaps else found

    def recovered(self) -> Recovered:
        """As archive.py reads it from the file."""
        streams: dict[str, RecoveredStream] = {}
        producers: dict[str, SeqRanges] = {}
        for frame in self.frames:
            if not frame.stream.startswith(OWN_STREAMS):
                continue
            stream = streams.setdefault(frame.stream, RecoveredStream())
            if frame.position <= stream.position:
                stream = streams[frame.stream] = RecoveredStream()
            stream.position, stream.run_boot, stream.unix_ms = frame.position, frame.run_boot, frame.unix_ms
            stream.channels[frame.channel] = frame.channel_id
            if frame.producer_seq:
                producers.setdefault(frame.producer, SeqRanges()).add(frame.producer_seq)
        return Recovered(streams, {name: seen.ranges for name, seen in producers.items()})
