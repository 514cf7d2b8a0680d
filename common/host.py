"""The host: one process on the bus — a pure node, its sockets, the loop, effects turned into I/O (design.md 5)."""

from __future__ import annotations

import argparse
import os
import random
import secrets
import sys
import time
from collections.abc import Callable, Container, Mapping
from pathlib import Path
from typing import Any

from common.actors import Actor
from common.addresses import Plane, Role
from common.bus import BindError, Bus, Dealers, KeyPair
from common.datastream import Drain, Emit, ObserverActor
from common.effects import Effect, Exit, JobDone, Log, Observed, OwnerGone, RunJob, StopSignal
from common.limits import EXIT_DRAIN_MS
from common.loop import Loop
from common.node import PLANES, Identity, Node
from common.operator_key import OperatorKeyError
from common.redact import Redactor
from common.run_files import Presence
from common.security import BusFile, SecurityError, read_bus_file

EFFECT_ROUNDS_MAX = 1000  # effects may cause events that cause effects; more is a loop
IDLE_TURN_MS = 1000  # an idle node wakes for its pings anyway


class _Everything(Container[Any]):
    def __contains__(self, item: object) -> bool:
        return True


EVERYTHING = _Everything()


class BaseHost:
    """Loop, node and effects of one process; how frames travel is up to the two kinds below."""

    def __init__(
        self, identity: Identity, node: Node, *, owner_fd: int | None, bus: Bus, run_dir: Path | None = None
    ) -> None:
        self.bus = bus
        self.loop = Loop(bus.poller)
        self.identity = identity
        self.node = node
        node.at(self.loop.now_ms(), self.loop.wall_ms())
        self.jobs: dict[str, Callable[..., Any]] = {}
        """Job table of RunJob: kind → function(**args), run on a thread that owns no socket."""
        self._handlers: dict[type[Effect], Callable[[bytes, Any], None]] = {
            RunJob: self._run_job,
            Observed: self._observed,
            Log: lambda _, effect: say(f"{identity.logical_id}: {effect.text}"),
            Exit: self._exit,
        }
        self._deadlines: list[tuple[int, Callable[[], None]]] = []
        self._status: int | None = None
        self._signals = 0
        self._presence = Presence(run_dir) if owner_fd is not None and run_dir is not None else None
        if owner_fd is not None:
            self._watch_owner(owner_fd)
        self.loop.watch_signals(self._signal)

    # --- what services use ------------------------------------------------------------------------------------
    @property
    def node_key(self) -> bytes:
        """This process's identity on the bus."""
        return self.identity.key

    @property
    def boot(self) -> int:
        """This process's incarnation."""
        return self.identity.boot

    def spawn(self, actor: Actor, name: str = "") -> bytes:
        """Start an actor; returns its address."""
        self.node.at(self.loop.now_ms(), self.loop.wall_ms())
        return self.node.spawn(actor, name)

    def deliver(self, address: bytes, event: object) -> None:
        """Hand an event to an actor (loop thread only); handled in this turn."""
        self.node.deliver(address, event)

    def run_actors(self) -> None:
        """Handle what was delivered now and not at the turn's end; not from inside of an actor."""
        self.node.run_actors(self.loop.now_ms(), self.loop.wall_ms())

    def call_soon(self, call: Callable[[], None]) -> None:
        """Run `call` in the loop; from any thread."""
        self.loop.call_soon(call)

    def on_effect(self, kind: type[Effect], handler: Callable[[bytes, Any], None], *, at_once: bool = False) -> None:
        """Handle effects of a type: handler(actor_address, effect). at_once: as soon as an actor asks for it, not when
        all actors are done (ActorSystem.at_once)."""
        self._handlers[kind] = handler
        if at_once:
            self.node.system.at_once[kind] = handler

    # --- effects ----------------------------------------------------------------------------------------------
    def _run_job(self, address: bytes, job: RunJob) -> None:
        function = self.jobs[job.kind]
        settled = False

        def settle(result: Any, error: str) -> None:
            nonlocal settled
            if not settled:
                settled = True
                self.deliver(address, JobDone(job.kind, job.key, result, error))

        self.loop.run_job(job.pool, function, job.args, settle)
        late = f"timed out after {job.limit_ms} ms"
        self._deadlines.append((self.loop.now_ms() + job.limit_ms, lambda: settle(None, late)))

    def _observed(self, address: bytes, effect: Observed) -> None:
        """Brokers emit no records."""

    def _exit(self, _: bytes, effect: Exit) -> None:
        if self._status is None:
            self._status = effect.status
            if effect.error:
                say(effect.error)

    def _signal(self, name: str) -> None:
        self._signals += 1
        self.node.system.broadcast(StopSignal(name, self._signals))

    def _watch_owner(self, fd: int) -> None:
        os.set_blocking(fd, False)

        def readable() -> None:
            if not os.read(fd, 4096):
                self.loop.remove_fd(fd)
                self.node.system.broadcast(OwnerGone())

        self.loop.add_fd(fd, readable)

    # --- running ----------------------------------------------------------------------------------------------
    def receive(self, now_ms: int, wall_ms: int) -> bool:
        """Move inbound frames into the node. True if more may be waiting."""
        raise NotImplementedError

    def transmit(self, now_ms: int) -> None:
        """Move the node's frames out."""
        raise NotImplementedError

    def shut(self) -> None:
        """Close the sockets."""
        raise NotImplementedError

    def deadlines(self, now_ms: int) -> list[int]:
        """When a turn must start, monotonic ms."""
        deadline = self.node.next_deadline()
        times = [now_ms + IDLE_TURN_MS, *(at for at, _ in self._deadlines)]
        return times if deadline is None else [*times, deadline]

    def expire(self, now_ms: int) -> None:
        """Jobs whose time is over are told so."""
        for item in [item for item in self._deadlines if item[0] <= now_ms]:
            self._deadlines.remove(item)
            item[1]()

    def turn(self) -> None:
        """One pump cycle (S1 5.1): wait, frames in, actors, frames out."""
        now = self.loop.now_ms()
        self.ready = self.loop.turn(0 if self._more else min(self.deadlines(now)) - now)
        started = self.loop.now_ms()
        self.pump()
        self.loop.note_turn(self.loop.now_ms() - started)

    _more = False
    ready: Container[Any] = EVERYTHING
    """The sockets that the last wait found readable; everything for a pump without a wait."""

    def pump(self) -> None:
        """Everything of a turn but the wait."""
        now, wall = self.loop.now_ms(), self.loop.wall_ms()
        self._more = self.receive(now, wall)
        self.expire(now)
        for _ in range(EFFECT_ROUNDS_MAX):
            self.node.tick(now, wall)
            effects = self.node.take_effects()
            for address, effect in effects:
                self._handlers[type(effect)](address, effect)
            if not effects or not self.node.system.busy:
                break
        self.transmit(now)

    def run(self) -> int:
        """Turn until an Exit effect; then drain what was sent and close. Returns the status."""
        try:
            while self._status is None:
                self.turn()
            return self._status
        finally:
            self.close()

    def close(self) -> None:
        """Leave: what was accepted gets up to EXIT_DRAIN_MS to be acknowledged."""
        self.node.system.broadcast(Drain())
        self.pump()
        self.node.ask_for_acks()
        self.transmit(self.loop.now_ms())
        until = time.monotonic() + EXIT_DRAIN_MS / 1000
        while self.node.unsettled and self.node.link.up and time.monotonic() < until:
            self.turn()
        self.shut()
        self.loop.close()
        self.bus.close()
        if self._presence is not None:
            self._presence.leave()


