"""`mvp-archive FILE`: read a frame archive (S1 8.12), filter and follow it, and say why a run stopped.

Whatever stands in the file, this prints: a torn last line is reported, unreadable lines are counted, and control
characters of logged text are shown escaped, so that they do nothing to the terminal.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from common.limits import STDERR_TAIL_LINES
from common.records import CHANNEL_BOOTSTRAP, CHANNEL_EVENTS

FOLLOW_POLL_S = 0.2
TEXT_CHARS_MAX = 2000  # of one record in the pretty form; --json shows everything
OWN_STREAMS = "mvp-orchestrator/"
START_PHASES = frozenset({"config", "run"})

EXAMPLES = """examples:
  mvp-archive run.jsonl                          every record, one a line
  mvp-archive run.jsonl --phase weights_loaded   the bootstrap and prompt records of one phase
  mvp-archive run.jsonl --node 2 --follow        what node 2 says, now and from now on
  mvp-archive run.jsonl runs                     the runs in this file, with how they ended
  mvp-archive run.jsonl why                      why the last run stopped (why 3: the third)
"""


# --- reading ---------------------------------------------------------------------------------------------------
@dataclass(slots=True)
class Entry:
    """One archived frame. content: the payload's JSON object, {} if it is none; text: the payload as text."""

    record: dict[str, Any]
    run: int = 0
    text: str = ""
    content: dict[str, Any] = field(default_factory=dict)

    @property
    def channel(self) -> str:
        """The channel's name."""
        return str(self.record.get("channel", ""))

    @property
    def unix_ms(self) -> int:
        """When it was collected, 0 if the archive does not say."""
        collected = self.record.get("collected")
        at = collected.get("unix_ms", 0) if isinstance(collected, dict) else 0
        return at if isinstance(at, int) else 0

    @property
    def detail(self) -> dict[str, Any]:
        """A record's detail, {} without one."""
        detail = self.content.get("detail")
        return detail if isinstance(detail, dict) else {}

    def body(self, key: str) -> dict[str, Any]:
        """The record inside `event` or `line`, {} if this is no such record."""
        inner = self.content.get(key)
        return inner if isinstance(inner, dict) else {}


def parse(line: bytes) -> Entry | None:
    """The entry of a line, or None for what is no archive record."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(record, dict) or not isinstance(record.get("arrival_seq"), int):
        return None
    entry = Entry(record)
    payload = record.get("payload")
    value = payload.get("value") if isinstance(payload, dict) else None
    if isinstance(value, str):
        entry.text = value
        with contextlib.suppress(ValueError, RecursionError):
            content = json.loads(value)
            entry.content = content if isinstance(content, dict) else {}
    elif isinstance(value, list):
        entry.text = f"<{len(value)} bytes>"
    return entry


@dataclass(slots=True)
class Damage:
    """What could not be read: whole lines, and the bytes of a last line without its end."""

    lines: int = 0
    torn_bytes: int = 0


def read(path: Path, damage: Damage, *, follow: bool = False) -> Iterator[Entry]:
    """Entries in file order, with their runs. Raises OSError when the file cannot be read at all."""
    numbering = Numbering()
    for line in _lines(path, damage, follow):
        if not line.strip():
            continue
        entry = parse(line)
        if entry is None:
            damage.lines += 1
            continue
        entry.run = numbering.run_of(entry)
        yield entry


def _lines(path: Path, damage: Damage, follow: bool) -> Iterator[bytes]:
    file = path.open("rb")
    rest = b""
    try:
        while True:
            line = file.readline()
            if line.endswith(b"\n"):
                yield rest + line
                rest = b""
            elif line:
                rest += line
            elif not follow:
                break
            else:
                time.sleep(FOLLOW_POLL_S)
                with contextlib.suppress(OSError):
                    now, ours = path.stat(), os.fstat(file.fileno())
                    if (now.st_ino, now.st_dev) != (ours.st_ino, ours.st_dev) or now.st_size < file.tell():
                        # Rotated or cut: go on with what stands there now.
                        file.close()
                        file, rest = path.open("rb"), b""
    finally:
        file.close()
    if rest:
        # The process was killed in the middle of its last write, or is writing it now.
        damage.torn_bytes = len(rest)


class Numbering:
    """Runs 1..n in file order (design.md 6 row 33). A run starts where the orchestrator's stream starts again from its
    first position, or with a first bootstrap record of another boot."""

    def __init__(self) -> None:
        self._run = 1
        self._boot: Any = None
        self._position = -1
        self._begun: set[str] = set()

    def run_of(self, entry: Entry) -> int:
        """The run that this entry, the next one of the file, belongs to."""
        position = entry.record.get("position")
        if str(entry.record.get("stream", "")).startswith(OWN_STREAMS) and isinstance(position, int):
            if position <= self._position:
                self._next()
            self._position = position
        if entry.channel == CHANNEL_BOOTSTRAP:
            self._bootstrap(entry)
        return self._run

    def _bootstrap(self, entry: Entry) -> None:
        phase, status = str(entry.content.get("phase", "")), entry.content.get("status")
        boot = entry.detail.get("boot")
        if phase in START_PHASES:
            if boot is not None:
                if self._boot not in (None, boot):
                    self._next()
                self._boot = boot
            elif status == "started" and phase in self._begun:
                self._next()
            if status == "started":
                self._begun.add(phase)

    def _next(self) -> None:
        self._run += 1
        self._boot = None
        self._begun = set()


# --- choosing --------------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Filter:
    """What the options ask for; None or "" = everything."""

    channel: str = ""
    phase: str = ""
    node: int | None = None
    request: str = ""
    run: int | None = None

    def wants(self, entry: Entry) -> bool:
        """Whether an entry is to be shown."""
        content = entry.content
        return (
            entry.channel.startswith(self.channel)
            and (not self.phase or content.get("phase") == self.phase)
            and (self.node is None or self.node in _nodes(entry))
            and (not self.request or str(content.get("request_id", "")) == self.request)
            and (self.run is None or entry.run == self.run)
        )


def _nodes(entry: Entry) -> set[Any]:
    """The nodes that an entry is about: its own stream's, and those its record names."""
    found: set[Any] = {
        entry.content.get("node_id"),
        entry.body("event").get("node_id"),
        entry.body("line").get("node_id"),
    }
    node = str(entry.record.get("stream", "")).partition("/")[0]
    if node.isdecimal():
        found.add(int(node))
    return {item for item in found if isinstance(item, int)}


