"""`mvp-archive FILE`: read a frame archive (S1 8.12), filter and follow it, and say why a run stopped.

Whatever stands in the file, this prints: a torn last line is reported, unreadable lines are counted, and control
characters of logged text are shown escaped, so that they do nothing to the terminal.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import re
import sys
import time
from collections.abc import Iterable, Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

from services.datastream_collector.reader import OWN_STREAMS, Damage, Entry, Filter, read, shown
from services.datastream_collector.story import Story

TEXT_CHARS_MAX = 2000  # of one record in the pretty form; --json shows everything
COMMANDS = {
    "show": "the records, one a line (the default)",
    "why": "why run N stopped (default: the last run)",
    "runs": "the runs in the file and how they ended",
    "convert": "the records as CSV or as logs, to stdout (--to)",
    "serve": "the dashboard over the file, in a browser (--addr)",
}
CSV_COLUMNS = ("run", "arrival_seq", "time", "source", "stream", "channel", "position", "phase", "status", "text")
AGO = {"s": 1, "m": 60, "h": 3600, "d": 86400}

EXAMPLES = """commands:
{commands}

examples:
  mvp-archive run.jsonl                          every record, one a line
  mvp-archive run.jsonl --phase weights_loaded   the bootstrap and prompt records of one phase
  mvp-archive run.jsonl --node 2 --follow        what node 2 says, now and from now on
  mvp-archive run.jsonl --since 10m              the last ten minutes; also 2026-11-30T14:05 and 14:05
  mvp-archive runs run.jsonl                     the runs in this file, with how they ended
  mvp-archive why run.jsonl                      why the last run stopped (why run.jsonl 3: the third)
  mvp-archive convert run.jsonl --to csv         a table for a spreadsheet
  mvp-archive serve run.jsonl                    the dashboard of a finished run
