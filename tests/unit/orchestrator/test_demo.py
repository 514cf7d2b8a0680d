"""Parts of `./dev demo`: whose archive it is, and usage. (Steps of the start: tests/unit/tools/test_chat.py.)"""

from __future__ import annotations

from pathlib import Path

import pytest

from tools import demo
from tools.demo import new_archive


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
