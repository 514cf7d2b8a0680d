"""Service: readiness, lease and the end of a run (design.md 2)."""

from __future__ import annotations

from typing import ClassVar

from common.addresses import SERVICES, U32, U64, Role
from common.codec import Message

_ORCHESTRATOR = frozenset({Role.ORCHESTRATOR})


class ServiceReady(Message, frozen=True, kw_only=True, tag=40):
    """Each service → the orchestrator, as soon as its route is seen, and again for each new orchestrator boot."""

    FROM: ClassVar[frozenset[Role]] = SERVICES
    service: str
    boot: U64


class ServiceFailed(Message, frozen=True, kw_only=True, tag=41):
    """Any service → the orchestrator: it cannot serve this run; phase and error end up in the exit line (S1 10)."""

    FROM: ClassVar[frozenset[Role]] = SERVICES
    service: str
    phase: str
    error: str


class Lease(Message, frozen=True, kw_only=True, tag=42):
    """Orchestrator → provisioner, gateway and agents each 5 s, a datagram. A holder whose lease ends stops itself."""

    FROM: ClassVar[frozenset[Role]] = _ORCHESTRATOR
    DATAGRAM: ClassVar[bool] = True
    ttl_ms: U32


class LeaseKept(Message, frozen=True, kw_only=True, tag=44):
    """Gateway → orchestrator, the answer to each Lease, a datagram. Without one for as long as a worker may be silent
    (design.md 6 row 22) the gateway is lost: nothing else would tell that it hangs."""

    FROM: ClassVar[frozenset[Role]] = frozenset({Role.GATEWAY})
    DATAGRAM: ClassVar[bool] = True


class RunEnded(Message, frozen=True, kw_only=True, tag=43):
    """Orchestrator → services: the run is over; run state is settled and the service waits for the next one."""

    FROM: ClassVar[frozenset[Role]] = _ORCHESTRATOR
    status: U32
    error: str = ""
