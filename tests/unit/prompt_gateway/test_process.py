"""The gateway as the process that a launcher starts."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from common import security
from common.addresses import Role

ROOT = Path(__file__).resolve().parents[3]
ENV = os.environ | {"PYTHONPATH": str(ROOT)}
COMMAND = [sys.executable, "-P", "-m", "services.prompt_gateway", "--bus"]


@pytest.fixture
def run_dir() -> Iterator[Path]:
    # Not tmp_path: paths of sockets have to be short.
    with tempfile.TemporaryDirectory(prefix="smq-") as folder:
        yield Path(folder)


def ends(process: subprocess.Popen[bytes]) -> int:
    try:
        return process.wait(60)
    finally:
        process.kill()


def wait_for_handler(process: subprocess.Popen[bytes]) -> None:
    """Until the process catches SIGTERM: before that the signal would simply kill it."""
    end = time.monotonic() + 60
    while True:
        assert process.poll() is None
        status = Path(f"/proc/{process.pid}/status").read_text()
        caught = int(next(line for line in status.splitlines() if line.startswith("SigCgt:")).split()[1], 16)
        if caught >> (signal.SIGTERM - 1) & 1:
            return
        assert time.monotonic() < end, "no handler of SIGTERM"
        time.sleep(0.02)


@pytest.mark.parametrize("how", ["owner", "signal"])
def test_it_ends_with_its_owner_or_by_a_signal_although_no_bus_is_there(run_dir: Path, how: str) -> None:
    files = security.init(run_dir, relay=False)
    reader, writer = os.pipe()
    process = subprocess.Popen(
        [*COMMAND, str(files[Role.GATEWAY]), "--owner-fd", str(reader)], cwd="/", env=ENV, pass_fds=[reader]
    )
    os.close(reader)
    try:
        wait_for_handler(process)
        if how == "owner":
            os.close(writer)
        else:
            process.send_signal(signal.SIGTERM)
        assert ends(process) == 0
    finally:
        if how != "owner":
            os.close(writer)


@pytest.mark.parametrize("content", [None, b"{}", b"\xff"])
def test_a_bad_bus_file_is_one_sentence(run_dir: Path, content: bytes | None) -> None:
    file = run_dir / "bus.json"
    if content is not None:
        file.write_bytes(content)
        file.chmod(0o600)
    done = subprocess.run([*COMMAND, str(file)], cwd="/", env=ENV, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    assert done.stderr.startswith("prompt_gateway: ")
    assert done.stderr.count("\n") == 1


def test_the_bus_file_of_another_service_is_refused(run_dir: Path) -> None:
    files = security.init(run_dir, relay=False)
    done = subprocess.run(
        [*COMMAND, str(files[Role.PROVISIONER])], cwd="/", env=ENV, capture_output=True, text=True, timeout=120
    )
    assert (done.returncode, "provisioner" in done.stderr) == (1, True)
