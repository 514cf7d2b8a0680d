"""The orchestrator behind mvp-chat: started, watched through its stream socket, stopped in order."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO

from common.records import CHANNEL_BOOTSTRAP, CHANNEL_EVENTS
from services.datastream_collector.reader import Entry, parse, shown
from services.datastream_collector.subscribe import SOCKET_NAME

READY_LIMIT_S = 1800.0  # rented machines and large downloads; the phases have limits of their own
STOP_LIMIT_S = 15.0
STOP_LIMIT_RENTED_S = 180.0
POLL_S = 0.05
BAR_WIDTH = 24
PR_SET_PDEATHSIG = 1

STEPS = {
    ("services", "ready"): "services are up",
    ("provider_start", "started"): "starting worker {node_id}",
    ("provider_start", "ready"): "worker {node_id} started",
    ("node_runtime_ready", "ready"): "worker {node_id} reported in",
    ("runtime_ready_ack", "ready"): "worker {node_id} acknowledged",
    ("weights_loaded", "started"): "loading weights",
    ("weights_loaded", "ready"): "weights are loaded",
    ("prompt_rpc", "ready"): "ready for prompts",
}


class RunError(Exception):
    """The run cannot go on; one sentence."""


class Steps:
    """The start as lines with times, and a bar while weights load on a terminal."""

    def __init__(self, out: TextIO) -> None:
        self._out, self._bars = out, out.isatty() and os.environ.get("TERM") != "dumb"
        self._bar = False
        self._began = time.monotonic()

    def line(self, text: str) -> None:
        """One finished step."""
        if self._bar:
            self._out.write("\r\x1b[K")
            self._bar = False
        self._out.write(f"{time.monotonic() - self._began:6.1f} s  {shown(text)}\n")
        self._out.flush()

    def record(self, record: dict[str, Any]) -> None:
        """A bootstrap record."""
        detail = record.get("detail") if isinstance(record.get("detail"), dict) else {}
        if text := STEPS.get((str(record.get("phase")), str(record.get("status")))):
            self.line(text.format(node_id=record.get("node_id")))
        elif record.get("phase") == "stage_provision_wait" and self._bars and detail:
            share = detail.get("done", 0) / max(1, detail.get("total", 0))
            filled = int(share * BAR_WIDTH)
            name = shown(f"node {record.get('node_id')} {detail.get('phase', '')}")
            self._out.write(f"\r\x1b[K          {name:18} [{'#' * filled}{'.' * (BAR_WIDTH - filled)}] {share:4.0%}")
            self._out.flush()
            self._bar = True


def run_directory(pid: int, configured: str) -> Path | None:
    """The run directory of the orchestrator with this pid: its lock holds the pid."""
    places = [Path(configured)] if configured else []
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    for parent, pattern in ((runtime, "smq-*"), ("/tmp", f"smq-{os.geteuid()}-*")):
        if parent and not configured:
            places += Path(parent).glob(pattern)
    for place in places:
        with contextlib.suppress(OSError):
            if (place / "lock").read_text().strip() == str(pid):
                return place
    return None


class OrchestratorRun:
    """A child orchestrator. on_step gets bootstrap records while it starts; `addr` is set when prompts are taken."""

    def __init__(self, arguments: list[str], config: Path | None, on_step: Callable[[dict[str, Any]], None]) -> None:
        self.addr = ""
        self.workers: dict[int, str] = {}
        """node id → what it costs, "" where nothing is charged."""
        self.stages: list[dict[str, Any]] = []
        self.stopped: list[str] = []
        """What the provider said that it stopped."""
        self._on_step = on_step
        self._ready = threading.Event()
        self._over = threading.Event()
        self._errors: list[str] = []
        self._configured = _configured_run_dir(config)
        command = [sys.executable, "-P", "-m", "services.orchestrator", *arguments]
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            # A terminal's Ctrl-C is the chat's: it stops the answer, and then the run in order.
            start_new_session=True,
            preexec_fn=_die_with_parent,
        )
        self._threads = [threading.Thread(target=work, daemon=True) for work in (self._read_errors, self._follow)]
        for thread in self._threads:
            thread.start()

    # --- threads ------------------------------------------------------------------------------------------------
    def _read_errors(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self._errors.append(line.decode(errors="replace").rstrip())

    def _follow(self) -> None:
        while not self._over.wait(POLL_S) and self.process.poll() is None:
            directory = run_directory(self.process.pid, self._configured)
            if directory is None:
                continue
            with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as sock:
                sock.connect(str(directory / SOCKET_NAME))
                wanted = {"replay": True, "channels": [CHANNEL_BOOTSTRAP, CHANNEL_EVENTS]}
                sock.sendall(json.dumps(wanted).encode() + b"\n")
                with sock.makefile("rb") as lines:
                    for line in lines:
                        if (entry := parse(line)) is not None:
                            self._take(entry)

    def _take(self, entry: Entry) -> None:
        if entry.channel == CHANNEL_EVENTS:
            event = entry.body("event")
            if event.get("kind") == "NodeStopped":
                self.stopped.append(f"worker {event.get('node_id')} ({event.get('provider')}): {event.get('message')}")
            return
        content, detail = entry.content, entry.detail
        step = (content.get("phase"), content.get("status"))
        if step == ("provider_start", "ready"):
            price = detail.get("dph_total")
            self.workers[int(content.get("node_id", 0))] = f"${price:.3f} an hour" if isinstance(price, float) else ""
        elif step == ("stage_provision", "started") and isinstance(detail.get("stages"), list):
            self.stages = [stage for stage in detail["stages"] if isinstance(stage, dict)]
        if not self._ready.is_set():
            self._on_step(content)
        if step == ("prompt_rpc", "ready"):
            self.addr = str(detail.get("addr", ""))
            self._ready.set()

    # --- for the chat -------------------------------------------------------------------------------------------
    def why_not_alive(self) -> str:
        """Empty while the orchestrator lives, else its last word."""
        if self.process.poll() is None:
            return ""
        self._threads[0].join(1)
        return self._errors[-1] if self._errors else f"the orchestrator ended with status {self.process.returncode}"

    def wait_ready(self) -> str:
        """The prompt RPC's address. Raises RunError."""
        until = time.monotonic() + READY_LIMIT_S
        while not self._ready.wait(0.1):
            if why := self.why_not_alive():
                raise RunError(why.removeprefix("mvp-orchestrator: "))
            if time.monotonic() > until:
                raise RunError(f"the prompt RPC was not ready within {READY_LIMIT_S / 60:.0f} minutes")
        return self.addr

    def stop(self, *, rented: bool = False) -> int:
        """Stop the run in order, at last by force. Returns its exit status."""
        if self.process.poll() is None:
            with contextlib.suppress(OSError):
                assert self.process.stdin is not None
                self.process.stdin.write(b"stop\n")
                self.process.stdin.flush()
            for escalate in (None, self.process.terminate, self.process.kill):
                if escalate is not None:
                    escalate()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self.process.wait(STOP_LIMIT_RENTED_S if rented else STOP_LIMIT_S)
                    break
        self._over.set()
        self._threads[1].join(1)
        return self.process.returncode


def _configured_run_dir(config: Path | None) -> str:
    if config is None:
        return ""
    try:
        table = tomllib.loads(config.read_text(encoding="utf-8")).get("runtime", {})
        return str(table.get("run_dir", "")) if isinstance(table, dict) else ""
    except (OSError, ValueError):
        return ""  # the orchestrator says what is wrong with it


def _die_with_parent() -> None:
    """In the child: EOF on stdin is no stop for an orchestrator, so a killed chat would leave it running."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
