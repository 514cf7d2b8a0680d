"""Provider `process`: workers are processes of this machine (S1 7.5; rust-swactor.md 8.1).

Each worker leads its own session and group and has one follower thread, which owns its pipes, its pidfd and its
reaping. Nothing here polls: the pidfd says at once that the worker ended.

The worker's stdin is a pipe that only this process holds, and workers exit at its EOF: so they end with us, however we
end. PR_SET_PDEATHSIG would not do: it fires when the *thread* that forked ends, and ours are short-lived job threads;
and setting it needs code between fork and exec, which is not safe in a process with threads.
"""

from __future__ import annotations

import contextlib
import errno
import os
import select
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from common.limits import PROCESS_STOP_GRACE_MS
from common.messages.provision import NodeProvisionSpec
from services.provisioner import processes
from services.provisioner.lines import LineSplitter, bridge_frame
from services.provisioner.plugin import (
    Exited,
    LeftBehind,
    Listed,
    Listing,
    PluginNodeHandle,
    PluginObservation,
    ProviderError,
    ProviderLine,
    Sink,
    StderrLine,
    StdoutLine,
)

NAME = "process"
KILL_WAIT_MS = 3000  # a killed process in the middle of disk I/O needs a moment; beyond that it is stuck in the kernel
DRAIN_MS = 1000  # what a dying group may still hold a pipe open; everything of it has been killed by then
READ_BYTES = 64 * 1024