class Host(BaseHost):
    """A process that dials its door broker: every service and agent."""

    def __init__(
        self,
        identity: Identity,
        *,
        broker_key: bytes,
        endpoints: Mapping[Plane, str],
        keys: KeyPair,
        owner_fd: int | None = None,
        bus_file: BusFile | None = None,
    ) -> None:
        node = Node(
            identity,
            rng=random.Random(secrets.randbits(64)),
            new_address=lambda: secrets.token_bytes(32),
            broker_key=broker_key,
            validate=os.environ.get("SMQ_VALIDATE") == "1",
        )
        run_dir = bus_file.run_dir if bus_file else None
        super().__init__(identity, node, owner_fd=owner_fd, bus=Bus(), run_dir=run_dir)
        self._bus_file = bus_file
        self.redactor = Redactor([])
        """Secrets that no record of this process may contain; replace it once they are known."""
        self.observer = node.spawn(ObserverActor(lambda data: self.redactor.redact(data)))
        self.dealers = Dealers(self.bus, {plane: endpoints[plane] for plane in PLANES}, broker_key, keys)

    @classmethod
    def from_bus_file(cls, path: Path, *, owner_fd: int | None = None) -> Host:
        """A service's host. Raises SecurityError."""
        bus_file = read_bus_file(path)
        identity = Identity(bus_file.keys.public, bus_file.role, new_boot(), bus_file.logical_id)
        return cls(
            identity,
            broker_key=bus_file.broker_key,
            endpoints=bus_file.endpoints,
            keys=bus_file.keys,
            owner_fd=owner_fd,
            bus_file=bus_file,
        )

    @property
    def bus_file(self) -> BusFile:
        """The bus file this host was made from (services only)."""
        if self._bus_file is None:
            raise SecurityError("this process has no bus file")
        return self._bus_file

    def _observed(self, address: bytes, effect: Observed) -> None:
        self.node.deliver(self.observer, Emit(effect.channel, effect.payload, effect.source))

    def receive(self, now_ms: int, wall_ms: int) -> bool:
        """Refusals, then every plane in order."""
        for plane in self.dealers.refused():
            self.node.on_refused(plane)
        return self.dealers.receive(lambda plane, data: self.node.on_frame(plane, data, now_ms, wall_ms))

    def transmit(self, now_ms: int) -> None:
        """Rebuild what must be, then send; a full socket drops, sessions repeat."""
        for plane in self.node.take_resets():
            self.dealers.reset(plane)
        for plane, frame in self.node.take_frames():
            self.dealers.send(plane, frame)

    def shut(self) -> None:
        """Say goodbye, close."""
        self.node.goodbye()
        self.transmit(self.loop.now_ms())
        self.dealers.close()


