"""What a fake instance really is: an sshd of its own in its own process and mount namespace. Destroyed means killed."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from pathlib import Path

from common.door import free_ports

WORK = "/tmp/swactor-mq"
SSHD = "/usr/sbin/sshd"


class FakeMachine:
    """Root logs in with the account's keys. The container's variables are those of process 1, as at vast.ai; what its
    image would set for logins as well is `login`."""

    def __init__(
        self, instance: int, keys: list[str], onstart: str, variables: dict[str, str], login: dict[str, str]
    ) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix=f"fake-vast-{instance}-", dir="/tmp"))
        self.port = free_ports("127.0.0.1")  # below those that every connection of this machine takes from
        (self.folder / "work").mkdir(mode=0o700)
        Path(WORK).mkdir(mode=0o700, exist_ok=True)
        Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)
        (self.folder / "keys").write_text("".join(f"{key}\n" for key in keys))
        (self.folder / "onstart").write_text(onstart)
        host_key = self.folder / "host_key"
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(host_key)], check=True)
        (self.folder / "sshd_config").write_text(
            f"Port {self.port}\nListenAddress 127.0.0.1\nHostKey {host_key}\nAuthorizedKeysFile {self.folder}/keys\n"
            "StrictModes no\nUsePAM no\nPidFile none\nPermitRootLogin prohibit-password\nPasswordAuthentication no\n"
            "KbdInteractiveAuthentication no\nMaxStartups 100\nLogLevel ERROR\n"
            # One line: of several sshd takes only the first.
            + ("SetEnv " + " ".join(f'"{name}={value}"' for name, value in login.items()) + "\n" if login else "")
        )
        # A container has a root of its own: what this machine's root does at a login is not part of it.
        (self.folder / "empty").touch()
        logins = [Path("~root").expanduser() / name for name in (".bashrc", ".profile", ".bash_profile")]
        hide = "".join(f"mount --bind {self.folder}/empty {path}\n" for path in logins if path.is_file())
        script = hide + (
            f"mount --bind {self.folder}/work {WORK} && (sh {self.folder}/onstart >{self.folder}/onstart.log 2>&1 &)\n"
            f"exec {SSHD} -D -e -f {self.folder}/sshd_config"
        )
        environment = {"PATH": os.environ["PATH"], "HOME": str(self.folder), **variables}
        with (self.folder / "log").open("wb") as log:
            self._process = subprocess.Popen(
                ["unshare", "--mount", "--pid", "--fork", "--kill-child=SIGKILL", "--mount-proc", "sh", "-c", script],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    @property
    def alive(self) -> bool:
        """Whether its processes run."""
        return self._process.poll() is None

    def file(self, name: str) -> Path:
        """A file of the worker's folder on the machine."""
        return self.folder / "work" / name

    @property
    def log(self) -> str:
        """What the container's onstart has printed."""
        with contextlib.suppress(OSError):
            return (self.folder / "onstart.log").read_text(errors="replace")
        return ""

    def wait_up(self) -> None:
        """Until its sshd answers."""
        until = time.monotonic() + 60
        while time.monotonic() < until:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), 1):
                return
            time.sleep(0.05)

    def destroy(self) -> None:
        """Everything of it is gone when this returns."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(60)
        shutil.rmtree(self.folder, ignore_errors=True)
