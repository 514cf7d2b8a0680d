"""The ledger: whoever dies at whatever point, the next start finds and stops what is left, and touches nothing else."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from common.launch_file import LaunchFile
from services.provisioner import processes
from services.provisioner.ledger import Ledger, LedgerError, LedgerRecord, ledger_folder, open_entries, reconcile
from services.provisioner.plugin import LeftBehind, ProviderError
from services.provisioner.process_provider import ProcessProvider
from services.provisioner.service import cleanup

ROOT = Path(__file__).parents[3]


def stopper() -> Callable[[LeftBehind], bool]:
    return ProcessProvider("none", {}).stop_left_behind


def record(op: Any, handle_id: str = "h", **more: Any) -> LedgerRecord:
    more.setdefault("boot_id", processes.boot_id())
    return LedgerRecord(op=op, id=handle_id, provider="process", node_id=1, **more)


def files(folder: Path) -> list[str]:
    return sorted(os.listdir(folder))


@pytest.fixture
def innocent() -> Iterator[Callable[..., subprocess.Popen[bytes]]]:
    """Processes that are none of our workers."""
    started: list[subprocess.Popen[bytes]] = []

    def start(mark: str = "") -> subprocess.Popen[bytes]:
        environment = dict(os.environ) | ({processes.MARK_VARIABLE: mark} if mark else {})
        started.append(subprocess.Popen(["sleep", "60"], env=environment))
        return started[-1]

    yield start
    for child in started:
        child.kill()
        child.wait()


PROVISIONER = """
import os, sys, time
from pathlib import Path
from common.messages.provision import NodeProvisionSpec
from services.provisioner import processes
from services.provisioner.ledger import Ledger, LedgerRecord
from services.provisioner.process_provider import ProcessProvider

folder, worker, mark, point = Path(sys.argv[1]), *sys.argv[2:]
os.environ["HOME"] = "/"

def die_at(name):
    if name == point:
        print("there", flush=True)
        time.sleep(60)

ledger = Ledger(folder, "dying")
die_at("locked")
ledger.append(LedgerRecord(op="intent", id=mark, provider="process", node_id=1, boot_id=processes.boot_id()))
die_at("intent")
provider = ProcessProvider(worker, os.environ)
seen = []
spec = NodeProvisionSpec(run_id=1, node_id=1, stage_index=0, image="")
handle = provider.start_node(mark, spec, Path("x"), seen.append)
while not seen:
    time.sleep(0.01)
die_at("started")
ledger.append(LedgerRecord(op="handle", id=mark, process_id=handle.provider_process_id, facts=dict(handle.facts)))
die_at("handle")
if point == "torn":
    os.write(ledger._fd, b'{"op":"stopped","id":"' + mark.encode())
    die_at("torn")
