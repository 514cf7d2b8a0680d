"""single-gpu-inference with two real processes on loopback: S2 8 and what a person sees of S2 4 and 7."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.unit.agent.real_worker import is_gone
from tools.fetch_model import default_model_path

ECHO = Path(__file__).resolve().parents[1] / "unit" / "gpu_node" / "echo_worker.py"
NODE = [sys.executable, "-P", "-m", "worker.gpu_node"]
CLIENT = [sys.executable, "-P", "-m", "tools.single_gpu_inference"]


class Place:
    """A state directory, the gpu-node in it, and clients."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.environ = {**os.environ, "XDG_STATE_HOME": str(home), "SMQ_VALIDATE": "1"}
        self.node: subprocess.Popen[str] | None = None
        self.said: list[str] = []

    def start(self, *options: str, **environ: str) -> str:
        """A gpu-node; returns its hex."""
        self.node = subprocess.Popen(
            [*NODE, *options],
            env={**self.environ, **environ},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        stderr = self.node.stderr
        assert stderr
        threading.Thread(target=lambda: self.said.extend(stderr), daemon=True).start()
        assert self.node.stdout
        word, key, address = self.node.stdout.readline().split()
        assert word == "GPU_NODE_ADDR" and len(key) == 64 and address.startswith("127.0.0.1:")
        self.address = address
        return key

    def heard(self, text: str, limit_s: float = 60) -> str:
        """The first line of gpu-node's stderr with this text."""
        found: list[str] = []
        self.until(lambda: found.extend(line for line in self.said if text in line) or found, limit_s)
        return found[0]

    @staticmethod
    def until(fact: Callable[[], object], limit_s: float) -> None:
        end = time.monotonic() + limit_s
        while not fact():
            assert time.monotonic() < end, f"not true within {limit_s} s"
            time.sleep(0.05)

    def worker_pid(self) -> int:
        return int(self.heard("worker process started").rsplit(" ", 1)[1])

    def client(self, *options: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [*CLIENT, *options], env=self.environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )

    def ask(self, *options: str, limit_s: float = 150) -> tuple[int, str, str]:
        process = self.client(*options)
        out, said = process.communicate(timeout=limit_s)
        return process.returncode, out, said

    def close(self) -> None:
        if self.node and self.node.poll() is None:
            self.node.terminate()
            self.node.wait(60)


def until_said(client: subprocess.Popen[str], word: str) -> str:
    """What a client says up to the line with this word."""
    assert client.stderr
    said = ""
    while word not in said:
        line = client.stderr.readline()
        assert line, f"it ended: {said}"
        said += line
    return said


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    made = Place(tmp_path)
    yield made
    made.close()


@pytest.mark.spec("S2 8", "S2 5", "S2 1", "S2 4.1", "S2 4.2")
def test_two_processes_with_the_stub_worker_and_nothing_is_left(place: Place) -> None:
    key = place.start("--stub")
    place.heard("worker ready")  # who asks before that is told so
    assert place.ask("--seed", key, "--prompt", "hello") == (
        0,
        "[stub] hello\n",
        'single-gpu-inference: gpu-node is a member\nsingle-gpu-inference: "inference" is resolved; asking\n',
    )
    worker = place.worker_pid()
    assert place.node
    place.node.terminate()
    assert place.node.wait(60) == 0
    assert is_gone(worker) and not list(place.home.rglob("*.json"))
    status, out, said = place.ask("--seed", key, "--prompt", "again")
    assert (status, out) == (1, "") and "no gpu-node" in said and "Traceback" not in said


@pytest.mark.spec("S2 4.3")
def test_clients_at_the_same_time(place: Place) -> None:
    key = place.start("--stub")
    clients = [place.client("--seed", key, "--prompt", f"p{number}") for number in range(4)]
    assert [client.communicate(timeout=150)[0] for client in clients] == [f"[stub] p{number}\n" for number in range(4)]


@pytest.mark.spec("S2 8", "S2 7.5.4")
def test_with_the_address_and_a_key_file_of_its_own(place: Place) -> None:
    key = place.start("--stub")
    copy = place.home / "elsewhere"
    copy.write_bytes((place.home / "swactor-mq" / "gpu-nodes" / f"{key}.json").read_bytes())
    copy.chmod(0o600)
    seed = f"{key}@{place.address}"
    assert place.ask("--seed", seed, "--key", str(copy), "--prompt", "x")[:2] == (0, "[stub] x\n")
    assert place.ask("--seed", seed, "--prompt", "y")[:2] == (0, "[stub] y\n")


@pytest.mark.spec("S2 4.5", "S2 7.3.4")
def test_a_worker_that_is_still_loading_is_asked_again(place: Place) -> None:
    ready = place.home / "ready"
    key = place.start(WORKER_SCRIPT=str(ECHO), ECHO_READY_FILE=str(ready))
    client = place.client("--seed", key, "--prompt", "patience", "--temperature", "0.25", "--max-tokens", "9")
    said = until_said(client, "still loading")
    ready.touch()
    out, rest = client.communicate(timeout=150)
    assert (client.returncode, out) == (0, "patience 9 0.25\n")
    assert (said + rest).count("still loading") == 1


@pytest.mark.spec("S2 4.4", "S2 7.3.2", "S2 7.3.3")
def test_a_worker_that_crashes_is_told_at_once_and_the_node_stays_for_diagnostics(place: Place) -> None:
    key = place.start(WORKER_SCRIPT=str(ECHO))
    status, out, said = place.ask("--seed", key, "--prompt", "__error__")
    assert (status, out) == (1, "") and "generation failed: as asked" in said
    status, out, said = place.ask("--seed", key, "--prompt", "__crash__")
    assert (status, out) == (1, "") and "the worker exited with status 7; its last words: about to crash" in said
    place.heard("worker exited, keeping main loop alive for diagnostics")
    assert place.node and place.node.poll() is None
    assert "status 7" in place.ask("--seed", key, "--prompt", "x")[2]


@pytest.mark.spec("S2 7.3.1")
def test_a_worker_that_dies_while_it_loads_ends_the_node(place: Place) -> None:
    place.start(WORKER_SCRIPT=str(ECHO), ECHO_FAIL="1")
    assert place.node and place.node.wait(60) == 1
    place.heard("the worker exited with status 3; its last words: cannot load the model")


def test_ctrl_c_ends_a_waiting_client(place: Place) -> None:
    key = place.start(WORKER_SCRIPT=str(ECHO))
    client = place.client("--seed", key, "--prompt", "__hang__")
    until_said(client, "asking")
    client.send_signal(signal.SIGINT)
    out, said = client.communicate(timeout=60)
    assert (client.returncode, out) == (1, "") and "SIGINT; no answer" in said and "Traceback" not in said


@pytest.mark.spec("S2 5")
def test_a_killed_node_takes_its_worker_with_it_and_is_known_to_be_gone(place: Place) -> None:
    key = place.start("--stub")
    place.heard("worker ready")
    worker = place.worker_pid()
    assert place.node
    place.node.kill()
    place.node.wait()
    assert is_gone(worker)
    status, _, said = place.ask("--seed", key, "--prompt", "x")
    assert status == 1 and "is not running any more" in said


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (("--prompt", "x", "--seed", "abc"), "is not HEX or HEX@HOST:PORT"),
        (("--prompt", "x", "--seed", "0" * 64 + "@nowhere"), "is not HEX or HEX@HOST:PORT"),
        (("--prompt", " ", "--seed", "0" * 64), "the prompt must have 1 to"),
        (("--prompt", "x", "--seed", "0" * 64, "--temperature", "nan"), "--temperature must be between"),
        (("--prompt", "x", "--seed", "0" * 64, "--max-tokens", "-1"), "--max-tokens must not be negative"),
        (("--prompt", "x", "--key", "f"), "--key goes with --seed"),
        (("--seed", "0" * 64), "required: --prompt"),
    ],
)
def test_usage_errors_are_one_sentence(place: Place, options: tuple[str, ...], sentence: str) -> None:
    status, out, said = place.ask(*options)
    assert (status, out) == (1, "") and sentence in said and said.count("\n") == 1


