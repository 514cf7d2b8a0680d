"""`./dev demo`: one command from nothing to an answer. Starts mvp-orchestrator with a process worker on SmolLM2, asks
the prompt (or opens a plain chat), stops everything. The answer alone goes to stdout, progress to stderr.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from tools.chat import run_chat
from tools.chat_run import OrchestratorRun, RunError, Steps
from tools.chat_text import harmless
from tools.fetch_model import FetchError, default_model_path, fetch_default
from tools.prompt_client import PromptClient, PromptClientError

ARCHIVES_KEPT = 5

CONFIG = """\
[provider]
kind = "process"
[model]
id = "smollm2-135m-instruct"
gguf_local_path = {model}
[prompt]
rpc_addr = "127.0.0.1:0"
[observability]
datastream_frame_log = {archive}
"""
EXAMPLES = """\
examples:
  ./dev demo                                        a chat
  ./dev demo --prompt "Name three primary colors."  one answer
"""


def start(model: Path, archive: Path, directory: Path, steps: Steps) -> OrchestratorRun:
    """mvp-orchestrator with one process worker; its configuration lies in directory."""
    config = directory / "demo.toml"
    config.write_text(CONFIG.format(model=json.dumps(str(model)), archive=json.dumps(str(archive))))
    return OrchestratorRun(["--runtime-config", str(config)], config, steps.record)


def new_archive() -> Path:
    """A file of this run's own; the newest few are kept for `mvp-archive`."""
    state = Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "swactor-mq" / "demo"
    state.mkdir(parents=True, exist_ok=True)
    for old in sorted(state.glob("*.jsonl"))[: -ARCHIVES_KEPT + 1]:
        old.unlink(missing_ok=True)
    return state / f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}.jsonl"


def answer(addr: str, prompt: str, max_tokens: int, alive: Callable[[], str]) -> None:
    """The answer's text to stdout, whole. Raises PromptClientError."""
    with contextlib.closing(PromptClient.connect(addr, wait_s=5, alive_check=alive)) as client:
        done = client.complete(prompt, max_tokens=max_tokens)
    print(done.final_text.strip(), flush=True)


def main(argv: list[str] | None = None) -> int:
    """The exit status: 0 after an answer (or a chat), 1 with one sentence otherwise."""
    parser = argparse.ArgumentParser(
        prog="./dev demo",
        description="From nothing to an answer: start a model, ask it, stop everything.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--prompt", metavar="TEXT", help="ask this one prompt; without it a chat opens")
    parser.add_argument("--max-tokens", type=int, default=0, metavar="N", help="cap of the answer (0: none)")
    parser.add_argument("--model", type=Path, metavar="GGUF", help="another model file")
    args = parser.parse_args(argv)
    if args.max_tokens < 0:
        parser.error("--max-tokens must not be negative")
    steps = Steps(sys.stderr)
    run: OrchestratorRun | None = None
    signal.signal(signal.SIGTERM, lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with tempfile.TemporaryDirectory(prefix="smq-demo-") as directory:
        archive = new_archive()
        try:
            model = args.model or default_model_path()
            if args.model is None and not model.exists():
                fetch_default(model.parent)
            run = start(model.absolute(), archive, Path(directory), steps)
            addr = run.wait_ready()
            if args.prompt is not None:
                answer(addr, args.prompt, args.max_tokens, run.why_not_alive)
                status = 0
            else:
                status = run_chat(addr, max_tokens=args.max_tokens, alive_check=run.why_not_alive)
        except (RunError, FetchError, PromptClientError) as error:
            print(f"demo: {harmless(str(error))}", file=sys.stderr)
            print(f"demo: what happened: mvp-archive {archive} why", file=sys.stderr)
            status = 1
        except KeyboardInterrupt:
            status = 1
        finally:
            if run is not None:
                # A second Ctrl-C while it stops must not leave workers behind.
                signal.signal(signal.SIGINT, signal.SIG_IGN)
            stopped = run.stop() if run is not None else 0
    if status == 0 and stopped != 0:
        print(f"demo: {harmless(run.why_not_alive()) if run else 'the run failed'}", file=sys.stderr)
        status = 1
    if status == 0:
        steps.line("everything is stopped")
    return status


if __name__ == "__main__":
    sys.exit(main())
