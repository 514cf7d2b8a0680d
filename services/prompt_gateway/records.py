"""The prompt records on `mvp.orch.prompt` (S1 8.5; rust-swactor.md 2.8): sizes, ids and causes, never text."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

from common.actors import Ctx
from common.records import CHANNEL_PROMPT, SOURCE_ORCHESTRATOR, prompt_record
from services.prompt_gateway.queue import PromptWork

REMEMBERED_PROMPTS_MAX = 256  # late events are dropped with their client's id as long as it is known


class Records:
    """Builds the records of one run. request_id is the client's id, detail.prompt_id the internal one (row 24)."""

    def __init__(self, run_id: int, node_id: int) -> None:
        self._run_id, self._node_id = run_id, node_id
        self._client_ids: OrderedDict[int, int] = OrderedDict()

    def emit(
        self, ctx: Ctx, phase: str, status: str, work: PromptWork, detail: Mapping[str, Any] | None = None
    ) -> None:
        """One record about a prompt."""
        self._client_ids[work.prompt_id] = work.client_id
        while len(self._client_ids) > REMEMBERED_PROMPTS_MAX:
            self._client_ids.popitem(last=False)
        self._send(ctx, phase, status, work.client_id, {"prompt_id": work.prompt_id, **(detail or {})})

    def dropped(self, ctx: Ctx, prompt_id: int, reason: str, event: str, active: PromptWork | None) -> None:
        """An event of no active prompt (S1 6.12). request_id: the client's, "" when nobody knows it any more."""
        detail = {
            "prompt_id": prompt_id,
            "reason": reason,
            "event": event,
            "active_request_id": active.client_id if active else None,
        }
        self._send(ctx, "node_prompt_event", "dropped", self._client_ids.get(prompt_id, ""), detail)

    def _send(self, ctx: Ctx, phase: str, status: str, request_id: int | str, detail: Mapping[str, Any]) -> None:
        # Batches on the way to the collector blur its clock (STREAM_BATCH_MS); latencies are measured by this one.
        detail = {**detail, "unix_ms": ctx.wall_ms}
        payload = prompt_record(phase, status, self._run_id, self._node_id, request_id, detail)
        ctx.observe(CHANNEL_PROMPT, payload, SOURCE_ORCHESTRATOR)
