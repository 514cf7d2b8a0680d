"""Why a run ended, from its records: phase, cause, last stderr lines, timeline (S1 10.15). Pure.

Used by `mvp-archive FILE why` and by the dashboard, so that both give the same answer.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from common.limits import STDERR_TAIL_LINES
from common.records import CHANNEL_BOOTSTRAP, CHANNEL_EVENTS
from services.datastream_collector.reader import Entry

NOT_FATAL = frozenset({"worker_datastream", "datastream_archive", "datastream_subscribe"})
"""Failed observations of the datastream itself end no run (S1 10.11)."""
ADVICE = (
    (
        r"SIGKILL|out of memory",
        "mostly the kernel kills so, for lack of memory (journalctl -k | grep -i oom): take a smaller [model] "
        'max_context or model, or more stages; [runtime] on_worker_loss = "restart" goes on after a loss',
    ),
    (
        r"SIGSEGV|SIGILL|SIGBUS|SIGFPE",
        "a crash in native code: SMQ_ENGINE_KERNELS=portable works around broken kernels, `mvp-orchestrator doctor` "
        "tries the device",
    ),
    (
        r"made no progress|did not answer|dead in SWIM|not alive in SWIM",
        "the machine, its disk or the network between hung: look at both machines' load and at `mvp-tap --stats`",
    ),
    (
        r"did not start|was not started|not ready within|exited before ready|before it was ready",
        "`mvp-orchestrator doctor` with the same configuration says what is missing on this machine",
    ),
    (
        r"cannot listen at [^']",
        "stop what listens there (ss -ltnp), or configure another address",
    ),
)
TIMELINE_MAX = 20_000  # of a run that repeats itself for days


@dataclass(slots=True)
class Story:
    """What is kept of a run to explain its end."""

    number: int
    timeline: list[Entry] = field(default_factory=list)
    stderr: list[Entry] = field(default_factory=list)
    frames: int = 0

    def add(self, entry: Entry) -> None:
        """Take the next entry of this run."""
        self.frames += 1
        if entry.channel in (CHANNEL_BOOTSTRAP, CHANNEL_EVENTS):
            self.timeline.append(entry)
            if len(self.timeline) > TIMELINE_MAX:
                # The beginning says how it started, the end why it stopped.
                del self.timeline[TIMELINE_MAX // 2 : TIMELINE_MAX * 3 // 4]
        elif entry.channel.endswith(".stderr"):
            self.stderr.append(entry)
            del self.stderr[:-STDERR_TAIL_LINES]

    @property
    def began_ms(self) -> int:
        """When the first record was collected, 0 if unknown."""
        return next((entry.unix_ms for entry in self.timeline if entry.unix_ms), 0)

    def outcome(self) -> tuple[str, str, str]:
        """(how it ended, phase, cause), each a few words.

        The first failure is the cause; what failed after it usually failed because of it. The exit record decides
        how the run ended.
        """
        phases = [entry for entry in self.timeline if "phase" in entry.content]
        failures = [entry for entry in phases if entry.content.get("status") == "failed" and is_fatal(entry)]
        exits = [entry for entry in phases if entry.content.get("phase") == "orch_exit"]
        stops = [entry for entry in phases if entry.content.get("phase") == "shutdown"]
        last = str(phases[-1].content.get("phase")) if phases else "unknown"
        if failures and not (exits and exits[-1].content.get("status") == "ready"):
            first = failures[0]
            ended = "failed" if exits else "failed, without an exit record"
            exit_error = str(exits[-1].detail.get("error", "")) if exits else ""
            return ended, str(first.content.get("phase")), exit_error or cause_of(first)
        if exits:
            source = stops[-1].detail.get("source") if stops else None
            return "ended", last, f"shutdown by {source}" if source else "it was done"
        if stops:
            return "stopping, without an exit record", "shutdown", f"shutdown by {stops[-1].detail.get('source')}"
        return "no exit record", last, "it still runs, or the orchestrator was killed"

    def advice(self) -> str:
        """What can be done about a failure, "" where the cause says it itself or nothing is known."""
        ended, _, cause = self.outcome()
        if not ended.startswith("failed"):
            return ""
        told = " ".join([cause, *(str(entry.body("line").get("line", "")) for entry in self.stderr[-5:])])
        return next((text for pattern, text in ADVICE if re.search(pattern, told)), "")


def is_fatal(entry: Entry) -> bool:
    """Whether a failed record can be why a run ended."""
    return str(entry.content.get("phase")) not in NOT_FATAL


def cause_of(entry: Entry) -> str:
    """The cause that a failed record names."""
    for key in ("error", "reason", "message", "classification"):
        if entry.detail.get(key):
            return str(entry.detail[key])
    return "no error text was recorded"
