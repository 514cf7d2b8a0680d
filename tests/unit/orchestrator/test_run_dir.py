"""The run directory: private, locked by one, emptied of what is a run's own and of nothing else (design.md 2)."""

from __future__ import annotations

import multiprocessing
import os
import socket
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from common.run_files import LOCK, Presence
from common.security import SecurityError, init
from services.orchestrator.run_dir import RunDirectory, default_path


@pytest.fixture
def path() -> Iterator[Path]:
    """Below /tmp: the paths of sockets are short."""
    import tempfile

    with tempfile.TemporaryDirectory(prefix="smq-t-", dir="/tmp") as directory:
        yield Path(directory) / "run"


def bound(path: Path) -> None:
    """A socket as a run leaves it."""
    with socket.socket(socket.AF_UNIX) as sock:
        sock.bind(str(path))


def test_it_is_private_and_gone_at_the_end(path: Path) -> None:
    directory = RunDirectory(str(path), {})
    assert stat.S_IMODE(path.stat().st_mode) == 0o700
    assert (path / LOCK).read_text() == str(os.getpid())
    init(path, relay=True)
    bound(path / "edge1")
    directory.remove()
    assert not path.exists()


@pytest.mark.spec("S1 10.3")
def test_the_second_one_is_told_who_holds_it(path: Path) -> None:
    first = RunDirectory(str(path), {})
    init(path, relay=False)
    with pytest.raises(SecurityError, match=rf"in use by another orchestrator \(process {os.getpid()}\); stop it, or"):
        RunDirectory(str(path), {})
    assert (path / "bus" / "router.json").exists() and (path / LOCK).read_text() == str(os.getpid())
    first.remove()
    RunDirectory(str(path), {}).remove()


def test_what_a_killed_run_left_is_cleared(path: Path) -> None:
    killed = RunDirectory(str(path), {})
    init(path, relay=False)
    bound(path / "stream.sock")
    os.close(killed._fd)  # what the kernel does for a process that was killed
    again = RunDirectory(str(path), {})
    assert [entry.name for entry in path.iterdir()] == [LOCK]
    again.remove()


def test_other_peoples_files_are_never_removed(path: Path) -> None:
    """Somebody names his home directory."""
    path.mkdir(mode=0o700)
    (path / "thesis.odt").write_text("years of work")
    with pytest.raises(SecurityError, match=r"holds other files \(thesis.odt\); set \[runtime\] run_dir"):
        RunDirectory(str(path), {})
    assert [entry.name for entry in path.iterdir()] == ["thesis.odt"]
    (path / "thesis.odt").unlink()
    directory = RunDirectory(str(path), {})
    (path / "keys").mkdir()
    (path / "thesis.odt").write_text("moved here while the run was on")
    directory.remove()
    assert [entry.name for entry in path.iterdir()] == ["thesis.odt"]


def test_a_link_in_it_is_unlinked_not_followed(path: Path) -> None:
    outside = path.parent / "outside"
    outside.mkdir()
    (outside / "file").touch()
    path.mkdir(mode=0o700)
    (path / "keys").symlink_to(outside)
    RunDirectory(str(path), {}).remove()
    assert (outside / "file").exists() and not path.exists()


@pytest.mark.spec("S1 10.3")
@pytest.mark.parametrize("mode", [0o755, 0o770, 0o701])
def test_a_directory_that_others_can_enter_is_refused(path: Path, mode: int) -> None:
    path.mkdir()
    path.chmod(mode)
    with pytest.raises(SecurityError, match="not a private directory of this user"):
        RunDirectory(str(path), {})


@pytest.mark.spec("S1 10.3")
def test_what_cannot_be_made_or_is_none(path: Path) -> None:
    path.parent.joinpath("file").touch()
    with pytest.raises(SecurityError, match=r"cannot be made: Not a directory; set \[runtime\] run_dir"):
        RunDirectory(str(path.parent / "file" / "run"), {})
    with pytest.raises(SecurityError, match="cannot be made: File exists"):
        RunDirectory(str(path.parent / "file"), {})
    path.symlink_to(path.parent)
    with pytest.raises(SecurityError, match="not a private directory"):
        RunDirectory(str(path), {})


def _hold(path: str, ready: str, go: str) -> None:
    directory = RunDirectory(path, {})
    Path(ready).touch()
    while not Path(go).exists():
        pass
    directory.remove()


def test_a_lock_that_was_removed_locks_nothing(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The owner goes between our open and our flock: we must end up with the lock of the file that is there."""
    import fcntl

    first = RunDirectory(str(path), {})
    real, calls = fcntl.flock, []

    def flock(fd: int, how: int) -> None:
        if not calls:
            calls.append(fd)
            first.remove()
        real(fd, how)

    monkeypatch.setattr(fcntl, "flock", flock)
    second = RunDirectory(str(path), {})
    assert os.path.samestat(os.fstat(second._fd), os.stat(path / LOCK))
    with pytest.raises(SecurityError, match="in use"):
        RunDirectory(str(path), {})
    second.remove()


def test_another_process_holds_it(path: Path) -> None:
    """The lock is the kernel's: it ends with its holder, however that ends."""
    context = multiprocessing.get_context("spawn")
    ready, go = path.parent / "ready", path.parent / "go"
    holder = context.Process(target=_hold, args=(str(path), str(ready), str(go)), daemon=True)
    holder.start()
    while not ready.exists():
        assert holder.is_alive()
    with pytest.raises(SecurityError, match=rf"process {holder.pid}"):
        RunDirectory(str(path), {})
    holder.kill()
    holder.join()
    RunDirectory(str(path), {}).remove()


@pytest.mark.parametrize(
    ("environ", "parent"),
    [({}, "/tmp"), ({"XDG_RUNTIME_DIR": "/nope"}, "/tmp"), ({"XDG_RUNTIME_DIR": "/tmp/" + "x" * 60}, "/tmp")],
)
def test_the_default_is_short_and_new_each_time(environ: dict[str, str], parent: str) -> None:
    one, other = default_path(environ), default_path(environ)
    assert one != other and str(one.parent) == parent and one.name.startswith(f"smq-{os.geteuid()}-")


def test_the_default_is_in_the_runtime_directory(path: Path) -> None:
    found = default_path({"XDG_RUNTIME_DIR": str(path.parent)})
    assert found.parent == path.parent and found.name.startswith("smq-")


def test_the_last_service_of_a_killed_run_removes_it(path: Path) -> None:
    killed = RunDirectory(str(path), {})
    init(path, relay=False)
    bound(path / "stream.sock")
    first, last = Presence(path), Presence(path)
    os.close(killed._fd)
    first.leave()
    assert path.exists()
    last.leave()
    assert not path.exists()


def test_services_leave_a_directory_that_is_in_use(path: Path) -> None:
    """The launcher lives and restarts this service, or another launcher has taken the directory over."""
    directory = RunDirectory(str(path), {})
    service = Presence(path)
    service.leave()
    assert path.exists()
    old = Presence(path)
    os.close(directory._fd)
    again = RunDirectory(str(path), {})
    old.leave()
    assert path.exists()
    again.remove()
    assert not path.exists()


def test_a_directory_that_is_gone_is_no_error(path: Path) -> None:
    Presence(path / "nothing").leave()
