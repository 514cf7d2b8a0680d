"""One cell of tests/kill_matrix.toml on real processes: reach the phase, send the signal, judge what comes of it.

Services are hit in the phase `start` while provider `external` waits for its worker, which this test starts after the
signal: with provider `process` that phase is over within milliseconds. Agent and engine are hit there as soon as they
exist.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from common.door import free_ports
from common.limits import LEASE_TTL_MS
from tests.e2e.stack import COLOURS, GONE_S, LONG, READY_S, Asker, Stack, StackError, model_file, wait_for
from tests.kill_matrix import MATRIX, WORKER, Cell, rule_of

LONG_TOKENS = 300  # seconds of answer
PROBE_TOKENS = 4
SLACK_S = 40.0  # this machine may be loaded; the table of a whole run shows what it really took
POLL_S = 0.01
CONTINUED_S = 3.0  # until a continued process has its link again
RESTED_STOP_S = 75.0  # a provider that has to be waited for may use all of its limit
REVISION = "0" * 40
NEXT: dict[str, tuple[str, str]] = {
    "services": ("services", "ready"),
    "start": ("provider_start", "ready"),
    "readiness": ("complete_bootstrap", "started"),
    "weights": ("prompt_rpc", "started"),
}
"""The record that says that the phase is over."""
KEPT = frozenset({"orchestrator.toml", "stdout", "stderr", "frames.jsonl", "state", "tmp", "hub"})


class Missed(Exception):
    """The phase was over before the signal came: says nothing about the cell."""


@dataclass(slots=True)
class Outcome:
    """What became of a cell. seconds: from the signal to its outcome, and `allowed` by the matrix."""

    cell: Cell
    how: str = ""
    seconds: float = 0.0
    allowed: float = 0.0
    error: str = ""

    @property
    def line(self) -> str:
        """One line of the table."""
        verdict = f"FAILED: {self.error[:1500]}" if self.error else self.how
        return f"{' '.join(self.cell):<42} {self.seconds:6.1f} of {self.allowed:3.0f} s  {verdict}"


def play(cell: Cell, tries: int = 5) -> Outcome:
    """Play one cell; failures are told in the outcome."""
    rule = rule_of(*cell)
    assert rule is not None
    outcome = Outcome(cell, allowed=rule["within_s"])
    for left in reversed(range(tries)):
        try:
            with _Play(cell, rule, outcome) as cell_play:
                cell_play.run()
            return outcome
        except Missed as missed:
            outcome.error = f"the phase was missed {tries} times: {missed}" if not left else ""
        except (AssertionError, OSError) as error:
            outcome.error = f"{error}"
            return outcome
    return outcome


@dataclass(slots=True)
class _Play:
    cell: Cell
    rule: dict[str, Any]
    outcome: Outcome
    stack: Stack = field(init=False)
    asker: Asker | None = None
    probes: list[Asker] = field(default_factory=list)
    hand: subprocess.Popen[bytes] | None = None
    """The worker that was started by hand, for provider `external`."""
    by_hand: bool = False
    began: float = 0.0
    timers: list[threading.Timer] = field(default_factory=list)

    def __enter__(self) -> _Play:
        process, _, phase = self.cell
        self.by_hand = phase == "start" and process not in WORKER
        relay = '[relay]\nmode = "default"\n'
        if self.by_hand:
            relay = f'[relay]\nbind_addr = "127.0.0.1:{free_ports("127.0.0.1")}"\n'
        self.stack = Stack(config=relay, args=("--provider", "external") if self.by_hand else ())
        if self.by_hand:
            self._external_model()
        (self.stack.home / "tmp").mkdir()
        self.stack.environ["TMPDIR"] = str(self.stack.home / "tmp")
        self.stack.start()
        return self

    def _external_model(self) -> None:
        """What runs elsewhere fetches its model: here out of a Hugging Face cache that has it, without network."""
        hub, model = self.stack.home / "hub", model_file()
        folder = hub / "models--local--model"
        (folder / "refs").mkdir(parents=True)
        (folder / "refs" / "main").write_text(REVISION)
        (folder / "snapshots" / REVISION).mkdir(parents=True)
        (folder / "snapshots" / REVISION / model.name).symlink_to(model)
        source = f'gguf_repo = "local/model"\ngguf_file = "{model.name}"\n'
        text = re.sub(r"gguf_local_path.*\n", source, self.stack.config_file.read_text())
        self.stack.config_file.write_text(text)
        self.stack.environ |= {"HF_HUB_CACHE": str(hub), "HF_HUB_OFFLINE": "1"}

    def __exit__(self, *_: object) -> None:
        for timer in self.timers:
            timer.cancel()
        self.stack.destroy()
        if self.hand is not None:
            self.hand.wait(60)
            assert self.hand.stdin is not None
            self.hand.stdin.close()

    def run(self) -> None:
        """Raises AssertionError where the cell does not hold, Missed."""
        pid = self._reach()
        wall_ms = time.time_ns() // 1_000_000
        self.began = time.monotonic()
        self._signal(pid)
        try:
            self._judge()
        except AssertionError:
            self._check_phase(wall_ms)
            raise
        finally:
            self.outcome.seconds = self.outcome.seconds or time.monotonic() - self.began
        self._check_phase(wall_ms)

    # --- reaching the phase -----------------------------------------------------------------------------------
    def _reach(self) -> int:
        process, _, phase = self.cell
        if phase == "services":
            self._wait("the first service", lambda: self._pid("router"))
            return self._wait(process, lambda: self._pid(process))
        if phase == "start" and process in WORKER:
            return self._wait(process, lambda: self._pid(process))
        match phase:
            case "start":
                self._record("provider_start", "started")
            case "readiness":
                self._record("node_runtime_ready", "started")
            case "weights":
                self._record("stage_provision_send", "sent")
            case _:
                self._record("serve_prompts", "started")
                self._serving(phase)
        return self._wait(process, lambda: self._pid(process))

    def _serving(self, phase: str) -> None:
        if phase == "prompt":
            self.asker = Asker(self.stack.addr(), LONG, max_tokens=LONG_TOKENS)
            self.asker.wait_text()
            return
        probe = self._probe()
        self._wait("an answer", lambda: _terminals(probe))
        if phase == "closing":
            self.stack.say("stop\n")
            self._record("shutdown", "started")

    def _pid(self, part: str) -> int:
        found = [process.pid for process in self.stack.left() if process.part == part]
        return min(found, default=0)  # the older one: between fork and exec a child looks like its parent

    def _record(self, phase: str, status: str) -> None:
        self._wait(f"{phase} {status}", lambda: self.stack.archive.find(phase, status))

    def _wait(self, what: str, condition: Callable[[], Any]) -> Any:
        until = time.monotonic() + READY_S
        while not (value := condition()):
            if self._ended():
                raise Missed(f"ended before {what}: {self.stack.stderr}")
            if time.monotonic() > until:
                raise StackError(f"{what}: not within {READY_S:g} s")
            time.sleep(POLL_S)
        return value

    def _ended(self) -> bool:
        assert self.stack.process is not None
        return self.stack.process.poll() is not None

    def _signal(self, pid: int) -> None:
        number = signal.Signals[f"SIG{self.cell[1]}"]
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            raise Missed(f"process {pid} ended just now") from None
        if number is signal.SIGSTOP:
            timer = threading.Timer(MATRIX["stop_s"], _continue, (pid,))
            timer.daemon = True
            timer.start()
            self.timers.append(timer)

    def _check_phase(self, wall_ms: int) -> None:
        """The signal came before the record that ends the phase."""
        phase = self.cell[2]
        if phase in NEXT and self.cell[0] not in WORKER:
            over = self.stack.archive.find(*NEXT[phase])
            if over is not None and over.unix_ms < wall_ms:
                raise Missed(f"{phase} had been over for {wall_ms - over.unix_ms} ms")

    # --- judging ----------------------------------------------------------------------------------------------
    def _judge(self) -> None:
        kind, until = self.rule["outcome"], self.began + self.rule["within_s"] + SLACK_S
        if kind == "lost":
            wait_for("all gone", lambda: not self.stack.left(), until - time.monotonic())
            self._over("lost")
        elif kind.startswith("goes_on"):
            self._goes_on(until, may_end=kind.endswith("exit_1"))
        else:
            self._ends(kind, until)
        self._prompts()
        self._nothing_left()

    def _over(self, how: str) -> None:
        self.outcome.how, self.outcome.seconds = how, time.monotonic() - self.began

    def _goes_on(self, until: float, *, may_end: bool) -> None:
        quiet_until = self.began + MATRIX["stop_s"] if self.rule.get("quiet") else 0.0
        while not self._ended():
            if time.monotonic() > until:
                raise StackError(f"does not go on: {self.stack.archive.lifecycle()[-4:]}, {self._last_answers()}")
            self._start_by_hand()
            may_ask = time.monotonic() > quiet_until and self.stack.archive.find("serve_prompts", "started")
            if may_ask and self._answers(until):
                self._over("goes on")
                break
            time.sleep(POLL_S)
        if self._ended():
            if not may_end:
                raise StackError(f"ended: {self.stack.stderr}")
            self._over(f"ended: {self._failed()}")
            return
        if self.cell[1] == "STOP":  # the end of a run with a process that hangs is another cell
            time.sleep(max(0.0, self.began + MATRIX["stop_s"] + CONTINUED_S - time.monotonic()))
        self.stack.say("stop\n")
        status = self.stack.wait(RESTED_STOP_S)
        assert (status, self._stderr(), self.stack.stdout) == (0, [], ""), (status, self._stderr())

    def _start_by_hand(self) -> None:
        """The worker of provider `external`, once its launch file is there."""
        launch = self.stack.run_dir / "nodes" / "1" / "launch.json"
        if self.by_hand and self.hand is None and launch.exists():
            self.hand = subprocess.Popen(
                [str(Path(sys.executable).with_name("mvp-worker-node")), "--launch", str(launch)],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env=self.stack.environ,
                start_new_session=True,
            )

    def _answers(self, until: float) -> bool:
        """Whether a prompt gets its answer; False after a fault or without a connection."""
        try:
            probe = self._probe()
        except OSError:
            return False
        while not (got := _terminals(probe)) and probe.is_open and not self._ended():
            if time.monotonic() > until:
                raise StackError(f"a prompt has no end: {probe.lines[-3:]}, {self.stack.archive.lifecycle()[-4:]}")
            time.sleep(POLL_S)
        return got[:1] == ["done"]

    def _probe(self) -> Asker:
        probe = Asker(self.stack.addr(), COLOURS, max_tokens=PROBE_TOKENS)
        self.probes.append(probe)
        return probe

    def _last_answers(self) -> list[Any]:
        return [probe.lines[-1:] for probe in self.probes[-2:]]

    def _ends(self, kind: str, until: float) -> None:
        status = self.stack.wait(until - time.monotonic())
        self._over(f"exit {status}")
        if kind == "exit_1" or (kind.endswith("exit_1") and status):
            self._over(f"exit {status}: {self._failed()}")
        else:
            assert (status, self._stderr(), self.stack.stdout) == (0, [], ""), (status, self._stderr())

    def _stderr(self) -> list[str]:
        """Its lines, but for the one that asks for a worker by hand."""
        return [
            line for line in self.stack.stderr.splitlines() if not (self.by_hand and " waits for its worker" in line)
        ]

    def _failed(self) -> str:
        """Status 1 and the one sentence, which is returned."""
        assert self.stack.process is not None
        lines = self._stderr()
        assert self.stack.process.returncode == 1, (self.stack.process.returncode, lines)
        assert len(lines) == 1 and lines[0].startswith("mvp-orchestrator: "), lines
        assert re.search(self.rule["says"], lines[0]), (lines[0], "does not say", self.rule["says"])
        return lines[0].removeprefix("mvp-orchestrator: ")

    def _prompts(self) -> None:
        """At most one terminal for every request, and the one that the rule wants for the prompt under way."""
        for probe in self.probes:
            assert len(probe.terminals()) <= 1, probe.lines[-3:]
        if self.asker is not None:
            got = [line["type"] for line in self.asker.terminals()]
            assert len(got) <= 1, self.asker.lines[-3:]
            wanted = self.rule.get("prompt", "done_or_fault").split("_or_")
            assert (got or ["closed"])[0] in wanted, f"the client gets {got or 'closed'}, not {wanted}"
        ended = Counter(record.detail.get("prompt_id") for record in self.stack.archive.prompts("prompt_complete"))
        assert all(count == 1 for count in ended.values()), f"terminals on record: {ended}"

    def _nothing_left(self) -> None:
        if self.hand is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                # It is told to stop; where it cannot be told its lease ends it.
                self.hand.wait(GONE_S + LEASE_TTL_MS / 1000)
        self.stack.assert_nothing_left()
        assert not list((self.stack.home / "tmp").iterdir()), list((self.stack.home / "tmp").iterdir())
        assert not (strange := {entry.name for entry in self.stack.home.iterdir()} - KEPT), strange
        ledger = self.stack.state / "swactor-mq" / "ledger"
        assert not ledger.exists() or not (open_handles := list(ledger.iterdir())), open_handles
        for line in self.stack.archive.path.read_text().splitlines()[:-1] if self.stack.archive.path.exists() else []:
            json.loads(line)


def _terminals(asker: Asker) -> list[str]:
    return [line["type"] for line in list(asker.lines) if line["type"] in ("done", "fault")]


def _continue(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGCONT)
