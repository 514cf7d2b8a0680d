"""`mvp-tap`: what passes router and relay, envelope by envelope, as people read it (design.md 3).

It listens at the taps, where a slow listener loses and nobody waits. An envelope of a worker behind the relay passes
both brokers and is shown by each.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import os
import struct
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import BinaryIO

import msgpack

from common.addresses import Plane, Role
from common.bus import TapReader
from common.limits import ENVELOPE_BYTES_MAX
from common.security import SecurityError, read_bus_file
from tools.tap_records import Line, Names, as_json, parse, pieces, printable
from tools.tap_stats import Stats
from tools.tap_stats import text as stats_text
from tools.tap_story import Story

TEXT_CHARS_MAX = 120
IDLE_MS = 500
WAIT_POLL_S = 0.02  # a run says the first things a third of a second after its bus files are there
ENTRY_BYTES_MAX = 2 * ENVELOPE_BYTES_MAX

EXAMPLES = """examples:
  mvp-tap                                  the run that goes on here
  mvp-tap --type InferPrompt --type TextDelta --plane prompt
  mvp-tap --actor prompt_gateway --verdict full
  mvp-tap --corr 1234                      message 1234 and its answers
  mvp-tap --read run.tap --tree 7          what message or request 7 caused, and what caused it
  mvp-tap --stats                          rates and latency per message type and link; --every 5 for each 5 s
  mvp-tap --live                           the same on the whole screen, with the newest envelopes
  mvp-tap --wait --record run.tap          the next run from its start, for mvp-replay
  mvp-tap --record run.tap                 keep everything; mvp-tap --read run.tap shows it again