def say(text: str) -> None:
    """A line on stderr: this process's own log, which its parent captures (S1 3.2)."""
    sys.stderr.write(text + "\n")
    sys.stderr.flush()


def new_boot() -> int:
    """An incarnation number above all earlier ones of this key: wall-clock milliseconds (ringpop's idea)."""
    return time.time_ns() // 1_000_000


def run_main(role: Role, make: Callable[[Path, int | None], BaseHost], argv: list[str] | None = None) -> int:
    """`--bus FILE [--owner-fd N]`, then run. One sentence and status 1 for bad keys or files."""
    parser = argparse.ArgumentParser(prog=f"python -m services.{role}")
    parser.add_argument("--bus", required=True, type=Path, metavar="FILE", help="the service's bus file")
    parser.add_argument("--owner-fd", type=int, help="read end of the launcher's pipe; its EOF ends this service")
    args = parser.parse_args(argv)
    try:
        host = make(args.bus.absolute(), args.owner_fd)
    except (SecurityError, OperatorKeyError, BindError) as error:
        say(f"{role}: {error}")
        return 1
    return host.run()


def service_main(role: Role, build: Callable[[Host], None], argv: list[str] | None = None) -> int:
    """The main function of a dialling service: build(host) spawns its actors and wires its effects."""

    def make(bus: Path, owner_fd: int | None) -> Host:
        host = Host.from_bus_file(bus, owner_fd=owner_fd)
        if host.identity.role is not role:
            raise SecurityError(f"{bus} is the bus file of {host.identity.role}, not of {role}")
        build(host)
        return host

    return run_main(role, make, argv)
