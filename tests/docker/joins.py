"""How fast agents behind a NAT join: from the first dial to Alive and routed, ten at a time, while the relay restarts.

Real router, relay and membership; admissions as the provisioner makes them; agents by tests/docker/nat_agent.py.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from common import security
from common.actors import Actor, Ctx
from common.addresses import Role
from common.bus import KeyPair, mint_keypair
from common.config_slices import MembershipSlice, encode_slice
from common.door import Door, free_ports
from common.host import Host
from common.launch_file import LaunchFile
from common.messages.bus import Admit, Admitted, Revoke, Revoked
from common.messages.config import ConfigGet, ConfigSlice
from common.security import planes_to_json
from tests.docker.engine import ROOT
from tests.docker.nat import GATEWAY, Nat

JOIN_LIMIT_S = 90.0  # of a loaded machine
READY_S = 60.0
SERVICES = (Role.ROUTER, Role.RELAY, Role.MEMBERSHIP)


class Admitting(Actor):
    """The provisioner's part: whose keys may join. Watches the members, too."""

    Incoming: ClassVar[tuple[type, ...]] = (Admitted, Revoked)

    def __init__(self) -> None:
        self.admitted: set[bytes] = set()
        self.revoked: set[bytes] = set()

    def on_start(self, ctx: Ctx) -> None:
        """The view that says who is Alive."""
        ctx.watch("members")

    def receive(self, msg: Any, ctx: Ctx) -> None:
        """The router's answers."""
        (self.admitted if isinstance(msg, Admitted) else self.revoked).add(msg.key)


class Resolving(Actor):
    """The config resolver's part: membership's slice."""

    Incoming: ClassVar[tuple[type, ...]] = (ConfigGet,)

    def receive(self, msg: ConfigGet, ctx: Ctx) -> None:
        """The only one who asks is membership."""
        ctx.reply(ConfigSlice(part=msg.part, digest="d", slice_json=encode_slice(MembershipSlice())))


@dataclass(slots=True)
class Place:
    """A process at one client of the NAT, and what it said last."""

    process: subprocess.Popen[bytes]
    dialled_ns: int = 0
    key: bytes = b""


