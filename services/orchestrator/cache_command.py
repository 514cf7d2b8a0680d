"""`mvp-orchestrator cache`: what is kept so that the next start is quick, and the way to be rid of it.

Models of a hub have no bound of their own, since a fetch of hours is not for a program to throw away; repacked weights
have one (16 GiB). Everything here is made or fetched again when it is missing.
"""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from common import sparse_file
from common.cache_files import cache_folder
from common.config_args import PROGRAM

CACHE_HELP = f"""\
usage: {PROGRAM} cache [--remove [--unused-days N]] [--json]

Lists what is kept in $XDG_CACHE_HOME/swactor-mq (~/.cache/swactor-mq), the one used last first: what was fetched of
models on Hugging Face, without a bound; the weights repacked from models, 16 GiB at most; compiled kernels. Whatever is
missing there is fetched or made again when a run needs it.

  --remove           remove it; a model that is being fetched is left alone, and a run that goes on is not disturbed
  --unused-days N    remove only what no run has used for N days
  --json             one JSON list: kind, name, bytes, used_unix_s, and with --remove: removed

Exit status: 0, or 1 if something could not be removed.

example: {PROGRAM} cache --remove --unused-days 30
  KIND     SIZE     LAST USED         NAME
  model    1.2 GiB  2026-10-02 09:12  owner/repo/model.gguf@0f3a: removed
"""
DAY_S = 86_400
TEMPORARY_S = 3600  # no write of one file takes so long
KERNELS, MODEL, WEIGHTS = "kernels", "model", "weights"


@dataclass(frozen=True, slots=True)
class Kept:
    """One thing that goes as a whole. paths: the first one is locked while it is being fetched."""

    kind: str
    name: str
    paths: tuple[Path, ...]
    bytes: int
    used_s: float


def cache(argv: Sequence[str]) -> int:
    """The exit status."""
    remove, as_json, days = False, False, 0.0
    words = list(argv)
    try:
        while words:
            match words.pop(0).split("=", 1):
                case ["--help" | "-h"]:
                    sys.stdout.write(CACHE_HELP)
                    return 0
                case ["--remove"]:
                    remove = True
                case ["--json"]:
                    as_json = True
                case ["--unused-days", *value]:
                    days = _days(value[0] if value else words.pop(0) if words else "")
                case [word, *_]:
                    raise ValueError(f"argument {word} is unknown: it takes --remove, --unused-days N and --json")
        if days and not remove:
            raise ValueError("--unused-days goes with --remove")
    except ValueError as error:
        sys.stderr.write(f"{PROGRAM} cache: {error}\n")
        return 1
    folder = cache_folder()
    kept = list_kept(folder)
    did: dict[Path, str] = {}
    if remove:
        for item in kept:
            if time.time() - item.used_s >= days * DAY_S:
                did[item.paths[0]] = _remove(item)
        _remove_empty(folder / "models")
    sys.stdout.write(_as_json(kept, did) if as_json else _table(kept, did, folder))
    return 1 if any(said not in (REMOVED, IN_USE) for said in did.values()) else 0


def _days(text: str) -> float:
    try:
        days = float(text)
    except ValueError:
        days = -1.0
    if not 0 <= days < 1e6:
        raise ValueError(f"--unused-days needs a number of days, not '{text}'")
    return days


# --- what is there --------------------------------------------------------------------------------------------------
def list_kept(folder: Path) -> list[Kept]:
    """Everything in the cache, the one used last first; what vanishes meanwhile is left out."""
    found = [*_models(folder / "models"), *_others(folder)]
    return sorted(found, key=lambda kept: -kept.used_s)


def _models(folder: Path) -> Iterator[Kept]:
    for path in folder.glob("*.gguf"):
        if path.is_symlink():
            continue
        source = path.with_suffix(sparse_file.SOURCE)
        name = f"{path.name} (fetched by an earlier version)"
        with contextlib.suppress(OSError):
            name = source.read_text().strip() or name
        yield from _kept(MODEL, name, sparse_file.parts(path))