# --- showing ---------------------------------------------------------------------------------------------------
def shown(text: str) -> str:
    """Text that does nothing to a terminal: control, format and unassigned characters as escapes."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


def clock(unix_ms: int) -> str:
    """Local time of day, or dashes."""
    if not 0 < unix_ms < 1 << 45:
        return "--:--:--.---"
    return datetime.fromtimestamp(unix_ms / 1000).strftime("%H:%M:%S.%f")[:-3]


def summary(entry: Entry) -> str:
    """The record in a few words."""
    content = entry.content
    if line := entry.body("line"):
        return str(line.get("line", ""))
    if event := entry.body("event"):
        words = [event.get("kind"), event.get("provider"), event.get("message")]
        return f"node {event.get('node_id')} " + " ".join(str(word) for word in words if word)
    if "phase" in content and "status" in content:
        request = f" request {content['request_id']}" if "request_id" in content else ""
        detail = json.dumps(entry.detail, ensure_ascii=False) if entry.detail else ""
        return f"{content['phase']} {content['status']}{request} {detail}".rstrip()
    return entry.text


def pretty(entry: Entry) -> str:
    """One line: arrival number, time, channel (with the stream if it is a worker's), record."""
    stream = str(entry.record.get("stream", ""))
    channel = entry.channel if stream.startswith(OWN_STREAMS) else f"{stream} {entry.channel}"
    text = summary(entry)
    if len(text) > TEXT_CHARS_MAX:
        text = f"{text[:TEXT_CHARS_MAX]}… ({len(text)} characters)"
    return f"{entry.record['arrival_seq']:>7} {clock(entry.unix_ms)} {shown(channel)}  {shown(text)}"


# --- why -------------------------------------------------------------------------------------------------------
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
        failures = [entry for entry in phases if entry.content.get("status") == "failed" and _fatal(entry)]
        exits = [entry for entry in phases if entry.content.get("phase") == "orch_exit"]
        stops = [entry for entry in phases if entry.content.get("phase") == "shutdown"]
        last = str(phases[-1].content.get("phase")) if phases else "unknown"
        if failures and not (exits and exits[-1].content.get("status") == "ready"):
            first = failures[0]
            ended = "failed" if exits else "failed, without an exit record"
            exit_error = str(exits[-1].detail.get("error", "")) if exits else ""
            return ended, str(first.content.get("phase")), exit_error or _cause(first)
        if exits:
            source = stops[-1].detail.get("source") if stops else None
            return "ended", last, f"shutdown by {source}" if source else "it was done"
        if stops:
            return "stopping, without an exit record", "shutdown", f"shutdown by {stops[-1].detail.get('source')}"
        return "no exit record", last, "it still runs, or the orchestrator was killed"


def _fatal(entry: Entry) -> bool:
    """Failed observations of the datastream itself end no run (S1 10.11)."""
    return entry.content.get("phase") not in ("worker_datastream", "datastream_archive", "datastream_subscribe")


def _cause(entry: Entry) -> str:
    for key in ("error", "reason", "message", "classification"):
        if entry.detail.get(key):
            return str(entry.detail[key])
    return "no error text was recorded"


def stories(entries: Iterable[Entry]) -> dict[int, Story]:
    """All runs, in file order."""
    found: dict[int, Story] = {}
    for entry in entries:
        found.setdefault(entry.run, Story(entry.run)).add(entry)
    return found


def explain(story: Story) -> Iterator[str]:
    """The answer to "why did run N stop"."""
    ended, phase, cause = story.outcome()
    yield f"run {story.number}: {ended}"
    yield f"phase: {shown(phase)}"
    yield f"cause: {shown(cause)}"
    yield ""
    yield f"last {len(story.stderr)} stderr lines:" if story.stderr else "no stderr line was recorded"
    for entry in story.stderr:
        node = entry.channel.removesuffix(".stderr").rpartition(".")[2]
        yield f"  [{shown(node)}] {shown(summary(entry)[:TEXT_CHARS_MAX])}"
    yield ""
    yield "timeline:"
    yield from _timeline(story)


def _timeline(story: Story) -> Iterator[str]:
    """One line a record; equal ones in a row (resends) are counted, not repeated."""
    index = 0
    while index < len(story.timeline):
        entry = story.timeline[index]
        same = 1
        while index + same < len(story.timeline) and _step(story.timeline[index + same]) == _step(entry):
            same += 1
        entry = story.timeline[index + same - 1]
        at = f"{(entry.unix_ms - story.began_ms) / 1000:+9.3f} s" if entry.unix_ms and story.began_ms else " " * 11
        times = f"  (×{same})" if same > 1 else ""
        yield f"  {at}  {shown(summary(entry)[:TEXT_CHARS_MAX])}{times}"
        index += same


def _step(entry: Entry) -> tuple[Any, ...]:
    content, event = entry.content, entry.body("event")
    return (
        content.get("phase"),
        content.get("status"),
        content.get("node_id", event.get("node_id")),
        event.get("kind"),
        entry.detail.get("stage_index"),
    )


def listed(story: Story) -> str:
    """A run on one line."""
    ended, phase, cause = story.outcome()
    began = datetime.fromtimestamp(story.began_ms / 1000).isoformat(" ", "seconds") if story.began_ms else "-"
    return f"run {story.number}  {began}  {story.frames} frames  {ended} in {shown(phase)}: {shown(cause)}"


# --- the program -----------------------------------------------------------------------------------------------
def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="mvp-archive",
        description="Read a frame archive.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("file", type=Path, metavar="FILE", help="the archive ([observability] datastream_frame_log)")
    parser.add_argument("command", nargs="?", choices=["why", "runs"], help="explain a run's end; list the runs")
    parser.add_argument("number", nargs="?", type=int, metavar="N", help="which run, for why (default: the last)")
    parser.add_argument("--json", action="store_true", help="whole records, one JSON object a line")
    parser.add_argument("--follow", action="store_true", help="go on with what is appended (Ctrl-C ends)")
    parser.add_argument("--channel", default="", metavar="PREFIX", help="channels that begin so")
    parser.add_argument("--phase", default="", help="bootstrap and prompt records of this phase")
    parser.add_argument("--node", type=int, metavar="ID", help="what this node said or what is said of it")
    parser.add_argument("--request", default="", metavar="ID", help="records of this prompt request")
    parser.add_argument("--run", type=int, metavar="N", help="records of run N, counted from 1")
    return parser


def _show(args: argparse.Namespace, damage: Damage) -> int:
    chosen = Filter(args.channel, args.phase, args.node, args.request, args.run)
    for entry in read(args.file, damage, follow=args.follow):
        if chosen.wants(entry):
            # ASCII JSON: control and format characters of payloads are escapes there too.
            print(json.dumps(entry.record) if args.json else pretty(entry), flush=args.follow)
    return 0


def _tell(args: argparse.Namespace, damage: Damage) -> int:
    runs = stories(read(args.file, damage))
    if args.command == "runs":
        for story in runs.values():
            print(listed(story))
        return 0
    number = args.number if args.number is not None else max(runs, default=1)
    if number not in runs:
        have = f"it has runs 1 to {max(runs)}" if runs else "it has no record"
        print(f"mvp-archive: {args.file} has no run {number}; {have}", file=sys.stderr)
        return 1
    for line in explain(runs[number]):
        print(line)
    return 0


def main(argv: list[str] | None = None) -> int:
    """0; 1 when the file cannot be read or has no such run. What could not be read of it is said on stderr."""
    args = _parser().parse_args(argv)
    damage = Damage()
    for stream in (sys.stdout, sys.stderr):
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is not None:
            reconfigure(errors="backslashreplace")
    try:
        status = _tell(args, damage) if args.command else _show(args, damage)
        sys.stdout.flush()
    except KeyboardInterrupt:
        return 0
    except BrokenPipeError:
        # The reader (head, less) has enough. Python would complain once more when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        print(f"mvp-archive: cannot read {args.file}: {error.strerror or error}", file=sys.stderr)
        return 1
    if damage.lines:
        print(f"mvp-archive: {damage.lines} lines are no archive records", file=sys.stderr)
    if damage.torn_bytes:
        print(f"mvp-archive: the last line is torn ({damage.torn_bytes} bytes): its write was cut off", file=sys.stderr)
    return status


if __name__ == "__main__":
    sys.exit(main())