provider.stop_node(handle, True)
ledger.append(LedgerRecord(op="stopped", id=mark))
die_at("stopped")
"""


@pytest.fixture
def provisioner(tmp_path: Path, worker_bin: Callable[[str], str]) -> Iterator[Callable[[str], Any]]:
    """A provisioner of its own process that stands still at the named point of its life, until it is killed."""
    script = tmp_path / "provisioner.py"
    script.write_text(textwrap.dedent(PROVISIONER))
    running: list[subprocess.Popen[bytes]] = []

    def start(point: str) -> Any:
        mark = f"ledger-{point}-{os.getpid()}-{time.monotonic_ns()}"
        # A worker that ends by itself at EOF would prove nothing.
        child = subprocess.Popen(
            [sys.executable, script, tmp_path / "ledger", worker_bin("stubborn"), mark, point],
            stdout=subprocess.PIPE,
            env=os.environ | {"PYTHONPATH": str(ROOT)},
        )
        running.append(child)
        assert child.stdout is not None and child.stdout.readline() == b"there\n"
        return child, mark

    yield start
    for child in running:
        child.kill()
        child.communicate()


@pytest.mark.spec("S1 4.13", "S1 9.16")
@pytest.mark.parametrize(
    ("point", "alive"), [("locked", 0), ("intent", 0), ("started", 3), ("handle", 3), ("torn", 3), ("stopped", 0)]
)
def test_killed_at_any_point_nothing_is_left_after_the_next_start(
    tmp_path: Path, stage: Any, provisioner: Callable[[str], Any], point: str, alive: int
) -> None:
    child, mark = provisioner(point)
    child.kill()
    child.wait()
    assert len(stage.alive_with(mark)) == alive
    done = reconcile(tmp_path / "ledger", stopper())
    assert (done.stopped, done.problems) == (1 if alive else 0, [])
    assert not stage.alive_with(mark)
    assert files(tmp_path / "ledger") == []


def test_what_a_living_instance_has_started_is_left_alone(
    tmp_path: Path, stage: Any, provisioner: Callable[[str], Any]
) -> None:
    child, mark = provisioner("handle")
    assert reconcile(tmp_path / "ledger", stopper()).stopped == 0
    assert len(stage.alive_with(mark)) == 3
    assert files(tmp_path / "ledger") == ["dying.jsonl"]
    child.kill()
    child.wait()
    assert reconcile(tmp_path / "ledger", stopper()).stopped == 1
    assert not stage.alive_with(mark)


@pytest.mark.parametrize("wrong", ["start_time", "boot_id", "mark", "no_handle"])
def test_a_process_that_is_not_provably_the_worker_lives_on(
    tmp_path: Path, innocent: Callable[..., subprocess.Popen[bytes]], wrong: str
) -> None:
    # In another boot even the right mark proves nothing: it is only looked for in this one.
    child = innocent(mark={"mark": "of-somebody-else", "boot_id": "h"}.get(wrong, ""))
    started = processes.start_time(child.pid) or 0
    boot = "another-boot" if wrong == "boot_id" else processes.boot_id()
    ledger = Ledger(tmp_path, "dead")
    ledger.append(record("intent", boot_id=boot))
    if wrong != "no_handle":
        facts: dict[str, str | int] = {"pid": child.pid, "start_time": started + (wrong == "start_time")}
        ledger.append(record("handle", process_id=child.pid, facts=facts))
    os.close(ledger._fd)
    done = reconcile(tmp_path, stopper())
    assert (done.stopped, done.problems, files(tmp_path)) == (0, [], [])
    assert child.poll() is None


def test_where_the_mark_cannot_be_read_pid_and_start_time_decide(
    innocent: Callable[..., subprocess.Popen[bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    child = innocent()
    started = processes.start_time(child.pid) or 0
    monkeypatch.setattr(processes, "marks_of", lambda _: None)
    assert not processes.kill_identified(child.pid, started + 1, "h")
    assert child.poll() is None
    assert processes.kill_identified(child.pid, started, "h")
    assert child.wait(60) == -9
    assert not processes.kill_identified(child.pid, started, "h")


def test_the_worker_itself_is_stopped(tmp_path: Path, innocent: Callable[..., subprocess.Popen[bytes]]) -> None:
    child = innocent(mark="h")
    ledger = Ledger(tmp_path, "dead")
    ledger.append(record("intent"))
    ledger.append(record("handle", facts={"pid": child.pid, "start_time": processes.start_time(child.pid) or 0}))
    os.close(ledger._fd)
    assert reconcile(tmp_path, stopper()).stopped == 1
    assert child.wait(60) == -9


def test_a_worker_that_cannot_be_stopped_keeps_its_file_and_the_others_are_attempted(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path, "dead")
    for name in ("a", "b", "c"):
        ledger.append(record("intent", name))
    os.close(ledger._fd)
    asked = []

    def stop(left: LeftBehind) -> bool:
        asked.append(left.id)
        if left.id == "b":
            raise ProviderError("the engine does not answer")
        return True

    done = reconcile(tmp_path, stop)
    assert asked == ["c", "b", "a"]
    assert done.stopped == 2 and "the engine does not answer" in done.problems[0]
    assert files(tmp_path) == ["dead.jsonl"]


def test_a_damaged_line_is_kept_for_people_and_hides_nothing(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path, "dead")
    ledger.append(record("intent", "a"))
    os.write(ledger._fd, b"\x00garbage\n")
    ledger.append(record("intent", "b"))
    os.close(ledger._fd)
    asked = []
    done = reconcile(tmp_path, lambda left: bool(asked.append(left.id)))
    assert asked == ["b", "a"]
    assert files(tmp_path) == ["dead.damaged"] and "1 unreadable" in done.problems[0]
    assert reconcile(tmp_path, stopper()).problems == []


def test_a_write_that_fails_leaves_whole_records_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ledger = Ledger(tmp_path, "own")
    ledger.append(record("intent", "a"))
    whole = ledger.path.read_bytes()
    real_write = os.write

    def full(handle: int, data: bytes) -> int:
        if len(data) > 10:
            return real_write(handle, data[:10])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    monkeypatch.setattr(os, "fsync", lambda _: full(-1, b""))
    with pytest.raises(LedgerError, match="No space left"):
        ledger.append(record("intent", "b"))
    monkeypatch.undo()
    assert ledger.path.read_bytes() == whole
    ledger.append(record("stopped", "a"))
    ledger.close()
    assert files(tmp_path) == []


def test_the_own_ledger_goes_only_when_all_is_settled(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path, "own")
    ledger.append(record("intent", "a"))
    ledger.append(record("stopped", "a", error="does not die"))
    assert ledger.unsettled == 1
    ledger.close()
    ledger.close()
    assert files(tmp_path) == ["own.jsonl"]


def test_a_launch_file_is_removed_only_if_it_is_that_workers(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger", "dead")
    for node, key in ((1, "0a" * 32), (2, "0b" * 32)):
        path = tmp_path / f"launch-{node}.json"
        LaunchFile(
            run_id=1,
            run="00" * 16,
            node_id=node,
            endpoints={"control": "ipc://x"},
            broker_public_key="01" * 32,
            public_key="0a" * 32,
            secret_key="02" * 32,
            orchestrator="03" * 32,
        ).write(path)
        ledger.append(record("intent", f"h{node}", launch=str(path), public_key=key))
    os.close(ledger._fd)
    reconcile(tmp_path / "ledger", lambda left: False)
    assert [path.name for path in sorted(tmp_path.glob("launch-*"))] == ["launch-2.json"]


def test_no_place_for_the_ledger_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(LedgerError, match="set HOME or XDG_STATE_HOME"):
        ledger_folder({})
    assert ledger_folder({"HOME": "/h", "XDG_STATE_HOME": "/s"}) == Path("/s/swactor-mq/ledger")
    (tmp_path / "file").touch()
    with pytest.raises(LedgerError, match="no worker is started"):
        Ledger(tmp_path / "file" / "ledger", "own")


def test_the_ledger_is_private(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger", "own")
    assert ledger.path.stat().st_mode & 0o777 == 0o600
    assert (tmp_path / "ledger").stat().st_mode & 0o777 == 0o700
    ledger.close()


def test_cleanup_without_a_bus_stops_all_and_says_so(
    tmp_path: Path, stage: Any, provisioner: Callable[[str], Any], capfd: pytest.CaptureFixture[str]
) -> None:
    child, mark = provisioner("handle")
    child.kill()
    child.wait()
    os.makedirs(tmp_path / "swactor-mq")
    os.rename(tmp_path / "ledger", tmp_path / "swactor-mq" / "ledger")
    assert cleanup({"XDG_STATE_HOME": str(tmp_path)}) == 0
    assert "1 worker of an earlier run stopped" in capfd.readouterr().err
    assert not stage.alive_with(mark)
    assert cleanup({}) == 1


def test_a_long_start_is_as_young_as_its_latest_attempt(tmp_path: Path) -> None:
    """Killed after a create at the end of a long start: whoever counted from the intent would call it none."""
    ledger = Ledger(tmp_path, "long")
    for op, at_ms in (("intent", 1_000), ("attempt", 61_000), ("attempt", 841_000)):
        ledger.append(record(op, at_unix_ms=at_ms))
    asked = [entry.asked_unix_ms for entry in open_entries(tmp_path)]
    os.close(ledger._fd)
    seen: list[int] = []

    def uncertain(left: LeftBehind) -> bool:
        seen.append(left.at_unix_ms)
        raise ProviderError("not listed yet")

    assert reconcile(tmp_path, uncertain).problems and files(tmp_path) == ["long.jsonl"]
    assert (asked, seen) == ([841_000], [841_000])
