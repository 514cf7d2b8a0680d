"""The ssh tunnel to a rented node: our broker's ports appear on the container's loopback, and the node's key goes over
(S2 1, 5; providers.md E). The OpenSSH client as a child, started again with the next address when it ends.
"""

from __future__ import annotations

import contextlib
import shlex
import subprocess
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from common.addresses import Plane
from worker.gpu_node.ends import LOOPBACK

RETRY_S = 2.0
NODE_KEY_FILE = "/run/smq/node.key"
USER = "root"  # of every vast.ai container


@dataclass(frozen=True, slots=True)
class Ports:
    """The bases of the four ports: our broker's here, and what the container dials on its own loopback."""

    here: int
    there: int


def remote_command(path: str = NODE_KEY_FILE) -> str:
    """Take the key from standard input, put it in place in one step, and stay until the client is gone."""
    folder, part, whole = (shlex.quote(text) for text in (str(Path(path).parent), f"{path}.part", path))
    return f"umask 077 && mkdir -p {folder} && head -n 1 > {part} && mv {part} {whole} && exec cat > /dev/null"


class Tunnel:
    """`tend` now and then; `close` at the end."""

    def __init__(
        self,
        addresses: Sequence[tuple[str, int]],
        ports: Ports,
        secret: bytes,
        *,
        identity: Path | None,
        key_file: str = NODE_KEY_FILE,
    ) -> None:
        self._addresses, self._ports, self._secret, self._identity = list(addresses), ports, secret, identity
        self._key_file = key_file
        self._folder = tempfile.TemporaryDirectory(prefix="smq-ssh-")
        self._child: subprocess.Popen[bytes] | None = None
        self._tries = 0
        self._next = 0.0

    def tend(self) -> str:
        """Start or restart what is not running. Returns a sentence when a try has failed, else nothing."""
        said = ""
        if self._child is not None and self._child.poll() is not None:
            said = self._why(self._child.returncode)
            self._end()
            self._next = time.monotonic() + RETRY_S
        if self._child is None and self._addresses and time.monotonic() >= self._next:
            self._start(*self._addresses[self._tries % len(self._addresses)])
            self._tries += 1
        return said

    def close(self) -> None:
        """End it."""
        self._end()
        self._folder.cleanup()

    def command(self, host: str, port: int) -> list[str]:
        """The ssh command line (settings and their reasons: providers.md E)."""
        options = {
            "BatchMode": "yes",
            "ExitOnForwardFailure": "yes",
            "ServerAliveInterval": "10",
            "ServerAliveCountMax": "3",
            "ConnectTimeout": "10",
            "StrictHostKeyChecking": "accept-new",
            "UserKnownHostsFile": f"{self._folder.name}/known_hosts",
            "ControlMaster": "no",
            "LogLevel": "ERROR",
        }
        command = ["ssh", "-T", "-F", "none"]
        for name, value in options.items():
            command += ["-o", f"{name}={value}"]
        if self._identity is not None:
            command += ["-o", "IdentitiesOnly=yes", "-i", str(self._identity)]
        for plane in Plane:
            there, here = self._ports.there + int(plane), self._ports.here + int(plane)
            command += ["-R", f"{LOOPBACK}:{there}:{LOOPBACK}:{here}"]
        return [*command, "-p", str(port), f"{USER}@{host}", remote_command(self._key_file)]

    def _start(self, host: str, port: int) -> None:
        with open(f"{self._folder.name}/stderr", "wb") as stderr:
            self._child = subprocess.Popen(
                self.command(host, port),
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=stderr,
                start_new_session=True,
            )
        assert self._child.stdin
        with contextlib.suppress(BrokenPipeError):
            self._child.stdin.write(self._secret.hex().encode() + b"\n")
            self._child.stdin.flush()

    def _why(self, status: int) -> str:
        lines = Path(self._folder.name, "stderr").read_text(errors="replace").split("\n")
        last = next((line.strip() for line in reversed(lines) if line.strip()), f"status {status}")
        return "".join(char for char in last if char.isprintable())[:300]

    def _end(self) -> None:
        if self._child is not None:
            if self._child.poll() is None:
                self._child.kill()
                self._child.wait()
            if self._child.stdin:
                with contextlib.suppress(BrokenPipeError):
                    self._child.stdin.close()
            self._child = None
