"""The launcher's children as real processes: environment, restarts, the order and the bounds of their end."""

from __future__ import annotations

import os
import signal
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from common.addresses import Role
from common.security import init
from services.orchestrator import children
from services.orchestrator.children import FATAL, STOP_ORDER, Children, how_it_ended

Lines = list[tuple[Role, str, bytes]]


@pytest.fixture
def files() -> Iterator[dict[Role, Path]]:
    """Bus files in a short directory."""
    with tempfile.TemporaryDirectory(prefix="smq-t-", dir="/tmp") as directory:
        yield init(Path(directory), relay=False)


@pytest.fixture
def lines() -> Lines:
    """What children printed."""
    return []


@pytest.fixture
def family(lines: Lines) -> Iterator[Children]:
    """Ended by the test or killed."""
    family = Children(lambda role, stream, line: lines.append((role, stream, line)))
    yield family
    for child in family.running.values():
        child.process.kill()
        child.process.wait()


def until(condition: object, what: str) -> None:
    """Wait, bounded."""
    end = time.monotonic() + 60
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < end, what
        time.sleep(0.02)


def sockets(files: dict[Role, Path]) -> bool:
    """Whether the router is up."""
    return (files[Role.ROUTER].parent.parent / "router-stream.sock").exists()


def catches_term(pid: int) -> bool:
    """Whether it has a handler for SIGTERM."""
    status = Path(f"/proc/{pid}/status").read_text()
    caught = next(int(line.split()[1], 16) for line in status.splitlines() if line.startswith("SigCgt"))
    return bool(caught >> (signal.SIGTERM - 1) & 1)


def test_a_service_gets_no_secret_and_a_session_of_its_own(
    family: Children, files: dict[Role, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VASTAI_API_KEY", "key-1")
    monkeypatch.setenv("HF_TOKEN", "token-1")
    pid = family.start(Role.ROUTER, files[Role.ROUTER]).process.pid
    until(lambda: sockets(files), "the router is up")
    environ = Path(f"/proc/{pid}/environ").read_bytes()
    assert b"key-1" not in environ and b"token-1" not in environ
    assert os.getsid(pid) == pid != os.getsid(0)
    assert b"\0-P\0-m\0services.router\0" in Path(f"/proc/{pid}/cmdline").read_bytes()
    monkeypatch.setattr(children, "SERVICE_STOP_MS", 60_000)
    process = family.running[Role.ROUTER].process
    family.stop_all()
    assert process.returncode == 0, "a service that is asked to end ends, and is not killed"
    assert not family.running and not Path(f"/proc/{pid}").exists()


def test_one_that_hangs_is_killed(family: Children, files: dict[Role, Path]) -> None:
    pid = family.start(Role.MEMBERSHIP, files[Role.MEMBERSHIP]).process.pid
    until(lambda: catches_term(pid), "its handler is there: else SIGTERM ends even a stopped process")
    os.kill(pid, signal.SIGSTOP)
    started = time.monotonic()
    family.stop_all()
    assert 1 < time.monotonic() - started < 30 and not Path(f"/proc/{pid}").exists()


def test_the_launchers_death_is_seen_through_the_pipe(family: Children, files: dict[Role, Path]) -> None:
    child = family.start(Role.ROUTER, files[Role.ROUTER])
    until(lambda: sockets(files), "the router is up")
    os.close(family._owner_write)
    assert child.process.wait(60) == 0
    family._owner_write = os.open(os.devnull, os.O_WRONLY)


def test_what_they_print_arrives_by_service_and_stream(family: Children, files: dict[Role, Path], lines: Lines) -> None:
    """A router with the bus file of somebody else says so in one line."""
    child = family.start(Role.ROUTER, files[Role.GATEWAY])
    assert child.process.wait(60) == 1
    until(lambda: lines, "the line")
    assert lines[0][:2] == (Role.ROUTER, "stderr") and b"is the bus file of prompt_gateway" in lines[0][2]
    family.stop_all()


def test_a_service_that_ended_leaves_no_descriptor(family: Children, files: dict[Role, Path], lines: Lines) -> None:
    """A run restarts its services for weeks; and what they said last is there."""

    def held() -> int:
        return len(os.listdir("/proc/self/fd"))

    before = held()
    for _ in range(3):
        child = family.start(Role.MEMBERSHIP, files[Role.MEMBERSHIP].with_name("nothing.json"))
        child.process.wait(60)
        child.ended()
    assert held() <= before  # what an earlier test has left may go meanwhile
    assert sum(stream == "stderr" and b"nothing.json" in line for _, stream, line in lines) == 3


def test_three_restarts_a_minute(family: Children, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1000.0]
    monkeypatch.setattr(children.time, "monotonic", lambda: now[0])
    assert [family.may_restart(Role.RELAY) for _ in range(3)] == [True, True, True]
    assert family.may_restart(Role.ROUTER), "each service has its own count"
    assert not family.may_restart(Role.RELAY)
    now[0] += 61
    assert family.may_restart(Role.RELAY)


@pytest.mark.spec("S1 4.13", "S1 10.13")
def test_clean_up_after_a_dead_provisioner(family: Children, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Nothing to do is success; what is wrong comes back as one sentence."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    assert family.cleanup_workers() == ""
    monkeypatch.delenv("XDG_STATE_HOME")
    monkeypatch.delenv("HOME", raising=False)
    assert family.cleanup_workers().startswith("the clean-up of its workers failed: provisioner: there is no place for")
    monkeypatch.setattr(children, "CLEANUP_LIMIT_S", 0)
    assert family.cleanup_workers() == "the clean-up of its workers did not end within 0 s"


@pytest.mark.spec("S1 4.12")
def test_the_order_of_the_end() -> None:
    """design.md 4: the collector hears everybody's last word, the router carries it."""
    flat = [role for group in STOP_ORDER for role in group]
    assert flat[-3:] == [Role.COLLECTOR, Role.RELAY, Role.ROUTER]
    assert len(flat) == len(set(flat)) == 9
    assert set(flat) >= FATAL


def test_how_it_ended() -> None:
    assert how_it_ended(3) == "ended with status 3"
    assert how_it_ended(-9) == "was killed by SIGKILL"
    assert how_it_ended(-99) == "was killed by signal 99"
