"""The state file of localhost mode: found by hex, private, a key for each client, gone with its node (row 38)."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from common.bus import mint_keypair
from worker.gpu_node.state_file import (
    CLIENTS_MAX,
    Published,
    StateError,
    find,
    mint_clients,
    read_key,
    state_folder,
)

NODE = mint_keypair().public


@pytest.fixture
def published(tmp_path: Path) -> Published:
    return Published(tmp_path / "s", NODE, "127.0.0.1", 5000, mint_clients())


@pytest.mark.spec("S2 8")
def test_each_client_process_gets_a_key_of_its_own(published: Published) -> None:
    """Two with one key would take each other's connection."""
    assert os.stat(published.path).st_mode & 0o777 == 0o600
    script = (
        "import sys; from pathlib import Path; from worker.gpu_node.state_file import find\n"
        "door = find(Path(sys.argv[1]), sys.argv[2]); print(door.host, door.port, door.keys.public.hex(), flush=True)\n"
        "sys.stdin.read()"
    )
    command = [sys.executable, "-P", "-c", script, str(published.path.parent), NODE.hex()]
    held = [subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    said = [process.stdout.readline().split() for process in held if process.stdout]
    assert {(host, port) for host, port, _ in said} == {("127.0.0.1", "5000")}
    assert len({key for *_, key in said}) == 3
    for process in held:
        process.communicate()
    again = subprocess.run(command, input="", stdout=subprocess.PIPE, text=True, check=True)
    assert again.stdout.split()[2] == said[0][2] or again.stdout.split()[2] in {key for *_, key in said}


def test_no_key_left(published: Published, monkeypatch: pytest.MonkeyPatch) -> None:
    def held(*_: object) -> None:
        raise BlockingIOError

    monkeypatch.setattr("fcntl.lockf", held)
    with pytest.raises(StateError, match=f"{CLIENTS_MAX} clients use this gpu-node already"):
        find(published.path.parent, NODE.hex())


def test_unknown_dead_damaged_and_open_files_are_one_sentence(tmp_path: Path, published: Published) -> None:
    folder = published.path.parent
    with pytest.raises(StateError, match=r"no gpu-node .* is known on this machine"):
        find(folder, "00" * 32)
    os.chmod(published.path, 0o644)
    with pytest.raises(StateError, match="others can read"):
        find(folder, NODE.hex())
    os.chmod(published.path, 0o600)
    content = published.path.read_bytes()
    published.path.write_bytes(b"{}")
    with pytest.raises(StateError, match="is damaged"):
        find(folder, NODE.hex())
    published.path.write_bytes(content)
    os.close(published._fd)
    with pytest.raises(StateError, match="not running any more"):
        find(folder, NODE.hex())
    Published(folder, mint_keypair().public, "127.0.0.1", 5004, mint_clients())
    assert not published.path.exists(), "the next node cleans up"


def test_it_goes_with_its_node(published: Published) -> None:
    published.remove()
    published.remove()
    assert not published.path.exists()


def test_where_it_lies() -> None:
    assert state_folder({"XDG_STATE_HOME": "/s"}) == Path("/s/swactor-mq/gpu-nodes")
    assert state_folder({"HOME": "/h"}) == Path("/h/.local/state/swactor-mq/gpu-nodes")
    with pytest.raises(StateError):
        state_folder({})


def test_key_files(tmp_path: Path, published: Published) -> None:
    keys, path = mint_keypair(), tmp_path / "k"
    path.write_text(keys.secret.hex() + "\n")
    os.chmod(path, 0o600)
    assert read_key(path) == keys
    assert len(read_key(published.path).public) == 32
    for text in ("", "zz", "{}", "ab" * 31):
        path.write_text(text)
        with pytest.raises(StateError, match="holds no secret key"):
            read_key(path)
    os.chmod(path, 0o640)
    with pytest.raises(StateError, match="others can read"):
        read_key(path)
    with pytest.raises(StateError):
        read_key(tmp_path / "none")