PASSED_NAMES = frozenset(
    {"PATH", "HOME", "USER", "LOGNAME", "LANG", "LANGUAGE", "TZ", "TMPDIR", "LD_LIBRARY_PATH", "CC"}
    | {"DEV", "CACHEDB", "CACHELEVEL", "MVP_MODEL_CACHE_DIR"}
    | {"HF_HOME", "HF_HUB_CACHE", "HF_ENDPOINT", "HF_HUB_OFFLINE", "SSL_CERT_FILE", "SSL_CERT_DIR"}
    | {"HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "http_proxy", "https_proxy", "no_proxy"}
    | {"OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMEXPR_NUM_THREADS", "RAYON_NUM_THREADS", "TOKENIZERS_PARALLELISM"}
)
PASSED_PREFIXES = ("LC_", "XDG_", "OMP_", "GOMP_", "CUDA_", "NVIDIA_")
NEVER_PASSED = frozenset({"HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HUGGINGFACE_HUB_TOKEN", "VASTAI_API_KEY"})
"""Secrets reach a worker only in its launch file (design.md 2): refused even when a spec names them."""


def worker_environment(own: Mapping[str, str], wanted: Mapping[str, str], mark: str) -> dict[str, str]:
    """The worker's environment: an allow-list of ours, what the spec wants, and the mark of its handle."""
    passed = {name: value for name, value in own.items() if name in PASSED_NAMES or name.startswith(PASSED_PREFIXES)}
    passed |= wanted
    for name in NEVER_PASSED:
        passed.pop(name, None)
    # Lines must come when they are printed, not when a buffer of 8 KiB is full.
    return passed | {"PYTHONUNBUFFERED": "1", processes.MARK_VARIABLE: mark}


class ProcessProvider:
    """One instance per provisioner. environment: of which the allow-list is passed; redact: removes known secrets;
    fleet: whose workers these are."""

    name = NAME

    def __init__(
        self,
        worker_bin: str,
        environment: Mapping[str, str],
        redact: Callable[[bytes], bytes] = bytes,
        grace_ms: int = PROCESS_STOP_GRACE_MS,
        fleet: str = "",
    ) -> None:
        self._worker_bin, self._fleet = worker_bin, fleet
        self._environment = dict(environment)
        self._redact = redact
        self._grace_ms = grace_ms
        self._lock = threading.Lock()
        self._workers: dict[str, _Worker] = {}

    def prepare(self) -> None:
        """S1 10.5: the worker binary must be there."""
        path = Path(self._worker_bin)
        if not self._worker_bin or not path.exists():
            raise ProviderError(
                f"worker binary {self._worker_bin or '(none)'} does not exist; "
                "install mvp-worker-node or set [process] worker_bin"
            )
        if not path.is_file() or not os.access(path, os.X_OK):
            raise ProviderError(f"worker binary {self._worker_bin} is not an executable file; chmod +x it")

    def start_node(self, handle_id: str, spec: NodeProvisionSpec, launch_file: Path, sink: Sink) -> PluginNodeHandle:
        """Fork and exec; returns when exec succeeded. Image and mounts mean nothing to this provider."""
        oom_before = processes.oom_kills()
        try:
            child = subprocess.Popen(
                [self._worker_bin, "--launch", str(launch_file), *spec.args],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env=worker_environment(self._environment, spec.env, handle_id)
                | ({processes.FLEET_VARIABLE: self._fleet} if self._fleet else {}),
                start_new_session=True,
                bufsize=0,
            )
        except OSError as error:
            raise ProviderError(f"cannot start worker binary {self._worker_bin}: {_why(error)}") from None
        try:
            worker = _Worker(handle_id, child, sink, self._redact, oom_before)
        except OSError as error:
            # No pidfd (out of descriptors): unwatched it must not run.
            os.killpg(child.pid, signal.SIGKILL)
            child.wait()
            raise ProviderError(f"cannot watch worker {child.pid}: {error.strerror}") from None
        facts: dict[str, str | int] = {"pid": child.pid, "boot_id": processes.boot_id()}
        # A worker that is dead already has no start time; 0 matches nothing later.
        facts["start_time"] = processes.start_time(child.pid) or 0
        with self._lock:
            self._workers[handle_id] = worker
        worker.follow()
        return PluginNodeHandle(handle_id, child.pid, facts)

    def complete_bootstrap(self, handle: PluginNodeHandle) -> None:
        """Nothing: a process needs nothing for its start that could go now."""

    def stop_node(self, handle: PluginNodeHandle, fast: bool) -> None:
        """`shutdown` on stdin, the grace, then SIGKILL of the whole group; unknown or dead workers are fine."""
        with self._lock:
            worker = self._workers.get(handle.id)
        if worker is None:
            return
        worker.stop(0 if fast else self._grace_ms)
        with self._lock:
            self._workers.pop(handle.id, None)

    def stop_left_behind(self, left: LeftBehind) -> bool:
        """Kill what is provably that worker or carries its mark; a pid of another boot or start is left alone."""
        if left.boot_id != processes.boot_id():
            return False
        killed = []
        if left.handle is not None:
            pid, started = int(left.handle.facts.get("pid", 0)), int(left.handle.facts.get("start_time", 0))
            if pid > 1 and started and processes.kill_identified(pid, started, left.id):
                killed.append(pid)
        killed += processes.kill_marked(left.id)
        if alive := processes.wait_gone(killed, KILL_WAIT_MS):
            raise ProviderError(f"worker process {alive[0]} of an earlier run does not die")
        return bool(killed)

    def list_owned(self) -> Listing:
        """Every process tree of this machine that bears the fleet's mark."""
        marked = processes.marked_with(processes.FLEET_VARIABLE, self._fleet) if self._fleet else {}
        return Listing(
            tuple(
                Listed(mark, f"pid {pids[0]}", "running", processes.started_unix_ms(pids[0]))
                for mark, pids in marked.items()
            )
        )


class _Worker:
    """One child and its follower thread. `lock` guards the pid: nobody signals it once it is reaped."""

    def __init__(
        self,
        mark: str,
        child: subprocess.Popen[bytes],
        sink: Sink,
        redact: Callable[[bytes], bytes],
        oom_before: int,
    ) -> None:
        self._mark, self._child, self._sink, self._oom_before = mark, child, sink, oom_before
        self._pidfd = os.pidfd_open(child.pid)
        self._lock = threading.Lock()
        self._reaped = False
        self._killed_by_us = False
        self._gone = threading.Event()
        assert child.stdout is not None and child.stderr is not None and child.stdin is not None
        self._stdin = child.stdin
        self._pipes = {
            child.stdout.fileno(): (LineSplitter(redact), self._out),
            child.stderr.fileno(): (LineSplitter(redact), StderrLine),
        }
        for pipe in self._pipes:
            os.set_blocking(pipe, False)
        # A worker that does not read its stdin must not hold up its own stop.
        os.set_blocking(self._stdin.fileno(), False)

    def follow(self) -> None:
        """Start the follower. A daemon: it may not keep a dying provisioner alive."""
        threading.Thread(target=self._follow, name=f"follow-{self._child.pid}", daemon=True).start()

    def stop(self, grace_ms: int) -> None:
        """Returns when the worker is reaped and its group is dead. Raises ProviderError if it does not die."""
        if grace_ms:
            with contextlib.suppress(OSError, ValueError):
                self._stdin.write(b"shutdown\n")
        # EOF as well: it means the same, and reaches a worker that reads no lines.
        with contextlib.suppress(OSError):
            self._stdin.close()
        if self._gone.wait(grace_ms / 1000):
            return
        self._kill_group()
        if not self._gone.wait(KILL_WAIT_MS / 1000):
            raise ProviderError(f"worker process {self._child.pid} does not die, it hangs in the kernel")

    def _kill_group(self) -> None:
        with self._lock:
            if not self._reaped:
                self._killed_by_us = True
                self._signal_group()

    def _signal_group(self) -> None:
        # Safe while the leader is not reaped: until then its pid, and so the group's id, is not given out again.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._child.pid, signal.SIGKILL)

    # --- the follower thread ----------------------------------------------------------------------------------
    def _follow(self) -> None:
        poller = select.poll()
        poller.register(self._pidfd, select.POLLIN)
        for pipe in self._pipes:
            poller.register(pipe, select.POLLIN)
        ended = False
        while not ended:
            for source, _ in poller.poll():
                if source == self._pidfd:
                    ended = True
                elif not self._read(source):
                    poller.unregister(source)
        self._finish()

    def _finish(self) -> None:
        """The leader is a zombie: empty the pipes, end its group and whatever carries its mark, reap, tell."""
        for pipe in list(self._pipes):
            self._read_all(pipe)
        with self._lock:
            self._signal_group()
        escaped = processes.kill_marked(self._mark)
        self._drain()
        with self._lock:
            status = self._child.wait()
            self._reaped = True
        reason = "stopped" if self._killed_by_us else self._reason(status)
        os.close(self._pidfd)
        for stream in (self._child.stdout, self._child.stderr, self._stdin):
            if stream is not None:
                with contextlib.suppress(OSError):
                    stream.close()
        processes.wait_gone(escaped, DRAIN_MS)
        self._emit(Exited(status, reason))
        self._gone.set()

    def _reason(self, status: int) -> str:
        return processes.describe_status(status, oom_seen=processes.oom_kills() > self._oom_before)

    def _drain(self) -> None:
        """Until EOF: then every process that held the pipes is gone. Bounded, should one of another user hold them."""
        deadline = time.monotonic() + DRAIN_MS / 1000
        poller = select.poll()
        for pipe in self._pipes:
            poller.register(pipe, select.POLLIN)
        while self._pipes and (left := deadline - time.monotonic()) > 0:
            for source, _ in poller.poll(left * 1000):
                if not self._read(source):
                    poller.unregister(source)
        for pipe in list(self._pipes):
            self._close(pipe)

    def _read_all(self, pipe: int) -> None:
        """What stands in a pipe now. A survivor of the group may write on for ever: at most 32 reads of it."""
        for _ in range(32):
            if pipe not in self._pipes or not self._read(pipe, until_empty=True):
                return

    def _read(self, pipe: int, until_empty: bool = False) -> bool:
        """Read once. False at EOF (the last, unfinished line is out then), with until_empty also when it is empty."""
        try:
            data = os.read(pipe, READ_BYTES)
        except BlockingIOError:
            return not until_empty
        except OSError:
            data = b""
        splitter, make = self._pipes[pipe]
        for line in splitter.feed(data):
            self._emit(make(line))
        if not data:
            self._close(pipe)
        return bool(data)

    def _close(self, pipe: int) -> None:
        splitter, make = self._pipes.pop(pipe)
        for line in splitter.flush():
            self._emit(make(line))

    @staticmethod
    def _out(line: str) -> PluginObservation:
        return bridge_frame(line) or StdoutLine(line)

    def _emit(self, observation: PluginObservation) -> None:
        try:
            self._sink(observation)
        except Exception as error:  # the follower must live on, or nobody would reap the worker
            with contextlib.suppress(Exception):
                self._sink(ProviderLine(f"an observation was lost: {error}"))


def _why(error: OSError) -> str:
    if error.errno == errno.ENOEXEC:
        return "it is no program of this machine (exec format error)"
    if error.errno == errno.ENOENT:
        return "it, or the interpreter in its first line, does not exist"
    if error.errno == errno.EACCES:
        return "it is not executable; chmod +x it"
    return error.strerror or str(error)
