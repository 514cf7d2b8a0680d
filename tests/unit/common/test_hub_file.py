"""The header of a model on a hub: by ranges, resumed, and what is said where it cannot be had."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from common.gguf import GgufFile
from common.sparse_file import merged, missing
from tests.support.hub import COMMIT, Hub
from tests.unit.common.test_gguf import split
from tests.unit.engine.tiny_model import TinySpec, write_model

TOKEN = "hf_secret_of_this_test"
PLAN = """
import json, sys
import msgspec
from common import hub_file
from common.config_slices import OrchestratorSlice
from services.orchestrator import planner_facts
hub_file.HEADER_BYTES, hub_file.PIECE_BYTES, hub_file.BACKOFF_S = 512, 4096, 0.01
options = json.loads(sys.argv[1])
planner_facts.HUB_HEADER_MS = options.pop("limit_ms", 20_000)
source = {"source": "HuggingFaceGguf", "repo": "owner/repo", "file": "model.gguf", **options}
config = {"provider": "process", "image": "", "model_id": "m", "tokenizer": {"source": "EmbeddedGguf"},
          "gguf_source": source, "pipeline_stages": 2, "hf_token_file": sys.argv[2]}
try:
    plan = planner_facts.plan_job(msgspec.convert(config, OrchestratorSlice))
    print(plan.facts.num_layers, plan.facts.gguf_source.revision)
except planner_facts.PlanError as error:
    print(error)
"""


@pytest.fixture
def model(tmp_path: Path) -> Path:
    write_model(tmp_path / "model.gguf", TinySpec(layers=4))
    return tmp_path / "model.gguf"


@pytest.fixture
def hub(model: Path) -> Iterator[Hub]:
    with Hub(model.read_bytes()) as hub:
        yield hub


def plan(hub: Hub, home: Path, environ: dict[str, str] | None = None, **source: object) -> str:
    """In a process of its own: huggingface_hub reads its environment when it is imported."""
    token = home.parent / "hf_token"
    token.touch(0o600)
    token.write_text(TOKEN + "\n")
    env = {**os.environ, **hub.environment(home), **(environ or {})}
    command = [sys.executable, "-c", PLAN, json.dumps(source), str(token)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=True, timeout=100)
    assert done.stderr == "" and TOKEN not in done.stdout
    return done.stdout.rstrip("\n")


def refused(why: str, revision: str = "main", file: str = "model.gguf") -> str:
    return f"planned execution needs to inspect the GGUF owner/repo/{file}@{revision} before it starts: {why}"


WHOLE = (
    "./dev fetch-model --repo owner/repo --file model.gguf fetches it whole: then set [model] cached_path to that file"
)


@pytest.mark.spec("S1 9.3", "S1 5.3", "S1 4.4", "S1 2.2")
def test_only_the_header_is_fetched_and_once(hub: Hub, model: Path, tmp_path: Path) -> None:
    """Workers are given the commit that was inspected; the token comes out of the run's file."""
    assert plan(hub, tmp_path / "home") == f"4 {COMMIT}"
    with GgufFile.open(model) as file:
        begin = min(info.offset for info in file.tensors.values())
    assert hub.wholes == 0 and merged(hub.ranges)[0][0] == 0
    assert begin <= sum(end - start for start, end in hub.ranges) < 2 * begin < len(hub.data) / 4
    assert set(hub.tokens) == {f"Bearer {TOKEN}"}
    asked = len(hub.ranges)
    assert plan(hub, tmp_path / "home", revision=COMMIT) == f"4 {COMMIT}"
    assert len(hub.ranges) == asked, "it is in the cache"


def test_a_model_in_several_files_is_planned_by_their_headers(hub: Hub, model: Path, tmp_path: Path) -> None:
    parts = split(model, tmp_path)
    hub.others = {part.name: part.read_bytes() for part in parts}
    for part in parts:
        assert plan(hub, tmp_path / "home", file=part.name) == f"4 {COMMIT}"
    assert hub.wholes == 0 and sum(end - begin for begin, end in hub.ranges) < len(hub.data) / 4
    del hub.others[parts[1].name]
    assert "has no such file: set [model] gguf_file" in plan(hub, tmp_path / "home", file=parts[0].name)


