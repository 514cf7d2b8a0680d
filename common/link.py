"""Link: whether this node's door broker is there, per plane (design.md 3).

Hello until Welcome, then an application ping each second: libzmq answers its own heartbeats even when the broker's
loop hangs, and a ROUTER that lost its state says nothing at all. Silence or a refusal rebuilds the socket, since libzmq
never retries after a failed handshake. Pure: it says what to send and which socket to rebuild.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from common.addresses import Plane
from common.codec import Message
from common.limits import (
    HELLO_RESEND_MS,
    LINK_PING_MS,
    LINK_REBUILD_MS_MAX,
    LINK_REBUILD_MS_MIN,
    LINK_SILENT_MS,
)
from common.messages.bus import Hello, Ping, Pong, Reintroduce, Welcome


@dataclass(frozen=True, slots=True)
class LinkSend:
    """Send this link message to the broker on this plane."""

    plane: Plane
    message: Message


@dataclass(frozen=True, slots=True)
class LinkReset:
    """Close and reconnect the socket of this plane."""

    plane: Plane


@dataclass(frozen=True, slots=True)
class LinkUp:
    """The plane is bound (again): sessions resend. fresh_router: the router's boot changed, register everything."""

    plane: Plane
    fresh_router: bool


LinkEffect = LinkSend | LinkReset | LinkUp


@dataclass(slots=True)
class _Lane:
    up: bool = False
    heard_ms: int = 0
    next_ms: int = 0
    tries_since_ms: int = 0
    down_since_ms: int | None = 0
    backoff_ms: int = LINK_REBUILD_MS_MIN

    @property
    def due_ms(self) -> int:
        """When there is something to do."""
        silent_ms = self.heard_ms + LINK_SILENT_MS + 1
        return silent_ms if self.up and silent_ms < self.next_ms else self.next_ms


class Link:
    """The state of all planes towards one broker."""

    def __init__(self, boot: int, logical_id: str, planes: Iterable[Plane]) -> None:
        self._hello = Hello(boot=boot, logical_id=logical_id)
        self.lanes: dict[Plane, _Lane] = {plane: _Lane() for plane in planes}
        self.broker_key = b""
        self.broker_boot = 0
        self.router_key = b""
        self.router_boot = 0
        self._started = False
        self._whole = len(self.lanes) == len(Plane)

    @property
    def up(self) -> bool:
        """The control plane is bound and answering."""
        return self.lanes[Plane.CONTROL].up

    @property
    def whole(self) -> bool:
        """Every plane is bound and answering."""
        for lane in self.lanes.values():  # not all(...): this is asked in every turn
            if not lane.up:
                return False
        return self._whole

    def is_up(self, plane: Plane) -> bool:
        """This plane is bound and answering."""
        lane = self.lanes.get(plane)
        return lane is not None and lane.up

    def down_since(self, plane: Plane) -> int | None:
        """Since when this plane is down, None while it is up: its sends fail after 5 s (S1 6.11). A plane that this
        node does not dial was never up."""
        lane = self.lanes.get(plane)
        return lane.down_since_ms if lane else 0

    def heard(self, plane: Plane, now_ms: int) -> None:
        """Any frame is a sign of life."""
        self.lanes[plane].heard_ms = now_ms

    def on_message(self, plane: Plane, message: Welcome | Pong | Reintroduce, now_ms: int) -> list[LinkEffect]:
        """The broker's answers."""
        lane = self.lanes[plane]
        lane.heard_ms = now_ms
        if isinstance(message, Reintroduce):
            return self._down(plane, now_ms)
        fresh = message.router_boot != self.router_boot
        broker_changed = message.broker_boot != self.broker_boot
        if isinstance(message, Pong):
            # A Pong of another boot comes from a broker that has forgotten us: introduce again.
            return self._down(plane, now_ms) if broker_changed or fresh else []
        self.broker_key, self.broker_boot = message.broker_key, message.broker_boot
        self.router_key, self.router_boot = message.router_key, message.router_boot
        lane.up, lane.backoff_ms, lane.next_ms = True, LINK_REBUILD_MS_MIN, now_ms + LINK_PING_MS
        lane.down_since_ms = None
        return [LinkUp(plane, fresh)]

    def on_refused(self, plane: Plane, now_ms: int) -> list[LinkEffect]:
        """The monitor saw a failed handshake: rebuild after the back-off."""
        effects = self._down(plane, now_ms)
        lane = self.lanes[plane]
        lane.next_ms = now_ms + lane.backoff_ms
        lane.tries_since_ms = now_ms - LINK_SILENT_MS
        return [effect for effect in effects if not isinstance(effect, LinkSend)]

    def _down(self, plane: Plane, now_ms: int) -> list[LinkEffect]:
        lane = self.lanes[plane]
        if lane.up:
            lane.tries_since_ms = lane.down_since_ms = now_ms
        elif now_ms < lane.next_ms:
            # A Hello is on its way: a restarted broker answers each of a window's frames with Reintroduce.
            return []
        lane.up = False
        lane.next_ms = now_ms + HELLO_RESEND_MS
        return [LinkSend(plane, self._hello)]

    def tick(self, now_ms: int) -> list[LinkEffect]:
        """Pings, Hellos and rebuilds that are due."""
        if not self._started:
            self._started = True
            for lane in self.lanes.values():
                lane.tries_since_ms = lane.heard_ms = lane.next_ms = lane.down_since_ms = now_ms
        effects: list[LinkEffect] = []
        for plane, lane in self.lanes.items():
            if lane.up and now_ms - lane.heard_ms > LINK_SILENT_MS:
                effects.append(LinkReset(plane))
                effects.extend(self._down(plane, now_ms))
            elif now_ms < lane.next_ms:
                continue
            elif lane.up:
                lane.next_ms = now_ms + LINK_PING_MS
                effects.append(LinkSend(plane, Ping()))
            else:
                if now_ms - lane.tries_since_ms >= LINK_SILENT_MS:
                    effects.append(LinkReset(plane))
                    lane.tries_since_ms = now_ms - LINK_SILENT_MS + lane.backoff_ms
                    lane.backoff_ms = min(lane.backoff_ms * 2, LINK_REBUILD_MS_MAX)
                lane.next_ms = now_ms + HELLO_RESEND_MS
                effects.append(LinkSend(plane, self._hello))
        return effects

    def next_deadline(self) -> int | None:
        """When tick has something to do."""
        return min([lane.due_ms for lane in self.lanes.values()])


class LocalDoor:
    """The link of a broker's own node to the broker core beside it: always there. A relay's node knows no router route
    view, so its router_key stays empty and it registers and watches nothing."""

    def __init__(self, key: bytes, boot: int, *, is_router: bool) -> None:
        self.broker_key, self.broker_boot = key, boot
        self.router_key, self.router_boot = (key, boot) if is_router else (b"", 0)
        self.up = self.whole = True

    def is_up(self, plane: Plane) -> bool:
        """Always."""
        return True

    def down_since(self, plane: Plane) -> int | None:
        """Never."""
        return None

    def heard(self, plane: Plane, now_ms: int) -> None:
        """Nothing to note."""

    def on_message(self, plane: Plane, message: Welcome | Pong | Reintroduce, now_ms: int) -> list[LinkEffect]:
        """A broker says these to others only."""
        return []

    def on_refused(self, plane: Plane, now_ms: int) -> list[LinkEffect]:
        """There is no handshake."""
        return []

    def tick(self, now_ms: int) -> list[LinkEffect]:
        """Nothing is ever due."""
        return []

    def next_deadline(self) -> int | None:
        """Never."""
        return None
