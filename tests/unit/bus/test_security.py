"""Keys and bus files: private, complete, checked, and one sentence for whatever is wrong with them."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from common.addresses import SERVICES, Plane, Role
from common.bus import public_of
from common.security import SOCKET_PATH_BYTES_MAX, SecurityError, init, main, read_bus_file, read_secret_file


def spoil(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def test_everything_is_for_this_user_alone(tmp_path: Path) -> None:
    os.umask(0o000)
    try:
        init(tmp_path / "r", relay=True)
    finally:
        os.umask(0o022)
    for directory, _, files in os.walk(tmp_path / "r"):
        assert stat.S_IMODE(os.stat(directory).st_mode) == 0o700, directory
        for name in files:
            assert stat.S_IMODE(os.stat(Path(directory) / name).st_mode) == 0o600, name


@pytest.mark.parametrize("relay", [False, True])
def test_each_service_has_a_file_and_the_brokers_know_their_keys(tmp_path: Path, relay: bool) -> None:
    files = init(tmp_path / "r", relay=relay)
    assert set(files) == (SERVICES | {Role.TAP}) - (set() if relay else {Role.RELAY})
    read = {role: read_bus_file(path) for role, path in files.items()}
    router = read[Role.ROUTER]
    for role, file in read.items():
        assert file.role is role and file.keys.public == public_of(file.keys.secret)
        if role is not Role.RELAY:
            assert router.allow[file.keys.public] is role and file.broker_key == router.keys.public
            assert set(file.endpoints) == set(Plane)
    workers_door = read[Role.RELAY if relay else Role.ROUTER]
    assert read[Role.PROVISIONER].worker_key == workers_door.keys.public
    assert read[Role.PROVISIONER].worker_endpoints == workers_door.endpoints
    assert set(read[Role.TAP].taps) == ({"router", "relay"} if relay else {"router"})
    if relay:
        assert router.uplink_key == workers_door.keys.public and router.uplink_endpoints == workers_door.endpoints
        assert set(workers_door.allow.values()) == {Role.ROUTER, Role.TAP, Role.RELAY}


def test_a_second_init_keeps_the_keys(tmp_path: Path) -> None:
    first = init(tmp_path / "r", relay=False)
    keys = {role: read_bus_file(path).keys.public for role, path in first.items()}
    again = init(tmp_path / "r", relay=True)
    assert {role: read_bus_file(path).keys.public for role, path in again.items() if role in keys} == keys


def test_a_run_directory_too_long_for_sockets(tmp_path: Path) -> None:
    with pytest.raises(SecurityError, match=f"too long for sockets .* at most {SOCKET_PATH_BYTES_MAX}.*run_dir"):
        init(tmp_path / ("x" * 90), relay=False)
    assert not list(tmp_path.iterdir())


def test_a_run_directory_that_others_can_write_to(tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o777)
    with pytest.raises(SecurityError, match="others can write to the run directory"):
        init(shared, relay=False)
    assert not list(shared.iterdir())


def test_a_run_directory_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(SecurityError, match="is not writable: Not a directory"):
        init(tmp_path / "file" / "r", relay=False)


def test_a_key_file_that_others_can_read_is_refused(tmp_path: Path) -> None:
    files = init(tmp_path / "r", relay=False)
    key = tmp_path / "r" / "keys" / "membership.key"
    key.chmod(0o640)
    with pytest.raises(SecurityError, match=r"others can read this key file; run chmod 600"):
        read_bus_file(files[Role.MEMBERSHIP])
    with pytest.raises(SecurityError, match="No such file"):
        read_secret_file(tmp_path / "none")


@pytest.mark.parametrize(
    "changes",
    [
        {"role": "king"},
        {"broker_key": "zz"},
        {"broker_key": "abcd"},
        {"broker_key": 7},
        {"endpoints": {"weather": "ipc://x"}},
        {"endpoints": ["ipc://x"]},
        {"allow": {"00": "agent"}},
        {"allow": ["agent"]},
        {"key_file": 5},
        {"uplink_key": "12"},
        {"worker_key": "12"},
        {"taps": {"router": {"endpoint": "ipc://x"}}},
        {"taps": [1]},
    ],
    ids=str,
)
def test_a_damaged_bus_file_is_one_sentence(tmp_path: Path, changes: dict[str, Any]) -> None:
    path = init(tmp_path / "r", relay=False)[Role.GATEWAY]
    spoil(path, **changes)
    with pytest.raises(SecurityError, match=r"^bus file .* is damaged \(.*\); write it anew with") as caught:
        read_bus_file(path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"null", b'"x"', b"\xff\xfe", b"{}", b"[" * 9000])
def test_what_is_no_bus_file(tmp_path: Path, content: bytes) -> None:
    path = init(tmp_path / "r", relay=False)[Role.GATEWAY]
    path.write_bytes(content)
    with pytest.raises(SecurityError, match="is damaged"):
        read_bus_file(path)


@pytest.mark.parametrize("content", ["", "zz", "abcd", "00" * 33])
def test_a_damaged_key_file_is_one_sentence(tmp_path: Path, content: str) -> None:
    files = init(tmp_path / "r", relay=False)
    (tmp_path / "r" / "keys" / "prompt_gateway.key").write_text(content)
    with pytest.raises(SecurityError, match="is damaged"):
        read_bus_file(files[Role.GATEWAY])


def test_a_missing_bus_file(tmp_path: Path) -> None:
    with pytest.raises(SecurityError, match=r"bus file .*: No such file"):
        read_bus_file(tmp_path / "none.json")


def test_keys_do_not_print() -> None:
    from common.bus import mint_keypair

    keys = mint_keypair()
    assert keys.secret.hex() not in repr(keys) and repr(keys.secret) not in repr(keys)


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["init", str(tmp_path / "r"), "--relay"]) == 0
    assert str(tmp_path / "r" / "bus" / "relay.json") in capsys.readouterr().out.splitlines()
    with pytest.raises(SystemExit):
        main(["init"])
    assert "usage" in capsys.readouterr().err
    assert main(["init", str(tmp_path / ("x" * 90))]) == 1
    assert capsys.readouterr().err.startswith("security: run directory")


def test_a_service_with_another_services_bus_file_says_so(tmp_path: Path) -> None:
    files = init(tmp_path / "r", relay=True)
    for bus, expected in (
        (files[Role.RELAY], "is the bus file of relay, not of router"),
        (tmp_path / "no", "bus file"),
    ):
        done = subprocess.run(
            [sys.executable, "-m", "services.router", "--bus", str(bus)], capture_output=True, text=True, timeout=120
        )
        assert done.returncode == 1 and expected in done.stderr and done.stderr.count("\n") == 1
