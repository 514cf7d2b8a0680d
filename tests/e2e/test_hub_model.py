"""A model named by its place on a hub, over two workers: the same answers, and nobody fetches the whole (S1 9.3)."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from common.gguf import GgufFile
from common.sparse_file import merged, missing
from tests.e2e.stack import COLOURS, COLOURS_TOKENS, Stack, model_file, wait_for
from tests.support.hub import Hub
from worker.engine.parts import Part
from worker.engine.ranged import tensor_ranges

TWO = ("--pipeline-stages", "2")
SECRET = "hf_secret_of_this_end_to_end_test"
HEADER = 4 << 20


@pytest.fixture(scope="module")
def hub() -> Iterator[Hub]:
    with Hub(model_file().read_bytes()) as hub:
        yield hub


def stack_of(hub: Hub, home: Path, args: tuple[str, ...] = TWO, **source: str) -> Stack:
    """Its workers and its planner share a cache that is empty."""
    wanted = {"gguf_repo": "owner/repo", "gguf_file": "model.gguf", **source}
    stack = Stack(args=args, environ={**hub.environment(home), "HF_TOKEN": SECRET})
    lines = "".join(f'{key} = "{value}"\n' for key, value in wanted.items())
    text = stack.config_file.read_text()
    line = next(line for line in text.splitlines(keepends=True) if line.startswith("gguf_local_path"))
    stack.config_file.write_text(text.replace(line, lines))
    return stack


def nbytes(ranges: list[tuple[int, int]]) -> int:
    return sum(end - begin for begin, end in ranges)


@pytest.mark.spec("S1 4.4", "S1 5.3", "S1 7.1", "S1 9.3", "S1 8.14")
def test_two_workers_fetch_their_parts_of_a_model_on_a_hub(hub: Hub, tmp_path: Path) -> None:
    with Stack() as local:
        expected = [local.ask(COLOURS, max_tokens=COLOURS_TOKENS).final_text, local.ask("Hi", max_tokens=32).final_text]
    with stack_of(hub, tmp_path / "home") as stack:
        said = [stack.ask(COLOURS, max_tokens=COLOURS_TOKENS).final_text, stack.ask("Hi", max_tokens=32).final_text]
        assert said == expected
        stack.say("stop\n")
        stack.assert_stopped("stdin")
        assert SECRET.encode() not in stack.archive.path.read_bytes()
    assert hub.ranges[0] == (0, HEADER) and hub.wholes == 0
    with GgufFile.open(model_file()) as file:
        own = [tensor_ranges(file, Part(at * 15, at * 15 + 15, at == 0, at == 1))[0] for at in (0, 1)]
    # The second stage begins when the first has all that it needs.
    whole = next(n for n in range(len(hub.ranges) + 1) if not missing(own[0], merged(hub.ranges[:n])))
    stages = [hub.ranges[1:whole], hub.ranges[whole:]]
    size = len(hub.data)
    # The second one needs the embedding as its head, which is in the cache of this machine by then.
    assert 0 < nbytes(stages[0]) <= nbytes(own[0]) < 0.75 * size
    assert 0 < nbytes(stages[1]) < nbytes(own[1]) and nbytes(stages[1]) < 0.5 * size
    assert nbytes(merged(hub.ranges)) == nbytes(hub.ranges) <= size, "nothing came twice"
    assert set(hub.tokens) == {f"Bearer {SECRET}"}


@pytest.mark.spec("S1 4.4")
def test_the_plan_of_it_fetches_the_header_only(hub: Hub, tmp_path: Path) -> None:
    stack = stack_of(hub, tmp_path / "home")
    try:
        asked = len(hub.ranges)
        command = [str(Path(sys.executable).with_name("mvp-orchestrator")), "plan"]
        done = subprocess.run(
            [*command, "--runtime-config", str(stack.config_file), *TWO],
            env=stack.environ, cwd=stack.home, capture_output=True, text=True, timeout=100, check=False,
        )  # fmt: skip
    finally:
        stack.destroy()
    assert (done.returncode, done.stderr) == (0, "") and "1      3     15..29" in done.stdout
    assert hub.ranges[asked:] == [(0, HEADER)]


@pytest.mark.spec("S1 9.3", "S1 10.4", "S1 4.4")
def test_what_is_not_on_the_hub_ends_the_start_before_any_worker(hub: Hub, tmp_path: Path) -> None:
    with stack_of(hub, tmp_path / "home", gguf_revision="v9") as stack:
        error = stack.assert_failed()
        assert error == (
            "planned execution needs to inspect the GGUF owner/repo/model.gguf@v9 before it starts: the repository has "
            "no revision v9: set [model] gguf_revision to one that it has"
        )
        assert stack.archive.one("run_plan", "failed").detail["error"] == error
        assert stack.archive.find("provider_start", "started") is None


def test_a_stop_does_not_wait_for_a_hub_that_hangs(hub: Hub, tmp_path: Path) -> None:
    asked, hub.pause_s = len(hub.ranges), 120
    try:
        with stack_of(hub, tmp_path / "home") as stack:
            wait_for("the request", lambda: len(hub.ranges) > asked, 60)
            stack.say("stop\n")
            error = stack.assert_failed()
        assert error == (
            "shutdown requested while waiting for the run plan (the header of owner/repo/model.gguf@main is fetched "
            "from the hub)"
        )
    finally:
        hub.pause_s = 0
