"""What the bus does, told once: the same file runs on the simulated network and on real ZeroMQ processes (issue 5).

Each scenario drives a `Stage` and returns what was observed; EXPECTED says what that has to be, whatever carries it.
Times are seconds of the stage's own clock, virtual or real.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, Protocol

from common.actors import Actor, Ctx
from common.effects import SendFailed, ViewChanged
from common.messages.node_agent import DecodeTokens
from common.messages.prompt import TokensDecoded
from common.node import Node
from tests.support.echo import Sink, Source

MANY = 600
PLENTY = 300
HOLD_S = 4.0  # a little below UNROUTABLE_HOLD_MS


class Answerer(Sink):
    """A worker's: answers what a gateway asks, and echoes what another worker says."""

    Incoming: ClassVar[tuple[type, ...]] = (DecodeTokens, TokensDecoded, SendFailed)

    def receive(self, msg: Any, ctx: Ctx) -> None:
        if isinstance(msg, DecodeTokens):
            ctx.send(msg.reply_to, TokensDecoded(request_id=msg.request_id, text="answer"))
        else:
            super().receive(msg, ctx)


class Asker(Source):
    """A gateway's: `count` numbered questions, `burst` each `every_ms`; remembers answers and failures."""

    Incoming: ClassVar[tuple[type, ...]] = (TokensDecoded, SendFailed, ViewChanged)

    def on_timer(self, key: str, ctx: Ctx) -> None:
        for _ in range(min(self.burst, self.count - self.sent)):
            self.sent += 1
            ctx.send(self.dst, DecodeTokens(request_id=self.sent, tokens=[], reply_to=ctx.address))
        if self.sent < self.count:
            ctx.timer("send", self.every_ms)

    def receive(self, msg: Any, ctx: Ctx) -> None:
        if isinstance(msg, SendFailed):
            assert isinstance(msg.message, DecodeTokens)
            self.failed.append((msg.message.request_id, msg.reason))
        else:
            super().receive(msg, ctx)


class Peer(Protocol):
    """A process on the bus that a scenario looks into."""

    @property
    def node(self) -> Node:
        """Its bus stack."""


class Stage(Protocol):
    """A router, perhaps a relay, a gateway and two agents; agent 1 is a process of its own, with an Answerer in it."""

    patience: float
    """How much longer than on an idle machine things may take: real processes share two cores with other tests."""

    def gateway(self) -> Peer:
        """A service beside the router."""

    def agent(self) -> Peer:
        """A worker at its door."""

    def spawn(self, peer: Peer, actor: Actor) -> bytes:
        """Start an actor; returns its address."""

    def start_other(self) -> bytes:
        """Agent 1 starts (again: as a new incarnation); returns the address of its Answerer, the same each time."""

    def kill_other(self) -> None:
        """SIGKILL of agent 1."""

    def crash_router(self) -> None:
        """SIGKILL of the router."""

    def start_router(self) -> None:
        """A new router process."""

    def half_open(self, peer: Peer) -> None:
        """The peer's way to its door breaks, and only the peer finds out."""

    def stop(self, peer: Peer) -> None:
        """SIGSTOP: it neither reads nor sends."""

    def go_on(self, peer: Peer) -> None:
        """SIGCONT."""

    def now(self) -> float:
        """Seconds since whenever."""

    def until(self, fact: Callable[[], object], limit_s: float) -> float:
        """Let time pass until fact() is true; returns how long it took. Fails after limit_s times
        patience."""

    def wait(self, seconds: float) -> None:
        """Let time pass."""


def _knows(peer: Peer, *addresses: bytes) -> bool:
    return peer.node.link.up and all(peer.node.views.routes.owner(address) for address in addresses)


def _meet(stage: Stage, *addresses: bytes) -> None:
    """Until both know the way: before that, a broker that is late longer than the hold would be told as a failure."""
    peers = (stage.gateway(), stage.agent())
    stage.until(lambda: all(_knows(peer, *addresses) for peer in peers), 15)


