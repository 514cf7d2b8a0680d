"""`./dev` and `.ci/run` are what strangers meet first: they must work from anywhere and say what they want."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from tests.tidy.rules import ROOT

DEV = ROOT / "dev"


def run(*command: str | Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=60, check=False)


def test_an_unknown_command_is_one_sentence_and_the_list(tmp_path: Path) -> None:
    result = run(DEV, "frobnicate", cwd=tmp_path)
    assert result.returncode == 2
    assert result.stdout == ""
    assert result.stderr.startswith("dev: there is no command 'frobnicate'\nusage: ./dev COMMAND")


def test_help_lists_every_command(tmp_path: Path) -> None:
    result = run(DEV, "help", cwd=tmp_path)
    assert result.returncode == 0
    for command in ("demo", "test", "lint", "bench", "spec", "sim", "fetch-model", "clean", "help"):
        assert f"\n  {command} " in result.stdout
    assert run(DEV, cwd=tmp_path).stdout == result.stdout


def test_it_works_through_a_symlink_from_a_folder_with_names_like_ours_and_adds_little(tmp_path: Path) -> None:
    assert (ROOT / ".venv" / ".dev-stamp").exists(), "run the tests by ./dev test: it makes the environment"
    here = tmp_path / "a folder"
    (here / "tools").mkdir(parents=True)
    (here / "tools" / "spec.py").write_text("raise SystemExit('the wrong module')")
    (here / "linked dev").symlink_to(DEV)
    run(here / "linked dev", "spec", "--missing", cwd=here)
    result = run(here / "linked dev", "spec", "--missing", cwd=here)
    assert result.returncode == 0
    assert result.stderr == ""
    assert result.stdout.splitlines()[-1].endswith("clauses proven")


def test_bench_lists_what_there_is(tmp_path: Path) -> None:
    result = run(DEV, "bench", "nothing", "--json", cwd=tmp_path)
    assert result.returncode == 2
    assert result.stdout == ""
    assert result.stderr.startswith("bench: there is no bench 'nothing'; the benches: ")


def test_dev_is_plain_posix_shell() -> None:
    assert run("sh", "-n", DEV, cwd=ROOT).stderr == ""


def test_the_scripts_are_executable() -> None:
    assert os.access(DEV, os.X_OK)
    assert os.access(ROOT / ".ci" / "run", os.X_OK)


def test_clean_refuses_what_it_does_not_know(tmp_path: Path) -> None:
    result = run(DEV, "clean", "--everything", cwd=tmp_path)
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr == "dev: clean takes only --models, not '--everything'\n"
    assert (ROOT / ".venv").exists()
