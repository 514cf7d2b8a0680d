"""All sessions of one node: found, polled, failed and, when idle for long, forgotten. Pure."""

from __future__ import annotations

from collections.abc import Callable

from common.addresses import Plane
from common.limits import SESSION_IDLE_MS
from common.session import Failure, Session

SWEEP_MS = 60_000  # a walk over all sessions, far rarer than anything else here
CHECK_ALL_EVERY = 32  # checks under validation


class SessionTable:
    """Sessions by (peer, plane). Workers come and go with new keys, so what is idle for SESSION_IDLE_MS goes."""

    def __init__(self, me: bytes, boot: int) -> None:
        self._me, self._boot = me, boot
        self._sessions: dict[tuple[bytes, Plane], Session] = {}
        self._stirred: dict[tuple[bytes, Plane], Session] = {}
        """Those that may have something to do: all others have neither message nor ack under way. Most peers are idle
        most of the time, and a walk over all of them each turn was a third of an idle node's work."""
        self._checks = 0
        self._first_seq = 1
        self._sweep_at: int | None = None

    def __len__(self) -> int:
        return len(self._sessions)

    def get(self, peer: bytes, plane: Plane) -> Session:
        """The session, made if need be. It starts above the numbers of all that were forgotten: a peer that still
        remembers one of them would take lower numbers for duplicates."""
        found = self._sessions.get((peer, plane))
        if found is None:
            found = Session(self._me, self._boot, peer, plane, self._first_seq)
            self._sessions[peer, plane] = found
        self._stirred[peer, plane] = found
        return found

    def known(self, peer: bytes, plane: Plane) -> Session | None:
        """The session if there is one."""
        found = self._sessions.get((peer, plane))
        if found is not None:
            self._stirred[peer, plane] = found
        return found

    def of_plane(self, plane: Plane) -> list[Session]:
        """All sessions on one plane."""
        return [session for (_, lane), session in self._sessions.items() if lane is plane]

    def note_boots(self, boots: dict[bytes, int]) -> list[Failure]:
        """What the routes say of incarnations: a newer one ends the sessions with the older."""
        return [
            failure
            for (peer, _), session in self._sessions.items()
            if (boot := boots.get(peer, 0)) > session.peer_boot
            for failure in session.note_boot(boot)
        ]

    def forget(self, peer: bytes, reason: str) -> list[Failure]:
        """This incarnation of the peer is gone for good (Goodbye, revocation)."""
        failures: list[Failure] = []
        for plane in Plane:
            self._stirred.pop((peer, plane), None)
            if session := self._sessions.pop((peer, plane), None):
                self._first_seq = max(self._first_seq, session.next_seq)
                failures += session.fail_all(reason)
        return failures

    def sweep(self, now_ms: int) -> None:
        """Forget idle sessions, at most once a minute."""
        if self._sweep_at is None:
            self._sweep_at = now_ms + SWEEP_MS
        if now_ms < self._sweep_at:
            return
        self._sweep_at = now_ms + SWEEP_MS
        for key in [key for key, session in self._sessions.items() if session.idle(now_ms - SESSION_IDLE_MS)]:
            self._stirred.pop(key, None)
            self._first_seq = max(self._first_seq, self._sessions.pop(key).next_seq)

    # --- time -------------------------------------------------------------------------------------------------
    def poll(self, now_ms: int, is_up: Callable[[Plane], bool], out: list[tuple[Plane, bytes]]) -> None:
        """Append what every session has to send now."""
        done: list[tuple[bytes, Plane]] = []
        for key, session in self._stirred.items():
            at = session.next_deadline()
            if at is None:
                done.append(key)
            elif at <= now_ms and is_up(key[1]):
                out.extend((key[1], frame) for frame in session.poll(now_ms))
        for key in done:
            del self._stirred[key]

    def next_deadline(self, is_up: Callable[[Plane], bool]) -> int | None:
        """When poll has something to do."""
        earliest: int | None = None
        for (_, plane), session in self._stirred.items():
            at = session.next_deadline()
            if at is not None and (earliest is None or at < earliest) and is_up(plane):
                earliest = at
        return earliest

    def owed_acks(self) -> list[tuple[Plane, bytes]]:
        """For a node that leaves: its peers know then what has arrived."""
        acks = ((plane, session.owed_ack()) for (_, plane), session in self._stirred.items())
        return [(plane, frame) for plane, frame in acks if frame is not None]

    def repeated_last(self) -> list[tuple[Plane, bytes]]:
        """For a node that waits for its last acks."""
        frames = ((plane, session.repeated_last()) for (_, plane), session in self._stirred.items())
        return [(plane, frame) for plane, frame in frames if frame is not None]

    @property
    def unsettled(self) -> int:
        """Messages that their receivers may still acknowledge."""
        return sum(session.outstanding for session in self._stirred.values() if not session.unroutable)

    def check(self) -> None:
        """The invariants of all sessions that may have changed; now and then of all, and that none at rest has work."""
        self._checks += 1
        if self._checks % CHECK_ALL_EVERY:
            for session in self._stirred.values():
                session.check()
            return
        for key, session in self._sessions.items():
            session.check()
            assert key in self._stirred or session.next_deadline() is None, "a session at rest has work"
        assert self._stirred.keys() <= self._sessions.keys()
