"""A worker as a process on a real router, and an orchestrator in this process that says what the test wants."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

from common.actors import Actor, Ctx
from common.addresses import Role
from common.codec import Message
from common.effects import SendFailed
from common.launch_file import LaunchFile
from common.messages.node_agent import EmbeddedGguf, LocalPath, ProvisionStage, RuntimeReadyAck, StageProvisionWire
from common.messages.orchestrator import ObserveNodeRuntimeReady, ObserveNodeRuntimeReadyAck, OrchestratorMsg
from common.messages.prompt import PromptEvent, RequestCancelled, TokenizerEvent
from common.security import planes_to_json
from tests.support.bus import RealBus

T = TypeVar("T", bound=Message)
ROOT = Path(__file__).resolve().parents[3]


class Boss(Actor):
    """Everything that a worker may say to the operator's side, as heard."""

    Incoming = (
        *OrchestratorMsg.__args__,
        *PromptEvent.__args__,
        *TokenizerEvent.__args__,
        RequestCancelled,
        SendFailed,
    )

    def __init__(self) -> None:
        self.heard: list[Any] = []

    def receive(self, msg: Any, ctx: Ctx) -> None:
        self.heard.append(msg)


class RealRun:
    """A router and the orchestrator's host, for many workers, each with a boss and key of its own."""

    def __init__(self, directory: Path, workers: int) -> None:
        self.bus = RealBus(directory / "bus", agents=workers)
        self.host = self.bus.service(Role.ORCHESTRATOR)
        self.unused = list(self.bus.agent_keys)

    def close(self) -> None:
        self.bus.close()


class RealWorker:
    """`ready()`, `provision()`, then `tell` and `wait_for`. The worker's stdin is a pipe that we hold.

    command: program and script, then its arguments behind the launch file; empty: the installed worker.
    """

    def __init__(self, run: RealRun, directory: Path, command: Sequence[str] = (), **launch: Any) -> None:
        self.bus, self.host = run.bus, run.host
        self.boss = Boss()
        self.address = self.host.spawn(self.boss)
        self.node_actor = b""
        door = self.bus.bus_file(Role.PROVISIONER)
        self.keys = keys = run.unused.pop()
        self.launch_path = directory / "launch.json"
        LaunchFile(
            run_id=1,
            run="00" * 16,
            node_id=1,
            endpoints=planes_to_json(door.worker_endpoints),
            broker_public_key=door.worker_key.hex(),
            public_key=keys.public.hex(),
            secret_key=keys.secret.hex(),
            orchestrator=self.address.hex(),
            **launch,
        ).write(self.launch_path)
        self.process = subprocess.Popen(
            [*command[:2], str(self.launch_path), *command[2:]] if command else self._installed(),
            stdin=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**os.environ, "SMQ_VALIDATE": "1", "PYTHONPATH": str(ROOT)},
            start_new_session=True,
        )

    def _installed(self) -> list[str]:
        return [sys.executable, "-P", "-m", "worker.agent", "--launch", str(self.launch_path)]

    def heard(self, kind: type[T]) -> list[T]:
        return [msg for msg in self.boss.heard if isinstance(msg, kind)]

    def wait_for(self, kind: type[T], limit_s: float = 60, count: int = 1) -> T:
        try:
            self.bus.until(lambda: len(self.heard(kind)) >= count, limit_s)
        except AssertionError:
            self.process.kill()
            assert self.process.stderr is not None
            said = self.process.stderr.read().decode()
            heard = [type(msg).__name__ for msg in self.boss.heard]
            router = self.bus.processes[Role.ROUTER].poll()
            facts = f"heard {heard}; router {router}; link up {self.host.node.link.up}"
            raise AssertionError(f"no {kind.__name__} in {limit_s} s; {facts}; stderr:\n{said}") from None
        return self.heard(kind)[count - 1]

    def tell(self, message: Message) -> None:
        self.host.node.system.post(self.node_actor, message, src=self.address)

    def ready(self, limit_s: float = 60) -> ObserveNodeRuntimeReady:
        """Runtime ready and acknowledged."""
        report = self.wait_for(ObserveNodeRuntimeReady, limit_s)
        self.node_actor = report.node_actor
        ack = RuntimeReadyAck(run_id=1, node_id=1, stage_index=0, readiness_id=report.readiness_id)
        self.tell(ack)
        self.wait_for(ObserveNodeRuntimeReadyAck)
        return report

    def provision(self, path: str = "/fake.gguf", **changes: Any) -> None:
        wire: dict[str, Any] = {
            "run_id": 1,
            "authorized_orchestrator": self.address,
            "node_id": 1,
            "stage_index": 0,
            "stage_count": 1,
            "layer_start": 0,
            "inbound_edge_id": 1,
            "outbound_edge_id": 2,
            "model_id": "m",
            "gguf_source": LocalPath(path=path),
            "tokenizer": EmbeddedGguf(),
        }
        self.tell(ProvisionStage(provision=StageProvisionWire(**{**wire, **changes})))

    def exit(self, limit_s: float = 60) -> tuple[int, str]:
        """Pump until the worker is gone; its status and stderr."""
        self.bus.until(lambda: self.process.poll() is not None, limit_s)
        assert self.process.stderr is not None
        return self.process.returncode, self.process.stderr.read().decode()

    def engine_pid(self) -> int:
        """The one child of the worker."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        assert len(children) == 1, children
        return int(children[0])

    def close(self) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, 9)
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stderr):
            if pipe is not None:
                pipe.close()


def is_gone(pid: int, limit_s: float = 20) -> bool:
    """Whether a process that is not our child ends in time (a zombie has ended)."""
    end = time.monotonic() + limit_s
    while time.monotonic() < end:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
        except OSError:
            return True
        if state == "Z":
            return True
        time.sleep(0.02)
    return False
