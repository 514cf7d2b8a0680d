"""Fake workers: small programs with one habit each, and the proof that none of them outlives its test."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from common.messages.provision import NodeProvisionSpec
from services.provisioner.plugin import Exited, Failed, PluginNodeHandle, PluginObservation
from services.provisioner.process_provider import ProcessProvider
from tests.unit.provisioner.playbook import Play

HABITS = {
    "polite": """
print("ready", flush=True)
print("careful", file=sys.stderr, flush=True)
for line in sys.stdin:
    if line.strip() == "shutdown":
        print("bye", flush=True)
        sys.exit(0)
""",
    "exits": """
print("cannot: no such model", file=sys.stderr, flush=True)
sys.exit(3)
""",
    # Ignores every request; its children too, and one of them leaves the group and the session.
    "stubborn": """
import signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
for escape in (False, True):
    if os.fork() == 0:
        if escape:
            os.setsid()
        while True:
            time.sleep(60)
print("deaf", flush=True)
while True:
    time.sleep(60)
""",
    # Ends, and leaves a child that holds the pipes.
    "careless": """
import time
if os.fork() == 0:
    time.sleep(60)
print("gone", flush=True)
os._exit(5)
""",
    "megabyte": """
sys.stdout.buffer.write("ä".encode() * 524288 + b"\\nnext\\n")
sys.stdout.flush()
""",
    "bridge": """
import json
frame = lambda channel, payload: print(json.dumps(
    {"mvp_stdio_event": 1, "kind": "datastream_frame", "channel": channel, "payload": payload}, separators=(",", ":")))
frame("worker.load", '{"phase":"weights"}')
frame("worker.big", "x" * 100000)
print('{"mvp_stdio_event":2,"kind":"datastream_frame","channel":"c","payload":"p"}')
print('{"mvp_stdio_event":1')
sys.stdout.flush()
""",
    "environment": """
import json
print(json.dumps([dict(os.environ), os.getsid(0) == os.getpid(), sys.argv[1:]]), flush=True)
""",
    "suicide": """
import signal
os.kill(os.getpid(), signal.SIGKILL)
""",
    "leaky": """
print("token=" + sys.argv[3], file=sys.stderr, flush=True)
""",
}


@pytest.fixture
def worker_bin(tmp_path: Path) -> Callable[[str], str]:
    """The path of a fake worker, by its habit."""

    def make(habit: str) -> str:
        path = tmp_path / f"worker-{habit}"
        path.write_text(f"#!{sys.executable} -S\nimport os, sys\n{HABITS[habit]}")
        path.chmod(0o755)
        return str(path)

    return make


class Watched:
    """The sink of a test: everything seen, and waiting for the end."""

    def __init__(self) -> None:
        self.seen: list[PluginObservation] = []
        self.at: list[float] = []
        self._changed = threading.Condition()

    def __call__(self, observation: PluginObservation) -> None:
        with self._changed:
            self.seen.append(observation)
            self.at.append(time.monotonic())
            self._changed.notify_all()

    def wait(self, done: Callable[[list[PluginObservation]], bool], limit_s: float = 60) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: done(self.seen), limit_s), self.seen

    def ended(self) -> Exited:
        self.wait(lambda seen: any(isinstance(item, Exited | Failed) for item in seen))
        last = self.seen[-1]
        assert isinstance(last, Exited), "something came after the end"
        return last


def alive_with(mark: str) -> list[int]:
    """Every living process with this mark, by a look of its own: not with the code under test."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdecimal() and f"SMQ_WORKER={mark}".encode() in (entry / "environ").read_bytes():
                found.append(int(entry.name))
        except OSError:
            continue
    return found


class Stage:
    """Starts fake workers and cleans up behind the test, whatever it did."""

    def __init__(self, worker_bin: Callable[[str], str]) -> None:
        self._worker_bin = worker_bin
        self._started: list[tuple[ProcessProvider, PluginNodeHandle]] = []

    def start(
        self, habit: str, *, grace_ms: int = 60_000, environment: dict[str, str] | None = None, **more: object
    ) -> tuple[ProcessProvider, PluginNodeHandle, Watched]:
        redact = more.pop("redact", bytes)
        assert callable(redact)
        provider = ProcessProvider(self._worker_bin(habit), environment or dict(os.environ), redact, grace_ms)
        watched = Watched()
        spec = NodeProvisionSpec(run_id=1, node_id=1, stage_index=0, image="", **more)  # type: ignore[arg-type]
        handle_id = f"test-{os.getpid()}-{len(self._started)}-{time.monotonic_ns()}"
        handle = provider.start_node(handle_id, spec, Path("launch.json"), watched)
        self._started.append((provider, handle))
        return provider, handle, watched

    @staticmethod
    def alive_with(mark: str) -> list[int]:
        return alive_with(mark)

    def finish(self) -> None:
        for provider, handle in self._started:
            provider.stop_node(handle, True)
        leaked = [pid for _, handle in self._started for pid in alive_with(handle.id)]
        assert not leaked, f"processes left: {leaked}"


@pytest.fixture
def stage(worker_bin: Callable[[str], str]) -> Iterator[Stage]:
    made = Stage(worker_bin)
    yield made
    made.finish()


@pytest.fixture
def play() -> Play:
    return Play()


@pytest.fixture
def ready() -> Play:
    made = Play()
    made.prepare()
    return made