def _outstanding(peer: Peer) -> int:
    """What was sent and has neither arrived nor failed. `unsettled` is without what waits for the end of its hold."""
    node = peer.node
    return len(node._held) + sum(session.outstanding for session in node._sessions._sessions.values())


def _boot_of(peer: Peer, address: bytes) -> int:
    route = peer.node.views.routes.owner(address)
    return route.boot if route else 0


def _fact(stage: Stage, took_s: float, at_least_s: float, at_most_s: float) -> str:
    return "in time" if at_least_s <= took_s <= at_most_s * stage.patience else f"after {took_s:.1f} s"


def join(stage: Stage) -> dict[str, object]:
    """Everybody finds everybody's actors."""
    gateway, agent = stage.gateway(), stage.agent()
    here, there = stage.spawn(gateway, Sink()), stage.spawn(agent, Sink())
    other = stage.start_other()
    took = stage.until(lambda: _knows(gateway, here, there, other) and _knows(agent, here, there, other), 15)
    routes = gateway.node.views.routes
    owners = [routes.owner(address) for address in (here, there)]
    return {
        "joined": _fact(stage, took, 0, 10),
        "owners": [
            owner is not None and owner.node == peer.node.identity.key
            for owner, peer in zip(owners, (gateway, agent), strict=True)
        ],
    }


def request_and_reply(stage: Stage) -> dict[str, object]:
    """Both directions, in order and once; also with a process of its own."""
    gateway, agent = stage.gateway(), stage.agent()
    ask = Asker(stage.spawn(agent, Answerer()), MANY, burst=100, every_ms=5)
    away = Asker(stage.start_other(), 50)
    between = Source(away.dst, 50, text="echo")
    _meet(stage, ask.dst, away.dst)
    stage.spawn(gateway, ask)
    stage.spawn(gateway, away)
    stage.spawn(agent, between)
    stage.until(lambda: len(ask.replies) == MANY and len(away.replies) == len(between.replies) == 50, 20)
    return {
        "answered": ask.replies == list(range(1, MANY + 1)),
        "away": away.replies == between.replies == list(range(1, 51)),
        "failed": ask.failed + away.failed + between.failed,
    }


def consumer_stall(stage: Stage) -> dict[str, object]:
    """A receiver that stands still delays nobody else, and has everything afterwards."""
    gateway, agent = stage.gateway(), stage.agent()
    slow = Sink()
    to_slow = Source(stage.spawn(gateway, slow), 5 * MANY, burst=500, every_ms=1)
    other = stage.start_other()
    stage.until(lambda: _knows(agent, to_slow.dst, other), 15)
    quick = Source(other, PLENTY, every_ms=5, text="echo")
    stage.stop(gateway)
    stage.spawn(agent, to_slow)
    stage.spawn(agent, quick)
    took = stage.until(lambda: len(quick.replies) == PLENTY, 10)
    stage.wait(1.5)
    before = len(slow.got)
    stage.go_on(gateway)
    stage.until(lambda: len(slow.got) == to_slow.count, 20)
    return {
        "quick": _fact(stage, took, 0, 5),
        "before": before,
        "after": slow.got == list(range(1, to_slow.count + 1)),
        "failed": to_slow.failed + quick.failed,
    }