""".format(commands="\n".join(f"  {name:8} {text}" for name, text in COMMANDS.items()))


# --- showing ---------------------------------------------------------------------------------------------------
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
    if advice := story.advice():
        yield f"what to do: {advice}"
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


# --- converting ------------------------------------------------------------------------------------------------
def table(entries: Iterable[Entry]) -> Iterator[list[Any]]:
    """Rows for a spreadsheet, the head first. No cell begins as a formula would."""
    yield list(CSV_COLUMNS)
    for entry in entries:
        at = datetime.fromtimestamp(entry.unix_ms / 1000).isoformat() if 0 < entry.unix_ms < 1 << 45 else ""
        record = entry.record
        row = [
            entry.run,
            record["arrival_seq"],
            at,
            record.get("source", ""),
            entry.stream,
            entry.channel,
            record.get("position", ""),
            entry.content.get("phase", ""),
            entry.content.get("status", ""),
            shown(summary(entry)),
        ]
        yield [f"'{cell}" if isinstance(cell, str) and cell[:1] in ("=", "+", "-", "@") else cell for cell in row]


def since(text: str, now: float) -> int:
    """Unix ms of "90s", "10m", "2h", "1d" ago, of an ISO date and time, or of a time of today. Raises ValueError."""
    if ago := re.fullmatch(r"(\d{1,6}(?:\.\d+)?)\s*([smhd])", text.strip()):
        return int((now - float(ago[1]) * AGO[ago[2]]) * 1000)
    try:
        if re.fullmatch(r"\d{1,2}:\d{2}(:\d{2})?", text.strip()):
            return int(
                datetime.fromisoformat(f"{datetime.fromtimestamp(now):%Y-%m-%d}T{text.strip():0>5}").timestamp() * 1000
            )
        return int(datetime.fromisoformat(text.strip()).timestamp() * 1000)
    except (ValueError, OverflowError):
        raise ValueError(f"'{text}' is no time: write 10m, 2h, 14:05 or 2026-11-30T14:05") from None


# --- the program -----------------------------------------------------------------------------------------------
def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="mvp-archive",
        usage="mvp-archive [COMMAND] FILE [N] [OPTIONS]",
        description="Read a frame archive.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("words", nargs="+", metavar="FILE", help="the archive ([observability] datastream_frame_log)")
    parser.add_argument("--json", action="store_true", help="whole records, one JSON object a line")
    parser.add_argument("--follow", action="store_true", help="go on with what is appended (Ctrl-C ends)")
    parser.add_argument("--channel", default="", metavar="PREFIX", help="channels that begin so")
    parser.add_argument("--phase", default="", help="bootstrap and prompt records of this phase")
    parser.add_argument("--node", type=int, metavar="ID", help="what this node said or what is said of it")
    parser.add_argument("--request", default="", metavar="ID", help="records of this prompt request")
    parser.add_argument("--run", type=int, metavar="N", help="records of run N, counted from 1")
    parser.add_argument("--since", default="", metavar="TIME", help="collected then or later: 10m, 14:05, an ISO time")
    parser.add_argument("--grep", action="append", default=[], metavar="WORD", help="records that contain this word")
    parser.add_argument("--to", choices=["csv", "logs"], default="csv", help="what convert writes (default csv)")
    parser.add_argument("--addr", default="127.0.0.1:0", metavar="HOST:PORT", help="where serve listens (loopback)")
    return parser


def _words(args: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    """COMMAND FILE [N] or FILE [COMMAND] [N]. A file that is named as a command is reached by ./why."""
    words: list[str] = args.words
    args.command, args.number = "show", None
    for at in (0, 1):
        if len(words) > at and words[at] in COMMANDS and len(words) > 1:
            args.command = words.pop(at)
            break
    args.file = Path(words.pop(0))
    if words and args.command == "why" and words[0].isdecimal():
        args.number = int(words.pop(0))
    if words:
        known = ", ".join(COMMANDS)
        parser.error(f"'{words[0]}' is neither a command ({known}) nor needed here")
    try:
        args.since_ms = since(args.since, time.time()) if args.since else 0
    except ValueError as error:
        parser.error(f"--since: {error}")


def _chosen(args: argparse.Namespace, damage: Damage, *, follow: bool = False) -> Iterator[Entry]:
    words = tuple(word.casefold() for word in args.grep)
    chosen = Filter(args.channel, args.phase, args.node, args.request, args.run, args.since_ms, words)
    return (entry for entry in read(args.file, damage, follow=follow) if chosen.wants(entry))


def _show(args: argparse.Namespace, damage: Damage) -> int:
    for entry in _chosen(args, damage, follow=args.follow):
        # ASCII JSON: control and format characters of payloads are escapes there too.
        print(json.dumps(entry.record) if args.json else pretty(entry), flush=args.follow)
    return 0


def _convert(args: argparse.Namespace, damage: Damage) -> int:
    entries = _chosen(args, damage)
    if args.to == "csv":
        csv.writer(sys.stdout, lineterminator="\n").writerows(table(entries))
        return 0
    for entry in entries:
        if line := entry.body("line"):
            node, stream = line.get("node_id"), str(line.get("stream", "")).lower()
            print(f"{clock(entry.unix_ms)} [{node} {shown(stream)}] {shown(str(line.get('line', '')))}")
    return 0


def _serve(args: argparse.Namespace) -> int:
    """The dashboard's program in place of this one: starlette is not imported for anybody else."""
    args.file.open("rb").close()
    command = [sys.executable, "-P", "-m", "services.datastream_collector.web"]
    sys.stdout.flush()
    os.execv(sys.executable, [*command, "--archive", str(args.file.absolute()), "--dashboard", args.addr])


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


def _run(args: argparse.Namespace, damage: Damage) -> int:
    match args.command:
        case "serve":
            return _serve(args)
        case "convert":
            return _convert(args, damage)
        case "show":
            return _show(args, damage)
        case _:
            return _tell(args, damage)


def main(argv: list[str] | None = None) -> int:
    """0; 1 when the file cannot be read or has no such run. What could not be read of it is said on stderr."""
    parser = _parser()
    args = parser.parse_args(argv)
    _words(args, parser)
    damage = Damage()
    for stream in (sys.stdout, sys.stderr):
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is not None:
            reconfigure(errors="backslashreplace")
    try:
        status = _run(args, damage)
        sys.stdout.flush()
    except KeyboardInterrupt:
        return 0
    except BrokenPipeError:
        # The reader (head, less) has enough. Python would complain once more when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        never = "; a run that ends before its configuration is resolved has none, its line on stderr says why"
        hint = never if isinstance(error, FileNotFoundError) and args.command in ("why", "runs") else ""
        print(f"mvp-archive: cannot read {args.file}: {error.strerror or error}{hint}", file=sys.stderr)
        return 1
    if damage.lines:
        print(f"mvp-archive: {damage.lines} lines are no archive records", file=sys.stderr)
    if damage.torn_bytes:
        print(f"mvp-archive: the last line is torn ({damage.torn_bytes} bytes): its write was cut off", file=sys.stderr)
    return status


if __name__ == "__main__":
    sys.exit(main())
