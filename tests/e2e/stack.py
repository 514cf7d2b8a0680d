"""A real `mvp-orchestrator` with a real worker in directories of its own, and the proof that nothing of it is left.

Everything that a stack starts inherits its XDG_STATE_HOME (the worker too: the process provider passes XDG_*), so that
this one variable marks all its processes, whoever forked them. A test kills only what carries its stack's mark.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from services.prompt_gateway.wire import DoneLine
from tools.fetch_model import default_model_path
from tools.prompt_client import PromptClient

READY_S = 150.0  # two cores that others load, too; the phases have limits of their own
STOP_S = 60.0
GONE_S = 30.0  # of a loaded machine; a free one takes a second or two
PID_S = 30.0
TAKEN_APART_S = 10.0  # what was killed, by the kernel; an orphan ends by itself only after 15 s
POLL_S = 0.05
LAUNCHER_ENVIRONMENT = frozenset({"PATH", "HOME", "LANG", "TMPDIR", "LD_LIBRARY_PATH", "CC", "CACHELEVEL"}) | {
    name for name in os.environ if name.startswith(("OMP_", "OPENBLAS_", "MKL_", "TOKENIZERS_", "XDG_CACHE"))
}


COLOURS = "Name three primary colors."
COLOURS_TOKENS = 24
LONG = "Write a very long story about a lighthouse keeper and the sea."
_answers: list[str] = []


def assert_right(text: str) -> None:
    """An answer to COLOURS (at most COLOURS_TOKENS): it names colours, and is the same in every run of this session."""
    assert "red" in text.lower() and "blue" in text.lower(), text
    _answers.append(text)
    assert text.strip() == _answers[0].strip()


class StackError(AssertionError):
    """The stack did not do what a test waited for."""


@dataclass(frozen=True, slots=True)
class Record:
    """One frame of the archive with the JSON of its payload."""

    seq: int
    channel: str
    stream: str
    unix_ms: int
    body: dict[str, Any] = field(repr=False)

    @property
    def phase(self) -> str:
        """phase of a lifecycle record, "" of others."""
        return str(self.body.get("phase", ""))

    @property
    def status(self) -> str:
        """status of a lifecycle record, "" of others."""
        return str(self.body.get("status", ""))

    @property
    def detail(self) -> dict[str, Any]:
        """detail of a lifecycle record."""
        return dict(self.body.get("detail") or {})

    @property
    def step(self) -> tuple[str, str]:
        """(phase, status)."""
        return self.phase, self.status

    def __repr__(self) -> str:
        return f"<{self.seq} {self.channel} {self.phase} {self.status}>"


@dataclass(frozen=True, slots=True)
class Process:
    """A live process of a stack. part: the service's name, "orchestrator", "agent" or "engine"."""

    pid: int
    part: str
    command: str


def processes(variable: str, value: str) -> list[Process]:
    """All live processes (no zombies) whose environment has the mark."""
    mark = f"{variable}={value}".encode()
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        with contextlib.suppress(OSError):
            if mark not in (entry / "environ").read_bytes().split(b"\0"):
                continue
            argv = (entry / "cmdline").read_bytes().decode(errors="replace").split("\0")
            state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
            if argv != [""] and state not in ("Z", "X"):
                found.append(Process(int(entry.name), _part(argv), " ".join(argv)))
    return found


def _part(argv: list[str]) -> str:
    for word in argv:
        if word.startswith("services."):
            return word.removeprefix("services.")
        if word.startswith("worker.engine"):
            return "engine"
        if word.endswith("mvp-worker-node") or word == "worker.agent":
            return "agent"
        if word.endswith("mvp-orchestrator"):
            return "orchestrator"
        if "supervisord" in word:
            return "supervisord"
    return argv[0] if argv else ""


def wait_for(what: str, condition: Callable[[], Any], limit_s: float) -> Any:
    """The first true value of condition(). Raises StackError."""
    until = time.monotonic() + limit_s
    while not (value := condition()):
        if time.monotonic() > until:
            raise StackError(f"{what}: not within {limit_s:g} s")
        time.sleep(POLL_S)
    return value