@pytest.mark.parametrize(
    ("environ", "sentence"),
    [
        ({"SEED_ADDR": "zz"}, "SEED_ADDR is not a key"),
        ({"SEED_ADDR": "0" * 64}, "SEED_RELAY is not the client's relay"),
        ({"SEED_ADDR": "0" * 64, "SEED_RELAY": "tcp://h:x"}, "SEED_RELAY is not the client's relay"),
    ],
)
@pytest.mark.spec("S2 5")
def test_a_bad_environment_of_gpu_node_is_one_sentence(place: Place, environ: dict[str, str], sentence: str) -> None:
    done = subprocess.run(
        [*NODE, "--stub"], env={**place.environ, **environ}, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 1 and sentence in done.stderr and done.stderr.count("\n") == 1


@pytest.mark.engine
@pytest.mark.spec("S2 8", "S2 4.2", "S2 6.4")
def test_the_real_model_answers_and_temperature_0_is_honoured(place: Place) -> None:
    key = place.start("--model", str(default_model_path()), "--max-context", "256")
    options = ("--seed", key, "--prompt", "Name the capital of France.", "--max-tokens", "12", "--temperature")
    first = place.ask(*options, "0", limit_s=300)
    assert first[0] == 0 and first[1].strip(), first[2]
    assert place.ask(*options, "0")[1] == first[1]
    hot = {place.ask(*options, "5")[1] for _ in range(2)}
    assert hot != {first[1]}, "temperature reaches the sampler"
