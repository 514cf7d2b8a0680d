"""What the dashboard shows of one run, derived from its records (S1 7.15, 8.11). Pure: entries in, sections out.

Sections are plain JSON values, each with a version that grows when it changes, so that a browser gets only what is
new. Everything is bounded; texts of workers are made harmless for terminals here and for HTML in the page.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable
from typing import Any

from common.records import (
    CHANNEL_BOOTSTRAP,
    CHANNEL_EVENTS,
    CHANNEL_PROMPT,
    CHANNEL_STAGE_ROUTE,
    CHANNEL_STDERR,
    CHANNEL_STDOUT,
    CHANNEL_SWIM,
)
from services.datastream_collector.reader import OWN_STREAMS, Entry, shown
from services.datastream_collector.story import Story
from services.datastream_collector.streams import CHANNEL_GAP
from services.datastream_collector.web.prompts import Prompts
from services.datastream_collector.web.workers import Workers

LOG_PREFIX = "mvp.provisioning.logs.node."
LOG_LINES_MAX = 4000  # per source
LOG_SOURCES_MAX = 256
LINE_CHARS_MAX = 4000
ITEMS_MAX = 200  # faults, transitions, route checks
CHANNELS_MAX = 500

SECTIONS = ("run", "phases", "workers", "prompts", "members", "routes", "faults", "streams", "log_sources")

PHASE_NAMES = {
    "config": "configuration",
    "services": "services",
    "node_provisioner": "provider prepared",
    "provider_start": "workers started",
    "node_runtime_ready": "workers report in",
    "runtime_ready_ack": "acknowledgement",
    "stage_provision": "stages provisioned",
    "weights_loaded": "weights",
    "prompt_rpc": "prompt RPC",
    "serve_prompts": "serving",
    "shutdown": "shutdown",
    "provider_stop": "workers stopped",
    "orch_exit": "exit",
}
"""The steps of a run in the order of S1 4; other phases are details of these."""


class RunView:
    """One run. `add` takes its entries in order."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.story = Story(number)
        self.versions = dict.fromkeys(SECTIONS, 0)
        self.facts: dict[str, Any] = {}
        self.phases: dict[str, dict[str, Any]] = {}
        self.workers = Workers()
        self.prompts = Prompts()
        self.members: dict[str, dict[str, Any]] = {}
        self.transitions: deque[dict[str, Any]] = deque(maxlen=ITEMS_MAX)
        self.routes: deque[dict[str, Any]] = deque(maxlen=ITEMS_MAX)
        self.faults: deque[dict[str, Any]] = deque(maxlen=ITEMS_MAX)
        self.frames: Counter[tuple[str, str]] = Counter()
        self.bytes: Counter[tuple[str, str]] = Counter()
        self.lost: Counter[str] = Counter()
        self.missed = 0
        """Frames that this dashboard did not get (explicit gaps of its subscription)."""
        self.logs: dict[str, LogTail] = {}
        self.began_ms = 0
        self.last_ms = 0
        self._step_ms = 0

    # --- entries in -------------------------------------------------------------------------------------------
    def add(self, entry: Entry) -> None:
        """The next frame of this run."""
        at = entry.unix_ms
        self.began_ms = self.began_ms or at
        self.last_ms = max(self.last_ms, at)
        channel = entry.channel
        self._count(entry, channel)
        if channel.startswith(LOG_PREFIX) or channel in (CHANNEL_STDOUT, CHANNEL_STDERR):
            self._log(entry, channel)
        elif channel == CHANNEL_BOOTSTRAP:
            self._bootstrap(entry, at)
        elif channel == CHANNEL_PROMPT:
            if self.prompts.add(entry):
                self._touch("prompts")
            self._prompt_fault(entry, at)
        elif channel == CHANNEL_EVENTS:
            self._event(entry, at)
        elif channel == CHANNEL_SWIM:
            self._member(entry, at)
        elif channel == CHANNEL_STAGE_ROUTE:
            self.routes.append({"ms": at, "node_id": entry.content.get("node_id"), **_plain(entry.detail)})
            self._touch("routes")
        elif channel == CHANNEL_GAP:
            self._gap(entry, at)
        elif self.workers.own(entry):
            self._touch("workers")
            self._fault_of(entry, at)
        if channel in (CHANNEL_BOOTSTRAP, CHANNEL_EVENTS) or channel.endswith(".stderr"):
            self.story.add(entry)

    def miss(self, count: int) -> None:
        """The subscription was overtaken: so many frames are not in this view."""
        self.missed += count
        self._touch("streams")

    def _touch(self, *sections: str) -> None:
        for section in sections:
            self.versions[section] += 1

    def _count(self, entry: Entry, channel: str) -> None:
        key = (entry.stream, channel)
        if key not in self.frames and len(self.frames) >= CHANNELS_MAX:
            key = (entry.stream, "(more)")
        self.frames[key] += 1
        self.bytes[key] += len(entry.text)
        self.versions["streams"] += 1

    # --- phases and faults ------------------------------------------------------------------------------------
    def _bootstrap(self, entry: Entry, at: int) -> None:
        phase, status = str(entry.content.get("phase", "")), str(entry.content.get("status", ""))
        if phase == "config":
            self.facts.update(_plain(entry.detail))
        if phase == "prompt_rpc" and status == "ready":
            self.facts["addr"] = entry.detail.get("addr")
        self._phase(phase, status, entry, at)
        if self.workers.bootstrap(entry):
            self._touch("workers")
        if status == "failed":
            self._fault(at, phase, entry)
        elif phase == "service_restart":
            how = entry.detail.get("how")
            self._say_fault(at, phase, None, f"{entry.detail.get('service')} {how}; it was restarted")
        self._touch("run", "phases")

    def _phase(self, phase: str, status: str, entry: Entry, at: int) -> None:
        is_detail = phase.endswith(("_send", "_wait")) or (status != "failed" and phase not in self.phases)
        if phase not in PHASE_NAMES and is_detail:
            return
        step = self.phases.get(phase)
        if step is None:
            # Without a "started" the step began where the one before it ended.
            begin = at if status in ("started", "sent") else self._step_ms or at
            name = PHASE_NAMES.get(phase, phase.replace("_", " "))
            step = self.phases[phase] = {"phase": phase, "name": name, "begin_ms": begin, "end_ms": None, "error": ""}
        step["status"] = status
        if status == "ready":
            step["end_ms"] = at
        elif status == "failed":
            step["end_ms"], step["error"] = at, shown(str(entry.detail.get("error", "")))[:LINE_CHARS_MAX]
        if phase == "weights_loaded" and status == "ready" and (stages := self.phases.get("stage_provision")):
            stages["end_ms"], stages["status"] = at, "ready"
        if phase == "shutdown":
            serving = self.phases.get("serve_prompts")
            if serving and serving["end_ms"] is None:
                serving["end_ms"], serving["status"] = at, "ready"
        if phase == "orch_exit" and (stop := self.phases.get("shutdown")):
            stop["end_ms"], stop["status"] = at, "ready" if status == "ready" else stop["status"]
        self._step_ms = at

    def _event(self, entry: Entry, at: int) -> None:
        if self.workers.event(entry):
            self._touch("workers")
        event = entry.body("event")
        if event.get("kind") == "ProvisionFailed":
            self._say_fault(at, "provider", event.get("node_id"), str(event.get("message") or "no cause was given"))

    def _member(self, entry: Entry, at: int) -> None:
        detail = _plain(entry.detail)
        peer = str(detail.get("peer", ""))
        if not peer:
            return
        self.transitions.append({"ms": at, **detail})
        self.members[peer] = {"since_ms": at, **detail}
        while len(self.members) > ITEMS_MAX:
            self.members.pop(next(iter(self.members)))
        if detail.get("to") in ("suspect", "dead"):
            name = detail.get("logical_id") or peer
            self._say_fault(at, "membership", None, f"{name} is {detail['to']}: {detail.get('reason') or 'no reason'}")
        self._touch("members")

    def _gap(self, entry: Entry, at: int) -> None:
        content = entry.content
        lost = content.get("lost")
        if isinstance(lost, int):
            stream = str(content.get("stream", ""))
            self.lost[stream] += lost
            self._say_fault(at, "datastream", None, f"{lost} frames of {stream} are lost: {content.get('reason')}")
            self._touch("streams")

    def _prompt_fault(self, entry: Entry, at: int) -> None:
        content = entry.content
        if content.get("phase") == "prompt_complete" and content.get("status") == "failed":
            cause = f"prompt {entry.detail.get('prompt_id')}: {entry.detail.get('error')}"
            self._say_fault(at, "prompt", None, cause)

    def _fault_of(self, entry: Entry, at: int) -> None:
        if entry.content.get("status") == "failed":
            self._fault(at, str(entry.content.get("phase", "")), entry)

    def _fault(self, at: int, phase: str, entry: Entry) -> None:
        detail = entry.detail
        cause = next((str(detail[key]) for key in ("error", "reason", "message") if detail.get(key)), "no cause given")
        self._say_fault(at, phase, entry.content.get("node_id"), cause)

    def _say_fault(self, at: int, phase: str, node_id: Any, cause: str) -> None:
        fault = {"ms": at, "phase": phase, "node_id": node_id, "cause": shown(cause)[:LINE_CHARS_MAX]}
        if not self.faults or {**self.faults[-1], "ms": at} != fault:
            self.faults.append(fault)
            self._touch("faults")

    # --- logs -------------------------------------------------------------------------------------------------
    def _log(self, entry: Entry, channel: str) -> None:
        line = entry.body("line")
        if channel.startswith(LOG_PREFIX):
            source = channel.removeprefix(LOG_PREFIX)
        else:
            source = f"services.{channel.rpartition('.')[2]}"
        tail = self.logs.get(source)
        if tail is None:
            if len(self.logs) >= LOG_SOURCES_MAX:
                return
            tail = self.logs[source] = LogTail()
        text = str(line.get("line", "")) if line else entry.text
        tail.append(entry.unix_ms, shown(text)[:LINE_CHARS_MAX])
        self._touch("log_sources")

    # --- sections out -----------------------------------------------------------------------------------------
    def section(self, name: str) -> Any:
        """One of SECTIONS as a JSON value."""
        match name:
            case "run":
                return self._run()
            case "phases":
                order = list(PHASE_NAMES)
                known = sorted(
                    (step for step in self.phases.values() if step["phase"] in PHASE_NAMES),
                    key=lambda step: order.index(step["phase"]),
                )
                return known + [step for step in self.phases.values() if step["phase"] not in PHASE_NAMES]
            case "workers":
                return self.workers.rows()
            case "prompts":
                return self.prompts.rows()
            case "members":
                return {"now": list(self.members.values()), "transitions": list(self.transitions)}
            case "routes":
                return list(self.routes)
            case "faults":
                return list(self.faults)
            case "log_sources":
                return {source: tail.total for source, tail in sorted(self.logs.items())}
            case _:
                return self._streams()

    def _run(self) -> dict[str, Any]:
        how, phase, cause = self.story.outcome()
        return {
            "number": self.number,
            "state": self.state,
            "how": how,
            "phase": phase,
            "cause": shown(cause)[:LINE_CHARS_MAX],
            "advice": self.story.advice(),
            "began_ms": self.began_ms,
            "last_ms": self.last_ms,
            "facts": self.facts,
        }

    @property
    def state(self) -> str:
        """starting, serving, stopping, ended or failed."""
        how = self.story.outcome()[0]
        if how.startswith("failed"):
            return "failed"
        if how == "ended":
            return "ended"
        if how.startswith("stopping"):
            return "stopping"
        return "serving" if "serve_prompts" in self.phases else "starting"

    def _streams(self) -> dict[str, Any]:
        rows: dict[str, dict[str, Any]] = {}
        for (stream, channel), count in self.frames.items():
            row = rows.setdefault(stream, {"frames": 0, "bytes": 0, "channels": {}})
            row["frames"] += count
            row["bytes"] += self.bytes[stream, channel]
            row["channels"][channel] = count
        own = next((name for name in rows if name.startswith(OWN_STREAMS)), "")
        lost = {stream or own: count for stream, count in self.lost.items()}
        return {"streams": rows, "lost": lost, "missed": self.missed}


