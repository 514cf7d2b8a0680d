"""One suspicion: how long its subject has left, and who else accuses it (Lifeguard's dynamic timeout)."""

from __future__ import annotations

from common.swim.formulas import suspicion_total_ms


class Suspicion:
    """Lives as long as its subject is suspect in one incarnation; a changed subject gets a new one or none.

    Times are protocol milliseconds. `accusers` starts with the first one, who counts as no confirmation.
    """

    def __init__(self, accuser: bytes, now: int, *, wanted: int, min_ms: int, max_ms: int) -> None:
        self.started = now
        self.accusers = [accuser]
        self.wanted, self.min_ms, self.max_ms = wanted, min_ms, max_ms
        self.tell_at: int | None = None
        """When to tell the subject itself again; None when somebody else accuses."""

    @property
    def deadline(self) -> int:
        """When the subject is dead. May lie in the past after a confirmation: then it is due at once."""
        return self.started + suspicion_total_ms(len(self.accusers) - 1, self.wanted, self.min_ms, self.max_ms)

    def confirm(self, accuser: bytes) -> bool:
        """Count an independent accuser. False: known already, or no more are wanted; then it is not passed on."""
        if len(self.accusers) - 1 >= self.wanted or accuser in self.accusers:
            return False
        self.accusers.append(accuser)
        return True

    def restart(self, now: int) -> None:
        """Begin anew: the time before proved nothing (the link was down)."""
        self.started = now
        del self.accusers[1:]
