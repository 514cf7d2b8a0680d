"""A provider on a fake vast.ai, with real machines (sshd) where a test wants them."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from common.config_slices import VastAiSlice
from common.messages.provision import NodeProvisionSpec
from services.provisioner.plugin import Owner, PluginNodeHandle
from services.provisioner.vastai_provider import VastAiProvider
from tests.fakes.vastai.server import FakeVast
from tests.unit.provisioner.conftest import Watched

FLEET = "0123456789abcdef"
SECRET = "s3cret-of-the-worker"
WORKER = """
import os, sys, time
args = sys.argv[1:]
launch = open(args[args.index("--launch") + 1]).read()
print("ready", len(launch), flush=True)
print("careful", file=sys.stderr, flush=True)
count = 0
while not os.path.exists("/tmp/swactor-mq/go"):
    time.sleep(0.05)
    count += 1
    print("tick", count, flush=True)
sys.exit(3)
"""


def no_machines() -> str:
    """Why there can be no real machines here, "" if there can."""
    if os.geteuid() != 0:
        return "sshd in a namespace needs root"
    missing = [name for name in ("ssh", "ssh-keygen", "unshare") if shutil.which(name) is None]
    if not os.path.exists("/usr/sbin/sshd"):
        missing.append("sshd")
    return f"missing: {', '.join(missing)}" if missing else ""


class VastStage:
    """Keys, configuration, provider; everything ends with `close`."""

    def __init__(self, folder: Path, *, real: bool) -> None:
        self.folder = folder
        self.fake = FakeVast(real=real)
        identity = folder / "identity"
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(identity)], check=True)
        self.public = " ".join(identity.with_suffix(".pub").read_text().split()[:2])
        self.identity = str(identity)
        (folder / "worker.py").write_text(WORKER)
        self._count = 0

    def secret(self, name: str, text: str) -> str:
        path = self.folder / name
        path.write_text(text)
        path.chmod(0o600)
        return str(path)

    def slice(self, **more: Any) -> VastAiSlice:
        wanted: dict[str, Any] = {
            "api_key_file": self.secret("key", self.fake.key),
            "bootstrap_command_file": self.secret("bootstrap", f"{sys.executable} {self.folder}/worker.py"),
            "ssh_identity": self.identity,
            "ssh_public_key": self.public,
            "disk_gb": 50,
            "ssh_user": "root",
            "confirm_lease": True,
            "min_down_mbps": 100.0,
            "min_reliability": 0.95,
            "require_verified": False,
            "poll_interval_secs": 1,
        }
        return VastAiSlice(**(wanted | more))

    def provider(self, *, fleet: str = FLEET, forwards: Any = (), config: Any = None, **more: Any) -> VastAiProvider:
        environment = {"VASTAI_BASE_URL": self.fake.url, "PATH": os.environ["PATH"]}
        return VastAiProvider(
            config or self.slice(**more),
            "image:1",
            Owner(fleet, "test"),
            list(forwards),
            self.folder / "state",
            environment,
            pace=0.05,
        )

    def handle_id(self) -> str:
        self._count += 1
        return f"cafe0123-{self._count}-{os.urandom(12).hex()}"

    def start(self, provider: VastAiProvider, handle_id: str = "") -> tuple[PluginNodeHandle, Watched]:
        launch = self.folder / "launch.json"
        launch.write_text(json.dumps({"secret_key": SECRET}))
        spec = NodeProvisionSpec(run_id=1, node_id=1, stage_index=0, image="", env={"DEV": "CPU", "HF_TOKEN": "hf_x"})
        watched = Watched()
        return provider.start_node(handle_id or self.handle_id(), spec, launch, watched), watched

    def close(self) -> None:
        self.fake.close()
