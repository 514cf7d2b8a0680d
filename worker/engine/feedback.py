"""[pipeline] feedback = "direct": the first stage takes decoded tokens from the last stage, and from the gateway. Pure.

Each decode object comes twice: over the feedback edge, one crossing after it was sampled, and over token-in, once the
gateway has checked it. Whichever is first is computed; the other one must be equal, or the stage faults. At most one
object runs ahead of the gateway. An empty object over token-in says that the sequence is over: then what ran ahead is
the gateway's to drop, and what is fed after it is dropped here.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from common.edge_records import Record, decode_tokens


@dataclass(frozen=True, slots=True)
class Compute:
    """This record is the next object of the stage; its bytes belong to `edge_id`."""

    edge_id: int
    record: Record


@dataclass(frozen=True, slots=True)
class Consumed:
    """This record needs no computing; its bytes can be given back."""

    edge_id: int
    record: Record


class FeedbackMismatch(ValueError):
    """The gateway and the last stage disagree; one sentence."""


@dataclass(slots=True)
class FeedbackGate:
    """Of one run's edges. Object ids count up by one, over all sequences."""

    token_in: int
    feedback: int
    first: int | None = None
    """The object that began the present sequence."""
    computed: int = -1
    """The last object that went to the stage."""
    confirmed: int = -1
    """The last object that came over token-in."""
    ended: bool = True
    _once: dict[int, bytes] = field(default_factory=dict)
    """Payloads whose second copy is awaited, by object."""
    _early: Record | None = None
    """A fed object that may not run ahead yet."""

    def on_token_in(self, record: Record) -> list[Compute | Consumed]:
        """From the gateway. Raises FeedbackMismatch."""
        at = record.object_id
        if record.begin:
            dropped = self._drop_early()
            self.first, self.ended = at, False
            self._once.clear()
            self.computed = self.confirmed = at
            return [*dropped, Compute(self.token_in, record)]
        self.confirmed = at
        if not record.payload:
            self.ended = True
        if at != self.computed:
            self.computed = at
            if record.payload:
                self._once[at] = record.payload
            return [Compute(self.token_in, record), *self._next()]
        fed = self._once.pop(at, b"")
        if record.payload and record.payload != fed:
            raise _mismatch(at, gateway=record.payload, fed=fed)
        return [Consumed(self.token_in, record), *self._next()]

    def on_feedback(self, record: Record) -> list[Compute | Consumed]:
        """From the last stage. Raises FeedbackMismatch."""
        at = record.object_id
        if self.first is None or at <= self.first or self.ended:
            return [Consumed(self.feedback, record)]
        if at <= self.computed:
            said = self._once.pop(at, record.payload)
            if said != record.payload:
                raise _mismatch(at, gateway=said, fed=record.payload)
            return [Consumed(self.feedback, record)]
        if at != self.computed + 1 or self._early is not None:
            raise FeedbackMismatch(f"the last stage fed object {at} back, the next one is {self.computed + 1}")
        self._early = record
        return self._next()

    @property
    def fed_next(self) -> bool:
        """The next object that comes over the feedback edge may run at once."""
        return self._early is None and not self.ended and self.confirmed == self.computed

    def _next(self) -> list[Compute | Consumed]:
        """What was fed and may run now."""
        early = self._early
        if early is None:
            return []
        if self.ended:
            return self._drop_early()
        if early.object_id <= self.computed:
            self._early = None
            return self.on_feedback(early)
        if self.confirmed != self.computed:
            return []
        self._early = None
        self.computed = early.object_id
        self._once[early.object_id] = early.payload
        return [Compute(self.feedback, early)]

    def _drop_early(self) -> list[Compute | Consumed]:
        early, self._early = self._early, None
        return [Consumed(self.feedback, early)] if early is not None else []

    def check(self) -> None:
        """Invariants."""
        assert self.confirmed <= self.computed <= self.confirmed + 1, "more than one object runs ahead"


def fed_back(record: Record) -> Record | None:
    """What the last stage feeds to the first for its token-out record: the object that follows; None at the end."""
    if record.end or not record.payload:
        return None
    return Record(record.object_id + 1, record.object_id + 1, record.payload, end=True)


def _mismatch(at: int, *, gateway: bytes, fed: bytes) -> FeedbackMismatch:
    said, got = decode_tokens(gateway), decode_tokens(fed)
    return FeedbackMismatch(f"object {at} is token {said} of the gateway and token {got} of the last stage")
