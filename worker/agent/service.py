"""Wiring of a worker: its host from the launch file, its actors, and the agent's effects turned into I/O."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Sequence

from common.addresses import Plane, Role
from common.bus import KeyPair
from common.datastream import Emit
from common.datastream_publisher import DatastreamPublisherActor, StreamProducer
from common.edges.carrier import EdgeCarrierActor, carrier_address
from common.effects import Observed
from common.host import Host, new_boot
from common.launch_file import LaunchFile, LaunchFileError
from common.limits import lease_ttl_ms
from common.messages.stream import StreamId
from common.node import PLANES, Identity
from common.redact import Redactor
from common.swim.actor import SwimActor
from common.swim.config import PROFILES
from worker.agent.core import NodeAgentActor
from worker.agent.edge_bind import edge_bind
from worker.agent.engine_process import ENGINE_COMMAND, EngineProcess
from worker.agent.events import EngineSend, KillEngine, ReadPage, StartEngine, StopAsked, WorkerIdentity
from worker.agent.host_stats import CPU, GPU, GPU_JOB, MEMORY, HostSampler, ReadHost, query_gpus, read_host
from worker.agent.records import CHANNELS
from worker.agent.stdin_watch import StdinLines, is_watched, on_readable

# libzmq itself would only say "Invalid argument"; an ipc path longer than 107 bytes does not fit the kernel.
ENDPOINT = re.compile(r"tcp://(\[[0-9a-fA-F:.]+\]|[^\s:/]+):[0-9]{1,5}|ipc://[^\0]{1,107}")


def host_of(launch: LaunchFile) -> Host:
    """The bus host of a worker. Raises LaunchFileError for planes, endpoints or a profile that do not fit."""
    missing = [plane.name.lower() for plane in PLANES if plane.name.lower() not in launch.endpoints]
    if missing:
        raise LaunchFileError(f"the launch file names no endpoint for the planes {', '.join(missing)}")
    for plane, endpoint in launch.endpoints.items():
        if not ENDPOINT.fullmatch(endpoint):
            raise LaunchFileError(f"the launch file's endpoint for {plane}, {endpoint!r}, is no tcp or ipc address")
    if launch.profile not in PROFILES:
        raise LaunchFileError(f"the launch file's profile is {launch.profile!r}, known are {', '.join(PROFILES)}")
    keys = KeyPair(bytes.fromhex(launch.public_key), bytes.fromhex(launch.secret_key))
    return Host(
        Identity(keys.public, Role.AGENT, new_boot(), f"node {launch.node_id}", bytes.fromhex(launch.run)),
        broker_key=bytes.fromhex(launch.broker_public_key),
        endpoints={plane: launch.endpoints[plane.name.lower()] for plane in Plane if plane in PLANES},
        keys=keys,
    )


class Worker:
    """One worker process: `run` until it is told or has to end."""

    def __init__(self, launch: LaunchFile, *, engine_command: Sequence[str] = ENGINE_COMMAND, stdin: int = 0) -> None:
        self.host = host = host_of(launch)
        host.pump()  # actors read the clock when they start
        secrets = [launch.secret_key, *([launch.hf_token] if launch.hf_token else [])]
        redactor = Redactor(secrets)
        producer = StreamProducer(StreamId(node=str(launch.node_id), life=launch.run_id), redact=redactor.redact)
        gpu = shutil.which("nvidia-smi") is not None
        for channel in (*CHANNELS, CPU, MEMORY, *((GPU,) if gpu else ())):
            producer.channel(channel)
        self.publisher = host.spawn(DatastreamPublisherActor(producer))
        swim = host.spawn(SwimActor(logical_id=host.identity.logical_id, config=PROFILES[launch.profile]))
        identity = WorkerIdentity(
            run_id=launch.run_id,
            node_id=launch.node_id,
            stage_index=launch.stage_index,
            orchestrator=bytes.fromhex(launch.orchestrator),
            device=launch.device,
            measure=launch.measure,
            lease_ms=lease_ttl_ms(launch.profile),
            edge=edge_bind(launch, KeyPair(bytes.fromhex(launch.public_key), bytes.fromhex(launch.secret_key))),
        )
        self.engine = EngineProcess(host.loop, self._tell, command=engine_command, environ=_environment(launch))
        host.on_effect(Observed, self._observed)
        host.on_effect(StartEngine, lambda _, __: self.engine.start())
        host.on_effect(EngineSend, lambda _, effect: self.engine.send(effect.message))
        host.on_effect(ReadPage, lambda _, __: self.engine.read_page())
        host.on_effect(KillEngine, lambda _, __: self.engine.kill())
        host.jobs[GPU_JOB] = query_gpus
        self.sampler = host.spawn(HostSampler(gpu=gpu))
        host.on_effect(ReadHost, lambda address, _: host.deliver(address, read_host(self.engine.pid)))
        self.agent = host.spawn(NodeAgentActor(identity, self.publisher, swim))
        host.node.system.spawn(EdgeCarrierActor(self.agent), address=carrier_address(host.node_key))
        if is_watched(stdin):
            self._stdin = stdin
            host.loop.add_fd(stdin, on_readable(stdin, StdinLines(), self._stop))

    def run(self) -> int:
        """The exit status. The engine never outlives this."""
        try:
            return self.host.run()
        finally:
            self.engine.close()

    def _tell(self, event: object) -> None:
        self.host.deliver(self.agent, event)

    def _observed(self, _address: bytes, effect: Observed) -> None:
        """A worker's records go into its own stream, not to the collector as an orchestrator's would."""
        self.host.deliver(self.publisher, Emit(effect.channel, effect.payload, effect.source))

    def _stop(self, why: str, is_over: bool) -> None:
        if is_over:
            self.host.loop.remove_fd(self._stdin)
        self._tell(StopAsked(why))


def _environment(launch: LaunchFile) -> dict[str, str]:
    """The engine downloads models itself; the token is in its environment only, readable by this user only."""
    environ = dict(os.environ)
    if launch.hf_token:
        environ["HF_TOKEN"] = launch.hf_token
    return environ
