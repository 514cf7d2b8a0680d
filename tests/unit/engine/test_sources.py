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

from common.gguf import GgufFile
from common.messages.node_agent import LocalPath
from tests.unit.engine.tiny_model import TinySpec, write_model
from worker.engine.errors import EngineError
from worker.engine.parts import Part
from worker.engine.ranged import merged, missing, tensor_ranges
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


FETCH_PART = """
import sys
from common.messages.node_agent import HuggingFaceGguf
from worker.engine import ranged
from worker.engine.errors import EngineError
from worker.engine.parts import Part
from worker.engine.sources import resolve_source
ranged.HEADER_BYTES, ranged.JOIN_BYTES, ranged.PIECE_BYTES, ranged.BACKOFF_S = 512, 64, 16_384, 0.01
try:
    source = HuggingFaceGguf(repo="owner/repo", file="model.gguf")
    part = Part(int(sys.argv[1]), int(sys.argv[2]), False, False)
    print("path", resolve_source(source, lambda *report: None, lambda count: part))
except EngineError as error:
    print("error", error)
"""


class Hub(ThreadingHTTPServer):
    """What a download needs of a hub; remembers the tokens and ranges it was shown.

    `has_ranges` False sends whole files only; after `breaks_after` ranges each further one is cut in its middle.
    """

    def __init__(self, data: bytes = DATA, has_ranges: bool = False) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.data, self.has_ranges = data, has_ranges
        self.tokens: list[str | None] = []
        self.ranges: list[tuple[int, int]] = []
        self.breaks_after: int | None = None


