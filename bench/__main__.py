"""`./dev bench NAME`: each module of this folder is a bench with `run(arguments) -> dict`.

The figures are promises that later work is held to, so every object says on what machine and commit it was
measured, and a figure that could not be measured says why instead of being left out.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import platform
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType

HERE = Path(__file__).resolve().parent
# What decides about the speed of inference; the full list of a processor has 150 names.
INSTRUCTION_SETS = ("sse4_2", "avx", "fma", "avx2", "f16c", "avx512f", "avx512_vnni", "avx_vnni", "amx_int8")


def names(folder: Path = HERE) -> list[str]:
    return sorted(file.stem for file in folder.glob("*.py") if not file.stem.startswith("_"))


def machine() -> dict[str, object]:
    """What the figures were measured on."""
    model, flags = platform.processor() or platform.machine(), set[str]()
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            key, _, value = line.partition(":")
            if key.strip() == "model name":
                model = value.strip()
            elif key.strip() == "flags":
                flags = set(value.split())
                break
    except OSError:
        pass
    return {
        "cpu": model,
        "cores": len(os.sched_getaffinity(0)),
        "instruction_sets": [name for name in INSTRUCTION_SETS if name in flags],
    }


def commit() -> str | None:
    """The measured commit, with `+` if the tree holds more than it; None outside of a checkout."""
    try:
        head = subprocess.run(
            ["git", "-C", str(HERE), "rev-parse", "HEAD"], capture_output=True, text=True, check=True
        ).stdout.strip()
        dirty = subprocess.run(
            ["git", "-C", str(HERE), "status", "--porcelain", "--untracked-files=no"],
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None
    return f"{head}+" if dirty else head


def unexplained(figures: Mapping[str, object]) -> list[str]:
    """Keys without a value that do not say why (`<key>_why`)."""
    return [key for key, value in figures.items() if value is None and not figures.get(f"{key}_why")]


def finish(figures: Mapping[str, object], rounds: int) -> dict[str, object]:
    """One bench's object: the figures, and what every object has."""
    found = commit()
    head: dict[str, object] = {"machine": machine(), "commit": found, "rounds": rounds}
    if found is None:
        head["commit_why"] = "not a git checkout"
    return {**head, **figures}


def load(name: str) -> ModuleType:
    return importlib.import_module(f"bench.{name}")


def parse(name: str, module: ModuleType, argv: list[str]) -> argparse.Namespace:
    """Options of all benches, and those that the bench adds by `add_arguments(parser)`."""
    parser = argparse.ArgumentParser(prog=f"./dev bench {name}", description=module.__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    parser.add_argument("--rounds", type=int, default=getattr(module, "ROUNDS", 3), help="default: %(default)s")
    add: Callable[[argparse.ArgumentParser], None] | None = getattr(module, "add_arguments", None)
    if add is not None:
        add(parser)
    arguments = parser.parse_args(argv)
    if arguments.rounds < 1:
        parser.error("--rounds must be at least 1")
    return arguments


def show(figures: Mapping[str, object]) -> str:
    width = max(map(len, figures))
    return "\n".join(f"{key:<{width}}  {value}" for key, value in figures.items())


def main(argv: list[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    known = names()
    listed = ", ".join(known) or "none yet"
    if not argv or argv[0] in ("-h", "--help"):
        print(f"usage: ./dev bench NAME [--json] [--rounds N]; the benches: {listed}")
        return 0 if argv else 2
    name = argv[0]
    if name not in known:
        print(f"bench: there is no bench '{name}'; the benches: {listed}", file=sys.stderr)
        return 2
    module = load(name)
    arguments = parse(name, module, argv[1:])
    figures = finish(module.run(arguments), arguments.rounds)
    print(json.dumps(figures, allow_nan=False) if arguments.json else show(figures))
    silent = unexplained(figures)
    if silent:
        print(f"bench: no value and no reason for {', '.join(silent)}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
