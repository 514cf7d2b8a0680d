"""What the SWIM core hands out; the host sends the Sends and passes the rest on to whoever owns the member."""

from __future__ import annotations

from dataclasses import dataclass

from common.codec import Message
from common.messages.bus import NameEntry
from common.messages.member import MemberId, MemberUpdate


@dataclass(frozen=True, slots=True)
class Send:
    """A datagram for the SWIM actor of another member."""

    dst: bytes
    message: Message


@dataclass(frozen=True, slots=True)
class Transition:
    """A member came to another state. from_state: "unknown" at first sight.

    to_state: also "dead" for a boot that was superseded while it was believed to live.
    update: what is believed now; for a superseded boot what was believed last.
    """

    peer: MemberId
    from_state: str
    to_state: str
    reason: str
    update: MemberUpdate


@dataclass(frozen=True, slots=True)
class Updated:
    """A member's incarnation or metadata changed, its state did not."""

    update: MemberUpdate


@dataclass(frozen=True, slots=True)
class Forgotten:
    """A dead or left member is no longer remembered."""

    peer: MemberId


@dataclass(frozen=True, slots=True)
class NameChanged:
    """A name resolves to something else now; entry None: it resolves to nothing."""

    name: str
    entry: NameEntry | None


@dataclass(frozen=True, slots=True)
class Left:
    """Our own leave is as well known as it will become; the process may go."""


@dataclass(frozen=True, slots=True)
class Superseded:
    """Somebody runs with our node key and a newer boot: this process is the old one and keeps silent from now on."""

    boot: int


Output = Send | Transition | Updated | Forgotten | NameChanged | Left | Superseded