class _Handler(BaseHTTPRequestHandler):
    def do_HEAD(self) -> None:
        self.answer(False)

    def do_GET(self) -> None:
        self.answer(True)

    def answer(self, with_body: bool) -> None:
        hub = self.server
        assert isinstance(hub, Hub)
        hub.tokens.append(self.headers.get("Authorization"))
        known = self.path == "/owner/repo/resolve/main/model.gguf"
        begin, end = 0, len(hub.data)
        is_range = known and with_body and hub.has_ranges and "Range" in self.headers
        if is_range:
            first, _, last = self.headers["Range"].removeprefix("bytes=").partition("-")
            begin, end = int(first), int(last) + 1
            hub.ranges.append((begin, end))
        self.send_response(206 if is_range else 200 if known else 404)
        if is_range:
            self.send_header("Content-Range", f"bytes {begin}-{end - 1}/{len(hub.data)}")
        if known:
            self.send_header("ETag", f'"{hashlib.sha256(hub.data).hexdigest()}"')
            self.send_header("X-Repo-Commit", "a" * 40)
        else:
            self.send_header("X-Error-Code", "EntryNotFound")
        self.send_header("Content-Length", str(end - begin if known else 0))
        self.end_headers()
        if known and with_body:
            is_cut = hub.breaks_after is not None and len(hub.ranges) > hub.breaks_after
            self.wfile.write(hub.data[begin : (begin + end) // 2 if is_cut else end])
            self.close_connection = self.close_connection or is_cut

    def log_message(self, format: str, *args: object) -> None:
        """Nothing: the test reads the tokens instead."""


def serve(hub: Hub) -> Iterator[Hub]:
    threading.Thread(target=hub.serve_forever, daemon=True).start()
    yield hub
    hub.shutdown()
    hub.server_close()


@pytest.fixture(scope="module")
def hub() -> Iterator[Hub]:
    yield from serve(Hub())


@pytest.fixture
def model_hub(tmp_path: Path) -> Iterator[Hub]:
    write_model(tmp_path / "model.gguf", TinySpec(layers=4))
    yield from serve(Hub((tmp_path / "model.gguf").read_bytes(), has_ranges=True))


def fetch(hub: Hub, home: Path, *arguments: object, code: str = FETCH) -> str:
    """In a process of its own: huggingface_hub reads its environment when it is imported."""
    env = {
        **os.environ,
        "HF_ENDPOINT": f"http://127.0.0.1:{hub.server_port}",
        "HF_HOME": str(home),
        "XDG_CACHE_HOME": str(home / "cache"),
        "HF_TOKEN": TOKEN,
    }
    command = [sys.executable, "-c", code, *map(str, arguments)]
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


def own_bytes(path: Path, layer: int) -> list[bytes]:
    with GgufFile.open(path) as file:
        return [bytes(file.tensor_bytes(name)) for name in file.tensors if name.startswith(f"blk.{layer}.")]


def test_a_stage_fetches_the_ranges_of_its_own_tensors(model_hub: Hub, tmp_path: Path) -> None:
    output = fetch(model_hub, tmp_path / "home", 1, 3, code=FETCH_PART)
    path, whole = Path(output.strip().removeprefix("path ")), tmp_path / "model.gguf"
    assert own_bytes(path, 1) == own_bytes(whole, 1) and own_bytes(path, 2) == own_bytes(whole, 2)
    assert not any(b"".join(own_bytes(path, 3))), "the last block is a hole"
    assert sum(end - begin for begin, end in model_hub.ranges) < 0.7 * len(model_hub.data)
    assert f"Bearer {TOKEN}" in model_hub.tokens
    with GgufFile.open(path) as part, GgufFile.open(whole) as all_:
        assert tensor_ranges(part, Part(1, 3, False, False)) == tensor_ranges(all_, Part(1, 3, False, False))
    # Another stage of the same machine fetches what is new to it and nothing twice.
    before = len(model_hub.ranges)
    assert fetch(model_hub, tmp_path / "home", 2, 4, code=FETCH_PART) == output
    assert own_bytes(path, 3) == own_bytes(whole, 3) and own_bytes(path, 1) == own_bytes(whole, 1)
    assert missing(merged(model_hub.ranges[before:]), merged(model_hub.ranges[:before])) == merged(
        model_hub.ranges[before:]
    )


def test_a_cut_fetch_of_ranges_goes_on_where_it_stopped(model_hub: Hub, tmp_path: Path) -> None:
    model_hub.breaks_after = 8
    output = fetch(model_hub, tmp_path / "home", 0, 4, code=FETCH_PART)
    assert output.startswith("error cannot fetch owner/repo/model.gguf@main: ") and output.count("\n") == 1
    whole, kept = merged(model_hub.ranges[:8]), len(model_hub.ranges)
    model_hub.breaks_after = None
    path = Path(fetch(model_hub, tmp_path / "home", 0, 4, code=FETCH_PART).strip().removeprefix("path "))
    assert own_bytes(path, 3) == own_bytes(tmp_path / "model.gguf", 3)
    assert missing(whole, merged(model_hub.ranges[kept:])) == whole, "nothing came twice"


@pytest.mark.parametrize("size", [None, 0, 4096])
def test_a_list_of_ranges_without_its_file_counts_for_nothing(model_hub: Hub, tmp_path: Path, size: int | None) -> None:
    path = Path(fetch(model_hub, tmp_path / "home", 1, 3, code=FETCH_PART).strip().removeprefix("path "))
    asked = len(model_hub.ranges)
    path.unlink() if size is None else os.truncate(path, size)
    assert fetch(model_hub, tmp_path / "home", 1, 3, code=FETCH_PART) == f"path {path}\n"
    assert own_bytes(path, 1) == own_bytes(tmp_path / "model.gguf", 1)
    assert merged(model_hub.ranges[asked:]) == merged(model_hub.ranges[:asked]), "everything came again"


def test_a_server_without_ranges_gives_the_whole_file(model_hub: Hub, tmp_path: Path) -> None:
    model_hub.has_ranges = False
    output = fetch(model_hub, tmp_path / "home", 1, 3, code=FETCH_PART)
    assert Path(output.strip().removeprefix("path ")).read_bytes() == model_hub.data


def test_ranges_as_sets() -> None:
    assert merged([(5, 9), (0, 2), (8, 12), (2, 3)]) == [(0, 3), (5, 12)]
    assert merged([(0, 2), (4, 6), (20, 21)], gap=2) == [(0, 6), (20, 21)]
    assert missing([(0, 10), (20, 30)], [(2, 4), (8, 22)]) == [(0, 2), (4, 8), (22, 30)]
    assert missing([(3, 3), (1, 2)], [(0, 9)]) == []