"""


class TapError(ValueError):
    """One sentence."""


# --- where ------------------------------------------------------------------------------------------------------
def lock_is_held(directory: Path) -> bool:
    """Whether the process that owns this run directory lives."""
    try:
        fd = os.open(directory / "lock", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(fd)
    return False


def live_runs() -> list[tuple[float, Path]]:
    """(when it began, the tap's bus file) of each run directory of this user whose lock is held, oldest first."""
    places = [Path("/tmp").glob(f"smq-{os.geteuid()}-*")]
    if runtime := os.environ.get("XDG_RUNTIME_DIR"):
        places.append(Path(runtime).glob("smq-*"))
    found: list[tuple[float, Path]] = []
    for directory in (path for place in places for path in place):
        file = directory / "bus" / f"{Role.TAP}.json"
        try:
            status = file.stat()
        except OSError:
            continue
        if status.st_uid == os.geteuid() and lock_is_held(directory):
            found.append((status.st_mtime, file))
    return sorted(found)


def newest_run() -> Path:
    """The tap's bus file of the newest of the live runs. Raises TapError."""
    if not (found := live_runs()):
        raise TapError("no run is going on here; name its tap.json with --bus")
    return found[-1][1]


def next_run(known: frozenset[Path]) -> Path:
    """The tap's bus file of the newest run that is not among those known, as soon as there is one."""
    while True:
        if fresh := [file for _, file in live_runs() if file not in known]:
            return fresh[-1]
        time.sleep(WAIT_POLL_S)


def live(bus: Path) -> Iterator[tuple[str, bytes] | None]:
    """(broker, record) as they come, None when nothing does for a while; ends when the run directory is removed."""
    file = read_bus_file(bus)
    if file.role is not Role.TAP:
        raise TapError(f"{bus} is the bus file of {file.role}; the tap has its own, {Role.TAP}.json beside it")
    taps = file.taps or {"router": (file.tap, file.broker_key)}
    print(f"mvp-tap: listening at {' and '.join(taps)} of {file.run_dir}; Ctrl-C ends", file=sys.stderr)
    reader = TapReader(taps, file.keys)
    try:
        while True:
            records = reader.read(IDLE_MS)
            yield from records
            if not records:
                if not bus.exists():
                    print("mvp-tap: the run is over", file=sys.stderr)
                    return
                yield None
    finally:
        reader.close()


# --- files ------------------------------------------------------------------------------------------------------
def write_entry(file: BinaryIO, broker: str, record: bytes) -> None:
    """A recording is entries of a big-endian u32 length and msgpack [broker, record as the tap sent it]."""
    entry = msgpack.packb((broker, record))
    file.write(struct.pack(">I", len(entry)) + entry)


def recorded(path: Path) -> Iterator[tuple[str, bytes] | None]:
    """The entries of a recording; a torn end is reported. Raises TapError for what is no recording."""
    with path.open("rb") as file:
        while head := file.read(4):
            size = struct.unpack(">I", head)[0] if len(head) == 4 else 0
            if size > ENTRY_BYTES_MAX:
                raise TapError(f"{path} is no recording of mvp-tap (an entry of {size} bytes)")
            entry = file.read(size)
            if len(head) < 4 or len(entry) < size:
                print(f"mvp-tap: the end of {path} is torn: its write was cut off", file=sys.stderr)
                return
            try:
                broker, record = msgpack.unpackb(entry)
                if not isinstance(broker, str) or not isinstance(record, bytes):
                    raise ValueError
            except (ValueError, TypeError, msgpack.UnpackException):
                raise TapError(f"{path} is no recording of mvp-tap") from None
            yield broker, record


# --- choosing and showing ----------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Filter:
    """What the arguments ask for; empty means all."""

    types: frozenset[str] = frozenset()
    actor: str = ""
    run: str = ""
    corr: int | None = None
    plane: str = ""
    verdict: str = ""

    def wants(self, line: Line, names: Names) -> bool:
        """Whether this line is shown. What is no envelope has only plane and verdict."""
        if (self.plane and line.plane != self.plane) or (self.verdict and line.verdict != self.verdict):
            return False
        if line.bad:
            return not (self.types or self.actor or self.run or self.corr is not None)
        if self.types and line.type.lower() not in self.types and str(line.tag) not in self.types:
            return False
        if self.corr is not None and self.corr not in (line.id, line.corr):
            return False
        if self.run and not line.run.hex().startswith(self.run):
            return False
        return not self.actor or self._concerns(line, names)

    def _concerns(self, line: Line, names: Names) -> bool:
        ends = ((line.src_node, line.src), (line.dst_node, line.dst))
        return any(
            self.actor in (names.of(node, address), names.of(node, node))
            or node.hex().startswith(self.actor)
            or address.hex().startswith(self.actor)
            for node, address in ends
        )


def pretty(line: Line, names: Names) -> str:
    """One line for people."""
    at = datetime.fromtimestamp(line.wall_ms / 1000) if 0 < line.wall_ms < 1 << 42 else None
    clock = at.strftime("%H:%M:%S.") + f"{line.wall_ms % 1000:03d}" if at else "--:--:--.---"
    return printable(" ".join((clock, *pieces(line, names, TEXT_CHARS_MAX))))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="mvp-tap",
        description="Show what passes the bus of a run.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--bus", type=Path, metavar="FILE", help="the run's tap.json (default: the newest run here)")
    parser.add_argument("--wait", action="store_true", help="listen to the next run that starts here, from its start")
    parser.add_argument("--type", action="append", default=[], metavar="NAME", help="message types, by name or tag")
    parser.add_argument("--actor", default="", metavar="NAME", help="to or from: a name, or the start of a key in hex")
    parser.add_argument("--run", default="", metavar="HEX", help="envelopes of the run whose nonce begins so")
    parser.add_argument("--corr", type=int, metavar="ID", help="message ID and its answers")
    parser.add_argument("--plane", choices=[plane.name.lower() for plane in Plane])
    parser.add_argument("--verdict", default="", help="forwarded, local, full, gone, unbound, refused, stale, bad, ...")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--tree", type=int, metavar="ID", help="at the end: what message or request ID caused, as a tree")
    form.add_argument("--stats", action="store_true", help="at the end: rates and latency per message type and link")
    form.add_argument("--live", action="store_true", help="rates and the newest envelopes on the whole screen")
    parser.add_argument("--every", type=float, default=0.0, metavar="S", help="with --stats: also each S seconds")
    form.add_argument("--json", action="store_true", help="one JSON object a line, nothing cut")
    parser.add_argument("--record", type=Path, metavar="FILE", help="also keep everything heard in FILE (unredacted)")
    parser.add_argument("--read", type=Path, metavar="FILE", help="show a recording instead of a live run")
    return parser


