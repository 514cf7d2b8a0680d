"""Where models come from: a local path, and a hub that is a small server of this test."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from common.messages.node_agent import LocalPath
from worker.engine.errors import EngineError
from worker.engine.sources import resolve_source

DATA = bytes(range(256)) * 1000
TOKEN = "hf_secret_of_this_test"
FETCH = """
import sys
from common.messages.node_agent import HuggingFaceGguf
from worker.engine.errors import EngineError
from worker.engine.sources import resolve_source
try:
    source = HuggingFaceGguf(repo="owner/repo", file=sys.argv[1])
    print("path", resolve_source(source, lambda *report: print(*report)))
except EngineError as error:
    print("error", error)
"""


class Hub(ThreadingHTTPServer):
    """The two answers of a hub that a download needs; remembers the tokens it was shown."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.tokens: list[str | None] = []


class _Handler(BaseHTTPRequestHandler):
    def do_HEAD(self) -> None:
        self.answer(False)

    def do_GET(self) -> None:
        self.answer(True)

    def answer(self, with_body: bool) -> None:
        assert isinstance(self.server, Hub)
        self.server.tokens.append(self.headers.get("Authorization"))
        known = self.path == "/owner/repo/resolve/main/model.gguf"
        self.send_response(200 if known else 404)
        if known:
            self.send_header("ETag", f'"{hashlib.sha256(DATA).hexdigest()}"')
            self.send_header("X-Repo-Commit", "a" * 40)
        else:
            self.send_header("X-Error-Code", "EntryNotFound")
        self.send_header("Content-Length", str(len(DATA) if known else 0))
        self.end_headers()
        if known and with_body:
            self.wfile.write(DATA)

    def log_message(self, format: str, *args: object) -> None:
        """Nothing: the test reads the tokens instead."""


@pytest.fixture(scope="module")
def hub() -> Iterator[Hub]:
    server = Hub()
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


def fetch(hub: Hub, home: Path, name: str) -> str:
    """In a process of its own: huggingface_hub reads its environment when it is imported."""
    env = {
        **os.environ,
        "HF_ENDPOINT": f"http://127.0.0.1:{hub.server_port}",
        "HF_HOME": str(home),
        "HF_TOKEN": TOKEN,
    }
    command = [sys.executable, "-c", FETCH, name]
    return subprocess.run(command, env=env, capture_output=True, text=True, check=True).stdout


def test_a_model_comes_from_the_hub_with_progress_and_token(hub: Hub, tmp_path: Path) -> None:
    lines = fetch(hub, tmp_path, "model.gguf").splitlines()
    assert f"download {len(DATA)} {len(DATA)}" in lines
    assert lines[-1].startswith("path ") and Path(lines[-1][5:]).read_bytes() == DATA
    assert f"Bearer {TOKEN}" in hub.tokens


def test_a_file_that_the_hub_does_not_have(hub: Hub, tmp_path: Path) -> None:
    output = fetch(hub, tmp_path, "absent.gguf")
    assert output.startswith("error cannot fetch owner/repo/absent.gguf@main: 404")
    assert output.count("\n") == 1 and TOKEN not in output


@pytest.mark.spec("S1 10.8")
def test_a_local_file_that_does_not_exist(tmp_path: Path) -> None:
    assert resolve_source(LocalPath(path=__file__), lambda *_: None) == Path(__file__)
    with pytest.raises(EngineError, match=r"absent\.gguf does not exist on this worker"):
        resolve_source(LocalPath(path=str(tmp_path / "absent.gguf")), lambda *_: None)
