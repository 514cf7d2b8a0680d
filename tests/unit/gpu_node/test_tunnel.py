"""The ssh tunnel with a stand-in for ssh: what is forwarded, how the key goes over, what a broken one does (S2 1)."""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path

import pytest

from tools.single_gpu_inference_tunnel import Ports, Tunnel, remote_command

SECRET = bytes(range(32))


@pytest.fixture
def fake_ssh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An ssh that runs the remote command here and writes down its arguments; port 1 fails at once."""
    script = tmp_path / "bin" / "ssh"
    script.parent.mkdir()
    script.write_text(
        f'#!/bin/sh\necho "$@" >> {tmp_path}/calls\nfor last; do :; done\n'
        'case "$*" in *"-p 1 "*) echo "port is closed" >&2; exit 255 ;; esac\nexec sh -c "$last"\n'
    )
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{script.parent}:{os.environ['PATH']}")
    monkeypatch.setattr("tools.single_gpu_inference_tunnel.RETRY_S", 0.1)
    return tmp_path


def tend(tunnel: Tunnel, path: Path) -> list[str]:
    said, until = [], time.monotonic() + 60
    while not path.exists():
        assert time.monotonic() < until
        if text := tunnel.tend():
            said.append(text)
        time.sleep(0.02)
    return said


@pytest.mark.spec("S2 1", "S2 5")
def test_four_ports_and_the_key_over_standard_input_only(fake_ssh: Path) -> None:
    key_file = fake_ssh / "run here" / "node.key"
    tunnel = Tunnel([("h", 22)], Ports(5000, 7700), SECRET, identity=Path("/id"), key_file=str(key_file))
    assert tend(tunnel, key_file) == []
    assert key_file.read_text() == SECRET.hex() + "\n" and os.stat(key_file).st_mode & 0o777 == 0o600
    call = (fake_ssh / "calls").read_text()
    for number in range(4):
        assert f"-R 127.0.0.1:{7700 + number}:127.0.0.1:{5000 + number} " in call
    assert "-i /id " in call and "-p 22 root@h" in call and "StrictHostKeyChecking=accept-new" in call
    assert SECRET.hex() not in call, "no secret on a command line"
    tunnel.close()
    tunnel.close()


def test_what_ends_is_tried_again_with_the_next_address(fake_ssh: Path) -> None:
    key_file = fake_ssh / "node.key"
    tunnel = Tunnel([("a", 1), ("b", 22)], Ports(5000, 7700), SECRET, identity=None, key_file=str(key_file))
    assert tend(tunnel, key_file) == ["port is closed"]
    key_file.unlink()
    assert tunnel._child
    tunnel._child.kill()
    assert len(tend(tunnel, key_file)) >= 1, "a tunnel that broke comes back, and brings the key again"
    tunnel.close()


def test_the_remote_command_ends_with_its_client(tmp_path: Path) -> None:
    path = tmp_path / "k"
    remote = subprocess.Popen(["sh", "-c", remote_command(str(path))], stdin=subprocess.PIPE)
    assert remote.stdin
    remote.stdin.write(b"ab\n")
    remote.stdin.close()
    assert remote.wait(60) == 0 and path.read_text() == "ab\n"
