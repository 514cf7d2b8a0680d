"""The process as the launcher sees it: the report, the owner's pipe, exit statuses (S1 9.1; design.md 2)."""

from __future__ import annotations

import os
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from common.codec import decode_body, tag_of
from common.messages.config import ConfigFailed, ConfigResolved
from services.config_resolver.service import read_line
from tests.unit.config.config_world import CACHED, World, make_world

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def world(tmp_path: Path) -> World:
    made = make_world(tmp_path.resolve())
    (made.cwd / "c.toml").write_text(CACHED + "[runtime]\nrun_dir = 'run'\nnode_id = 4\n[relay]\nmode = 'default'\n")
    # A folder `services` where the user stands must not be taken for ours.
    (made.cwd / "services").mkdir()
    (made.cwd / "services" / "__init__.py").write_text("raise SystemExit(99)\n")
    return made


def start(
    world: World, *arguments: str, environ: dict[str, str] | None = None
) -> tuple[subprocess.Popen[bytes], int, int]:
    """(process, read end of the report, write end of the owner's pipe)."""
    report_out, report_in = os.pipe()
    owner_out, owner_in = os.pipe()
    command = [sys.executable, "-P", "-m", "services.config_resolver"]
    command += ["--report-fd", str(report_in), "--owner-fd", str(owner_out), "--", *arguments]
    process = subprocess.Popen(
        command,
        cwd=world.cwd,
        env={"PYTHONPATH": str(ROOT), "PATH": os.environ["PATH"], **(environ or {})},
        pass_fds=(report_in, owner_out),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    os.close(report_in)
    os.close(owner_out)
    return process, report_out, owner_in


def read_report(fd: int) -> ConfigResolved | ConfigFailed:
    with open(fd, "rb") as pipe:
        data = pipe.read()
    (length,) = struct.unpack("<I", data[:4])
    body = data[4:]
    assert len(body) == length
    for kind in (ConfigResolved, ConfigFailed):
        try:
            return decode_body(tag_of(kind), body)  # type: ignore[return-value]
        except ValueError:
            continue
    raise AssertionError(body)


@pytest.mark.spec("S1 9.1")
def test_embedded_resolves_reports_and_leaves_with_its_owner(world: World) -> None:
    worker = str(world.cwd / "bin" / "mvp-worker-node")
    process, report, owner = start(world, "--runtime-config", "c.toml", "--worker-bin", worker)
    found = read_report(report)
    assert isinstance(found, ConfigResolved)
    assert len(found.digest) == 64
    assert (found.run_dir, found.relay, found.run_id, found.node_id) == (str(world.cwd / "run"), True, 1, 4)
    assert found.provider == "process"
    assert process.poll() is None, "it waits for its bus file"
    os.close(owner)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out, err) == (0, b"", b"")


@pytest.mark.spec("S1 9.1", "S1 10.2", "S1 10.16")
def test_embedded_reports_one_sentence(world: World) -> None:
    environ = {"VASTAI_API_KEY": "QXQXQXQXQX", "HF_TOKEN": "QZQZQZQZQZ"}
    process, report, owner = start(world, "--runtime-config", "c.toml", "--provider", "mock", environ=environ)
    found = read_report(report)
    assert found == ConfigFailed(
        error='argument --provider = "mock" is not valid: '
        'it must be "process", "docker", "swarm", "vastai" or "external"'
    )
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out, err) == (1, b"", b"")
    os.close(owner)


def run(world: World, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-P", "-m", "services.config_resolver", *arguments],
        cwd=world.cwd,
        env={"PYTHONPATH": str(ROOT), "PATH": os.environ["PATH"]},
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.mark.spec("S1 2.3")
def test_help_and_misuse(world: World) -> None:
    shown = run(world, "--help")
    assert (shown.returncode, shown.stderr) == (0, "")
    assert shown.stdout.startswith("usage: mvp-orchestrator")
    assert run(world).returncode == 2
    assert run(world, "--report-fd", "1", "--", "x").returncode == 2


def test_hosted_without_a_bus_file(world: World) -> None:
    gone = run(world, "--bus", "gone.json", "--runtime-config", "c.toml")
    assert gone.returncode == 1
    assert gone.stderr.startswith("config_resolver: ")
    assert gone.stderr.count("\n") == 1


def test_read_line_leaves_the_rest_for_the_host() -> None:
    out, into = os.pipe()
    os.write(into, b"/run/bus.json\nrest")
    assert read_line(out) == "/run/bus.json"
    assert os.read(out, 10) == b"rest"
    os.close(into)
    assert read_line(out) == ""
    os.close(out)


def test_nothing_else_pays_for_pydantic() -> None:
    """0.3 s and 20 MB are the resolver's alone."""
    code = "import sys, common.config_args, common.config_slices, common.config_model; print('pydantic' in sys.modules)"
    found = subprocess.run(
        [sys.executable, "-P", "-c", code], cwd=ROOT, env={"PYTHONPATH": str(ROOT)}, capture_output=True
    )
    assert found.stdout == b"False\n"
