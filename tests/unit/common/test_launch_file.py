"""The launch file is private, whole, and says in one sentence what is wrong with it."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec
import pytest

from common.launch_file import LaunchFile, LaunchFileError
from common.limits import LAUNCH_FILE_BYTES_MAX

SECRET = "5e" * 32


def sample(**changes: object) -> LaunchFile:
    launch = LaunchFile(
        run_id=1,
        run="01" * 16,
        node_id=2,
        stage_index=1,
        endpoints={"control": "ipc://c", "prompt": "ipc://p", "edge": "ipc://e", "stream": "ipc://s"},
        broker_public_key="0b" * 32,
        public_key="0a" * 32,
        secret_key=SECRET,
        orchestrator="0c" * 32,
        hf_token="hf_very_secret",
    )
    return msgspec.structs.replace(launch, **changes)


def test_what_was_written_is_read(tmp_path: Path) -> None:
    path = tmp_path / "launch.json"
    sample().write(path)
    assert LaunchFile.read(path) == sample()
    assert os.listdir(tmp_path) == ["launch.json"]


def test_the_file_belongs_to_its_owner_alone_whatever_the_umask(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        sample().write(tmp_path / "launch.json")
    finally:
        os.umask(before)
    assert (tmp_path / "launch.json").stat().st_mode & 0o777 == 0o600


def test_an_existing_file_is_never_replaced(tmp_path: Path) -> None:
    path = tmp_path / "launch.json"
    sample().write(path)
    with pytest.raises(LaunchFileError, match="exists already"):
        sample(node_id=9).write(path)
    assert LaunchFile.read(path).node_id == 2
    assert os.listdir(tmp_path) == ["launch.json"]


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660])
def test_a_file_that_others_can_read_is_refused(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "launch.json"
    sample().write(path)
    path.chmod(mode)
    with pytest.raises(LaunchFileError, match=f"mode {mode:04o}.*chmod 600"):
        LaunchFile.read(path)


def test_a_file_without_end_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "launch.json"
    path.touch(0o600)
    os.truncate(path, LAUNCH_FILE_BYTES_MAX + 1)
    with pytest.raises(LaunchFileError, match="larger than"):
        LaunchFile.read(path)


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (b"{", "malformed"),
        (b'{"v":1}', "missing required field"),
        (b"\xff\xfe", "malformed"),
    ],
)
def test_garbage_is_refused_in_one_sentence(tmp_path: Path, content: bytes, complaint: str) -> None:
    path = tmp_path / "launch.json"
    path.touch(0o600)
    path.write_bytes(content)
    with pytest.raises(LaunchFileError, match=complaint):
        LaunchFile.read(path)


def test_a_missing_file_and_a_fifo_are_refused(tmp_path: Path) -> None:
    with pytest.raises(LaunchFileError, match="No such file"):
        LaunchFile.read(tmp_path / "none")
    os.mkfifo(tmp_path / "fifo", 0o600)
    with pytest.raises(LaunchFileError, match="not a regular file"):
        LaunchFile.read(tmp_path / "fifo")


def test_another_version_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "launch.json"
    path.touch(0o600)
    path.write_bytes(msgspec.json.encode(sample(v=2)))
    with pytest.raises(LaunchFileError, match="version 2, this worker reads 1"):
        LaunchFile.read(path)


@pytest.mark.parametrize(
    "changes", [{"run": "xy"}, {"secret_key": "5E" * 32}, {"public_key": "0a" * 32 + "\n"}, {"endpoints": {}}]
)
def test_a_malformed_field_never_reaches_the_disk_and_is_never_shown(
    tmp_path: Path, changes: dict[str, object]
) -> None:
    with pytest.raises(LaunchFileError) as caught:
        sample(**changes).write(tmp_path / "launch.json")
    assert not os.listdir(tmp_path)
    assert "5E" not in str(caught.value) and "hf_" not in str(caught.value)


def test_repr_shows_no_secret() -> None:
    text = repr(sample())
    assert SECRET not in text and "hf_very_secret" not in text
    assert "secret_key='<set>'" in text and "hf_token='<set>'" in text
    assert "hf_token='<unset>'" in repr(sample(hf_token=""))