def router_crash(stage: Stage) -> dict[str, object]:
    """In mid-stream: nothing is lost or doubled, and all are back within 5 s."""
    gateway, agent = stage.gateway(), stage.agent()
    sink = Sink()
    address = stage.spawn(gateway, sink)
    source = Source(address, MANY, burst=10, every_ms=20)
    other = stage.start_other()
    _meet(stage, address, other)
    stage.spawn(agent, source)
    stage.until(lambda: len(sink.got) >= MANY // 4 and _knows(gateway, other), 20)
    crashed = stage.now()
    stage.crash_router()
    stage.wait(0.5)
    stage.start_router()
    boots = [peer.node.link.router_boot for peer in (gateway, agent)]
    took = stage.until(
        lambda: all(
            _knows(peer, address, other) and peer.node.link.router_boot != boot
            for peer, boot in zip((gateway, agent), boots, strict=True)
        ),
        15,
    )
    away = stage.now() - crashed
    stage.until(lambda: len(sink.got) + len(source.failed) >= MANY, 20)
    after = Asker(other, 20)
    stage.spawn(gateway, after)
    stage.until(lambda: len(after.replies) == 20, 10)
    failed = [number for number, _ in source.failed]
    return {
        "back": _fact(stage, took, 0, 5),
        "order": sink.got == sorted(set(sink.got)),
        "settled": sorted([*sink.got, *failed]) == list(range(1, MANY + 1)),
        # A machine so busy that the new router takes longer than the hold may tell senders so.
        "failed": [] if away > HOLD_S else source.failed,
    }


def peer_killed(stage: Stage) -> dict[str, object]:
    """What a dead process did not acknowledge fails, each message once; its successor at the same key is reached."""
    gateway = stage.gateway()
    other = stage.start_other()
    _meet(stage, other)
    stream = Asker(other, 4 * MANY, burst=5, every_ms=10)
    stage.spawn(gateway, stream)
    stage.until(lambda: len(stream.replies) >= 50, 20)
    stage.kill_other()
    took = stage.until(lambda: stream.failed and stream.sent == stream.count and not _outstanding(gateway), 30)
    failed = [number for number, _ in stream.failed]
    silent = set(range(1, stream.count + 1)) - set(failed) - set(stream.replies)
    old = _boot_of(gateway, other)
    stage.start_other()
    stage.until(lambda: _boot_of(gateway, other) > old, 15)
    again = Asker(other, 20)
    stage.spawn(gateway, again)
    stage.until(lambda: len(again.replies) + len(again.failed) == 20, 20)
    return {
        "told": _fact(stage, took, 3, 20),
        "reasons": sorted({reason for _, reason in stream.failed} - {"unroutable", "peer_lost"}),
        "once": len(failed) == len(set(failed)),
        # Acknowledged and killed before its answer: at most what one moment holds.
        "silent": "few" if len(silent) <= 200 else len(silent),
        "answers": stream.replies == sorted(stream.replies),
        "again": again.replies == list(range(1, 21)),
    }


def half_open_link(stage: Stage) -> dict[str, object]:
    """The broker keeps a connection that is none: the new one counts, and nothing is lost."""
    gateway, agent = stage.gateway(), stage.agent()
    sink = Sink()
    address = stage.spawn(gateway, sink)
    _meet(stage, address)
    stage.spawn(agent, Source(address, 10))
    stage.until(lambda: len(sink.got) == 10, 15)
    stage.half_open(agent)
    source = Source(address, 100, burst=10, every_ms=5)
    stage.spawn(agent, source)
    took = stage.until(lambda: len(sink.got) == 110, 10)
    return {"healed": _fact(stage, took, 0, 3), "got": sink.got[10:] == list(range(1, 101)), "failed": source.failed}


def nobody_there(stage: Stage) -> dict[str, object]:
    """An address without a route: told after the hold, not before."""
    agent = stage.agent()
    source = Source(b"z" * 32, 3)
    stage.spawn(agent, source)
    took = stage.until(lambda: len(source.failed) == 3, 12)
    return {"told": _fact(stage, took, 4, 9), "failed": source.failed}


SCENARIOS: dict[str, tuple[Callable[[Stage], dict[str, object]], dict[str, object]]] = {
    "join": (join, {"joined": "in time", "owners": [True, True]}),
    "request and reply": (request_and_reply, {"answered": True, "away": True, "failed": []}),
    "consumer stall": (consumer_stall, {"quick": "in time", "before": 0, "after": True, "failed": []}),
    "router crash": (router_crash, {"back": "in time", "order": True, "settled": True, "failed": []}),
    "peer killed": (
        peer_killed,
        {"told": "in time", "reasons": [], "once": True, "silent": "few", "answers": True, "again": True},
    ),
    "half-open link": (half_open_link, {"healed": "in time", "got": True, "failed": []}),
    "unroutable": (
        nobody_there,
        {"told": "in time", "failed": [(1, "unroutable"), (2, "unroutable"), (3, "unroutable")]},
    ),
}
"""What happens → (the scenario, what has to be observed)."""
