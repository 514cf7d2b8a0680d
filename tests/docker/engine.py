"""A real Docker engine of our own for the tests: dockerd with its own bridge, images from a Debian root file system.

Nothing of a Docker that already runs on the machine is used or touched. Images are kept between runs in the cache.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import docker
import docker.errors

from services.provisioner.processes import start_time

ROOT = Path(__file__).resolve().parents[2]
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "swactor-mq-tests" / "docker"
BRIDGE, BRIDGE_NET = "smqtest0", "10.219.71.1/24"
GATEWAY = BRIDGE_NET.partition("/")[0]
BASE = "debian:bookworm-slim"
WORKER_IMAGE = "swactor-mvp-node:latest"
SERVICES_IMAGE = "swactor-mvp-services:latest"
HABIT_IMAGE = "smq-test-habits:latest"
SWARM_HABIT_IMAGE = "smq-test-swarm-habits:latest"
START_LIMIT_S = 150  # a slow disk, and others that use it


class EngineError(Exception):
    """The engine cannot be started here; one sentence."""


def why_not() -> str:
    """Why no engine can be started on this machine, "" if one can."""
    if os.geteuid() != 0:
        return "starting dockerd needs root"
    for program, package in (("dockerd", "docker.io"), ("mmdebstrap", "mmdebstrap"), ("ip", "iproute2")):
        if shutil.which(program) is None:
            return f"{program} is missing: apt-get install {package}"
    return ""


class TestEngine:
    """dockerd as a child. Its data lies in the cache, locked, so that two test runs do not share it at once."""

    __test__ = False

    def __init__(self, run_dir: Path, data: Path = CACHE, network: str = "") -> None:
        """network: the network namespace to live in, with Docker's own bridge there; "" for this one."""
        self.run_dir, self.data, self.network = run_dir, data, network
        run_dir.mkdir(parents=True, exist_ok=True)
        self.host = f"unix://{run_dir}/docker.sock"
        self.environment = dict(os.environ) | {"DOCKER_HOST": self.host}
        self.live_restore = False
        self._process: subprocess.Popen[bytes] | None = None
        data.mkdir(parents=True, exist_ok=True)
        self._lock = open(data / "lock", "w")  # noqa: SIM115 - held for the engine's life
        fcntl.flock(self._lock, fcntl.LOCK_EX)

    def start(self) -> None:
        """Until it answers. Raises EngineError with the end of its log."""
        (self.run_dir / "docker.pid").unlink(missing_ok=True)
        command = ["dockerd", "-H", self.host, "--data-root", str(self.data / "data")]
        if self.network:
            # Not `ip netns exec`: it mounts /sys anew, without the cgroups.
            command = ["nsenter", f"--net=/run/netns/{self.network}", *command]
        else:
            subprocess.run(["ip", "link", "add", BRIDGE, "type", "bridge"], stderr=subprocess.DEVNULL, check=False)
            subprocess.run(["ip", "addr", "replace", BRIDGE_NET, "dev", BRIDGE], check=True)
            subprocess.run(["ip", "link", "set", BRIDGE, "up"], check=True)
            command += ["--bridge", BRIDGE]
        command += ["--exec-root", str(self.run_dir / "exec"), "-p", str(self.run_dir / "docker.pid")]
        # Without CAP_SYS_RESOURCE the default of -500 cannot be set.
        command += ["--oom-score-adjust", "0", "--containerd-namespace", "smqtest", "--log-level", "warn"]
        if self.live_restore:
            command.append("--live-restore")
        with (self.run_dir / "dockerd.log").open("ab") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL)
        until = time.monotonic() + START_LIMIT_S
        while time.monotonic() < until and self._process.poll() is None:
            with contextlib.suppress(Exception):
                self.client().ping()
                return
            time.sleep(0.2)
        raise EngineError(f"dockerd does not start: {self.log_tail()}")

    def log_tail(self) -> str:
        """Its last words."""
        with contextlib.suppress(OSError):
            return "\n".join((self.run_dir / "dockerd.log").read_text(errors="replace").splitlines()[-5:])
        return ""

    def client(self) -> Any:
        """A docker.APIClient of the test's own."""
        return docker.APIClient(base_url=self.host, version="1.41", timeout=150)

    def end(self, how: int = signal.SIGTERM) -> None:
        """Stop dockerd, and the containerd that it started: that one outlives a SIGKILL of dockerd."""
        if self._process is None:
            return
        self._process.send_signal(how)
        self._process.wait(150)
        self._process = None
        if how == signal.SIGTERM:
            return
        # Its containerd dies with it; while that is a zombie, the next dockerd takes its pid file for a living one.
        pid_file = self.run_dir / "exec" / "containerd" / "containerd.pid"
        with contextlib.suppress(OSError, ValueError):
            pid, until = int(pid_file.read_text()), time.monotonic() + 60
            while start_time(pid) is not None and time.monotonic() < until:
                time.sleep(0.05)
            pid_file.unlink()

    def clear(self) -> None:
        """Remove what a test run that was killed has left in the data: images stay."""
        api = self.client()
        until = time.monotonic() + START_LIMIT_S
        while (left := api.containers(all=True)) and time.monotonic() < until:
            for found in left:
                # A swarm that was left removes its own at the same time.
                with contextlib.suppress(docker.errors.APIError):
                    api.remove_container(found["Id"], force=True, v=True)
        for network in api.networks():
            if network["Name"] not in ("bridge", "host", "none", "docker_gwbridge", "ingress"):
                api.remove_network(network["Id"])
        for volume in api.volumes()["Volumes"] or []:
            api.remove_volume(volume["Name"], force=True)

    def close(self) -> None:
        """No container, process, interface, mount or lock is left."""
        with contextlib.suppress(Exception):
            self.clear()
        self.end()
        # A dockerd that finds its data mounted on itself, because the one before it was killed, leaves it so.
        subprocess.run(["umount", str(self.data / "data")], stderr=subprocess.DEVNULL, check=False)
        if not self.network:
            subprocess.run(["ip", "link", "del", BRIDGE], stderr=subprocess.DEVNULL, check=False)
        self._lock.close()

    def containers(self, label: str = "swactor-mq=worker") -> list[dict[str, Any]]:
        """All that bear the label."""
        return list(self.client().containers(all=True, filters={"label": [label]}))

    # --- images ---------------------------------------------------------------------------------------------------
    def build_base(self) -> None:
        """A Debian root file system under the name that the Dockerfiles start from; no registry is asked."""
        api = self.client()
        if any(BASE in (image["RepoTags"] or []) for image in api.images()):
            return
        tar = self.data / "base.tar"
        command = ["mmdebstrap", "--quiet", "--variant=minbase", "--include=python3,ca-certificates"]
        # The machine's own certificates and index of packages: the build installs with pip.
        for path in ("/etc/ssl/certs/ca-certificates.crt", "/etc/pip.conf"):
            if os.path.exists(path):
                command.append(f"--customize-hook=copy-in {path} {os.path.dirname(path)}")
        done = subprocess.run([*command, "bookworm", str(tar)], capture_output=True, text=True, check=False)
        if done.returncode:
            raise EngineError(f"mmdebstrap failed: {done.stderr[-500:]}")
        name, _, version = BASE.partition(":")
        api.import_image_from_file(str(tar), repository=name, tag=version)
        tar.unlink()

    def build(self, dockerfile: str, tag: str, path: Path = ROOT, **arguments: str) -> None:
        """The classic builder; unchanged layers come from its cache. arguments: those of the build."""
        lines = []
        for line in self.client().build(
            path=str(path), dockerfile=dockerfile, tag=tag, rm=True, decode=True, timeout=600, buildargs=arguments
        ):
            lines.append(str(line.get("stream", line)).rstrip())
            if "error" in line:
                raise EngineError(f"the image {tag} cannot be built: " + "\n".join(lines[-15:]))
