"""Provider external on three boxes: network namespaces, a launch file copied to each, and the README's own steps."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from services.provisioner.ledger import ledger_folder
from tests.e2e.stack import model_file
from tests.support.secrets import arguments_of_all, seen_in
from tools.prompt_client import PromptClient

NET = "10.219.75"  # of no test of the docker tier, which runs at the same time
BRIDGE, HERE = "smqboxes0", f"{NET}.1"
BOXES = 3
LIMIT_S = 300
CONFIG = """\
[runtime]
pipeline_stages = {stages}
run_dir = "{run_dir}"
[provider]
kind = "external"
[relay]
bind_addr = "{here}:19800"
[model]
cached_path = "{model}"
[prompt]
rpc_addr = "127.0.0.1:0"
[observability]
datastream_frame_log = "{archive}"
"""
WAITS = re.compile(r"mvp-orchestrator: node (\d+) waits for its worker: copy (\S+) to its machine \(mode 0600\)")
missing = [name for name in ("ip", "unshare", "mount") if shutil.which(name) is None]

pytestmark = pytest.mark.skipif(
    os.geteuid() != 0 or bool(missing),
    reason=f"network namespaces need root and ip, unshare, mount; missing: {missing}",
)


def ip(*words: str, check: bool = True) -> None:
    subprocess.run(["ip", *words], check=check, capture_output=True)


@pytest.fixture
def boxes() -> Iterator[list[str]]:
    """Names of network namespaces that reach this machine, and that nobody reaches by another way."""
    names = [f"smqbox{number}" for number in range(BOXES)]

    def remove() -> None:
        for name in names:
            ip("netns", "del", name, check=False)
        ip("link", "del", BRIDGE, check=False)

    remove()
    ip("link", "add", BRIDGE, "type", "bridge")
    ip("addr", "add", f"{HERE}/24", "dev", BRIDGE)
    ip("link", "set", BRIDGE, "up")
    for number, name in enumerate(names):
        ip("netns", "add", name)
        ip("link", "add", f"smqb{number}", "type", "veth", "peer", "name", "eth0", "netns", name)
        ip("link", "set", f"smqb{number}", "master", BRIDGE, "up")
        ip("-n", name, "addr", "add", f"{NET}.{number + 11}/24", "dev", "eth0")
        ip("-n", name, "link", "set", "eth0", "up")
        ip("-n", name, "link", "set", "lo", "up")
    yield names
    remove()


@pytest.fixture
def models() -> Iterator[Path]:
    """Where every box has its models: a mount point here, filled in each box's own view only."""
    folder = Path("/models")
    made = not folder.exists()
    folder.mkdir(exist_ok=True)
    yield folder
    if made:
        with contextlib.suppress(OSError):
            folder.rmdir()


class Operator:
    """The orchestrator, and what it says on the terminal."""

    def __init__(self, folder: Path) -> None:
        self.archive, self.environment = (
            folder / "frames.jsonl",
            {**os.environ, "XDG_STATE_HOME": str(folder / "state")},
        )
        config = folder / "config.toml"
        config.write_text(
            CONFIG.format(stages=BOXES, run_dir=folder / "run", here=HERE, model=model_file(), archive=self.archive)
        )
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-m", "services.orchestrator", "--runtime-config", str(config)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            env=self.environment,
        )
        self.said = ""
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.said += line.decode()

    def wait(self, what: str, fact: object) -> object:
        until = time.monotonic() + LIMIT_S
        while time.monotonic() < until:
            if found := fact():  # type: ignore[operator]
                return found
            assert self.process.poll() is None, self.said
            time.sleep(0.2)
        raise AssertionError(f"{what}: not within {LIMIT_S} s; {self.said}")

    def rpc(self) -> str:
        with contextlib.suppress(FileNotFoundError, json.JSONDecodeError):
            for line in self.archive.read_text().splitlines():
                frame = json.loads(line)
                if frame["channel"] == "mvp.orch.bootstrap":
                    record = json.loads(frame["payload"]["value"])
                    if (record["phase"], record["status"]) == ("prompt_rpc", "ready"):
                        return str(record["detail"]["addr"])
        return ""


def start_box(name: str, launch: Path, models: Path) -> subprocess.Popen[bytes]:
    """The one command of the README, on the box: its own network, its own /models."""
    model = model_file()
    target = f"{models}/cached/{model.name}"
    script = (
        f"mount -t tmpfs tmpfs {models} && mkdir {models}/cached && touch {target} && mount --bind {model} {target}\n"
        f"cd {launch.parent} && exec {sys.executable} -P -m worker.agent --launch {launch.name}"
    )
    return subprocess.Popen(
        ["ip", "netns", "exec", name, "unshare", "--mount", "sh", "-c", script],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )


@pytest.mark.spec("S1 7.5", "S1 9.16", "S1 9.20", "S1 10.16")
def test_three_boxes_serve_one_model_and_no_key_is_seen(boxes: list[str], models: Path, tmp_path: Path) -> None:
    operator = Operator(tmp_path)
    workers: list[subprocess.Popen[bytes]] = []
    try:
        operator.wait("three launch files", lambda: len(WAITS.findall(operator.said)) == BOXES)
        secrets = []
        for name, (node, where) in zip(boxes, WAITS.findall(operator.said), strict=True):
            # As with scp: a folder of the box, mode 0600.
            copy = tmp_path / f"box-{node}" / "launch.json"
            copy.parent.mkdir()
            shutil.copy2(where, copy)
            assert copy.stat().st_mode & 0o777 == 0o600
            secrets.append(str(json.loads(copy.read_text())["secret_key"]))
            workers.append(start_box(name, copy, models))
        addr = str(operator.wait("the prompt RPC", operator.rpc))
        with contextlib.closing(PromptClient.connect(addr, wait_s=5)) as client:
            done = client.complete("What is the capital of France? One word.", max_tokens=8)
        assert "Paris" in done.final_text
        listed = subprocess.run(
            [sys.executable, "-P", "-m", "services.orchestrator", "workers", "--json", "--provider", "external"],
            env=operator.environment, capture_output=True, text=True, check=True,
        )  # fmt: skip
        assert [row["provider"] for row in json.loads(listed.stdout)] == ["external"] * BOXES
        ledger = "".join(path.read_text() for path in ledger_folder(operator.environment).glob("*.jsonl"))
        places = arguments_of_all() | {"ledger": ledger, "workers --json": listed.stdout, "terminal": operator.said}
        assert seen_in(places, secrets) == []
        assert operator.process.stdin is not None
        operator.process.stdin.write(b"stop\n")
        operator.process.stdin.flush()
        assert operator.process.wait(150) == 0, operator.said
        for worker in workers:
            assert worker.wait(60) == 0
        assert seen_in({"archive": operator.archive.read_text(), "terminal": operator.said}, secrets) == []
        assert not list(ledger_folder(operator.environment).glob("*.jsonl")) and not (tmp_path / "run").exists()
    finally:
        for process in (operator.process, *workers):
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
        for process in (operator.process, *workers):
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(30)
            if process.poll() is None:
                process.kill()