@pytest.mark.spec("S1 10.4")
def test_a_cut_fetch_says_so_and_goes_on_where_it_stopped(hub: Hub, tmp_path: Path) -> None:
    hub.breaks_after = 2
    said = plan(hub, tmp_path / "home")
    assert said.startswith(refused(f"the hub {hub.url} cannot be reached, or breaks off: ")) and said.endswith(WHOLE)
    got, asked = merged(hub.ranges[:2]), len(hub.ranges)
    hub.breaks_after = None
    assert plan(hub, tmp_path / "home") == f"4 {COMMIT}"
    assert missing(got, merged(hub.ranges[asked:])) == got, "nothing came twice"


@pytest.mark.spec("S1 9.3", "S1 10.4")
def test_what_the_hub_does_not_have_is_named(hub: Hub, tmp_path: Path) -> None:
    home = tmp_path / "home"
    assert plan(hub, home, revision="v9") == refused(
        "the repository has no revision v9: set [model] gguf_revision to one that it has", "v9"
    )
    assert plan(hub, home, file="x.gguf") == refused(
        "the repository has no such file: set [model] gguf_file to one that it has", file="x.gguf"
    )
    assert "there is no such repository that you may read: mind [model] gguf_repo and HF_TOKEN" in plan(
        hub, home, repo="a/b"
    )
    assert hub.ranges == []


@pytest.mark.spec("S1 9.3")
def test_a_hub_without_ranges_and_without_answer(hub: Hub, tmp_path: Path) -> None:
    hub.has_ranges = False
    assert plan(hub, tmp_path / "home") == refused(f"the hub sends no byte ranges of it; {WHOLE}")
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{nobody.getsockname()[1]}"
        said = plan(hub, tmp_path / "home", {"HF_ENDPOINT": url})
    assert said.startswith(refused(f"the hub {url} cannot be reached, or breaks off: ")) and said.endswith(WHOLE)


def test_a_hub_that_hangs_is_given_up(hub: Hub, tmp_path: Path) -> None:
    hub.pause_s = 30
    started = time.monotonic()
    said = plan(hub, tmp_path / "home", limit_ms=1000)
    assert time.monotonic() - started < 28 and said.startswith(refused("the hub ")), said


@pytest.mark.spec("S1 9.3", "S1 10.4")
@pytest.mark.parametrize("harm", ["magic", "version", "architecture", "cut"])
def test_what_is_no_usable_gguf_is_refused(hub: Hub, tmp_path: Path, harm: str) -> None:
    data = bytearray(hub.data)
    if harm == "magic":
        data[:4] = b"PK\3\4"
    if harm == "version":
        data[4] = 9
    if harm == "architecture":
        data = data.replace(b"\x05\0\0\0\0\0\0\0llama", b"\x05\0\0\0\0\0\0\0lamma", 1)
    hub.data = bytes(data[: 2000 if harm == "cut" else None])
    said = plan(hub, tmp_path / "home")
    what = {
        "magic": "not a GGUF file (it does not start with the letters GGUF)",
        "version": "GGUF version 9 is not supported; versions 2 and 3 are",
        "architecture": "architecture 'lamma' is not supported; supported are ",
        "cut": "truncated: ",
    }[harm]
    assert said.startswith(f"GGUF metadata cannot be used for planning: owner/repo/model.gguf@main: {what}"), said
    assert len(hub.ranges) <= (1 if harm in ("magic", "version") else 12)


@pytest.mark.spec("S1 9.3")
def test_a_file_that_was_fetched_whole_needs_no_hub(hub: Hub, model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "home" / "hub" / "models--owner--repo"
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_text(COMMIT)
    (folder / "snapshots" / COMMIT).mkdir(parents=True)
    (folder / "snapshots" / COMMIT / "model.gguf").symlink_to(model)
    assert plan(hub, tmp_path / "home", {"HF_HUB_OFFLINE": "1"}) == "4 None"
    said = plan(hub, tmp_path / "other", {"HF_HUB_OFFLINE": "1"})
    assert said == refused(f"HF_HUB_OFFLINE is set; {WHOLE}") and hub.tokens == []


def test_a_cache_that_cannot_be_written(hub: Hub, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    said = plan(hub, tmp_path / "home", {"XDG_CACHE_HOME": str(tmp_path / "file")})
    assert "cannot be written: Not a directory; set XDG_CACHE_HOME to another folder" in said, said