def _others(folder: Path) -> Iterator[Kept]:
    """Files of the engine (worker/engine/cpu_cache.py, cpu_objects.py, tinygrad's), and what a killed write left."""
    groups: dict[str, list[Path]] = {}
    with contextlib.suppress(OSError):
        for path in sorted(folder.iterdir()):
            is_being_written = path.name.startswith(".") and time.time() - path.stat().st_mtime < TEMPORARY_S
            if path.is_file() and not is_being_written:
                groups.setdefault(path.name.partition(".db")[0], []).append(path)  # a database is up to three files
    for name, paths in groups.items():
        is_weights = name.lstrip(".").startswith(("weights-", "note-"))
        yield from _kept(WEIGHTS if is_weights else KERNELS, name, paths)


def _kept(kind: str, name: str, paths: Sequence[Path]) -> Iterator[Kept]:
    facts = []
    for path in paths:
        with contextlib.suppress(OSError):
            facts.append(path.stat())
    if facts:
        size = sum(fact.st_blocks for fact in facts) * 512
        # A model's note is written at each use, and read by this program.
        used_s = max(fact.st_mtime if kind == MODEL else max(fact.st_mtime, fact.st_atime) for fact in facts)
        yield Kept(kind, name, tuple(paths), size, used_s)


# --- its end --------------------------------------------------------------------------------------------------------
REMOVED, IN_USE = "removed", "left alone, it is being fetched"


def _remove(item: Kept) -> str:
    try:
        if item.kind == MODEL:
            sparse_file.remove(item.paths[0])
        else:
            for path in item.paths:
                path.unlink(missing_ok=True)
    except BlockingIOError:
        return IN_USE
    except FileNotFoundError:
        pass
    except OSError as error:
        return f"cannot be removed: {error.strerror}"
    return REMOVED


def _remove_empty(folder: Path) -> None:
    """Folders of links to the files of a model in several, once a file is gone; the next fetch makes them anew."""
    with contextlib.suppress(OSError):
        for inner in folder.iterdir():
            links = list(inner.iterdir()) if inner.is_dir() and not inner.is_symlink() else []
            if links and not all(link.exists() for link in links):
                for link in links:
                    link.unlink(missing_ok=True)
                inner.rmdir()


# --- what is said ---------------------------------------------------------------------------------------------------
def _as_json(kept: Sequence[Kept], did: dict[Path, str]) -> str:
    facts = []
    for item in kept:
        fact: dict[str, object] = {"kind": item.kind, "name": item.name, "bytes": item.bytes}
        fact["used_unix_s"] = int(item.used_s)
        if did:
            fact["removed"] = did.get(item.paths[0]) == REMOVED
        facts.append(fact)
    return json.dumps(facts, indent=2) + "\n"


def _table(kept: Sequence[Kept], did: dict[Path, str], folder: Path) -> str:
    if not kept:
        return f"nothing is kept in {folder}\n"
    rows = [("KIND", "SIZE", "LAST USED", "NAME")]
    for item in kept:
        if item.kind == MODEL:
            end = f": {did[item.paths[0]]}" if item.paths[0] in did else ""
            rows.append((MODEL, _size(item.bytes), _when(item.used_s), item.name + end))
    for kind in (WEIGHTS, KERNELS):
        if some := [item for item in kept if item.kind == kind]:
            said = [did[item.paths[0]] for item in some if item.paths[0] in did]
            name = _many(len(some), "file") + (f": {said.count(REMOVED)} removed" if said else "")
            name += "".join(sorted({f", {_many(said.count(why), 'file')} {why}" for why in said if why != REMOVED}))
            rows.append((kind, _size(sum(item.bytes for item in some)), _when(some[0].used_s), name))
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    lines = [
        "  ".join([*(f"{text:<{width}}" for text, width in zip(row, widths, strict=False)), row[3]]) for row in rows
    ]
    gone = sum(item.bytes for item in kept if did.get(item.paths[0]) == REMOVED)
    total = sum(item.bytes for item in kept)
    lines.append(f"{_size(gone)} removed, {_size(total - gone)} kept" if did else f"{_size(total)} in {folder}")
    return "\n".join(lines) + "\n"


def _when(at_s: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(at_s))


def _many(count: int, what: str) -> str:
    return f"{count} {what}{'s'[: count != 1]}"


def _size(count: int) -> str:
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{count / 2**20:.1f} MiB"
