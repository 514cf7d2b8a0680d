"""gpu-node's main thread, its environment and its worker's command line (S2 5, 7.3.1)."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from common.addresses import Plane
from common.bus import mint_keypair
from tests.unit.agent.real_worker import is_gone
from tests.unit.gpu_node.ends import ECHO
from worker.gpu_node.__main__ import _arguments, worker_spec
from worker.gpu_node.ends import broker_end, free_ports
from worker.gpu_node.events import ProcessSpec
from worker.gpu_node.orphan import Orphan, destroy_self
from worker.gpu_node.service import GpuNode, GpuNodeError, make_inbox, run_rented, seed_of, wait_for_key

KEY = "ab" * 32


def make(spec: ProcessSpec, limit_ms: int) -> GpuNode:
    end = broker_end(make_inbox(), keys=mint_keypair(), base=free_ports(), admitted=[], logical_id="gpu-node")
    return GpuNode(end, spec, ready_limit_ms=limit_ms)


@pytest.mark.spec("S2 7.3.1", "S2 3.5")
def test_a_worker_that_never_reports_ready_ends_the_node_with_status_1(capsys: pytest.CaptureFixture[str]) -> None:
    node = make(ProcessSpec(ECHO.command, {"ECHO_READY_S": "60"}), 1500)
    started = time.monotonic()
    assert node.run() == 1
    assert time.monotonic() - started < 50
    assert "the worker did not report ready within 1 s" in capsys.readouterr().err
    assert all(child.pid == 0 for child in node._children.values())


@pytest.mark.spec("S2 7.3.1")
def test_a_worker_that_exits_while_it_loads_ends_the_node_with_status_1(capsys: pytest.CaptureFixture[str]) -> None:
    assert make(ProcessSpec((sys.executable, "-c", "print('loading')")), 60_000).run() == 1
    assert "the worker exited with status 0; its last words: loading" in capsys.readouterr().err


@pytest.mark.parametrize("ready_s", ["0", "30"])
def test_a_signal_stops_it_and_its_worker_while_it_loads_and_while_it_serves(ready_s: str) -> None:
    node = make(ProcessSpec(ECHO.command, {"ECHO_READY_S": ready_s}), 60_000)
    node.end.turn_until(lambda: node._hear() or node.inference.process_alive, 60_000)
    pid = node._children[node.inference.process_addr].pid
    threading.Timer(1.0, lambda: os.kill(os.getpid(), signal.SIGTERM)).start()
    assert node.run() == 0
    assert is_gone(pid)


@pytest.mark.spec("S2 5", "S2 8")
def test_seed_addr_and_seed_relay() -> None:
    assert seed_of({}) is None and seed_of({"SEED_RELAY": "tcp://h:1"}) is None
    seed = seed_of({"SEED_ADDR": KEY, "SEED_RELAY": "tcp://127.0.0.1:7700"})
    assert seed and seed.key.hex() == KEY
    assert seed.endpoints == {plane: f"tcp://127.0.0.1:{7700 + int(plane)}" for plane in Plane}
    for addr, relay in (
        (KEY[:-2], "tcp://h:1"),
        (KEY, ""),
        (KEY, "tcp://h:65533"),
        (KEY, "udp://h:1"),
        (KEY, "tcp://:1"),
    ):
        with pytest.raises(GpuNodeError):
            seed_of({"SEED_ADDR": addr, "SEED_RELAY": relay})


@pytest.mark.spec("S2 5", "S2 7.5.4")
def test_the_key_comes_as_a_file_and_does_not_stay(tmp_path: Path) -> None:
    path, keys = tmp_path / "node.key", mint_keypair()
    with pytest.raises(GpuNodeError, match="nobody has put"):
        wait_for_key(path, 300)

    def deliver() -> None:
        part = tmp_path / "part"
        part.write_text(keys.secret.hex() + "\n")
        part.chmod(0o600)
        part.rename(path)

    threading.Timer(0.3, deliver).start()
    assert wait_for_key(path, 60_000) == keys
    assert not path.exists()
    path.write_text("nonsense")
    with pytest.raises(GpuNodeError, match="others can read"):
        wait_for_key(path, 0)
    path.chmod(0o600)
    with pytest.raises(GpuNodeError, match="holds no secret key"):
        wait_for_key(path, 0)


@pytest.mark.spec("S2 5")
def test_the_worker_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = (sys.executable, "-P", "-m", "worker.engine", "--ndjson")

    def spec(*argv: str, **environ: str) -> ProcessSpec:
        return worker_spec(_arguments(list(argv)), environ)

    assert spec("--stub") == ProcessSpec((*engine, "--stub"))
    assert spec("--model", "m", "--max-context", "9") == ProcessSpec((*engine, "--model", "m", "--max-context", "9"))
    assert spec(GPU_NODE_MODEL="hf://o/r/f", CUDA="1") == ProcessSpec(
        (*engine, "--model", "hf://o/r/f"), {"DEV": "CUDA"}
    )
    assert spec("--device", "CPU", "--stub", CUDA="1").environ == {"DEV": "CPU"}
    assert spec(WORKER_SCRIPT="w.py").command == (sys.executable, "w.py")
    assert spec(WORKER_SCRIPT="w.py", WORKER_CMD="python3").command == ("python3", "w.py")
    monkeypatch.setattr("tools.fetch_model.default_model_path", lambda: tmp_path / "none")
    with pytest.raises(GpuNodeError, match="no model: say --model"):
        spec()


def test_an_orphan_is_one_after_the_whole_limit_only() -> None:
    orphan = Orphan(0, 100)
    assert not orphan.is_left(False, 99) and not orphan.is_left(True, 150)
    assert not orphan.is_left(False, 249) and orphan.is_left(False, 250)


@pytest.mark.spec("S2 7.5.1")
def test_a_rented_node_whose_client_stays_away_destroys_its_instance(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[tuple[str, str]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_DELETE(self) -> None:
            asked.append((self.path, self.headers["Authorization"]))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{server.server_address[1]}"
    environ = {"CONTAINER_ID": "77", "CONTAINER_API_KEY": "k", "VASTAI_BASE_URL": url}
    seed = seed_of({"SEED_ADDR": mint_keypair().public.hex(), "SEED_RELAY": f"tcp://127.0.0.1:{free_ports()}"})
    assert seed
    path = tmp_path / "node.key"
    with pytest.raises(GpuNodeError, match="is being destroyed"):
        run_rented(ECHO, seed, path, environ, orphan_limit_ms=300)
    path.write_text(mint_keypair().secret.hex())
    path.chmod(0o600)
    assert run_rented(ECHO, seed, path, environ, orphan_limit_ms=2000) == 1
    assert asked == [("/api/v0/instances/77/", "Bearer k")] * 2
    assert "whoever rented this node is gone" in capsys.readouterr().err
    server.shutdown()
    server.server_close()
    assert "could not be destroyed" in destroy_self(environ)
    assert destroy_self({}) == "this container has no key to destroy itself"
