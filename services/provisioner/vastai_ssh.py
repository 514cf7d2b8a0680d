"""The way to a rented machine: OpenSSH's client, for one deployment and then one session with tunnel and output.

The worker dials its own loopback; the session's four reverse forwards lead to the relay here. A session that breaks is
begun again; the worker does not notice more than a pause.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path

from services.provisioner.lines import LineSplitter, bridge_frame
from services.provisioner.plugin import Exited, Failed, ProviderError, ProviderLine, Sink, StderrLine, StdoutLine
from services.provisioner.processes import MARK_VARIABLE, describe_status, exit_status
from services.provisioner.vastai_scripts import EXIT_WORD, READY_WORD, follow

CONNECT_S = 10
DEPLOY_S = 300  # a wheel of a few megabytes over a slow line; the bootstrap's installation is not part of it
LOOK_S = 0.2  # between two looks whether it was cancelled
LOST_S = 180  # so long a worker may be out of reach; its own lease is longer
RETRY_S_MIN, RETRY_S_MAX = 0.5, 10.0


class Machine:
    """One sshd: user@host:port with the prepared identity. known_hosts: pins the host key at the first contact.

    mark: in the environment of its ssh clients, by which a later start finds those of a killed one.
    """

    def __init__(self, user: str, host: str, port: int, identity: str, known_hosts: Path, mark: str) -> None:
        self.host, self.port = host, port
        self._environment = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
        self._environment[MARK_VARIABLE] = mark
        self._command = ["ssh", "-T", "-F", "none", "-p", str(port), "-i", identity]
        options = {
            "BatchMode": "yes",
            "IdentitiesOnly": "yes",
            "ControlMaster": "no",
            "ConnectTimeout": str(CONNECT_S),
            "ExitOnForwardFailure": "yes",
            # Debian changes the interval under BatchMode, so it is always said.
            "ServerAliveInterval": "10",
            "ServerAliveCountMax": "3",
            "StrictHostKeyChecking": "accept-new",
            "UserKnownHostsFile": str(known_hosts),
            "LogLevel": "ERROR",
        }
        for name, value in options.items():
            self._command += ["-o", f"{name}={value}"]
        self._target = f"{user}@{host}"

    def deploy(self, script: str, data: bytes, cancelled: Callable[[], bool] = lambda: False) -> None:
        """Run a script with the data on its stdin. Raises ProviderError, also as soon as it is cancelled."""
        until = time.monotonic() + DEPLOY_S
        # In memory, not in a pipe: communicate() forgets the rest of its input when it is interrupted by a timeout.
        with open(os.memfd_create("deploy"), "w+b") as source:
            source.write(data)
            source.seek(0)
            process = subprocess.Popen(
                [*self._command, self._target, script],
                stdin=source,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env=self._environment,
                start_new_session=True,
            )
        with process:
            while True:
                try:
                    out, err = process.communicate(timeout=LOOK_S)
                    break
                except subprocess.TimeoutExpired:
                    if cancelled() or time.monotonic() > until:
                        process.kill()
                        what = "the start was cancelled" if cancelled() else f"no answer within {DEPLOY_S} s"
                        raise ProviderError(f"ssh to {self.host}:{self.port}: {what}") from None
        if READY_WORD.encode() not in out:
            raise ProviderError(f"ssh to {self.host}:{self.port}: {why(process.returncode, err)}")

    def session(self, script: str, forwards: list[tuple[int, str]]) -> subprocess.Popen[bytes]:
        """forwards: (port on the machine's loopback, host:port here)."""
        more: list[str] = []
        for port, here in forwards:
            more += ["-R", f"127.0.0.1:{port}:{here}"]
        return subprocess.Popen(
            [*self._command, *more, self._target, script],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=self._environment,
            start_new_session=True,
        )


class Session:
    """Follows one worker until its end, which it tells once. Its thread is a daemon."""

    def __init__(
        self, machine: Machine, forwards: list[tuple[int, str]], sink: Sink, redact: Callable[[bytes], bytes]
    ) -> None:
        self._machine, self._forwards, self._sink, self._redact = machine, forwards, sink, redact
        self._lines = {b"1": 0, b"2": 0}
        self._closing = threading.Event()
        self._ended = threading.Event()
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._end_said = False
        self._words = b""

    def start(self) -> None:
        """Begin to follow."""
        threading.Thread(target=self._run, name=f"ssh-{self._machine.host}", daemon=True).start()

    def wait(self, limit_s: float) -> bool:
        """Whether the worker has ended by then."""
        return self._ended.wait(limit_s)

    def close(self) -> None:
        """No ssh client is left when this returns."""
        self._closing.set()
        with self._lock:
            process = self._process
        if process is not None:
            with contextlib.suppress(OSError):
                process.kill()
            process.wait()
        self._ended.wait(5)

    def end(self, what: Exited | Failed) -> None:
        """Tell the end, only once, whoever saw it first."""
        with self._lock:
            if self._end_said:
                return
            self._end_said = True
        self._sink(what)

    def _run(self) -> None:
        lost_at, retry_s = 0.0, RETRY_S_MIN
        try:
            while not self._closing.is_set():
                began = time.monotonic()
                status = self._once()
                if status is not None:
                    self.end(Exited(status, describe_status(status)))
                    return
                now = time.monotonic()
                if now - began > 2 * CONNECT_S:
                    lost_at, retry_s = 0.0, RETRY_S_MIN
                lost_at = lost_at or now
                if now - lost_at > LOST_S:
                    self.end(Failed(f"the rented machine cannot be reached any more for {LOST_S} s"))
                    return
                if not self._closing.is_set() and retry_s > 2 * RETRY_S_MIN:
                    self._sink(ProviderLine(f"the connection to the rented machine broke: {why(255, self._words)}"))
                self._closing.wait(retry_s)
                retry_s = min(2 * retry_s, RETRY_S_MAX)
        except Exception as error:
            self.end(Failed(f"the rented machine can no longer be followed: {error}"))
        finally:
            self._ended.set()

    def _once(self) -> int | None:
        """One connection. The worker's exit status, None if the connection ended before it."""
        with self._lock:
            if self._closing.is_set():
                return None
            process = self._process = self._machine.session(
                follow(self._lines[b"1"], self._lines[b"2"]), self._forwards
            )
        assert process.stdout is not None and process.stderr is not None
        splitters = {b"1": LineSplitter(self._redact), b"2": LineSplitter(self._redact)}
        status: int | None = None
        for raw in process.stdout:
            kind, line = raw[:1], raw[1:]
            if raw.startswith(EXIT_WORD.encode()):
                words = raw.split()
                status = int(words[1]) if len(words) > 1 and words[1].isdigit() else 1
            elif kind in splitters and raw.endswith(b"\n"):
                self._lines[kind] += 1
                for text in splitters[kind].feed(line):
                    self._sink((bridge_frame(text) or StdoutLine(text)) if kind == b"1" else StderrLine(text))
        self._words = process.stderr.read()
        process.wait()
        for pipe in (process.stdout, process.stderr):
            pipe.close()
        return None if status is None else exit_status(status)


def why(status: int, stderr: bytes) -> str:
    """What went wrong, in one line."""
    lines = [line.strip() for line in stderr.decode("utf-8", "replace").splitlines() if line.strip()]
    last = lines[-1] if lines else f"it ended with status {status}"
    if "Permission denied" in last:
        return "the machine does not accept the ssh identity"
    if "Host key verification failed" in last:
        return "another machine answers than before"
    return last
