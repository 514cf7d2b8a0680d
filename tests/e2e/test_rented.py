"""The whole mvp-orchestrator with provider vastai: a fake vast.ai, whose machine is a real sshd, and the real model."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import sysconfig
import time
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.stack import model_file
from tests.fakes.vastai.server import FakeVast
from tests.support.secrets import arguments_of_all, seen_in
from tests.unit.provisioner.vastai_stage import no_machines
from tools.prompt_client import PromptClient

pytestmark = pytest.mark.skipif(bool(no_machines()), reason=no_machines())
ROOT = Path(__file__).resolve().parents[2]
READY_S = 300
CONFIG = """\
[provider]
kind = "vastai"
[model]
id = "smollm2-135m-instruct"
gguf_local_path = "{model}"
[vastai]
ssh_identity = "{identity}"
confirm_lease = true
poll_interval_secs = 2
max_dph_total = 0.5
max_hours = 1
bootstrap_command = {bootstrap}
[prompt]
rpc_addr = "127.0.0.1:0"
[observability]
datastream_frame_log = "{archive}"
"""


def bootstrap_command() -> str:
    """The one that users get."""
    example = tomllib.loads((ROOT / "config" / "vastai.toml").read_text())
    return str(example["vastai"]["bootstrap_command"])


def image_logins(folder: Path) -> dict[str, str]:
    """What the image sets for logins: a pip without an index; what the wheel depends on is there already."""
    site = folder / "site"
    site.mkdir()
    for entry in Path(sysconfig.get_paths()["purelib"]).iterdir():
        if not entry.name.startswith(("swactor_mq", "_editable", "_swactor", "pip")) and entry.suffix != ".pth":
            (site / entry.name).symlink_to(entry)
    python = Path(sys._base_executable).resolve().parent
    settings = {"PIP_NO_INDEX": "1", "PIP_NO_DEPS": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    return {"PATH": f"{python}:/usr/bin:/bin", "PYTHONPATH": str(site), **settings}


class Rented:
    """One run on the fake market."""

    def __init__(self, folder: Path, fake: FakeVast) -> None:
        self.archive, self.state = folder / f"archive-{time.monotonic_ns()}.jsonl", folder / "state"
        identity = folder / "identity"
        if not identity.exists():
            subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(identity)], check=True)
        config = folder / "config.toml"
        config.write_text(
            CONFIG.format(
                model=model_file(), identity=identity, archive=self.archive, bootstrap=json.dumps(bootstrap_command())
            )
        )
        self.environment = os.environ | {
            "VASTAI_BASE_URL": fake.url,
            "VASTAI_API_KEY": fake.key,
            "XDG_STATE_HOME": str(self.state),
            "PYTHONPATH": str(ROOT),
        }
        command = [sys.executable, "-P", "-m", "services.orchestrator", "--runtime-config", str(config)]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, env=self.environment
        )

    def wait(self, phase: str, status: str = "ready") -> dict[str, Any]:
        until = time.monotonic() + READY_S
        while time.monotonic() < until:
            with contextlib.suppress(FileNotFoundError):
                for line in self.archive.read_text().splitlines():
                    with contextlib.suppress(json.JSONDecodeError):
                        frame = json.loads(line)
                        if frame["channel"] == "mvp.orch.bootstrap":
                            record: dict[str, Any] = json.loads(frame["payload"]["value"])
                            if (record["phase"], record["status"]) == (phase, status):
                                return record
            if self.process.poll() is not None:
                pytest.fail(f"the orchestrator ended: {self.error()}")
            time.sleep(0.1)
        pytest.fail(f"{phase} was not {status} in time")

    def error(self) -> str:
        assert self.process.stderr is not None
        return self.process.stderr.read().decode()

    def secrets(self, market: FakeVast) -> list[str]:
        """The account's key, the ssh identity, the worker's key, and the machine's own key."""
        (rented,) = [one for one in market.instances.values() if one.machine is not None]
        assert rented.machine is not None
        launch = json.loads(rented.machine.file("launch.json").read_text())
        identity = (self.state.parent / "identity").read_text().splitlines()[2]
        return [market.key, rented.key, str(launch["secret_key"]), identity]

    def workers(self) -> str:
        """What `mvp-orchestrator workers --json` prints."""
        command = [sys.executable, "-P", "-m", "services.orchestrator", "workers", "--json", "--provider", "vastai"]
        return subprocess.run(command, env=self.environment, capture_output=True, text=True, check=True).stdout

    def stop(self) -> int:
        assert self.process.stdin is not None
        self.process.stdin.write(b"stop\n")
        self.process.stdin.flush()
        return self.process.wait(150)


