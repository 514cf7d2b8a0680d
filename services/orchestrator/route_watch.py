"""The routes of the workers' actors, and each transition of one (S1 6.2, 8.3; design.md 6 row 22). Pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from common.addresses import short
from common.views import Views
from services.orchestrator.base import Worker

ROUTED, SUSPENDED, NONE, FOREIGN, UNKNOWN = "routed", "suspended", "none", "foreign", "unknown"


class RouteWatch:
    """Remembers the state of each route: routed; suspended (its node is dead in SWIM); none; foreign (another node
    owns the address); unknown (no route view, while the router restarts, or never seen)."""

    def __init__(self) -> None:
        self._states: dict[bytes, str] = {}

    def transitions(self, workers: Iterable[Worker], views: Views) -> list[tuple[Worker, dict[str, Any]]]:
        """What has changed since the last call: the details of its records."""
        found = []
        for worker in workers:
            for kind, address in (("node_actor", worker.node_actor), ("datastream_publisher", worker.publisher)):
                if not address:
                    continue
                before = self._states.get(address, UNKNOWN)
                now, reason = _state(worker, address, views)
                if now != before:
                    self._states[address] = now
                    detail = {
                        "peer": short(worker.node_key),
                        "logical_id": str(worker.node_id),
                        "actor": short(address),
                        "kind": kind,
                        "from": before,
                        "to": now,
                        "reason": reason,
                    }
                    found.append((worker, detail))
        return found


def _state(worker: Worker, address: bytes, views: Views) -> tuple[str, str]:
    if not views.routes.known:
        return UNKNOWN, "the router is away"
    owner = views.routes.owner(address)
    if owner is None:
        return NONE, views.routes.went.get(address) or "not registered"
    if owner.node != worker.node_key:
        return FOREIGN, f"owned by {short(owner.node)}"
    if (member := views.members.member(worker.node_key)) is not None and member.state in ("dead", "left"):
        return SUSPENDED, f"{member.state} in SWIM: {member.reason}"
    return ROUTED, "registered"
