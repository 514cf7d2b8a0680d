"""Where models come from: a local path, and a hub that is a small server of this test."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from common.gguf import GgufFile
from common.messages.node_agent import LocalPath
from common.sparse_file import merged, missing
from tests.support.hub import Hub
from tests.unit.common.test_gguf import split
from tests.unit.engine.tiny_model import TinySpec, write_model
from worker.engine.errors import EngineError
from worker.engine.parts import Part
from worker.engine.ranged import tensor_ranges
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
from common import hub_file
from worker.engine import ranged
from worker.engine.errors import EngineError
from worker.engine.parts import Part
from worker.engine.sources import resolve_source
hub_file.HEADER_BYTES, ranged.JOIN_BYTES, hub_file.PIECE_BYTES, hub_file.BACKOFF_S = 512, 64, 16_384, 0.01
try:
    source = HuggingFaceGguf(repo="owner/repo", file=(*sys.argv, "model.gguf")[3])
    part = Part(int(sys.argv[1]), int(sys.argv[2]), False, False)
    print("path", resolve_source(source, lambda *report: None, lambda count: part))
except EngineError as error:
    print("error", error)
"""


@pytest.fixture(scope="module")
def hub() -> Iterator[Hub]:
    with Hub(DATA, has_ranges=False) as hub:
        yield hub


@pytest.fixture
def model_hub(tmp_path: Path) -> Iterator[Hub]:
    write_model(tmp_path / "model.gguf", TinySpec(layers=4))
    with Hub((tmp_path / "model.gguf").read_bytes()) as hub:
        yield hub


def fetch(hub: Hub, home: Path, *arguments: object, code: str = FETCH) -> str:
    """In a process of its own: huggingface_hub reads its environment when it is imported."""
    env = {
        **os.environ,
        **hub.environment(home),
        "HF_TOKEN": TOKEN,
    }
    command = [sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.run(command, env=env, capture_output=True, text=True, check=True, timeout=120).stdout


def test_a_model_comes_from_the_hub_with_progress_and_token(hub: Hub, tmp_path: Path) -> None:
    lines = fetch(hub, tmp_path, "model.gguf").splitlines()
    assert f"download {len(DATA)} {len(DATA)}" in lines
    assert lines[-1].startswith("path ") and Path(lines[-1][5:]).read_bytes() == DATA
    assert f"Bearer {TOKEN}" in hub.tokens


def test_a_file_that_the_hub_does_not_have(hub: Hub, tmp_path: Path) -> None:
    output = fetch(hub, tmp_path, "absent.gguf")
    assert output == (
        "error cannot fetch owner/repo/absent.gguf@main: the repository has no such file: set [model] gguf_file to one "
        "that it has\n"
    )
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


def test_the_store_that_a_hub_redirects_to_gets_no_token(model_hub: Hub, tmp_path: Path) -> None:
    with Hub(model_hub.data) as hub:
        hub.store = model_hub.url
        output = fetch(hub, tmp_path / "home", 1, 3, code=FETCH_PART)
    path = Path(output.strip().removeprefix("path "))
    assert own_bytes(path, 1) == own_bytes(tmp_path / "model.gguf", 1) and hub.ranges == [] != model_hub.ranges
    assert set(hub.tokens) == {f"Bearer {TOKEN}"} and set(model_hub.tokens) == {None}


def test_a_stage_takes_the_whole_file_that_was_fetched_before(model_hub: Hub, tmp_path: Path) -> None:
    whole = fetch(model_hub, tmp_path / "home", "model.gguf").splitlines()[-1]
    assert fetch(model_hub, tmp_path / "home", 1, 3, code=FETCH_PART).strip() == whole and model_hub.ranges == []


def test_a_cut_fetch_of_ranges_goes_on_where_it_stopped(model_hub: Hub, tmp_path: Path) -> None:
    model_hub.breaks_after = 8
    output = fetch(model_hub, tmp_path / "home", 0, 4, code=FETCH_PART)
    assert output.startswith("error cannot fetch owner/repo/model.gguf@main: ") and output.count("\n") == 1
    whole, kept = merged(model_hub.ranges[:8]), len(model_hub.ranges)
    model_hub.breaks_after = None
    path = Path(fetch(model_hub, tmp_path / "home", 0, 4, code=FETCH_PART).strip().removeprefix("path "))
    assert own_bytes(path, 3) == own_bytes(tmp_path / "model.gguf", 3)
    assert missing(whole, merged(model_hub.ranges[kept:])) == whole, "nothing came twice"


@pytest.mark.parametrize("size", [None, 0, 4096, -1])
def test_a_list_of_ranges_without_its_file_counts_for_nothing(model_hub: Hub, tmp_path: Path, size: int | None) -> None:
    """The file is lost, cut, or made anew with its old size (-1): what the list says of it is fetched again."""
    path = Path(fetch(model_hub, tmp_path / "home", 1, 3, code=FETCH_PART).strip().removeprefix("path "))
    asked = len(model_hub.ranges)
    if size is None or size < 0:
        path.unlink()
    if size is not None:
        with path.open("ab") as file:
            file.truncate(size if size >= 0 else len(model_hub.data))
    assert fetch(model_hub, tmp_path / "home", 1, 3, code=FETCH_PART) == f"path {path}\n"
    assert own_bytes(path, 1) == own_bytes(tmp_path / "model.gguf", 1)
    assert merged(model_hub.ranges[asked:]) == merged(model_hub.ranges[:asked]), "everything came again"


def test_a_server_without_ranges_gives_the_whole_file(model_hub: Hub, tmp_path: Path) -> None:
    model_hub.has_ranges = False
    output = fetch(model_hub, tmp_path / "home", 1, 3, code=FETCH_PART)
    assert Path(output.strip().removeprefix("path ")).read_bytes() == model_hub.data


def test_a_stage_of_a_model_in_several_files_fetches_its_ranges_of_each(model_hub: Hub, tmp_path: Path) -> None:
    whole = tmp_path / "model.gguf"
    parts = split(whole, tmp_path)
    model_hub.others = {part.name: part.read_bytes() for part in parts}
    for number in (2, 1):  # any of them names the model
        output = fetch(model_hub, tmp_path / f"home{number}", 1, 3, parts[number - 1].name, code=FETCH_PART)
        path = Path(output.strip().removeprefix("path "))
        assert own_bytes(path, 1) == own_bytes(whole, 1) and own_bytes(path, 2) == own_bytes(whole, 2)
        assert not any(b"".join(own_bytes(path, 3)) + b"".join(own_bytes(path, 0))), "other blocks are holes"
    assert model_hub.wholes == 0
