"""A real router (and relay) as processes, and hosts in this process, for tests on real sockets."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from common.addresses import Role
from common.bus import KeyPair, mint_keypair
from common.host import Host, new_boot
from common.node import Identity
from common.security import BusFile, init, read_bus_file


class RealBus:
    """Keys in `directory`, a router process and optionally a relay process. `pump` turns every host once."""

    def __init__(self, directory: Path, *, relay: bool = False, agents: int = 2, validate: bool = True) -> None:
        self._environ = {**os.environ, "SMQ_VALIDATE": "1" if validate else ""}
        self.files = init(directory, relay=relay)
        self.agent_keys = [mint_keypair() for _ in range(agents)]
        self.hosts: list[Host] = []
        self.processes: dict[Role, subprocess.Popen[bytes]] = {}
        for role in (Role.ROUTER, Role.RELAY):
            if role in self.files:
                content = json.loads(self.files[role].read_text())
                content["allow"].update({keys.public.hex(): "agent" for keys in self.agent_keys})
                self.files[role].write_text(json.dumps(content))
                self.start(role)

    def start(self, role: Role) -> None:
        command = [sys.executable, "-P", "-m", f"services.{role}", "--bus", str(self.files[role])]
        self.processes[role] = subprocess.Popen(command, env=self._environ)

    def kill(self, role: Role) -> None:
        process = self.processes.pop(role)
        process.send_signal(signal.SIGKILL)
        process.wait()

    def bus_file(self, role: Role) -> BusFile:
        return read_bus_file(self.files[role])

    def service(self, role: Role) -> Host:
        host = Host.from_bus_file(self.files[role])
        self.hosts.append(host)
        return host

    def agent(self, index: int = 0, keys: KeyPair | None = None) -> Host:
        keys = keys or self.agent_keys[index]
        door = self.bus_file(Role.PROVISIONER)
        host = Host(
            Identity(keys.public, Role.AGENT, new_boot(), f"node {index}"),
            broker_key=door.worker_key,
            endpoints=door.worker_endpoints,
            keys=keys,
        )
        self.hosts.append(host)
        return host

    def pump(self, *hosts: Host) -> None:
        for host in hosts or self.hosts:
            host.loop.turn(1)
            host.pump()

    def until(self, fact: Callable[[], object], limit_s: float, *hosts: Host) -> float:
        """Pump until fact() is true; returns the seconds it took; fails after limit_s."""
        started = time.monotonic()
        while not fact():
            assert time.monotonic() - started < limit_s, f"not true within {limit_s} s"
            self.pump(*hosts)
        return time.monotonic() - started

    def close(self) -> None:
        until = time.monotonic() + 1
        while any(host.node.unsettled for host in self.hosts) and time.monotonic() < until:
            # All live in this process: one that closes alone would wait for acks of the others.
            self.pump()
        for host in self.hosts:
            host.close()
        for process in self.processes.values():
            process.terminate()
        for process in self.processes.values():
            assert process.wait(30) == 0