def wait_taken_apart(left: Callable[[], list[Process]], limit_s: float = TAKEN_APART_S) -> None:
    """Nothing is left but what is dying already. Raises AssertionError."""
    until = time.monotonic() + limit_s
    while (found := left()) and time.monotonic() < until:
        time.sleep(POLL_S)
    assert not found, found


class Archive:
    """Reads a frame archive as it grows."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._offset = 0
        self._records: list[Record] = []

    def records(self) -> list[Record]:
        """All complete frames so far, in file order."""
        if self.path.exists():
            with self.path.open("rb") as file:
                file.seek(self._offset)
                while (line := file.readline()).endswith(b"\n"):
                    self._offset += len(line)
                    self._records.append(_record(json.loads(line)))
        return self._records

    def lifecycle(self) -> list[Record]:
        """The orchestrator's own records, in the order they were made."""
        return [record for record in self.records() if record.channel == "mvp.orch.bootstrap"]

    def find(self, phase: str, status: str) -> Record | None:
        """The first such record."""
        return next((record for record in self.lifecycle() if record.step == (phase, status)), None)

    def one(self, phase: str, status: str) -> Record:
        """The only such record. Raises StackError."""
        found = [record for record in self.lifecycle() if record.step == (phase, status)]
        if len(found) != 1:
            raise StackError(f"{len(found)} records {phase} {status}, not one: {self.lifecycle()}")
        return found[0]

    def prompts(self, phase: str = "") -> list[Record]:
        """Records of the prompt channel."""
        own = [record for record in self.records() if record.channel == "mvp.orch.prompt"]
        return [record for record in own if not phase or record.phase == phase]


def _record(frame: dict[str, Any]) -> Record:
    payload = frame["payload"]
    body: dict[str, Any] = {}
    if payload.get("encoding") == "utf8":
        with contextlib.suppress(json.JSONDecodeError):
            body = json.loads(payload["value"])
    return Record(frame["arrival_seq"], frame["channel"], frame["stream"], frame["collected"]["unix_ms"], body)


