"""The end of rented machines: destroyed until a successful listing shows them gone, and found again by their label.

Labels are the truth: a create whose answer was lost may have made an instance whose number nobody knows, and a second
one under the same label is ours as well.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from services.provisioner import vastai_offers as offers
from services.provisioner.plugin import LeftBehind, Listed, Listing, ProviderError
from services.provisioner.vastai_api import VastClient, VastError

DESTROY_S = 90
FIND_READS = 4  # a row lags behind its creation by one to three reads (providers.md A2)
FIND_PAUSE_S = 3
YOUNG_MS = 180_000  # an instance that was last asked for longer ago is in the list, or never was


def rows_of(client: VastClient, handle_id: str) -> list[dict[str, Any]]:
    """Every row with the handle's label. Raises VastError when it cannot be known."""
    return [row for row in client.list_all() if offers.is_of(str(row.get("label") or ""), handle_id) and _number(row)]


def find(client: VastClient, handle_id: str, reads: int, pace: float) -> list[dict[str, Any]]:
    """Rows of this handle, looked for so many times. Raises VastError when a look fails."""
    for left in reversed(range(reads)):
        if found := rows_of(client, handle_id):
            return found
        if left:
            time.sleep(FIND_PAUSE_S * pace)
    return []


def destroy(client: VastClient, instance: int, handle_id: str, pace: float, looks: int = 1) -> None:
    """Until a successful list shows neither the instance (0: none known) nor its label. Raises ProviderError.

    looks: how many such lists in a row; more than one where another instance under the label may still appear.
    """
    until = time.monotonic() + DESTROY_S * max(pace, 0.1)
    problem, wanted = "", {instance} if instance else set()
    while True:
        try:
            for number in sorted(wanted):
                client.destroy(number)
            rows = client.list_all()
            wanted = {
                _number(row)
                for row in rows
                if (instance and row.get("id") == instance) or offers.is_of(str(row.get("label") or ""), handle_id)
            }
            problem = "it is still listed"
            if not wanted:
                looks -= 1
                if not looks:
                    return
                problem, until = "the list is not certain yet", until + FIND_PAUSE_S * pace
        except VastError as error:
            problem = str(error)
        if time.monotonic() > until:
            named = ", ".join(map(str, sorted(wanted))) or handle_id
            raise ProviderError(
                f"instance {named} may still run and cost money ({problem}); the next start or `mvp-orchestrator "
                "reconcile` destroys it, or do it at https://cloud.vast.ai/instances/"
            )
        time.sleep(2 * pace)


def destroy_left_behind(client: VastClient, left: LeftBehind, pace: float, now_ms: Callable[[], int]) -> bool:
    """What bears the label of a dead instance's handle. True if there was something. Raises ProviderError."""
    facts = left.handle.facts if left.handle is not None else {}
    known = int(facts.get("instance") or facts.get("contract") or 0)
    young = left.at_unix_ms > 0 and now_ms() - left.at_unix_ms < YOUNG_MS * pace
    # Whoever died while it was created may be followed by us before the list has it: one look would prove nothing.
    found = find(client, left.id, FIND_READS if young and not known else 1, pace)
    if not found and not known:
        if young:
            raise ProviderError(
                "it may have been rented a moment ago and is not listed yet; it is looked for again, or run "
                "`mvp-orchestrator reconcile` in three minutes"
            )
        return False
    destroy(client, _number(found[0]) if found else known, left.id, pace, FIND_READS if young else 1)
    return bool(found)


def listing(client: VastClient, fleet: str) -> Listing:
    """All instances of the account, by their label. Raises VastError."""
    rows = client.list_all()
    owned = tuple(
        Listed(
            id=handle,
            where=f"instance {row.get('id')}",
            state=str(row.get("actual_status") or "provisioning"),
            since_unix_ms=int(float(row.get("start_date") or 0) * 1000),
            price=float(row["dph_total"]) if isinstance(row.get("dph_total"), int | float) else None,
        )
        for row in rows
        if (handle := offers.handle_of(str(row.get("label") or ""), fleet))
    )
    return Listing(owned, len(rows) - len(owned))


def _number(row: dict[str, Any]) -> int:
    value = row.get("id")
    return value if isinstance(value, int) else 0