def _kept(source: Iterator[tuple[str, bytes] | None], path: Path | None) -> Iterator[tuple[str, bytes] | None]:
    """The source, also written to a recording."""
    if path is None:
        yield from source
        return
    # It holds prompts and tokens as they passed.
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    with os.fdopen(fd, "wb") as keep:
        for heard in source:
            if heard is None:
                keep.flush()
            else:
                write_entry(keep, *heard)
            yield heard


def _wanted(source: Iterator[tuple[str, bytes] | None], wanted: Filter, names: Names) -> Iterator[Line | None]:
    """What the filters let through, None where nothing came for a while."""
    for heard in source:
        line = None if heard is None else parse(*heard)
        if line is not None:
            names.learn(line)
        if line is None or wanted.wants(line, names):
            yield line


def _show(lines: Iterator[Line | None], show: Callable[[Line, Names], str], names: Names, *, flush: bool) -> None:
    for line in lines:
        if line is None:
            sys.stdout.flush()
        else:
            print(show(line, names), flush=flush)


def _stats(lines: Iterator[Line | None], names: Names, every_s: float) -> None:
    """All of it at the end, Ctrl-C too; with every_s also of each such time."""
    whole, part = Stats(), Stats()
    due = time.monotonic() + every_s
    with contextlib.suppress(KeyboardInterrupt):
        for line in lines:
            if line is not None:
                whole.add(line)
                part.add(line)
            if every_s and time.monotonic() >= due:
                due = time.monotonic() + every_s
                print(stats_text(part, names), flush=True)
                part.reset()
    print(stats_text(whole, names), end="")


def _tree(lines: Iterator[Line | None], names: Names, number: int) -> int:
    story = Story()
    with contextlib.suppress(KeyboardInterrupt):
        for line in lines:
            if line is not None:
                story.add(line)
    told = False
    for text in story.tell(number, names):
        told = True
        print(text)
    if not told:
        print(f"mvp-tap: no message and no request {number} passed", file=sys.stderr)
    return 0 if told else 1


def _where(args: argparse.Namespace) -> Path:
    """The bus file to listen with. Raises TapError."""
    if args.bus is None and not args.wait:
        return newest_run().absolute()
    if args.bus is not None:
        while args.wait and not args.bus.exists():
            time.sleep(WAIT_POLL_S)
        return Path(args.bus).absolute()
    known = frozenset(file for _, file in live_runs())
    print("mvp-tap: waiting for a run to start; Ctrl-C ends", file=sys.stderr)
    return next_run(known).absolute()


def _run(args: argparse.Namespace) -> int:
    wanted = Filter(
        frozenset(name.lower() for name in args.type),
        args.actor,
        args.run.lower(),
        args.corr,
        args.plane or "",
        args.verdict,
    )
    if args.live and not sys.stdout.isatty():
        raise TapError("--live needs a terminal; --stats --every 5 is for files and pipes")
    names = Names()
    source = recorded(args.read) if args.read else live(_where(args))
    lines = _wanted(_kept(source, args.record), wanted, names)
    if args.tree is not None:
        return _tree(lines, names, args.tree)
    if args.stats:
        _stats(lines, names, args.every)
    elif args.live:
        from tools.tap_live import watch  # rich is slow to import

        watch(lines, names)
    else:
        _show(lines, as_json if args.json else pretty, names, flush=not args.read)
    return 0


def main(argv: list[str] | None = None) -> int:
    """0, also after Ctrl-C; 1 when there is nothing to listen to or to read, with one sentence."""
    parser = _parser()
    args = parser.parse_args(argv)
    if args.every and not args.stats:
        parser.error("--every is for --stats")
    if args.read and (args.wait or args.bus):
        parser.error("--read shows a recording: --wait and --bus are for a live run")
    for stream in (sys.stdout, sys.stderr):
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is not None:
            reconfigure(errors="backslashreplace")
    try:
        status = _run(args)
        sys.stdout.flush()
    except KeyboardInterrupt:
        return 0
    except BrokenPipeError:
        # The reader (head, less) has enough. Python would complain once more when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        print(f"mvp-tap: {error.filename or 'the tap'}: {error.strerror or error}", file=sys.stderr)
        return 1
    except (TapError, SecurityError) as error:
        print(f"mvp-tap: {error}", file=sys.stderr)
        return 1
    return status


if __name__ == "__main__":
    sys.exit(main())