def _is_tunnel_of(entry: Path, folder: Path) -> bool:
    with contextlib.suppress(OSError):
        words = (entry / "cmdline").read_bytes()
        return entry.name.isdecimal() and words.startswith(b"ssh\0") and str(folder).encode() in words
    return False


@pytest.fixture
def market(tmp_path: Path) -> Iterator[FakeVast]:
    fake = FakeVast()
    fake.login = image_logins(tmp_path)
    fake.offer(price=0.2, behaviour="oci")
    fake.offer(price=0.3)
    fake.offer(price=0.4)
    yield fake
    fake.close()


@pytest.fixture
def rented(market: FakeVast, tmp_path: Path) -> Iterator[Rented]:
    run = Rented(tmp_path, market)
    yield run
    if run.process.poll() is None:
        run.process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            run.process.wait(60)
        run.process.kill()


@pytest.mark.spec("S1 4.1", "S1 4.5", "S1 7.3", "S1 7.5", "S1 9.16", "S1 9.20", "S1 10.16")
def test_a_rented_machine_answers_through_the_tunnel_and_is_given_back(rented: Rented, market: FakeVast) -> None:
    market.foreign(30)
    addr = rented.wait("prompt_rpc")["detail"]["addr"]
    assert rented.wait("provider_start")["detail"]["dph_total"] == 0.3, "what it costs is on record"
    with contextlib.closing(PromptClient.connect(addr, wait_s=5)) as client:
        done = client.complete("What is the capital of France? One word.", max_tokens=12)
    assert "Paris" in done.final_text
    assert len(market.created) == 2, "the first machine's engine could not start it"
    secrets = rented.secrets(market)
    # What everybody on either machine, in the account or with a look at our files can read.
    listed = rented.workers()
    (row,) = json.loads(listed)
    assert row["provider"] == "vastai" and row["dph"] == 0.3 and row["owner"] == "run" and row["state"] == "running"
    rows = market._list({})[1]["instances"]
    asked = "".join(path + body for _, path, body in market.requests)
    ledger = "".join(path.read_text() for path in (rented.state / "swactor-mq" / "ledger").glob("*.jsonl"))
    places = {"requests": asked, "instances": json.dumps(rows), "ledger": ledger, "workers --json": listed}
    (machine,) = [one.machine for one in market.instances.values() if one.machine is not None]
    places |= {f"machine {name}": machine.file(name).read_text() for name in ("out", "err")} | {"onstart": machine.log}
    assert seen_in(places | arguments_of_all(), secrets) == []
    assert rented.stop() == 0, rented.error()
    assert seen_in({"archive": rented.archive.read_text(), "terminal": rented.error()}, secrets) == []
    assert len(market.instances) == 30
    assert not list((rented.state / "swactor-mq" / "ledger").glob("*.jsonl"))
    told = rented.archive.read_text()
    assert "OCI runtime create failed" in told


@pytest.mark.spec("S1 9.16")
def test_after_a_kill_of_everything_the_next_start_gives_the_machine_back(
    rented: Rented, market: FakeVast, tmp_path: Path
) -> None:
    rented.wait("provider_start")
    children = Path(f"/proc/{rented.process.pid}/task/{rented.process.pid}/children").read_text().split()
    # As one: whoever sees another die cleans up.
    for number in (signal.SIGSTOP, signal.SIGKILL):
        for pid in [rented.process.pid, *map(int, children)]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
    rented.process.wait()
    left = set(market.instances)
    assert len(left) == 1
    following = Rented(tmp_path, market)
    try:
        following.wait("node_provisioner")
        assert not left & set(market.instances)
        tunnels = [entry for entry in Path("/proc").iterdir() if _is_tunnel_of(entry, tmp_path)]
        assert not tunnels, "a tunnel of the killed run is left"
        following.process.send_signal(signal.SIGINT)
        assert following.process.wait(150) == 1
        assert not market.instances
    finally:
        following.process.kill()