class Campaign:
    """A cluster whose door is the NAT's gateway, and one place a client."""

    def __init__(self, nat: Nat) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="smq-nat-", dir="/tmp")
        self.run_dir = Path(self._folder.name) / "run"
        door = Door(f"{GATEWAY}:{free_ports(GATEWAY)}")
        self.files = security.init(self.run_dir, relay=True, door=door)
        self.services = {role: self._service(role) for role in SERVICES}
        self.host = Host.from_bus_file(self.files[Role.PROVISIONER])
        self.actor = Admitting()
        self.address = self.host.spawn(self.actor, name=Role.PROVISIONER)
        self.resolver = Host.from_bus_file(self.files[Role.RESOLVER])
        self.resolver.spawn(Resolving(), name=Role.RESOLVER)
        self._environment = os.environ | {"PYTHONPATH": str(ROOT)}
        self.places = [self._place(nat, number) for number in range(len(nat.clients))]
        self.restarts = 0

    def _service(self, role: Role) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-P", "-m", f"services.{role}", "--bus", str(self.files[role])]
        return subprocess.Popen(command, env=os.environ | {"PYTHONPATH": str(ROOT)}, stdin=subprocess.DEVNULL)

    def _place(self, nat: Nat, number: int) -> Place:
        command = nat.command(number, sys.executable, "-P", "-m", "tests.docker.nat_agent")
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=self._environment)
        assert process.stdout is not None
        assert process.stdout.readline() == b"here\n"
        place = Place(process)
        threading.Thread(target=self._listen, args=(place,), daemon=True).start()
        return place

    @staticmethod
    def _listen(place: Place) -> None:
        assert place.process.stdout is not None
        for line in place.process.stdout:
            if line.startswith(b"dial "):
                place.dialled_ns = int(line.split()[1])

    def restart_relay(self) -> None:
        """SIGKILL, and at once again, as the launcher does it."""
        relay = self.services[Role.RELAY]
        relay.kill()
        relay.wait()
        self.services[Role.RELAY] = self._service(Role.RELAY)
        self.restarts += 1

    def until(self, what: str, fact: Any, limit_s: float) -> None:
        """Turn until fact(). Raises TimeoutError."""
        end = time.monotonic() + limit_s
        while not fact():
            if time.monotonic() > end:
                raise TimeoutError(f"{what} did not come to be within {limit_s:g} s")
            self.host.turn()

    def ready(self) -> None:
        """Membership is there and answers."""
        self.until("membership", lambda: self.host.node.views.routes.named(Role.MEMBERSHIP) is not None, READY_S)
        self.until("the members", lambda: self.host.node.views.members.known, READY_S)
        self.until("membership's configuration", self._configured, READY_S)

    def _configured(self) -> bool:
        """It is a member itself once it has its slice."""
        self.resolver.turn()
        return bool(self.host.node.views.members.items)

    def joined(self, key: bytes) -> bool:
        """Alive and routed."""
        views = self.host.node.views
        member = views.members.member(key)
        return member is not None and member.state == "alive" and any(e.node == key for e in views.routes.entries())

    def round(self, *, restart: bool) -> list[float | None]:
        """One agent at every place at once; the seconds that each took, None for one that did not join in
        JOIN_LIMIT_S. restart: the relay is killed when they begin to dial."""
        keys = [mint_keypair() for _ in self.places]
        for pair in keys:
            self._post(Admit(key=pair.public, role=Role.AGENT, run=b"n" * 16, node_id=1))
        wanted = {pair.public for pair in keys}
        self.until("admission", lambda: wanted <= self.actor.admitted, READY_S)
        launches = [self._launch(pair) for pair in keys]
        for place, pair, launch in zip(self.places, keys, launches, strict=True):
            place.key, place.dialled_ns = pair.public, 0
            self._tell(place, str(launch))
        if restart:
            self.restart_relay()
        took: dict[bytes, float] = {}
        end = time.monotonic() + JOIN_LIMIT_S
        while len(took) < len(keys) and time.monotonic() < end:
            self.host.turn()
            now = time.monotonic_ns()
            for place in self.places:
                if place.key not in took and place.dialled_ns and self.joined(place.key):
                    took[place.key] = (now - place.dialled_ns) / 1e9
        for place in self.places:
            self._tell(place, "leave")
        for pair in keys:
            self._post(Revoke(key=pair.public))
        self.until("revocation", lambda: wanted <= self.actor.revoked, READY_S)
        return [took.get(pair.public) for pair in keys]

    def _post(self, message: Any) -> None:
        self.host.node.system.post(self.host.bus_file.broker_key, message, src=self.address)

    def _launch(self, pair: KeyPair) -> Path:
        bus_file = self.host.bus_file
        path = self.run_dir / "nodes" / f"{secrets.token_hex(8)}.json"
        LaunchFile(
            run_id=1,
            run=(b"n" * 16).hex(),
            node_id=1,
            endpoints=planes_to_json(bus_file.worker_endpoints),
            broker_public_key=bus_file.worker_key.hex(),
            public_key=pair.public.hex(),
            secret_key=pair.secret.hex(),
            orchestrator=(b"o" * 32).hex(),
        ).write(path)
        return path

    @staticmethod
    def _tell(place: Place, line: str) -> None:
        assert place.process.stdin is not None
        place.process.stdin.write(line.encode() + b"\n")
        place.process.stdin.flush()

    def close(self) -> None:
        """Everything that was started ends."""
        for place in self.places:
            assert place.process.stdin is not None
            place.process.stdin.close()
        for role in reversed(SERVICES):
            self.services[role].terminate()
        for process in (*(place.process for place in self.places), *self.services.values()):
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(30)
            process.kill()
            process.wait()
        for host in (self.resolver, self.host):
            host.shut()
            host.loop.close()
            host.bus.close()
        self._folder.cleanup()


def campaign(joins: int, at_once: int, restart_every: int) -> tuple[list[float], int, int]:
    """(seconds of each join, how many did not join, restarts of the relay): every restart_every-th round has one."""
    nat = Nat(at_once)
    try:
        cluster = Campaign(nat)
        try:
            cluster.ready()
            took: list[float] = []
            failed = 0
            for number in range(joins // at_once):
                found = cluster.round(restart=number % restart_every == restart_every - 1)
                took += [seconds for seconds in found if seconds is not None]
                failed += found.count(None)
                print(f"round {number + 1}: {[round(s, 2) if s is not None else None for s in found]}", file=sys.stderr)
            return took, failed, cluster.restarts
        finally:
            cluster.close()
    finally:
        nat.close()
