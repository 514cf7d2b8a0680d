"""`python -P -m worker.engine --fd N [--progress-fd M]`: started by the worker's agent, never by hand.

`python -P -m worker.engine --ndjson [--stub] [--model MODEL]`: S2 6.4's front of the same engine, on pipes.
"""

from __future__ import annotations

import argparse
import signal
import sys


def main() -> None:
    parser = argparse.ArgumentParser(prog="worker.engine", description=__doc__)
    kind = parser.add_mutually_exclusive_group(required=True)
    kind.add_argument("--fd", type=int, help="inherited AF_UNIX socket to the agent")
    kind.add_argument("--ndjson", action="store_true", help="prompts and answers as JSON lines on stdin and stdout")
    parser.add_argument("--progress-fd", type=int, help="inherited memfd of the progress page")
    parser.add_argument("--model", default="", help="with --ndjson: a GGUF file, or hf://OWNER/REPOSITORY/FILE.gguf")
    parser.add_argument("--max-context", type=int, help="with --ndjson: tokens of prompt and answer together")
    parser.add_argument("--stub", action="store_true", help="with --ndjson: no model, an answer at once")
    arguments = parser.parse_args()
    # A terminal's Ctrl-C is the launcher's business; the engine ends when its agent says so or is gone.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if arguments.ndjson:
        from worker.engine import ndjson

        if not arguments.stub and not arguments.model:
            parser.error("--ndjson needs --model, or --stub")
        sys.exit(ndjson.serve(arguments.model, stub=arguments.stub, max_context=arguments.max_context))
    from worker.engine.process import serve

    serve(arguments.fd, arguments.progress_fd)


if __name__ == "__main__":
    main()
