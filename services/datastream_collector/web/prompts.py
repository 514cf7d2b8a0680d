"""Prompts as rows, derived from the prompt records (S1 8.5): state, queue, tokens, rates; never text. Pure."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

from services.datastream_collector.reader import Entry, shown

PROMPTS_MAX = 200
OUTCOMES = {"ready": "done", "failed": "fault", "cancelled": "cancelled"}


class Prompts:
    """The newest prompts by internal id."""

    def __init__(self) -> None:
        self._rows: OrderedDict[int, dict[str, Any]] = OrderedDict()
        self.counts = {"done": 0, "fault": 0, "cancelled": 0}
        self.tokens = 0

    def rows(self) -> dict[str, Any]:
        """Newest first, with the totals of the run."""
        return {"rows": list(reversed(self._rows.values())), "counts": dict(self.counts), "tokens": self.tokens}

    @property
    def open(self) -> int:
        """Prompts without an end."""
        return sum(row["ended_ms"] is None for row in self._rows.values())

    @property
    def queued(self) -> int:
        """Prompts that wait for the active one."""
        return sum(row["state"] == "queued" for row in self._rows.values())

    def add(self, entry: Entry) -> bool:
        """A prompt record; whether a row changed."""
        content, detail = entry.content, entry.detail
        prompt_id = detail.get("prompt_id")
        if not isinstance(prompt_id, int) or content.get("status") == "dropped":
            return False
        at = at_ms(entry)
        row = self._rows.get(prompt_id)
        if row is None:
            row = self._rows[prompt_id] = {
                "prompt_id": prompt_id,
                "request_id": shown(str(content.get("request_id", ""))),
                "state": "queued",
                "begin_ms": at,
                "first_ms": None,
                "last_ms": at,
                "ended_ms": None,
                "tokens": 0,
                "max_tokens": detail.get("max_tokens"),
                "prompt_bytes": detail.get("prompt_bytes"),
                "prompt_tokens": None,
                "finish": "",
                "rate": None,
            }
            while len(self._rows) > PROMPTS_MAX:
                self._rows.popitem(last=False)
        self._update(row, content, detail, at)
        return True

    def _update(self, row: dict[str, Any], content: dict[str, Any], detail: dict[str, Any], at: int) -> None:
        phase, status = content.get("phase"), content.get("status")
        if row["ended_ms"] is not None:
            return
        row["last_ms"] = max(row["last_ms"], at)
        if phase == "prompt_complete" and status in OUTCOMES:
            self._end(row, str(status), detail, at)
        elif phase == "prompt_work":
            pass
        elif row["state"] == "queued":
            row["state"] = "active"
        if (tokens := new_tokens(detail)) and phase != "prompt_complete":
            row["first_ms"] = row["first_ms"] or at
            row["tokens"] += tokens
            self.tokens += tokens
            if at > row["first_ms"]:
                row["rate"] = round((row["tokens"] - 1) * 1000 / (at - row["first_ms"]), 1)

    def _end(self, row: dict[str, Any], status: str, detail: dict[str, Any], at: int) -> None:
        row["state"], row["ended_ms"] = OUTCOMES[status], at
        self.counts[OUTCOMES[status]] += 1
        generated = detail.get("tokens_generated")
        if isinstance(generated, int):
            self.tokens += generated - row["tokens"]
            row["tokens"] = generated
        row["prompt_tokens"] = detail.get("prompt_tokens")
        row["elapsed_ms"] = detail.get("elapsed_ms")
        words = (detail.get("finish_reason"), detail.get("error"), detail.get("reason"))
        row["finish"] = shown(str(next((word for word in words if word), "")))[:500]


def new_tokens(detail: dict[str, Any]) -> int:
    """How many tokens a prompt event brought."""
    tokens = detail.get("tokens")
    if isinstance(detail.get("generated_index"), int):
        # Pipeline mode: one record a token, one for the end of the sequence, and after a worker's restart those again.
        return int(detail.get("eos") is False and detail.get("replayed") is not True)
    return tokens if detail.get("event") in ("text_delta", "token") and isinstance(tokens, int) and tokens > 0 else 0


def at_ms(entry: Entry) -> int:
    """When it happened: by the gateway's clock if it says so, else when it was collected, up to a batch later."""
    at = entry.detail.get("unix_ms")
    return at if isinstance(at, int) and 0 < at < 1 << 53 else entry.unix_ms
