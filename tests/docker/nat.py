"""Network namespaces behind a NAT that maps every connection to a random port, and that lets nothing in.

CLIENTS cannot reach each other, this machine has no route to them; they reach it at GATEWAY.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence

from tests.docker.swarm_engines import ip

BOX, OUTSIDE = "smqnat", "smqnat0"
GATEWAY, EXTERNAL = "10.219.73.1", "10.219.73.2"
INSIDE = "10.219.74"


def why_not() -> str:
    """Why no namespaces can be made here, "" if they can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    for program, package in (("ip", "iproute2"), ("iptables", "iptables"), ("nsenter", "util-linux")):
        if shutil.which(program) is None:
            return f"{program} is missing: apt-get install {package}"
    return ""


class Nat:
    """The box and its clients; `command(n, ...)` is a command line that runs at client n."""

    def __init__(self, clients: int) -> None:
        self.clients = [f"{BOX}c{number}" for number in range(clients)]
        self.close()
        ip("netns", "add", BOX)
        ip("link", "add", OUTSIDE, "type", "veth", "peer", "name", "outside", "netns", BOX)
        ip("addr", "add", f"{GATEWAY}/24", "dev", OUTSIDE)
        ip("link", "set", OUTSIDE, "up")
        self._inside(BOX, "link", "add", "inside", "type", "bridge")
        for name, address in (("outside", f"{EXTERNAL}/24"), ("inside", f"{INSIDE}.1/24")):
            self._inside(BOX, "addr", "add", address, "dev", name)
            self._inside(BOX, "link", "set", name, "up")
        self._inside(BOX, "link", "set", "lo", "up")
        for number, name in enumerate(self.clients):
            ip("netns", "add", name)
            self._inside(BOX, "link", "add", f"port{number}", "type", "veth", "peer", "name", "eth0", "netns", name)
            self._inside(BOX, "link", "set", f"port{number}", "master", "inside", "up")
            # Isolated ports talk to the box only.
            self._box("bridge", "link", "set", "dev", f"port{number}", "isolated", "on")
            self._inside(name, "addr", "add", f"{INSIDE}.{number + 10}/24", "dev", "eth0")
            self._inside(name, "link", "set", "eth0", "up")
            self._inside(name, "link", "set", "lo", "up")
            self._inside(name, "route", "add", "default", "via", f"{INSIDE}.1")
        for rule in (
            "-t nat -A POSTROUTING -o outside -j MASQUERADE --random-fully",
            "-A FORWARD -i inside -o outside -j ACCEPT",
            "-A FORWARD -i outside -o inside -m conntrack --ctstate ESTABLISHED,RELATED -j ACCEPT",
            "-P FORWARD DROP",
        ):
            self._box("iptables", *rule.split())
        self._box("sysctl", "-qw", "net.ipv4.ip_forward=1")

    @staticmethod
    def _box(*command: str) -> None:
        subprocess.run(["ip", "netns", "exec", BOX, *command], check=True, stdout=subprocess.DEVNULL)

    @staticmethod
    def _inside(namespace: str, *arguments: str) -> None:
        ip("-n", namespace, *arguments)

    def command(self, client: int, *command: str) -> list[str]:
        """As an argument vector."""
        return ["nsenter", f"--net=/run/netns/{self.clients[client]}", *command]

    def run(self, client: int, command: Sequence[str], limit_s: float = 60) -> subprocess.CompletedProcess[str]:
        """Run it there to its end."""
        line = self.command(client, *command)
        return subprocess.run(line, capture_output=True, text=True, timeout=limit_s, check=False)

    def close(self) -> None:
        """Nothing is left."""
        for name in (*self.clients, BOX):
            ip("netns", "del", name, check=False)
        ip("link", "del", OUTSIDE, check=False)
