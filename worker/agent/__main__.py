"""`mvp-worker-node --launch FILE`: one worker of a run (design.md 2). Started by a provisioner, or by hand."""

from __future__ import annotations

import argparse
import importlib.metadata
import sys
from pathlib import Path
from typing import NoReturn

from common.launch_file import LaunchFile, LaunchFileError

PROGRAM = "mvp-worker-node"
DISTRIBUTION = "swactor-mq"


class _Parser(argparse.ArgumentParser):
    """Usage errors are one sentence and status 1, as all errors of this program."""

    def error(self, message: str) -> NoReturn:
        self.exit(1, f"{PROGRAM}: {message}; try {PROGRAM} --help\n")


def _arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = _Parser(
        prog=PROGRAM,
        description="One worker of a swactor-mq run: joins the run that the launch file names and serves its stage.",
        epilog="It ends when the run ends, when standard input says shutdown or closes, or on SIGTERM. "
        "example, on a box of your own (provider external): mvp-worker-node --launch launch.json",
    )
    parser.add_argument("--launch", required=True, type=Path, metavar="FILE", help="the launch file, mode 0600")
    parser.add_argument("--version", action="version", version=f"{PROGRAM} {_version()}")
    return parser.parse_args(argv)


def _version() -> str:
    try:
        return importlib.metadata.version(DISTRIBUTION)
    except importlib.metadata.PackageNotFoundError:
        return "(not installed)"


def main(argv: list[str] | None = None) -> int:
    """Exit status: 0 after a stop, 1 after an error, which is one sentence on stderr."""
    arguments = _arguments(argv)
    try:
        launch = LaunchFile.read(arguments.launch)
        # Here, so that --help and a bad launch file need no ZeroMQ.
        from worker.agent.service import Worker

        worker = Worker(launch)
    except (LaunchFileError, OSError) as error:
        print(f"{PROGRAM}: {error}", file=sys.stderr)
        return 1
    return worker.run()


if __name__ == "__main__":
    sys.exit(main())