class LogTail:
    """The newest lines of one source, numbered from 0."""

    def __init__(self, limit: int = LOG_LINES_MAX) -> None:
        self._lines: deque[tuple[int, int, str]] = deque(maxlen=limit)
        self.total = 0

    def append(self, unix_ms: int, text: str) -> None:
        """The next line."""
        self._lines.append((self.total, unix_ms, text))
        self.total += 1

    def lines(self, *, search: str = "", after: int = -1, limit: int = 500) -> list[tuple[int, int, str]]:
        """The newest `limit` lines with a number above `after` that contain `search` in any case."""
        wanted = search.casefold()
        found: list[tuple[int, int, str]] = []
        for line in reversed(self._lines):
            if line[0] <= after or len(found) >= limit:
                break
            if not wanted or wanted in line[2].casefold():
                found.append(line)
        found.reverse()
        return found


def _plain(detail: dict[str, Any]) -> dict[str, Any]:
    """A record's detail with harmless texts; what is deep or long is cut."""
    return {shown(str(key))[:100]: _value(value, 4) for key, value in list(detail.items())[:64]}


def _value(value: Any, depth: int) -> Any:
    if isinstance(value, str):
        return shown(value)[:LINE_CHARS_MAX]
    if value is None or isinstance(value, bool | int | float):
        return value
    if depth == 0:
        return "…"
    if isinstance(value, dict):
        return {shown(str(key))[:100]: _value(item, depth - 1) for key, item in list(value.items())[:64]}
    if isinstance(value, Iterable):
        return [_value(item, depth - 1) for item in list(value)[:64]]
    return None
