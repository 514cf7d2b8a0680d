"""A real swarm of two Docker engines, each in a network namespace of its own, joined by a bridge of this machine.

Node 1 is the manager. A container of either reaches this machine at GATEWAY and nothing reaches it from outside.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import docker.errors

from tests.docker.engine import CACHE, EngineError, TestEngine

HUB, LINK, LINK_NET = "smqswhub", "smqswarm0", "10.219.72.1/24"
GATEWAY = LINK_NET.partition("/")[0]
NODES = (("smqsw1", "10.219.72.11"), ("smqsw2", "10.219.72.12"))
DOWN_S = 150  # the swarm notices within 15 s on a free machine


def ip(*arguments: str, check: bool = True) -> None:
    """The command ip. Raises EngineError."""
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True, check=False)
    if check and done.returncode:
        raise EngineError(f"ip {' '.join(arguments)}: {done.stderr.strip()}")


def copy_image(image: str, source: TestEngine, target: TestEngine) -> None:
    """From one engine to another, unless that one has it."""
    wanted, api = source.client().inspect_image(image)["Id"], target.client()
    if any(found["Id"] == wanted and image in (found["RepoTags"] or []) for found in api.images()):
        return
    for _ in api.load_image(source.client().get_image(image)):
        pass
    for found in api.images(filters={"dangling": True}):
        with contextlib.suppress(Exception):
            api.remove_image(found["Id"])


class TestManager(TestEngine):
    """A swarm of one engine, in a network namespace that leads nowhere."""

    def __init__(self, folder: Path) -> None:
        name, address = NODES[0]
        ip("netns", "del", name, check=False)
        ip("netns", "add", name)
        ip("-n", name, "link", "set", "lo", "up")
        ip("-n", name, "link", "add", "eth0", "type", "bridge")  # one without ports
        ip("-n", name, "addr", "add", f"{address}/24", "dev", "eth0")
        ip("-n", name, "link", "set", "eth0", "up")
        super().__init__(folder, CACHE.parent / "swarm1", name)

    def begin(self) -> None:
        """Started, and the manager of a new swarm that is empty."""
        self.start()
        with contextlib.suppress(Exception):
            self.client().leave_swarm(force=True)
        self.clear()
        self.client().init_swarm(advertise_addr=NODES[0][1], listen_addr=NODES[0][1])

    def close(self) -> None:
        """Nothing is left but the images."""
        with contextlib.suppress(Exception):
            self.client().leave_swarm(force=True)
        super().close()
        ip("netns", "del", NODES[0][0], check=False)


class TestSwarm:
    """Two engines and what joins them."""

    __test__ = False

    def __init__(self, folder: Path) -> None:
        # The bridge is in a namespace of its own, because an engine on this machine drops what is only passed on.
        ip("netns", "del", HUB, check=False)
        ip("netns", "add", HUB)
        ip("-n", HUB, "link", "add", "bridge0", "type", "bridge")
        ip("-n", HUB, "link", "set", "bridge0", "up")
        self._plug("gateway", LINK, "")
        ip("addr", "add", LINK_NET, "dev", LINK)
        self.engines: list[TestEngine] = []
        for number, (name, address) in enumerate(NODES):
            ip("netns", "del", name, check=False)
            ip("netns", "add", name)
            self._plug(name, "eth0", name)
            ip("-n", name, "addr", "add", f"{address}/24", "dev", "eth0")
            ip("-n", name, "link", "set", "lo", "up")
            ip("-n", name, "route", "add", "default", "via", GATEWAY)
            self.engines.append(TestEngine(folder / f"node{number + 1}", CACHE.parent / f"swarm{number + 1}", name))

    @staticmethod
    def _plug(port: str, interface: str, namespace: str) -> None:
        """A cable from a port of the hub to an interface of the namespace ("" for this machine), up on both ends."""
        where = ("-n", namespace) if namespace else ()
        ip("-n", HUB, "link", "add", port, "type", "veth", "peer", "name", interface, "netns", namespace or "1")
        ip("-n", HUB, "link", "set", port, "master", "bridge0", "up")
        ip(*where, "link", "set", interface, "up")

    @property
    def manager(self) -> TestEngine:
        """Node 1."""
        return self.engines[0]

    @property
    def second(self) -> TestEngine:
        """Node 2."""
        return self.engines[1]

    def start(self) -> None:
        """Both engines, joined to one new swarm."""
        for engine in self.engines:
            engine.start()
            with contextlib.suppress(Exception):
                engine.client().leave_swarm(force=True)
            engine.clear()
        self.manager.client().init_swarm(advertise_addr=NODES[0][1], listen_addr=NODES[0][1])
        token = self.manager.client().inspect_swarm()["JoinTokens"]["Worker"]
        self.second.client().join_swarm([NODES[0][1]], token, listen_addr=NODES[1][1], advertise_addr=NODES[1][1])
        self.wait_nodes("ready", "ready")

    def clear(self) -> None:
        """No service and no secret; what ran is gone."""
        api = self.manager.client()
        for service in api.services():
            api.remove_service(service["ID"])
        for secret in api.secrets():
            api.remove_secret(secret["ID"])
        until = time.monotonic() + DOWN_S
        while self.workers() and time.monotonic() < until:
            time.sleep(0.2)

    def wait_gone(self) -> None:
        """Until no container is left on either node. Raises EngineError."""
        until = time.monotonic() + DOWN_S
        while left := [item["Names"] for engine in self.engines for item in engine.client().containers(all=True)]:
            if time.monotonic() > until:
                raise EngineError(f"containers are left in the swarm: {left}")
            time.sleep(0.2)

    def workers(self) -> list[str]:
        """Containers of workers, on both nodes, as "node1 running"."""
        found = []
        for number, engine in enumerate(self.engines):
            with contextlib.suppress(Exception):
                found += [f"node{number + 1} {item['State']}" for item in engine.containers()]
        return found

    def left(self) -> tuple[list[str], list[str]]:
        """Names of the services and secrets that the swarm has."""
        api = self.manager.client()
        return [item["Spec"]["Name"] for item in api.services()], [item["Spec"]["Name"] for item in api.secrets()]

    def load(self, image: str, source: TestEngine) -> None:
        """Copy an image from another engine to both, unless they have it."""
        for engine in self.engines:
            copy_image(image, source, engine)

    def nodes(self) -> list[str]:
        """The state of node 1 and 2."""
        found = {node["Description"]["Hostname"] + node["Status"]["Addr"]: node for node in self.raw_nodes()}
        return [
            next((node["Status"]["State"] for name, node in found.items() if name.endswith(address)), "missing")
            for _, address in NODES
        ]

    def raw_nodes(self) -> list[dict[str, Any]]:
        """What the manager says of its nodes."""
        return list(self.manager.client().nodes())

    def set_availability(self, address: str, wanted: str) -> None:
        """Of the node with that address: "active", or "drain" for one that takes nothing. Raises EngineError."""
        until = time.monotonic() + DOWN_S
        while True:
            node = next(node for node in self.raw_nodes() if node["Status"]["Addr"] == address)
            try:
                spec = node["Spec"] | {"Availability": wanted}
                self.manager.client().update_node(node["ID"], node["Version"]["Index"], spec)
                return
            except docker.errors.APIError as error:
                # Its version has moved on between the look and the update.
                if "out of sequence" not in str(error) or time.monotonic() > until:
                    raise EngineError(f"the node {address} cannot be made {wanted}: {error}") from None

    def wait_nodes(self, *states: str) -> None:
        """Until the nodes have these states. Raises EngineError."""
        until = time.monotonic() + DOWN_S
        while (found := self.nodes()) != list(states):
            if time.monotonic() > until:
                raise EngineError(f"the swarm's nodes are {found}, not {states}")
            time.sleep(0.2)

    def kill_second(self) -> None:
        """As if its plug were pulled: dockerd, its containerd and every container of it, at once."""
        mine = os.stat(f"/run/netns/{self.second.network}").st_ino
        marks = str(self.second.run_dir).encode()
        self.second.end(signal.SIGKILL)
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit():
                continue
            with contextlib.suppress(OSError):
                inside = os.stat(entry / "ns" / "net").st_ino == mine
                if inside or marks in (entry / "cmdline").read_bytes():
                    os.kill(int(entry.name), signal.SIGKILL)

    def cut(self, *, off: bool) -> None:
        """Pull node 2's network cable, or plug it in again; its containers run on."""
        ip("-n", HUB, "link", "set", NODES[1][0], "down" if off else "up")

    def close(self) -> None:
        """Nothing is left but the images."""
        for engine in reversed(self.engines):
            with contextlib.suppress(Exception):
                engine.client().leave_swarm(force=True)
            engine.close()
        # A node that was killed leaves its network namespaces mounted.
        mounts = [line.split()[1] for line in Path("/proc/mounts").read_text().splitlines()]
        for mount in mounts:
            if any(mount.startswith(f"{engine.run_dir}/") for engine in self.engines):
                subprocess.run(["umount", "-l", mount], check=False)
        for name in (*(name for name, _ in NODES), HUB):
            ip("netns", "del", name, check=False)
