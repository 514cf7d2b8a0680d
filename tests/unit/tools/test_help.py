"""Every console script says what it is for, with an example that can be typed."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
SCRIPTS: dict[str, str] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
SUBCOMMANDS = [("mvp-orchestrator", "doctor"), ("mvp-orchestrator", "cache")]
WIDTH_MAX = 160  # of a terminal on a wide screen; most lines are of 80 to 120


def run(script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    module, _, function = SCRIPTS[script].partition(":")
    code = f"import sys; sys.argv[0] = {script!r}; from {module} import {function}; sys.exit({function}())"
    command = [sys.executable, "-P", "-c", code, *arguments]
    environ = {**os.environ, "COLUMNS": "100"}
    return subprocess.run(
        command, capture_output=True, text=True, timeout=120, check=False, stdin=subprocess.DEVNULL, env=environ
    )


@pytest.mark.parametrize(("script", "word"), [*((name, "") for name in SCRIPTS), *SUBCOMMANDS])
def test_help_names_the_program_its_options_and_an_example(script: str, word: str) -> None:
    told = run(script, *filter(None, [word]), "--help")
    assert (told.returncode, told.stderr) == (0, "")
    text = told.stdout
    assert text.lower().startswith("usage: ") and script in text
    assert "--" in text
    example = re.split(r"\bexamples?\b", " ".join(text.split()), maxsplit=1)[-1]
    assert script in example and example != text, f"{script} --help has no example"
    assert max(map(len, text.splitlines())) <= WIDTH_MAX


@pytest.mark.parametrize("script", SCRIPTS)
def test_an_unknown_option_is_said_without_a_traceback(script: str) -> None:
    told = run(script, "--frobnicate")
    assert told.returncode in (1, 2) and told.stdout == ""
    assert script in told.stderr and "Traceback" not in told.stderr
