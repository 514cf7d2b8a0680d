"""A worker's datastream: its producer and the actor that streams it to one subscriber (S1 2.8, 6.7, 8.10). Pure.

Frames are numbered by one counter per stream when they are emitted; what the bounded ring loses is said as a gap.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from common.actors import Actor, Ctx
from common.datastream import Backoff, Drain, Emit, Redact, SeqRanges, channel_name, emitted, keep
from common.effects import SendFailed, StopSignal, ViewChanged
from common.limits import STREAM_BATCH_BYTES_MAX, STREAM_BATCH_MS
from common.messages.stream import (
    ChannelDeclaration,
    DatastreamSubscribe,
    Frame,
    StreamFrames,
    StreamId,
    SubscribeRequest,
)

PRODUCER_RING_FRAMES_MAX = 4096  # as the observer's; covers a worker's start before anybody subscribes
PRODUCER_RING_BYTES_MAX = 8 * 1024 * 1024
FRAME_OVERHEAD_BYTES = 32
CHANNELS_MAX = 4096  # names are made by code, but a bug must not fill the memory of worker and collector


@dataclass(slots=True)
class Subscription:
    """The producer's one subscriber. header_due: the stream's identity and channels are still to be said."""

    collector: bytes
    flow_id: bytes
    token: bytes
    request: SubscribeRequest
    header_due: bool = True
    declared: int = 0

    def wants(self, channel: str) -> bool:
        """Whether a channel of this name is subscribed."""
        prefixes = self.request.channel_prefixes
        return not prefixes or channel.startswith(tuple(prefixes))


class StreamProducer:
    """The endpoint of one stream: channels by name from id 1, positions from 0, a bounded ring, one subscriber.

    Frames that nobody has taken yet stay in the ring, so that a worker's start is seen by whoever subscribes later.
    """

    def __init__(
        self,
        stream: StreamId,
        *,
        redact: Redact = keep,
        ring_frames: int = PRODUCER_RING_FRAMES_MAX,
        ring_bytes: int = PRODUCER_RING_BYTES_MAX,
    ) -> None:
        self.stream = stream
        self.channels: list[ChannelDeclaration] = []
        self.subscription: Subscription | None = None
        self.ended = False
        self._redact = redact
        self._ring_frames, self._ring_bytes = ring_frames, ring_bytes
        self._ids: dict[str, int] = {}
        self._ring: deque[Frame] = deque()
        self._returned: list[Frame] = []
        self.pending_bytes = 0
        self._position = 0
        self._gaps = SeqRanges()
        self._end_due = False

    def channel(self, name: str, content: str = "json") -> int:
        """The id of a channel, declared on first use. Raises ValueError when its content was declared differently."""
        name = channel_name(name)
        known = self._ids.get(name)
        if known is None:
            if len(self.channels) >= CHANNELS_MAX:
                return 0
            known = self._ids[name] = len(self.channels) + 1
            self.channels.append(ChannelDeclaration(channel_id=known, name=name, content=content))
        elif self.channels[known - 1].content != content:
            raise ValueError(f"channel {name} carries {self.channels[known - 1].content}, not {content}")
        return known

    def emit(self, channel: str, payload: bytes) -> int:
        """Append a frame and return its position. An unknown channel is declared as "json". Never raises."""
        name = channel_name(channel)
        frame = Frame(
            channel_id=self._ids.get(name) or self.channel(name),
            position=self._position,
            payload=emitted(payload, self._redact),
        )
        self._position += 1
        self._ring.append(frame)
        self.pending_bytes += _size(frame)
        self._bound()
        return frame.position

    def end(self) -> None:
        """No frame follows; the subscriber is told after the last one."""
        if not self.ended:
            self.ended = self._end_due = True

    def subscribe(self, subscribe: DatastreamSubscribe) -> Subscription | None:
        """The new subscription; None if this flow is subscribed already. A new flow replaces the old one."""
        if self.subscription is not None and self.subscription.flow_id == subscribe.flow_id:
            return None
        self.subscription = Subscription(
            subscribe.collector, subscribe.flow_id, bytes(subscribe.token), subscribe.request
        )
        if self.ended:
            self._end_due = True
        return self.subscription

    def take(self) -> StreamFrames | None:
        """The next batch of at most 64 KiB for the subscriber: first message the channel list, then frames."""
        to = self.subscription
        if to is None:
            return None
        self._merge()
        frames = self._take_frames(to)
        gap = self._take_gap()
        channels = [declared for declared in self.channels[to.declared :] if to.wants(declared.name)]
        more = bool(self._ring) or bool(self._gaps.ranges)
        end = self._end_due and not more
        if not (to.header_due or channels or frames or gap or end):
            return None
        header = self.stream if to.header_due else None
        to.header_due, to.declared = False, len(self.channels)
        self._end_due = self._end_due and not end
        return StreamFrames(
            flow_id=to.flow_id, token=to.token, stream=header, channels=channels, frames=frames, gap=gap, end=end
        )

    def put_back(self, message: StreamFrames) -> None:
        """The batch was not delivered: its frames come again, the channel list too, to whoever subscribes then."""
        # Merged later, once for a burst of failures: each merge walks the whole ring.
        self._returned.extend(message.frames)
        if len(self._returned) > self._ring_frames:
            self._merge()
        if message.gap:
            self._gaps.add(*message.gap)
        self._end_due = self._end_due or message.end
        if self.subscription is not None:
            self.subscription.header_due, self.subscription.declared = True, 0

    def _merge(self) -> None:
        if not self._returned:
            return
        merged = {frame.position: frame for frame in [*self._returned, *self._ring]}
        self._returned.clear()
        self._ring = deque(merged[position] for position in sorted(merged))
        self.pending_bytes = sum(_size(frame) for frame in self._ring)
        self._bound()

    def _take_frames(self, to: Subscription) -> list[Frame]:
        frames: list[Frame] = []
        size = 0
        while self._ring:
            frame = self._ring[0]
            if frames and size + _size(frame) > STREAM_BATCH_BYTES_MAX:
                break
            self._ring.popleft()
            self.pending_bytes -= _size(frame)
            name = self.channels[frame.channel_id - 1].name if frame.channel_id else ""
            if to.wants(name):
                frames.append(frame)
                size += _size(frame)
        return frames

    def _take_gap(self) -> tuple[int, int] | None:
        ranges = self._gaps.ranges
        if not ranges:
            return None
        self._gaps = SeqRanges(ranges[1:])
        return ranges[0]

    def _bound(self) -> None:
        while len(self._ring) > self._ring_frames or self.pending_bytes > self._ring_bytes:
            frame = self._ring.popleft()
            self.pending_bytes -= _size(frame)
            self._gaps.add(frame.position)


class DatastreamPublisherActor(Actor):
    """S1 6.7: owns an endpoint and waits for `Subscribe`; an accepted one gets everything the endpoint produces.

    on_subscribe, if given, is told each accepted subscription (the original's hook for its transport); the frames
    themselves leave through this actor's ctx. A repeat with the same flow_id changes nothing, a new one replaces.
    """

    Incoming = (DatastreamSubscribe, Emit, Drain, SendFailed, StopSignal, ViewChanged)

    def __init__(self, endpoint: StreamProducer, on_subscribe: Callable[[Subscription], None] | None = None) -> None:
        self.endpoint = endpoint
        self.on_subscribe = on_subscribe
        self._batching = False
        self._holding = False
        self._outlived = False
        """The subscriber's process is over: its actor does not come back, even while the routes still name it. Only a
        new subscription helps, and what is sent before is lost without a word if we end first."""
        self._backoff = Backoff()

    @property
    def state(self) -> str:
        """S1 6.7: "waiting for subscription" or "subscription accepted"."""
        return "subscription accepted" if self.endpoint.subscription else "waiting for subscription"

    def on_start(self, ctx: Ctx) -> None:
        """Know whether the subscriber is there."""
        ctx.watch("routes")

    def receive(self, msg: Any, ctx: Ctx) -> None:
        """Take frames and subscriptions."""
        match msg:
            case ViewChanged():
                self._pump(ctx)
            case Emit():
                self.endpoint.emit(msg.channel, msg.payload)
                self._due(ctx)
            case DatastreamSubscribe():
                if accepted := self.endpoint.subscribe(msg):
                    self._holding = self._outlived = False
                    self._backoff.reset()
                    ctx.cancel("retry")
                    if self.on_subscribe:
                        self.on_subscribe(accepted)
                    self._pump(ctx)
            case SendFailed():
                if isinstance(msg.message, StreamFrames):
                    self.endpoint.put_back(msg.message)
                    to = self.endpoint.subscription
                    if msg.reason == "peer_lost" and to is not None and msg.dst == to.collector:
                        self._outlived = True
                    elif not self._holding:
                        self._holding = True
                        ctx.timer("retry", self._backoff.next_ms(ctx.now_ms))
            case Drain() | StopSignal():
                self._holding = False
                self._pump(ctx)

    def on_timer(self, key: str, ctx: Ctx) -> None:
        """ "batch": a batch's time is over; "retry": the pause after a failed send is."""
        if key == "retry":
            self._holding = False
        else:
            self._batching = False
        self._pump(ctx)

    def on_stop(self, ctx: Ctx) -> None:
        """The stream ends with its actor."""
        self.endpoint.end()
        self._holding = False
        self._pump(ctx)

    def _due(self, ctx: Ctx) -> None:
        if self.endpoint.subscription is None or self._holding:
            return
        if self.endpoint.pending_bytes >= STREAM_BATCH_BYTES_MAX:
            self._pump(ctx)
        elif not self._batching:
            self._batching = True
            ctx.timer("batch", STREAM_BATCH_MS)

    def _pump(self, ctx: Ctx) -> None:
        if self._holding or self._outlived or not self._is_there(ctx):
            return
        while (message := self.endpoint.take()) is not None and self.endpoint.subscription is not None:
            ctx.send(self.endpoint.subscription.collector, message)

    def _is_there(self, ctx: Ctx) -> bool:
        """What is sent to a collector that is no more waits for a route, and is lost without a word if we end first.
        After a break of the link the routes are old until the router speaks."""
        to, routes = self.endpoint.subscription, ctx.views.routes
        if to is None or not routes.known:
            return to is not None
        return routes.current and routes.owner(to.collector) is not None


def _size(frame: Frame) -> int:
    return len(frame.payload) + FRAME_OVERHEAD_BYTES
