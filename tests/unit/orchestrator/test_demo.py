"""Parts of `./dev demo`: what a person sees of the start, the archive as it grows, whose archive it is."""

from __future__ import annotations

import io
import json
import threading
from pathlib import Path
from typing import Any

import pytest

from tools import demo
from tools.demo import Progress, bootstrap_records, new_archive


def frame(phase: str, status: str, channel: str = "mvp.orch.bootstrap", **detail: Any) -> str:
    """A line of an archive."""
    body = json.dumps({"phase": phase, "status": status, "detail": detail})
    return json.dumps({"channel": channel, "payload": {"encoding": "utf8", "value": body}}) + "\n"


def test_a_line_for_each_phase_that_means_something() -> None:
    out = io.StringIO()
    progress = Progress(out)
    for phase, status in [("config", "ready"), ("services", "ready"), ("weights_loaded", "ready")]:
        progress.record({"phase": phase, "status": status, "detail": {}})
    assert [line.split("s  ", 1)[1] for line in out.getvalue().splitlines()] == [
        "services are up",
        "weights are loaded",
    ]


def test_bars_are_for_terminals_only() -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    waiting = {"phase": "stage_provision_wait", "status": "observed", "detail": {"phase": "tensors"}}
    waiting["detail"] |= {"done": 5, "total": 10}  # type: ignore[operator]
    for out, shown in ((io.StringIO(), False), (Terminal(), True)):
        progress = Progress(out)
        progress.record(waiting)
        progress.line("done")
        assert ("tensors" in out.getvalue() and " 50%" in out.getvalue()) == shown
        assert out.getvalue().endswith("done\n")
        assert out.getvalue().count("\n") == (2 if shown else 1), "the bar's line is ended before the next one"


def test_no_total_is_no_division_by_zero() -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    waiting = {"phase": "load", "done": 0, "total": 0}
    Progress(Terminal()).record({"phase": "stage_provision_wait", "status": "observed", "detail": waiting})


def test_records_as_they_are_written(tmp_path: Path) -> None:
    """The file may not exist yet, and its last line may be half written."""
    archive, stop = tmp_path / "frames.jsonl", threading.Event()
    seen: list[tuple[str, str]] = []

    def follow() -> None:
        seen.extend((record["phase"], record["status"]) for record in bootstrap_records(archive, stop))

    thread = threading.Thread(target=follow)
    thread.start()
    whole = frame("a", "ready") + frame("b", "ready", channel="mvp.orch.prompt") + frame("c", "ready")
    with archive.open("w") as file:
        for piece in (whole[:20], whole[20:-5], whole[-5:]):
            file.write(piece)
            file.flush()
            threading.Event().wait(0.12)
    stop.set()
    thread.join(5)
    assert not thread.is_alive() and seen == [("a", "ready"), ("c", "ready")]


def test_the_newest_archives_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    folder = tmp_path / "swactor-mq" / "demo"
    folder.mkdir(parents=True)
    for day in range(10, 20):
        (folder / f"202601{day}-000000-1.jsonl").touch()
    (folder / "notes.txt").touch()
    mine = new_archive()
    mine.touch()
    kept = sorted(path.name for path in folder.glob("*.jsonl"))
    assert len(kept) == demo.ARCHIVES_KEPT and kept[0] == "20260116-000000-1.jsonl" and mine.parent == folder
    assert (folder / "notes.txt").exists()


@pytest.mark.parametrize("arguments", [["--max-tokens", "-1"], ["--max-tokens", "x"], ["--frobnicate"]])
def test_usage_errors(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        demo.main(arguments)
    assert ended.value.code == 2 and "usage: ./dev demo" in capsys.readouterr().err
