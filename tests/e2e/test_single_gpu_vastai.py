"""single-gpu-inference renting from a vast.ai that starts real sshds and gpu-nodes: S2 1, 5, 6.3, 7.1, 7.3 to 7.5."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.e2e.single_gpu_vast import KEY, Vast

ECHO = Path(__file__).resolve().parents[1] / "unit" / "gpu_node" / "echo_worker.py"
IMAGE = "registry.example.org/me/gpu-node"
CLIENT = [sys.executable, "-P", "-m", "tools.single_gpu_inference"]

pytestmark = pytest.mark.skipif(
    not (shutil.which("ssh") and (shutil.which("sshd") or Path("/usr/sbin/sshd").exists()) and os.geteuid() == 0),
    reason="needs root, ssh and sshd (Debian: apt-get install openssh-client openssh-server)",
)


class Renter:
    def __init__(self, folder: Path, vast: Vast) -> None:
        self.vast, self.home = vast, folder / "state"
        self.environ = {
            **os.environ,
            "XDG_STATE_HOME": str(self.home),
            "VASTAI_API_KEY": KEY,
            "VASTAI_BASE_URL": vast.url,
            "NODE_KEY_FILE": str(folder / "run" / "node.key"),
            "SMQ_VALIDATE": "1",
        }

    def start(self, prompt: str, *options: str) -> subprocess.Popen[str]:
        command = [*CLIENT, "--ssh-identity", str(self.vast.identity), "--image", IMAGE, "--yes", "--prompt", prompt]
        pipe = subprocess.PIPE
        return subprocess.Popen([*command, *options], env=self.environ, stdout=pipe, stderr=pipe, text=True)

    def ask(self, prompt: str, *options: str, limit_s: float = 120) -> tuple[int, str, str]:
        process = self.start(prompt, *options)
        out, said = process.communicate(timeout=limit_s)
        return process.returncode, out, said

    def ledgers(self) -> list[Path]:
        return list(self.home.rglob("*.jsonl"))


def until(fact: Callable[[], object], limit_s: float = 60) -> None:
    end = time.monotonic() + limit_s
    while not fact():
        assert time.monotonic() < end, f"not true within {limit_s} s"
        time.sleep(0.1)


@pytest.fixture
def renter(tmp_path: Path) -> Iterator[Renter]:
    vast = Vast(tmp_path, ECHO)
    yield Renter(tmp_path, vast)
    vast.close()


@pytest.mark.spec("S2 1", "S2 5", "S2 6.3", "S2 4.2", "S2 7.5.1", "S2 7.5.4", "S2 7.4.1")
def test_from_nothing_to_an_answer_and_everything_is_given_back(renter: Renter) -> None:
    renter.vast.delete_errors = 1
    status, out, said = renter.ask("hello", "--temperature", "0", "--max-tokens", "7", "--model", "hf://o/r/f.gguf")
    assert (status, out) == (0, "hello 7 0.0\n"), said
    assert renter.vast.deleted == [1001] and not renter.vast.instances and not renter.ledgers()
    (body,) = renter.vast.created
    assert (
        body["image"] == IMAGE
        and body["onstart"] == "exec /usr/local/bin/gpu-node 2>&1"
        and body["env"]["GPU_NODE_MODEL"] == "hf://o/r/f.gguf"
    )
    assert len(body["env"]["SEED_ADDR"]) == 64 and body["env"]["SEED_RELAY"].startswith("tcp://127.0.0.1:")
    assert "at most 60 minutes, $0.50" in said and "instance 1001 is destroyed" in said
    assert KEY not in said and "secret" not in str(body)


@pytest.mark.spec("S2 7.1.2", "S2 7.1.3")
def test_a_sold_offer_and_a_broken_host_take_the_next(renter: Renter) -> None:
    renter.vast.creates = [(410, {"error": "no_such_ask", "msg": "no longer available"})]
    renter.vast.states = [{"actual_status": "created", "status_msg": "Error response from daemon: CDI"}]
    status, out, said = renter.ask("third time")
    assert (status, out) == (0, "third time 64 0.7\n"), said
    assert len(renter.vast.created) == 3 and renter.vast.deleted == [1001, 1002] and not renter.ledgers()


@pytest.mark.spec("S2 7.3.2", "S2 4.4")
def test_a_crash_of_the_worker_shows_the_remote_log_and_destroys(renter: Renter) -> None:
    status, out, said = renter.ask("__crash__")
    assert (status, out) == (1, "") and "the worker exited with status 7" in said
    assert "remote: gpu-node: worker exited, keeping main loop alive for diagnostics" in said
    assert renter.vast.deleted == [1001] and not renter.ledgers()


@pytest.mark.spec("S2 7.3.5")
def test_no_answer_within_the_limit(renter: Renter) -> None:
    status, _, said = renter.ask("__hang__", "--limit-s", "3")
    assert status == 1 and "no answer within 3 s: the worker did not answer" in said and "remote: gpu-node: " in said
    assert renter.vast.deleted == [1001] and not renter.ledgers()


@pytest.mark.spec("S2 7.5.1")
def test_ctrl_c_gives_back_first(renter: Renter) -> None:
    client = renter.start("__hang__")
    until(lambda: any(b"worker ready" in rented.log.read_bytes() for rented in renter.vast.instances.values()))
    client.send_signal(signal.SIGINT)
    _, said = client.communicate(timeout=60)
    assert client.returncode == 1 and "SIGINT; no answer" in said and "Traceback" not in said
    assert renter.vast.deleted == [1001] and not renter.ledgers()


@pytest.mark.spec("S2 7.5.1")
def test_what_a_killed_client_left_the_next_start_destroys_first(renter: Renter) -> None:
    client = renter.start("__hang__")
    until(lambda: any(b"worker ready" in rented.log.read_bytes() for rented in renter.vast.instances.values()))
    client.kill()
    client.communicate()
    assert list(renter.vast.instances) == [1001] and len(renter.ledgers()) == 1
    status, out, said = renter.ask("after the fall")
    assert (status, out) == (0, "after the fall 64 0.7\n"), said
    assert "an earlier run left instance 1001; destroying it" in said
    assert renter.vast.deleted == [1001, 1002] and not renter.ledgers()


@pytest.mark.spec("S2 7.1.1")
def test_nothing_for_rent_and_nobody_agreed(renter: Renter) -> None:
    status, _, said = renter.ask("x", "--max-dph", "0.05")
    assert status == 1 and "no GPU is for rent at $0.05 an hour or less" in said and not renter.vast.created
    command = [*CLIENT, "--prompt", "x", "--image", IMAGE]
    done = subprocess.run(
        command, env=renter.environ, capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False
    )
    assert done.returncode == 1 and "say --yes to agree" in done.stderr and not renter.vast.created
    for options in (("--image", "gpu-node:latest"), ("--ssh-identity", "/nowhere")):
        status, out, said = renter.ask("x", *options)
        assert (status, out) == (1, "") and said.count("\n") == 1 and not renter.vast.created
