"""`./dev demo`: one command from nothing to an answer. Starts mvp-orchestrator with a process worker on SmolLM2, asks
the prompt (or opens a plain chat), stops everything. The answer alone goes to stdout, progress to stderr.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TextIO

from tools.chat import run_chat
from tools.fetch_model import FetchError, default_model_path, fetch_default
from tools.prompt_client import PromptClient, PromptClientError

READY_LIMIT_S = 180.0  # the phases have their own, shorter limits; this one only catches a silent launcher
STOP_LIMIT_S = 15.0
ARCHIVES_KEPT = 5
PR_SET_PDEATHSIG = 1
BAR_WIDTH = 24

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


class DemoError(Exception):
    """The demo cannot go on; one sentence."""


class Progress:
    """Start-up as a person wants to see it: a line per phase, a bar while weights load (on a terminal)."""

    TEXTS = {
        ("services", "ready"): "services are up",
        ("provider_start", "started"): "starting the worker",
        ("provider_start", "ready"): "worker started",
        ("node_runtime_ready", "ready"): "worker reported in",
        ("node_swim", "ready"): "worker is a member",
        ("runtime_ready_ack", "ready"): "worker acknowledged",
        ("weights_loaded", "started"): "loading weights",
        ("weights_loaded", "ready"): "weights are loaded",
        ("prompt_rpc", "ready"): "ready for prompts",
    }

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._tty = out.isatty()
        self._bar = False
        self._started = time.monotonic()

    def line(self, text: str) -> None:
        """One finished step."""
        self._end_bar()
        print(f"{time.monotonic() - self._started:6.1f} s  {text}", file=self._out, flush=True)

    def record(self, record: dict[str, Any]) -> None:
        """A bootstrap record."""
        if text := self.TEXTS.get((record["phase"], record["status"])):
            self.line(text)
        elif record["phase"] == "stage_provision_wait" and self._tty:
            detail = record["detail"]
            share = detail["done"] / max(1, detail["total"])
            filled = int(share * BAR_WIDTH)
            bar = "#" * filled + "." * (BAR_WIDTH - filled)
            print(f"\r          {detail['phase']:8} [{bar}] {share:4.0%}", end="", file=self._out, flush=True)
            self._bar = True

    def _end_bar(self) -> None:
        if self._bar:
            print(file=self._out)
            self._bar = False


def bootstrap_records(archive: Path, stop: threading.Event) -> Iterator[dict[str, Any]]:
    """Bootstrap records of the archive as they are written, until `stop`."""
    pending = ""
    while not archive.exists():
        if stop.wait(0.05):
            return
    with archive.open() as lines:
        while True:
            pending += lines.readline()
            if not pending.endswith("\n"):
                if stop.wait(0.05):
                    return
                continue
            frame, pending = json.loads(pending), ""
            if frame["channel"] == "mvp.orch.bootstrap":
                yield json.loads(frame["payload"]["value"])


class Run:
    """An orchestrator as a child of the demo. It dies with the demo, however that ends."""

    def __init__(self, model: Path, archive: Path, directory: Path, progress: Progress) -> None:
        self._progress = progress
        self._stop = threading.Event()
        self._ready = threading.Event()
        self.addr = ""
        config = directory / "demo.toml"
        config.write_text(CONFIG.format(model=json.dumps(str(model)), archive=json.dumps(str(archive))))
        command = [sys.executable, "-P", "-m", "services.orchestrator", "--runtime-config", str(config)]
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            # A terminal's Ctrl-C is the demo's: it stops the answer or the run in order.
            start_new_session=True,
            preexec_fn=_die_with_parent,
        )
        self._errors: list[str] = []
        self._threads = [
            threading.Thread(target=self._read_errors, daemon=True),
            threading.Thread(target=self._follow, args=(archive,), daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    def _read_errors(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self._errors.append(line.decode(errors="replace").rstrip())

    def _follow(self, archive: Path) -> None:
        for record in bootstrap_records(archive, self._stop):
            self._progress.record(record)
            if (record["phase"], record["status"]) == ("prompt_rpc", "ready"):
                self.addr = record["detail"]["addr"]
                self._ready.set()

    def why_not_alive(self) -> str:
        """Empty while the orchestrator lives, else its last word."""
        if self.process.poll() is None:
            return ""
        self._threads[0].join(1)
        return self._errors[-1] if self._errors else f"the orchestrator ended with status {self.process.returncode}"

    def wait_ready(self) -> str:
        """The prompt RPC's address. Raises DemoError."""
        until = time.monotonic() + READY_LIMIT_S
        while not self._ready.wait(0.1):
            if why := self.why_not_alive():
                raise DemoError(why)
            if time.monotonic() > until:
                raise DemoError(f"the prompt RPC was not ready within {READY_LIMIT_S:.0f} s")
        return self.addr

    def stop(self) -> int:
        """Stop the run in order and wait for its end."""
        if self.process.poll() is None:
            with contextlib.suppress(OSError):
                assert self.process.stdin is not None
                self.process.stdin.write(b"stop\n")
                self.process.stdin.flush()
            for escalate in (None, self.process.terminate, self.process.kill):
                if escalate is not None:
                    escalate()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self.process.wait(STOP_LIMIT_S)
                    break
        self._stop.set()
        return self.process.returncode


def _die_with_parent() -> None:
    """In the child: EOF on stdin is no stop for an orchestrator, so a killed demo would leave it running."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


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
    parser = argparse.ArgumentParser(prog="./dev demo", description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--prompt", metavar="TEXT", help="ask this one prompt; without it a chat opens")
    parser.add_argument("--max-tokens", type=int, default=0, metavar="N", help="cap of the answer (0: none)")
    parser.add_argument("--model", type=Path, metavar="GGUF", help="another model file")
    args = parser.parse_args(argv)
    if args.max_tokens < 0:
        parser.error("--max-tokens must not be negative")
    progress = Progress(sys.stderr)
    run: Run | None = None
    signal.signal(signal.SIGTERM, lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with tempfile.TemporaryDirectory(prefix="smq-demo-") as directory:
        archive = new_archive()
        try:
            model = args.model or default_model_path()
            if args.model is None and not model.exists():
                fetch_default(model.parent)
            run = Run(model.absolute(), archive, Path(directory), progress)
            addr = run.wait_ready()
            if args.prompt is not None:
                answer(addr, args.prompt, args.max_tokens, run.why_not_alive)
                status = 0
            else:
                status = run_chat(addr, max_tokens=args.max_tokens, alive_check=run.why_not_alive)
        except (DemoError, FetchError, PromptClientError) as error:
            print(f"demo: {error}", file=sys.stderr)
            print(f"demo: what happened: mvp-archive {archive} why", file=sys.stderr)
            status = 1
        except KeyboardInterrupt:
            status = 1
        finally:
            stopped = run.stop() if run is not None else 0
    if status == 0 and stopped != 0:
        print(f"demo: {run.why_not_alive() if run else 'the run failed'}", file=sys.stderr)
        status = 1
    if status == 0:
        progress.line("everything is stopped")
    return status


if __name__ == "__main__":
    sys.exit(main())
