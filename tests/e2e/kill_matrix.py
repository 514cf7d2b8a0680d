"""`./dev kill-matrix`: the whole kill matrix on real processes, or the cells that are named; one line for each."""

from __future__ import annotations

import argparse
import sys
import time
from concurrent.futures import ThreadPoolExecutor, as_completed

from tests.e2e.kill_cell import play
from tests.kill_matrix import MATRIX, Cell, cells


def chosen(words: list[str]) -> list[Cell]:
    """The cells that hold all words: "router STOP" is a row, "weights" a column."""
    known = {*MATRIX["processes"], *MATRIX["signals"], *MATRIX["phases"]}
    if unknown := set(words) - known:
        raise SystemExit(
            f"kill-matrix: there is no '{min(unknown)}'; process, signal or phase: {', '.join(sorted(known))}"
        )
    axes = [[word for word in words if word in MATRIX[axis]] for axis in ("processes", "signals", "phases")]
    return [cell for cell in cells() if all(not axis or word in axis for word, axis in zip(cell, axes, strict=True))]


def main(argv: list[str] | None = None) -> int:
    """Status 1 when a cell does not hold."""
    parser = argparse.ArgumentParser(prog="./dev kill-matrix", description=__doc__)
    parser.add_argument("words", nargs="*", help="processes, signals, phases; default: all")
    parser.add_argument("--jobs", type=int, default=2, help="cells at a time (%(default)s)")
    arguments = parser.parse_args(argv)
    wanted = chosen(arguments.words)
    began = time.monotonic()
    failed = []
    with ThreadPoolExecutor(arguments.jobs) as pool:
        for future in as_completed([pool.submit(play, cell) for cell in wanted]):
            outcome = future.result()
            print(outcome.line, flush=True)
            if outcome.error:
                failed.append(outcome)
    print(f"{len(wanted)} cells, {len(failed)} failed, {time.monotonic() - began:.0f} s")
    for outcome in failed:
        print(outcome.line)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
