"""The workers of a run as rows, derived from records of orchestrator, provider and the workers themselves. Pure."""

from __future__ import annotations

from typing import Any

from services.datastream_collector.reader import Entry, shown

WORKERS_MAX = 256
NOT_OF_A_WORKER = frozenset({"config", "run_command", "run_lifecycle"})
"""They name a stage, but the orchestrator speaks of itself."""
EDGE_CHANNEL = "mvp.node.edge"
"""A worker's record of an edge: NodeEvent with detail {edge_id, records, bytes, latency_ms?, held_ms?}."""

_FIRST_STATES = {
    ("provider_start", "started"): "starting",
    ("provider_start", "ready"): "started",
    ("node_runtime_ready", "ready"): "reported in",
    ("runtime_ready_ack", "ready"): "acknowledged",
    ("stage_provision_send", "sent"): "loading",
    ("provider_stop", "ready"): "stopped",
}


class Workers:
    """Rows by node id."""

    def __init__(self) -> None:
        self._rows: dict[int, dict[str, Any]] = {}
        self._stages: dict[int, dict[str, Any]] = {}

    def rows(self) -> list[dict[str, Any]]:
        """By stage, then node."""
        return sorted(self._rows.values(), key=lambda row: (row["stage_index"] or 0, row["node_id"]))

    def _row(self, node_id: Any) -> dict[str, Any] | None:
        if not isinstance(node_id, int) or isinstance(node_id, bool):
            return None
        row = self._rows.get(node_id)
        if row is None and len(self._rows) < WORKERS_MAX:
            row = self._rows[node_id] = {
                "node_id": node_id,
                "stage_index": None,
                "provider": "",
                "state": "",
                "starts": 0,
                "layers": None,
                "error": "",
                "edges": {},
            }
        return row

    # --- the orchestrator's records ---------------------------------------------------------------------------
    def bootstrap(self, entry: Entry) -> bool:
        """A bootstrap record; whether a row changed."""
        content, detail = entry.content, entry.detail
        phase, status = content.get("phase"), content.get("status")
        if phase == "stage_provision" and status == "started":
            self._plan(detail)
            return True
        if phase == "weights_loaded" and status == "ready":
            for held in self._rows.values():
                if held["state"] in ("loading", "weights loaded"):
                    held["state"] = "ready"
                held.pop("progress", None)
            return True
        if str(phase) in NOT_OF_A_WORKER or (
            "stage_index" not in detail and phase not in ("runtime_ready_ack", "provider_stop", "node_swim")
        ):
            return False
        if phase == "provider_stop" and "stage_index" not in detail:
            return self._stopped(detail.get("stopped"))
        # A failure is recorded by the orchestrator as its own; the worker that it is about stands in the detail.
        row = self._row(detail.get("node_id", content.get("node_id")))
        if row is None:
            return False
        if isinstance(detail.get("stage_index"), int):
            row["stage_index"] = detail["stage_index"]
        for key in ("provider", "handle", "endpoint", "dph_total"):
            if detail.get(key) is not None:
                row[key] = shown(str(detail[key])) if key != "dph_total" else detail[key]
        if phase == "provider_start" and status == "started":
            row["starts"] += 1
            row["error"] = ""
        if state := _FIRST_STATES.get((str(phase), str(status))):
            row["state"] = row["state"] if state == "stopped" and row["state"] == "failed" else state
        elif phase == "weights_loaded" and status == "observed":
            row["state"] = "weights loaded"
        elif phase == "stage_provision_wait":
            row["state"] = "loading"
            row["progress"] = {key: detail.get(key) for key in ("phase", "done", "total")}
        elif status == "failed":
            row["state"], row["error"] = "failed", shown(str(detail.get("error", "")))
        return True

    def _stopped(self, node_ids: Any) -> bool:
        """The provider is done: which of the workers it stopped."""
        found = [row for row in self._rows.values() if isinstance(node_ids, list) and row["node_id"] in node_ids]
        for row in found:
            row["state"] = row["state"] if row["state"] == "failed" else "stopped"
        return bool(found)

    def _plan(self, detail: dict[str, Any]) -> None:
        stages = detail.get("stages")
        for stage in stages if isinstance(stages, list) else []:
            if isinstance(stage, dict) and (row := self._row(stage.get("node_id"))) is not None:
                layers = stage.get("layer_range")
                row["stage_index"] = stage.get("stage_index")
                row["inbound_edge"], row["outbound_edge"] = stage.get("inbound_edge_id"), stage.get("outbound_edge_id")
                if isinstance(layers, dict):
                    row["layers"] = [layers.get("start"), layers.get("end_exclusive")]

    # --- the provider's events --------------------------------------------------------------------------------
    def event(self, entry: Entry) -> bool:
        """A provisioning event; whether a row changed."""
        event = entry.body("event")
        row = self._row(event.get("node_id"))
        if row is None:
            return False
        row["provider"] = shown(str(event.get("provider") or row["provider"]))
        match event.get("kind"):
            case "ProvisionFailed":
                row["state"], row["error"] = "failed", shown(str(event.get("message") or ""))
            case "NodeStopped":
                row["exit"] = shown(str(event.get("message") or ""))
                row["state"] = row["state"] if row["state"] == "failed" else "stopped"
            case _:
                return False
        return True

    # --- the workers' own streams -----------------------------------------------------------------------------
    def own(self, entry: Entry) -> bool:
        """A frame of a worker's stream; whether a row changed."""
        node = entry.stream.partition("/")[0]
        row = self._row(int(node)) if node.isdecimal() and len(node) < 20 else None
        if row is None:
            return False
        content, detail = entry.content, entry.detail
        match entry.channel:
            case "host.cpu":
                row["cpu"] = {key: _number(content.get(key)) for key in ("percent", "worker_percent", "cores", "load1")}
            case "host.memory":
                keys = ("total_bytes", "available_bytes", "agent_rss_bytes", "engine_rss_bytes")
                row["memory"] = {key: _number(content.get(key)) for key in keys}
            case "host.gpu":
                row["gpus"] = _gpus(content.get("gpus"))
            case "mvp.node.stage" if content.get("phase") == "weights" and content.get("status") == "ready":
                for key in ("weights_bytes", "kv_bytes", "layers_held", "max_context", "elapsed_ms"):
                    row[key] = _number(detail.get("layers" if key == "layers_held" else key))
            case "mvp.node.stage" if content.get("phase") == "edge" and isinstance(detail.get("edge_id"), int):
                row.setdefault("paths", {})[str(detail["edge_id"])] = shown(str(detail.get("path", "")))[:100]
            case "mvp.node.bootstrap" if content.get("phase") == "engine" and content.get("status") == "ready":
                row["backend"] = shown(str(detail.get("backend", "")))
            case _ if entry.channel == EDGE_CHANNEL:
                self._edge(row, detail, entry.unix_ms)
            case _:
                return content.get("status") == "failed"
        return True

    def _edge(self, row: dict[str, Any], detail: dict[str, Any], at: int) -> None:
        """Totals and latency of one edge as its worker sees it, with rates since the record before."""
        edge_id, edges = detail.get("edge_id"), row["edges"]
        if not isinstance(edge_id, int) or len(edges) > 64:
            return
        before = edges.get(str(edge_id))
        now = {key: _number(detail.get(key)) for key in ("records", "bytes", "latency_ms", "held_ms")}
        now["ms"] = at
        if before and at > before["ms"]:
            for key in ("records", "bytes"):
                if now[key] is not None and before[key] is not None:
                    now[f"{key}_per_s"] = round((now[key] - before[key]) * 1000 / (at - before["ms"]), 1)
        edges[str(edge_id)] = now


def _number(value: Any) -> Any:
    return value if isinstance(value, int | float) and not isinstance(value, bool) else None


def _gpus(gpus: Any) -> list[dict[str, Any]]:
    keys = ("memory_used_mib", "memory_total_mib", "utilization_gpu_percent", "temperature_c", "power_draw_w")
    return [
        {"name": shown(str(gpu.get("name", ""))), **{key: _number(gpu.get(key)) for key in keys}}
        for gpu in (gpus if isinstance(gpus, list) else [])[:64]
        if isinstance(gpu, dict)
    ]
