"""The dead man's switch of a rented node: whoever rented it may be gone for good, and an instance costs money until it
is destroyed (design.md 6 row 20: destroyed on every path). vast.ai gives each container a key for just that.
"""

from __future__ import annotations

import urllib.request
from collections.abc import Mapping

from worker.gpu_node.limits import ORPHAN_LIMIT_MS

BASE_URL = "https://console.vast.ai"
CALL_S = 30


class Orphan:
    """Pure: how long the client has not been there."""

    def __init__(self, now_ms: int, limit_ms: int = ORPHAN_LIMIT_MS) -> None:
        self._seen_ms, self._limit_ms = now_ms, limit_ms

    def is_left(self, link_up: bool, now_ms: int) -> bool:
        """True once the link was down for the whole limit."""
        if link_up:
            self._seen_ms = now_ms
        return now_ms - self._seen_ms >= self._limit_ms


def destroy_self(environ: Mapping[str, str]) -> str:
    """Destroy the instance that this container is. Returns what happened, as a sentence."""
    contract, key = environ.get("CONTAINER_ID", ""), environ.get("CONTAINER_API_KEY", "")
    if not (contract.isdigit() and key):
        return "this container has no key to destroy itself"
    request = urllib.request.Request(
        f"{environ.get('VASTAI_BASE_URL') or BASE_URL}/api/v0/instances/{contract}/",
        method="DELETE",
        headers={"Authorization": f"Bearer {key}"},
    )
    try:
        with urllib.request.urlopen(request, timeout=CALL_S) as response:
            return f"instance {contract} is being destroyed ({response.status})"
    except (OSError, ValueError) as error:
        return f"instance {contract} could not be destroyed from inside: {error}"
