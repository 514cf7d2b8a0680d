"""The launcher's own edges: closed descriptors, a stderr that is gone, configuration errors (S1 3.1, 9.1, 10)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

LAUNCH = [sys.executable, "-P", "-m", "services.orchestrator"]


def closed(*fds: int) -> str:
    """A shell redirection list."""
    return " ".join(f"{fd}{'<' if fd == 0 else '>'}&-" for fd in fds)


@pytest.mark.parametrize("fds", [(0,), (1,), (2,), (0, 1, 2)])
def test_closed_descriptors_are_filled_before_anything_is_opened(tmp_path: Path, fds: tuple[int, ...]) -> None:
    """Else the first socket would be number 0 and taken for standard input."""
    code = "; ".join(
        [
            "import json, os",
            "from services.orchestrator.launcher import open_standard_descriptors as fill",
            "fill()",
            "found = [os.readlink(f'/proc/self/fd/{fd}') for fd in (0, 1, 2)]",
            "new = os.open('/', os.O_RDONLY)",
            f"open({str(tmp_path / 'out')!r}, 'w').write(json.dumps((found, new)))",
        ]
    )
    script = f'exec "{sys.executable}" -P -c "$1" {closed(*fds)}'
    done = subprocess.run(["sh", "-c", script, "sh", code], capture_output=True, timeout=120)
    assert done.returncode == 0, done.stderr
    found, new = json.loads((tmp_path / "out").read_text())
    assert new > 2 and all(found[fd] == "/dev/null" for fd in fds)


@pytest.mark.spec("S1 3.1", "S1 9.1", "S1 10.1", "S1 10.2")
def test_a_wrong_configuration_is_one_line_and_status_1(tmp_path: Path) -> None:
    done = subprocess.run([*LAUNCH, "--frobnicate"], capture_output=True, text=True, cwd=tmp_path, timeout=120)
    assert done.returncode == 1 and done.stdout == ""
    assert done.stderr.count("\n") == 1 and done.stderr.startswith('mvp-orchestrator: argument "--frobnicate"')
    assert list(tmp_path.iterdir()) == []


@pytest.mark.spec("S1 3.1")
def test_it_ends_with_status_1_also_where_nobody_reads_the_line(tmp_path: Path) -> None:
    """stderr closed, or a pipe whose reader is gone."""
    script = f'exec "{sys.executable}" -P -m services.orchestrator --frobnicate {closed(0, 1, 2)}'
    assert subprocess.run(["sh", "-c", script], cwd=tmp_path, timeout=120).returncode == 1
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "wb") as pipe:
        assert subprocess.run([*LAUNCH, "--frobnicate"], stderr=pipe, cwd=tmp_path, timeout=120).returncode == 1


@pytest.mark.spec("S1 2.3")
@pytest.mark.parametrize(("argument", "says"), [("--help", "usage: mvp-orchestrator"), ("--version", "mvp-orch")])
def test_information_is_for_stdout(tmp_path: Path, argument: str, says: str) -> None:
    done = subprocess.run([*LAUNCH, argument], capture_output=True, text=True, cwd=tmp_path, timeout=120)
    assert done.returncode == 0 and done.stdout.startswith(says) and done.stderr == ""


def test_a_folder_services_where_it_is_started_is_not_taken_for_ours(tmp_path: Path) -> None:
    """design.md 2: -P for every child."""
    trap = tmp_path / "services"
    trap.mkdir()
    (trap / "__init__.py").write_text("raise SystemExit('the wrong services')")
    (tmp_path / "common").mkdir()
    (tmp_path / "common" / "__init__.py").write_text("raise SystemExit('the wrong common')")
    program = Path(sys.executable).with_name("mvp-orchestrator")
    done = subprocess.run([program, "--frobnicate"], capture_output=True, text=True, cwd=tmp_path, timeout=120)
    assert "wrong" not in done.stderr and "--frobnicate" in done.stderr
