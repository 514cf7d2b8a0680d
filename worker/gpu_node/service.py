"""gpu-node as a process: which end of the bus it is, its actor tree, its startup wait and its serving loop (S2 4.1)."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.addresses import Plane
from common.bus import KeyPair, mint_keypair, public_of
from common.effects import StopSignal
from common.security import SecurityError, read_secret_file
from worker.gpu_node.bridges import SERVICE_NAME, RequestBridge
from worker.gpu_node.child import ChildProcess
from worker.gpu_node.ends import LOOPBACK, End, EndError, broker_end, dial_end, free_ports, main_inbox
from worker.gpu_node.events import (
    CloseChild,
    InferenceActorStatus,
    ProcessExited,
    ProcessSpec,
    ProcessStarted,
    SignalChild,
    SpawnChild,
    Stop,
    WorkerReady,
    WriteChild,
)
from worker.gpu_node.inference import InferenceActor
from worker.gpu_node.limits import KILL_TIMEOUT_MS, NODE_KEY_LIMIT_MS, ORPHAN_LIMIT_MS, WORKER_READY_LIMIT_MS
from worker.gpu_node.orphan import Orphan, destroy_self
from worker.gpu_node.state_file import Published, StateError, mint_clients, state_folder

LOGICAL_ID = "gpu-node"
KEY_POLL_S = 0.25


class GpuNodeError(Exception):
    """gpu-node cannot start; one sentence."""


@dataclass(frozen=True, slots=True)
class Seed:
    """What a rented node is told of its client (S2 5): the broker's key, and its ports as the container sees them."""

    key: bytes
    endpoints: dict[Plane, str]


def seed_of(environ: Mapping[str, str]) -> Seed | None:
    """SEED_ADDR and SEED_RELAY, None without the former: localhost mode. Raises GpuNodeError."""
    addr, relay = environ.get("SEED_ADDR", ""), environ.get("SEED_RELAY", "")
    if not addr:
        return None
    try:
        key = bytes.fromhex(addr)
    except ValueError:
        key = b""
    if len(key) != 32:
        raise GpuNodeError("SEED_ADDR is not a key of 64 hex digits")
    host, _, port = relay.removeprefix("tcp://").rpartition(":")
    if not relay.startswith("tcp://") or not host or not port.isdigit() or not 0 < int(port) <= 65532:
        raise GpuNodeError("SEED_RELAY is not the client's relay, tcp://HOST:PORT")
    return Seed(key, {plane: f"tcp://{host}:{int(port) + int(plane)}" for plane in Plane})


def wait_for_key(path: Path, limit_ms: int = NODE_KEY_LIMIT_MS) -> KeyPair:
    """The node's own key, put there over ssh: no secret travels in an environment. Raises GpuNodeError."""
    until = time.monotonic() + limit_ms / 1000
    while not path.exists():
        if time.monotonic() > until:
            raise GpuNodeError(f"nobody has put this node's key into {path} within {limit_ms // 1000} s")
        time.sleep(KEY_POLL_S)
    try:
        text = read_secret_file(path).decode("ascii", "replace").strip()
    except SecurityError as error:
        raise GpuNodeError(str(error)) from None
    if not re.fullmatch(r"[0-9a-fA-F]{64}", text):
        raise GpuNodeError(f"{path} holds no secret key of 64 hex digits")
    secret = bytes.fromhex(text)
    path.unlink(missing_ok=True)
    return KeyPair(public_of(secret), secret)


