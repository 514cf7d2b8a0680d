"""A small vast.ai for single-gpu-inference: the calls of S2 6.3 over HTTP, and for an instance a real sshd and a real
gpu-node on this machine. What it shall do wrong is said by the test.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

KEY = "vast-key"


@dataclass(slots=True)
class Rented:
    """One instance: its processes and their log."""

    label: str
    log: Path
    ssh_port: int
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)
    state: dict[str, Any] = field(default_factory=dict)


class Vast:
    """`url`, then `instances`; `creates` and `states` hold what the next creates answer and the instances show."""

    def __init__(self, folder: Path, worker: Path) -> None:
        self.folder, self.worker = folder, worker
        self.instances: dict[int, Rented] = {}
        self.deleted: list[int] = []
        self.created: list[dict[str, Any]] = []
        self.creates: list[tuple[int, dict[str, Any]]] = []
        self.states: list[dict[str, Any]] = []
        self.delete_errors = 0
        self._next = 1000
        self._lock = threading.Lock()
        self.identity = folder / "id"
        for name in ("id", "host"):
            command = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name)]
            subprocess.run(command, check=True)
        vast = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self._answer()

            do_POST = do_PUT = do_DELETE = do_GET

            def _answer(self) -> None:
                size = int(self.headers.get("Content-Length") or 0)
                body = json.loads(self.rfile.read(size) or b"{}")
                path = self.path.split("?")[0].rstrip("/").split("/")[1:]
                if path[0] != "log" and self.headers.get("Authorization") != f"Bearer {KEY}":
                    status, answer = 401, {"error": "auth_error"}
                else:
                    with vast._lock:
                        status, answer = vast.handle(self.command, path, body, f"http://{self.headers['Host']}")
                data = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def handle(self, method: str, path: list[str], body: dict[str, Any], here: str) -> tuple[int, Any]:
        match (method, path):
            case ("POST", ["api", "v0", "bundles"]):
                return 200, {"offers": [self._offer(number) for number in range(1, 6)]}
            case ("PUT", ["api", "v0", "asks", _]):
                self.created.append(body)
                if self.creates and (answer := self.creates.pop(0))[0] != 200:
                    return answer
                return 200, {"success": True, "new_contract": self._start(body)}
            case ("GET", ["api", "v1", "instances"]):
                rows = [{"id": id, "label": rented.label} for id, rented in self.instances.items()]
                return 200, {"success": True, "instances": rows, "next_token": None}
            case ("PUT", ["api", "v0", "instances", "request_logs", id]):
                return 200, {"success": True, "result_url": f"{here}/log/{id}"}
            case ("GET", ["log", id]):
                return 200, self.instances[int(id)].log.read_bytes()
            case ("GET", ["api", "v0", "instances", id]):
                rented = self.instances.get(int(id))
                return 200, {"instances": rented.state if rented else None}
            case ("DELETE", ["api", "v0", "instances", id]):
                if self.delete_errors:
                    self.delete_errors -= 1
                    return 500, {"error": "internal"}
                self._stop(int(id))
                return 200, {"success": True}
        return 404, {"error": "no such path"}

    @staticmethod
    def _offer(number: int) -> dict[str, Any]:
        return {
            "id": number,
            "gpu_name": "RTX 4090",
            "dph_total": 0.1 * number,
            "geolocation": "Norway, NO",
            "host_id": 9,
        }

    def _start(self, body: dict[str, Any]) -> int:
        self._next += 1
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = int(probe.getsockname()[1])
        rented = Rented(body["label"], self.folder / f"{self._next}.log", port)
        rented.log.write_bytes(b"")
        self.instances[self._next] = rented
        running = {
            "actual_status": "running",
            "intended_status": "running",
            "ssh_host": "127.0.0.1",
            "ssh_port": port,
            "dph_total": 0.1,
        }
        rented.state = self.states.pop(0) if self.states else running
        if rented.state is running:
            os.makedirs("/run/sshd", exist_ok=True)
            config = self.folder / f"{self._next}.sshd"
            config.write_text(
                f"Port {port}\nListenAddress 127.0.0.1\nHostKey {self.folder}/host\nUsePAM no\nStrictModes no\n"
                f"AuthorizedKeysFile {self.folder}/id.pub\nPermitRootLogin yes\nPidFile none\n"
            )
            sshd = shutil.which("sshd") or "/usr/sbin/sshd"
            environ = {
                "PATH": os.environ["PATH"],
                "HOME": str(self.folder),
                "WORKER_SCRIPT": str(self.worker),
                "SMQ_VALIDATE": "1",
                **body["env"],
            }
            node = [sys.executable, "-P", "-m", "worker.gpu_node"]
            with open(rented.log, "ab") as log:
                for command in ([sshd, "-D", "-e", "-f", str(config)], node):
                    output = log if command is node else subprocess.DEVNULL
                    child = subprocess.Popen(
                        command,
                        env=environ,
                        stdout=output,
                        stderr=output,
                        stdin=subprocess.DEVNULL,
                        start_new_session=True,
                    )
                    rented.processes.append(child)
        return self._next

    def _stop(self, id: int) -> None:
        rented = self.instances.pop(id, None)
        if rented is None:
            return
        self.deleted.append(id)
        for process in rented.processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def close(self) -> None:
        for id in list(self.instances):
            self._stop(id)
        self._server.shutdown()
        self._server.server_close()