class Stack:
    """One start of mvp-orchestrator. Use as a context manager: at its end everything that carries the mark is dead."""

    def __init__(
        self,
        *,
        model: Path | None = None,
        config: str = "",
        args: tuple[str, ...] = (),
        environ: Mapping[str, str] | None = None,
        rpc_addr: str = "127.0.0.1:0",
        run_dir: Path | None = None,
        text: str | None = None,
        archive: Path | None = None,
        runtime: str = "",
        model_key: str = "gguf_local_path",
    ) -> None:
        self.home = Path(tempfile.mkdtemp(prefix="smq-e2e-", dir="/tmp"))
        self.run_dir = run_dir or self.home / "run"
        self.archive = Archive(archive or self.home / "frames.jsonl")
        self.config_file = self.home / "orchestrator.toml"
        self.state = self.home / "state"
        if text is None:
            text = (
                _config(model or model_file(), rpc_addr, self.archive.path, self.run_dir, runtime, model_key) + config
            )
        self.config_file.write_text(text)
        self._args = args
        self.environ = {name: value for name, value in os.environ.items() if name in LAUNCHER_ENVIRONMENT}
        self.environ |= {"XDG_STATE_HOME": str(self.state), "SMQ_TRACEBACK": "1", **(environ or {})}
        self.process: subprocess.Popen[bytes] | None = None
        self._ended_at = 0.0

    # --- life -------------------------------------------------------------------------------------------------
    def __enter__(self) -> Stack:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.destroy()

    def start(self) -> Stack:
        """Start; returns at once."""
        with (self.home / "stdout").open("wb") as out, (self.home / "stderr").open("wb") as err:
            self.process = subprocess.Popen(
                [str(Path(sys.executable).with_name("mvp-orchestrator")), *self._arguments()],
                stdin=subprocess.PIPE,
                stdout=out,
                stderr=err,
                cwd=self.home,
                env=self.environ,
                start_new_session=True,
            )
        return self

    def _arguments(self) -> list[str]:
        return ["--runtime-config", str(self.config_file), *self._args]

    def destroy(self) -> None:
        """However the test ended: kill what carries the mark, remove the directories."""
        for _ in range(20):
            left = self.left()
            for process in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process.pid, signal.SIGKILL)
            if self.process is not None:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self.process.wait(0.1)
            if not left:
                break
            time.sleep(0.1)
        if self.process is not None and self.process.stdin is not None:
            with contextlib.suppress(OSError):
                self.process.stdin.close()
        if self.run_dir != self.home / "run":
            shutil.rmtree(self.run_dir, ignore_errors=True)
        shutil.rmtree(self.home, ignore_errors=True)

    # --- what it is -------------------------------------------------------------------------------------------
    @property
    def stderr(self) -> str:
        """What it printed on the real stderr."""
        return (self.home / "stderr").read_text(errors="replace")

    @property
    def stdout(self) -> str:
        """What it printed on the real stdout."""
        return (self.home / "stdout").read_text(errors="replace")

    def left(self) -> list[Process]:
        """Every live process of this stack."""
        return processes("XDG_STATE_HOME", str(self.state))

    def pid(self, part: str) -> int:
        """The one process of a part. Between fork and exec a child looks like its parent, and in the middle of exec
        like nobody: that passes, so it is waited for. Raises StackError."""
        until = time.monotonic() + PID_S
        while len(found := [process.pid for process in self.left() if process.part == part]) != 1:
            if time.monotonic() > until:
                raise StackError(f"{len(found)} processes are {part}: {self.left()}")
            time.sleep(0.005)
        return found[0]

    def kill(self, part: str, number: signal.Signals = signal.SIGKILL) -> int:
        """Signal one part; returns the pid it had."""
        pid = self.pid(part)
        os.kill(pid, number)
        return pid

    # --- waiting ----------------------------------------------------------------------------------------------
    def wait_record(self, phase: str, status: str, limit_s: float = READY_S) -> Record:
        """Until such a record is in the archive, or the process ended."""

        def found() -> Record | None:
            if record := self.archive.find(phase, status):
                return record
            if self.process is not None and self.process.poll() is not None:
                if record := self.archive.find(phase, status):
                    return record
                raise StackError(f"ended with {self.process.returncode} before {phase} {status}: {self.stderr}")
            return None

        record = wait_for(f"record {phase} {status}", found, limit_s)
        assert isinstance(record, Record)
        return record

    def addr(self) -> str:
        """The prompt RPC's address, once it is ready."""
        return str(self.wait_record("prompt_rpc", "ready").detail["addr"])

    def client(self) -> PromptClient:
        """A connection to the prompt RPC."""
        return PromptClient.connect(self.addr(), wait_s=10, read_timeout_s=150)

    def ask(self, prompt: str, **options: Any) -> DoneLine:
        """One prompt on a connection of its own."""
        with self.client() as client:
            return client.complete(prompt, **options)

    def assert_answers(self) -> None:
        """A prompt gets its right answer."""
        assert_right(self.ask(COLOURS, max_tokens=COLOURS_TOKENS).final_text)

    def say(self, text: str) -> None:
        """Write to its stdin."""
        assert self.process is not None and self.process.stdin is not None
        self.process.stdin.write(text.encode())
        self.process.stdin.flush()

    def wait(self, limit_s: float = STOP_S) -> int:
        """Its exit status. Raises StackError when it does not end."""
        assert self.process is not None
        try:
            return self.process.wait(limit_s)
        except subprocess.TimeoutExpired:
            last = self.archive.lifecycle()[-5:]
            raise StackError(f"still running after {limit_s:g} s: {self.left()}, {last}") from None

    # --- judgements -------------------------------------------------------------------------------------------
    def assert_nothing_left(self, limit_s: float = TAKEN_APART_S) -> None:
        """No process, no run directory, no open handle in the ledger."""
        wait_taken_apart(self.left, limit_s)
        assert not self.run_dir.exists(), sorted(self.run_dir.rglob("*"))

    def assert_failed(self, limit_s: float = STOP_S) -> str:
        """It exits 1 with exactly one line, which is returned without its prefix; nothing is left."""
        started = time.monotonic()
        status = self.wait(limit_s)
        lines = self.stderr.splitlines()
        print(f"status {status} after {time.monotonic() - started:.1f} s:", *lines, sep="\n")
        assert status == 1, (status, lines)
        assert len(lines) == 1, lines
        assert lines[0].startswith("mvp-orchestrator: "), lines
        assert not self.stdout, self.stdout
        self.assert_nothing_left()
        return lines[0].removeprefix("mvp-orchestrator: ")

    def assert_stopped(self, source: str, limit_s: float = STOP_S) -> None:
        """A controlled shutdown: status 0, not a byte on stdout and stderr, the source in the record, nothing left."""
        status = self.wait(limit_s)
        assert (status, self.stderr, self.stdout) == (0, "", "")
        assert self.archive.one("shutdown", "started").detail["source"] == source
        assert self.archive.one("orch_exit", "ready").detail == {"result": "ok"}
        self.assert_nothing_left()