class GpuNode:
    """The actor tree on one end, and S2 3.5's main thread: waits for WorkerReady, then serves until it is stopped."""

    def __init__(
        self,
        end: End,
        spec: ProcessSpec,
        *,
        ready_limit_ms: int = WORKER_READY_LIMIT_MS,
        orphan_limit_ms: int | None = None,
    ) -> None:
        self.end = end
        self.ready = False
        self.worker_gone = ""
        self._ready_limit_ms = ready_limit_ms
        self._orphan = None if orphan_limit_ms is None else Orphan(end.now_ms, orphan_limit_ms)
        self.orphaned = False
        self._children: dict[bytes, ChildProcess] = {}
        self._signals = 0
        host = end.host
        host.on_effect(SpawnChild, self._spawn)
        host.on_effect(WriteChild, lambda address, effect: self._children[address].write(effect.data))
        host.on_effect(CloseChild, lambda address, _: self._children[address].close_stdin())
        host.on_effect(SignalChild, lambda address, effect: self._children[address].signal(kill=effect.kill))
        # S2 4.1 steps 1 and 3.
        self.inference = InferenceActor(spec, end.inbox_addr)
        self.inference_addr = host.spawn(self.inference)
        self.bridge_addr = host.spawn(RequestBridge(self.inference_addr))
        end.register(SERVICE_NAME, self.bridge_addr)

    def run(self) -> int:
        """The exit status. The worker never outlives this."""
        try:
            return self._startup_wait() or self._serve()
        finally:
            self._close()

    def _startup_wait(self) -> int:
        self.end.turn_until(lambda: self._hear() or self.ready or self.worker_gone, self._ready_limit_ms)
        if self._signals or self.ready:
            return 0
        if not (self.worker_gone or self.orphaned):
            log(f"the worker did not report ready within {self._ready_limit_ms // 1000} s")
        return 1

    def _serve(self) -> int:
        while not self._hear():
            self.end.host.turn()
        return 1 if self.orphaned else 0

    def _hear(self) -> bool:
        """Drain the inbox, the lifecycle observer. True: it is time to go."""
        for _, message in self.end.inbox.drain():
            if isinstance(message, StopSignal):
                self._signals += 1
            elif isinstance(message, InferenceActorStatus):
                self._status(message)
        if self._orphan is not None and not self.orphaned:
            self.orphaned = self._orphan.is_left(self.end.host.node.views.link_up, self.end.now_ms)
            if self.orphaned:
                log("whoever rented this node is gone")
        return self._signals > 0 or self.orphaned

    def _status(self, status: InferenceActorStatus) -> None:
        match status:
            case ProcessStarted():
                log(f"worker process started, pid {status.pid}")
            case WorkerReady():
                self.ready = True
                log(f"worker ready, pid {status.pid}")
            case ProcessExited():
                self.worker_gone = status.reason
                log(status.reason)
                if self.ready:
                    # S2 4.4 step 5: whoever wants to know why must still find this process and its log.
                    log("worker exited, keeping main loop alive for diagnostics")

    def _spawn(self, address: bytes, effect: SpawnChild) -> None:
        child = ChildProcess(self.end.host.loop, lambda fact: self.end.host.deliver(address, fact))
        self._children[address] = child
        child.start(effect.spec)

    def _close(self) -> None:
        """The worker first, in its own time unless a second signal came, then the bus."""
        host = self.end.host
        running = self._children.get(self.inference.process_addr)
        if running is not None and running.pid:
            host.deliver(self.inference.process_addr, Stop())
            limit_ms = KILL_TIMEOUT_MS + 500
            self.end.turn_until(lambda: not running.pid or (self._hear() and self._signals > 1), limit_ms)
        host.node.system.stop(self.inference_addr)
        self.end.close()
        for child in self._children.values():
            child.close()


def log(text: str) -> None:
    """A line for the container's log: what the client fetches when something failed."""
    print(f"{LOGICAL_ID}: {text}", file=sys.stderr, flush=True)


def announce(node: bytes, address: str) -> None:
    """The line that a person copies from (S2 8)."""
    print(f"GPU_NODE_ADDR {node.hex()} {address}", flush=True)


def make_inbox() -> Any:
    """What gpu-node's main thread hears."""
    return main_inbox(ProcessStarted, WorkerReady, ProcessExited)


def run_local(spec: ProcessSpec, environ: Mapping[str, str], port: int) -> int:
    """Localhost mode (S2 8): this process is the broker. Raises GpuNodeError."""
    keys, clients = mint_keypair(), mint_clients()
    try:
        base = port or free_ports()
        admitted = [client.public for client in clients]
        end = broker_end(make_inbox(), keys=keys, base=base, admitted=admitted, logical_id=LOGICAL_ID)
        published = Published(state_folder(environ), keys.public, LOOPBACK, base, clients)
    except (EndError, StateError) as error:
        raise GpuNodeError(str(error)) from None
    try:
        announce(keys.public, f"{LOOPBACK}:{base}")
        return GpuNode(end, spec).run()
    finally:
        published.remove()


def run_rented(
    spec: ProcessSpec, seed: Seed, key_file: Path, environ: Mapping[str, str], orphan_limit_ms: int = ORPHAN_LIMIT_MS
) -> int:
    """Rented: dial the client's broker through its tunnel (S2 5); destroy the instance if the client stays away.

    Raises GpuNodeError.
    """
    log(f"waiting for this node's key in {key_file}")
    try:
        keys = wait_for_key(key_file, min(orphan_limit_ms, NODE_KEY_LIMIT_MS))
    except GpuNodeError as error:
        raise GpuNodeError(f"{error}; {destroy_self(environ)}") from None
    end = dial_end(
        make_inbox(),
        broker_key=seed.key,
        endpoints=seed.endpoints,
        keys=keys,
        logical_id=LOGICAL_ID,
        profile="wan",
    )
    announce(keys.public, seed.endpoints[Plane.CONTROL].removeprefix("tcp://"))
    node = GpuNode(end, spec, orphan_limit_ms=orphan_limit_ms)
    status = node.run()
    if node.orphaned:
        log(destroy_self(environ))
    return status
