"""`mvp-orchestrator cache`: what is kept, and that nothing in use is taken away."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from common.cache_files import cache_folder
from common.sparse_file import SparseFile
from services.orchestrator.launcher import main
from tests.support.hub import COMMIT, Hub
from tests.unit.common.test_hub_file import model, plan

assert model  # a fixture
DAY_S = 86_400


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home" / "cache"))
    return tmp_path / "home"


@pytest.fixture
def hub(model: Path) -> Iterator[Hub]:
    with Hub(model.read_bytes()) as hub:
        yield hub


def kept_model(name: str, days_ago: float = 0.0) -> SparseFile:
    file = SparseFile(cache_folder() / "models" / f"{name}.gguf", 1 << 20, f"owner/{name}@main")
    file.put(0, b"x" * 8192)
    aged(days_ago, *(cache_folder() / "models").glob(f"{name}*"))
    return file


def kept_file(name: str, days_ago: float = 0.0) -> None:
    path = cache_folder() / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(bytes(5000))
    aged(days_ago, path)


def aged(days: float, *paths: Path) -> None:
    at = time.time() - days * DAY_S
    for path in paths:
        os.utime(path, (at, at))


def listed(capsys: pytest.CaptureFixture[str], *argv: str) -> list[dict[str, object]]:
    assert main(["cache", "--json", *argv]) == 0
    found: list[dict[str, object]] = json.loads(capsys.readouterr().out)
    return found


def test_what_was_fetched_of_a_hub_is_named_removed_and_fetched_again(
    hub: Hub, home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert plan(hub, home) == f"4 {COMMIT}"
    (one,) = listed(capsys)
    assert (one["kind"], one["name"]) == ("model", "owner/repo/model.gguf@main")
    fetched = len(hub.ranges)
    assert plan(hub, home) == f"4 {COMMIT}" and len(hub.ranges) == fetched
    (gone,) = listed(capsys, "--remove")
    assert gone["removed"] is True and listed(capsys) == []
    assert plan(hub, home) == f"4 {COMMIT}" and len(hub.ranges) == 2 * fetched


def test_a_model_that_is_being_fetched_is_left_alone(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fetching = kept_model("one")
    kept_model("other")
    assert main(["cache", "--remove"]) == 0
    said = capsys.readouterr().out
    assert "owner/one@main: left alone, it is being fetched\n" in said and "owner/other@main: removed\n" in said
    fetching.put(8192, b"y")
    assert fetching.have() == [(0, 8193)]
    del fetching
    assert main(["cache", "--remove"]) == 0
    capsys.readouterr()
    assert listed(capsys) == []


def test_only_what_was_not_used_for_long(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kept_model("old", 40)
    kept_model("new", 20)
    kept_file("weights-1-all-aa", 31)
    kept_file("weights-1-all-bb", 29)
    for end in ("", "-shm", "-wal"):
        kept_file(f"kernels-cc.db{end}", 50 if end else 3)
    kept_file("x86_64-avx2-dd.o", 50)
    kept_file(".weights-1-all-ee.tmp", 0)
    assert main(["cache", "--remove", "--unused-days", "30"]) == 0
    said = capsys.readouterr().out
    assert "owner/old@main: removed" in said and "2 files: 1 removed" in said
    assert [item["name"] for item in listed(capsys)] == ["kernels-cc", "owner/new@main", "weights-1-all-bb"]
    assert (cache_folder() / ".weights-1-all-ee.tmp").exists(), "somebody writes it at this moment"


def test_links_to_the_files_of_a_split_model_go_with_them(home: Path) -> None:
    folder = cache_folder() / "models" / "split"
    for name in ("a", "b"):
        kept_model(name)
        folder.mkdir(exist_ok=True)
        (folder / f"m-{name}.gguf").symlink_to(cache_folder() / "models" / f"{name}.gguf")
    assert main(["cache", "--remove"]) == 0
    assert sorted(path.suffix for path in (cache_folder() / "models").iterdir()) == [".lock", ".lock"]


def test_what_cannot_be_removed_is_said(
    home: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    kept_file("weights-1-all-aa")

    def refused(path: Path, missing_ok: bool = False) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "unlink", refused)
    assert main(["cache", "--remove"]) == 1
    assert "1 file cannot be removed: Permission denied" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["--remov"], "argument --remov is unknown: it takes --remove, --unused-days N and --json"),
        (["--remove", "--unused-days"], "--unused-days needs a number of days, not ''"),
        (["--remove", "--unused-days=soon"], "--unused-days needs a number of days, not 'soon'"),
        (["--unused-days", "3"], "--unused-days goes with --remove"),
    ],
)
def test_bad_arguments_are_one_sentence(argv: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cache", *argv]) == 1
    assert capsys.readouterr() == ("", f"mvp-orchestrator cache: {says}\n")


def test_nothing_is_kept(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cache"]) == 0
    assert capsys.readouterr().out == f"nothing is kept in {cache_folder()}\n"
