"""The bus under faults on virtual time: exactly once and in order, and after the faults everybody knows the same.

A failing seed prints the one command that replays it: SMQ_SEED=N pytest tests/sim/test_bus_sim.py.
"""

from __future__ import annotations

import os
import random
from dataclasses import dataclass

import pytest

from common.addresses import Plane, Role
from common.limits import BROKER_SILENT_MS
from tests.sim.bus_world import Book, BusWorld, key_of
from tests.support.echo import Source

SEEDS = [int(os.environ["SMQ_SEED"])] if "SMQ_SEED" in os.environ else list(range(24))
FAULTS_MS = 25_000
HEAL_MS = 45_000


@dataclass(slots=True)
class Stream:
    """One sender's messages to one book: what it sent, what failed, in which incarnations of the two."""

    name: str
    source: Source
    book: Book


class Scenario:
    """Two agents and a gateway that send to each other while the seed's faults happen."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.rng = random.Random(seed * 7919 + 1)
        self.world = BusWorld(seed, relay=seed % 3 != 0, hwm=self.rng.choice([50, 300, 2000]))
        self.world.delay_ms = self.rng.choice([(0, 2), (1, 20), (10, 60)])
        self.streams: list[Stream] = []
        self.books: dict[str, tuple[Book, bytes]] = {}
        self.happened: list[str] = []
        for name in (Role.GATEWAY, *self.world.agents):
            self._book(name)
        assert self.world.run(30_000, lambda: self._connected()), "the bus never came up"
        self._stream(self.world.agents[0], Role.GATEWAY)
        self._stream(self.world.agents[1], Role.GATEWAY)
        self._stream(self.world.agents[0], self.world.agents[1])

    def _book(self, name: str) -> None:
        book = Book()
        self.books[name] = (book, self.world.members[name].node.spawn(book))
        self.world.members[name].wake(self.world.now)

    def _stream(self, sender: str, receiver: str) -> None:
        book, address = self.books[receiver]
        member = self.world.members[sender]
        name = f"{sender}@{member.boot} to {receiver}@{self.world.members[receiver].boot} {len(self.streams)}"
        source = Source(address, 400, burst=self.rng.randint(2, 20), every_ms=self.rng.randint(20, 150), text=name)
        member.node.at(self.world.now, 0)
        member.node.spawn(source)
        member.wake(self.world.now)
        self.streams.append(Stream(name, source, book))

    def _connected(self) -> bool:
        nodes = [member.node for member in self.world.members.values() if member.alive]
        addresses = [address for _, address in self.books.values()]
        return all(node.link.up and all(node.views.routes.owner(one) for one in addresses) for node in nodes)

    # --- faults -----------------------------------------------------------------------------------------------------
    def disturb(self) -> None:
        until = self.world.now + FAULTS_MS
        kinds = [self._cut, self._stall, self._freeze, self._crash, self._half_open, self._restart]
        self.rng.shuffle(kinds)
        kinds = kinds[: self.rng.randint(1, len(kinds))]
        while self.world.now < until:
            self.world.run(self.rng.randint(200, 6000))
            kind = self.rng.choice(kinds)
            self.happened.append(f"{self.world.now} {kind.__name__}")
            kind()

    def _connection(self) -> object:
        found = [
            connection
            for dialler in self.world.diallers()
            for plane, connection in sorted(dialler.connections.items())
            if connection.established and not connection.cut
        ]
        return self.rng.choice(found) if found else None

    def _cut(self) -> None:
        if (connection := self._connection()) is not None:
            self.world.cut(connection)  # type: ignore[arg-type]

    def _half_open(self) -> None:
        if (connection := self._connection()) is not None:
            self.world.cut(connection, door_notices_ms=self.rng.randint(500, 15_000))  # type: ignore[arg-type]

    def _stall(self) -> None:
        if (connection := self._connection()) is not None:
            self.world.stall(connection, self.rng.randint(100, 4000))  # type: ignore[arg-type]

    def _freeze(self) -> None:
        processes = [*self.world.members.values(), *self.world.doors.values()]
        self.world.freeze(self.rng.choice(processes), self.rng.randint(100, 7000))

    def _crash(self) -> None:
        door = self.world.doors[self.rng.choice(sorted(self.world.doors))]
        self.world.crash_door(Role(door.name))
        self.world.run(self.rng.randint(10, 3000))
        self.world.start_door(Role(door.name))

    def _restart(self) -> None:
        name = self.rng.choice([Role.GATEWAY, *self.world.agents])
        self.world.restart_member(name)
        self._book(name)
        if name in self.world.agents:
            self._stream(name, Role.GATEWAY)

    # --- what must hold -----------------------------------------------------------------------------------------------
    def heal(self) -> None:
        world = self.world
        world.delay_ms = (0, 3)
        world.run(BROKER_SILENT_MS + HEAL_MS)
        live = [stream for stream in self.streams if self._sends(stream)]
        assert world.run(60_000, lambda: all(stream.source.sent == 400 for stream in live))
        world.run(10_000)
        assert self._connected(), "not everybody is connected and knows the routes"

    def check_streams(self) -> None:
        for stream in self.streams:
            got = stream.book.streams.get(stream.name, [])
            assert got == sorted(set(got)), f"{stream.name}: doubled or out of order"
            if not self._sends(stream):
                continue  # its sender is gone: a prefix at most
            failed = {number for number, _ in stream.source.failed}
            lost = set(range(1, stream.source.sent + 1)) - set(got) - failed
            assert not lost, f"{stream.name}: {len(lost)} lost without a word, first {min(lost)}"

    def _sends(self, stream: Stream) -> bool:
        """Whether the incarnation that sends it lives."""
        name, boot = stream.name.split(" to ")[0].rsplit("@", 1)
        return self.world.members[name].boot == int(boot)

    def check_tables(self) -> None:
        routers = self.world.doors[Role.ROUTER].broker.owners
        for name, member in self.world.members.items():
            seen = {route.address: route.node for route in member.node.views.routes.entries()}
            assert seen == routers, f"{name} does not know what the router knows"
            for address, _, _ in member.node.system.addresses():
                assert routers.get(address) == key_of(name), f"an actor of {name} has no route"

    def check_new_traffic(self) -> None:
        """After all that the bus is as good as new."""
        before = len(self.streams)
        for sender, receiver in (
            (self.world.agents[0], Role.GATEWAY),
            (self.world.agents[1], self.world.agents[0]),
            (Role.GATEWAY, self.world.agents[1]),
        ):
            if sender == Role.GATEWAY:
                continue
            self._stream(sender, receiver)
        self.world.run(60_000, lambda: all(stream.source.sent == 400 for stream in self.streams[before:]))
        self.world.run(2_000)
        for stream in self.streams[before:]:
            assert stream.book.streams.get(stream.name) == list(range(1, 401)), stream.name
            assert stream.source.failed == []


def play(seed: int) -> Scenario:
    scenario = Scenario(seed)
    scenario.disturb()
    scenario.heal()
    return scenario


@pytest.mark.spec("S1 6.1", "S1 6.2", "S1 6.11")
@pytest.mark.parametrize("seed", SEEDS)
def test_whatever_happens_streams_arrive_once_in_order_and_tables_converge(seed: int) -> None:
    scenario: Scenario | None = None
    try:
        scenario = play(seed)
        scenario.check_streams()
        scenario.check_tables()
        scenario.check_new_traffic()
    except AssertionError:
        if scenario is not None:
            print(f"faults: {scenario.happened}; verdicts: {scenario.world.verdicts}")
        print(f"replay: SMQ_SEED={seed} .venv/bin/python -m pytest {os.path.relpath(__file__)}")
        raise


def test_the_same_seed_gives_the_same_run() -> None:
    assert play(4).world.digest() == play(4).world.digest()


def test_without_faults_nothing_is_dropped() -> None:
    scenario = Scenario(1)
    scenario.world.run(20_000)
    assert scenario.world.verdicts.keys() <= {"forwarded", "local", "reintroduce", "refused"}
    for stream in scenario.streams:
        assert stream.book.streams[stream.name] == list(range(1, 401)) and stream.source.failed == []
    assert Plane.PROMPT in scenario.world.members[Role.GATEWAY].dialler.connections