def model_file() -> Path:
    """The real model; `./dev test` fetches it."""
    return default_model_path()


def _config(model: Path, rpc_addr: str, archive: Path, run_dir: Path, runtime: str, model_key: str) -> str:
    return f"""\
[runtime]
run_dir = {json.dumps(str(run_dir))}
{runtime}
[provider]
kind = "process"
[model]
id = "smollm2"
{model_key} = {json.dumps(str(model))}
[prompt]
rpc_addr = {json.dumps(rpc_addr)}
[observability]
datastream_frame_log = {json.dumps(str(archive))}
"""


NO_WEIGHTS = """\
import sys, time
if "worker.engine" in sys.orig_argv:
    from worker.engine import sources
    sources.resolve_source = lambda *_: time.sleep(600)
"""


def held_worker(folder: Path, phase: str) -> tuple[str, str]:
    """Arguments for a worker that does not get beyond the phase, however late a test comes: it never reports
    ("provider_start"), or its engine never has its model ("weights_loaded")."""
    script = folder / "worker"
    if phase == "provider_start":
        script.write_text("#!/bin/sh\nread until_shutdown\n")
    else:
        (folder / "sitecustomize.py").write_text(NO_WEIGHTS)
        worker = Path(sys.executable).with_name("mvp-worker-node")
        script.write_text(f'#!/bin/sh\nPYTHONPATH={folder} exec {worker} "$@"\n')
    script.chmod(0o700)
    return "--worker-bin", str(script)


class Asker:
    """One prompt on a raw connection that is read to its very end, so that a second terminal event would be seen."""

    def __init__(self, addr: str, prompt: str, **fields: Any) -> None:
        host, _, port = addr.rpartition(":")
        self.lines: list[dict[str, Any]] = []
        self._sock = socket.create_connection((host, int(port)), timeout=200)  # longer than any freeze
        self._sock.sendall(json.dumps({"request_id": 7, "prompt_text": prompt, **fields}).encode() + b"\n")
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    @property
    def is_open(self) -> bool:
        """Whether the gateway may still say something."""
        return self._thread.is_alive()

    def _read(self) -> None:
        with contextlib.suppress(OSError, ValueError), self._sock, self._sock.makefile("rb") as lines:
            self.lines.extend(json.loads(line) for line in lines)

    def wait_text(self, limit_s: float = 120) -> None:
        """Until the answer has begun."""
        wait_for("text", lambda: any(line["type"] == "text_delta" for line in list(self.lines)), limit_s)

    def terminals(self, limit_s: float = 60) -> list[dict[str, Any]]:
        """All terminal lines, once the gateway has closed the connection."""
        self._thread.join(limit_s)
        if self._thread.is_alive():
            raise StackError(f"the connection was not closed within {limit_s:g} s; it said {self.lines[-3:]}")
        return [line for line in self.lines if line["type"] in ("done", "fault")]
