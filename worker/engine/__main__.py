"""`python -P -m worker.engine --fd N [--progress-fd M]`: started by the worker's agent, never by hand."""

from __future__ import annotations

import argparse
import signal

from worker.engine.process import serve


def main() -> None:
    parser = argparse.ArgumentParser(prog="worker.engine", description=__doc__)
    parser.add_argument("--fd", type=int, required=True, help="inherited AF_UNIX socket to the agent")
    parser.add_argument("--progress-fd", type=int, help="inherited memfd of the progress page")
    arguments = parser.parse_args()
    # A terminal's Ctrl-C is the launcher's business; the engine ends when its agent says so or is gone.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    serve(arguments.fd, arguments.progress_fd)


if __name__ == "__main__":
    main()
