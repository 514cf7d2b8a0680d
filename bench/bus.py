"""The bus: how much the router adds to a direct connection, how much it carries, what it loses and what it keeps.

Both sides of the ratio are CURVE over ipc with one process at each end and the same frames; the rounds alternate, so
that what else runs on the machine meets both. The losses are counted between two whole nodes with their sessions.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from bench._bus_peers import Setting, dial, request
from common.addresses import Plane, Role
from common.bus import KeyPair, mint_keypair
from tests.support.bus import RealBus
from tests.support.echo import Sink, Source

ROUNDS = 5
REQUESTS = 1500
FLOOD = 60_000
STREAM = 3000
STALL_S = 3.0
RSS_ENVELOPES = 1_000_000
RSS_WARM_UP = 100_000
LIMIT_S = 60.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of this bench."""
    parser.add_argument("--envelopes", type=int, default=RSS_ENVELOPES, help="for rss_growth_bytes (%(default)s)")


class Peer:
    """One far end."""

    def __init__(self, kind: str, setting: Setting) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "bench._bus_peers", kind], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(setting.dump() + b"\n")
        self.process.stdin.flush()
        self.out = self.process.stdout
        if self.out.readline() != b"ready\n":
            raise RuntimeError(f"the {kind} end did not start")

    def stop(self) -> None:
        """End it."""
        self.process.kill()
        self.process.wait()
        self.out.close()


def _setting(endpoint: str, broker: bytes, keys: KeyPair, peer: KeyPair, count: int = 0) -> Setting:
    return Setting(endpoint, broker, keys.public, keys.secret, peer.public, count)


@contextmanager
def _bus() -> Iterator[RealBus]:
    with tempfile.TemporaryDirectory(prefix="smq-bench-") as directory:
        bus = RealBus(Path(directory) / "r", validate=False)
        try:
            yield bus
        finally:
            bus.close()


class _Ends:
    """Gateway and worker at one router."""

    def __init__(self, bus: RealBus) -> None:
        self.gateway = bus.bus_file(Role.GATEWAY).keys
        self.agent = bus.agent_keys[0]
        self.router = bus.bus_file(Role.ROUTER).keys.public
        self.endpoint = bus.bus_file(Role.GATEWAY).endpoints[Plane.PROMPT]


def _round_trips(setting: Setting, count: int, *, hello: bool) -> float:
    """The median round trip in seconds."""
    socket = dial(setting, hello=hello)
    data = request(setting.public, setting.peer)
    took: list[float] = []
    for _ in range(count):
        started = time.perf_counter()
        socket.send(data)
        if not socket.poll(int(LIMIT_S * 1000)):
            raise RuntimeError("no answer")
        socket.recv()
        took.append(time.perf_counter() - started)
    socket.close()
    return statistics.median(took[count // 10 :])


def ratio(rounds: int) -> dict[str, object]:
    """router_rtt_ratio_p50 and the two medians behind it."""
    with _bus() as bus:
        ends = _Ends(bus)
        server = mint_keypair()
        direct_at = f"ipc://{bus.files[Role.ROUTER].parent.parent}/direct.sock"
        direct = Peer("echo", _setting(direct_at, b"", server, ends.gateway))
        routed = Peer("echo", _setting(ends.endpoint, ends.router, ends.agent, ends.gateway))
        through: list[float] = []
        beside: list[float] = []
        try:
            for _ in range(rounds):
                beside.append(
                    _round_trips(_setting(direct_at, server.public, ends.gateway, server), REQUESTS, hello=False)
                )
                through.append(
                    _round_trips(_setting(ends.endpoint, ends.router, ends.gateway, ends.agent), REQUESTS, hello=True)
                )
        finally:
            direct.stop()
            routed.stop()
    ratios = sorted(a / b for a, b in zip(through, beside, strict=True))
    return {
        "router_rtt_ratio_p50": statistics.median(ratios),
        "router_rtt_ratio_p50_min": ratios[0],
        "router_rtt_ratio_p50_max": ratios[-1],
        "router_rtt_s": statistics.median(through),
        "direct_rtt_s": statistics.median(beside),
    }


def _flood(ends: _Ends, count: int) -> float:
    """Forwarded envelopes a second over `count`, the credits counted."""
    sink = Peer("sink", _setting(ends.endpoint, ends.router, ends.agent, ends.gateway, count))
    try:
        flood = Peer("flood", _setting(ends.endpoint, ends.router, ends.gateway, ends.agent, count))
        try:
            said = json.loads(sink.out.readline())
        finally:
            flood.stop()
    finally:
        sink.stop()
    if said["got"] != count:
        raise RuntimeError(f"only {said['got']} of {count} envelopes came through")
    return float(count * (1 + 1 / 256) / said["seconds"])


def _rss(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4096


def flow(rounds: int, envelopes: int) -> dict[str, object]:
    """forwards_per_s and rss_growth_bytes."""
    with _bus() as bus:
        ends = _Ends(bus)
        _flood(ends, RSS_WARM_UP)
        rates = sorted(_flood(ends, FLOOD) for _ in range(rounds))
        router = bus.processes[Role.ROUTER].pid
        before = _rss(router)
        _flood(ends, envelopes)
        growth = _rss(router) - before
    return {
        "forwards_per_s": statistics.median(rates),
        "forwards_per_s_min": rates[0],
        "forwards_per_s_max": rates[-1],
        "rss_growth_bytes": growth,
        "rss_envelopes": envelopes,
    }


def lost_on_stall() -> int:
    """A consumer that takes nothing for 3 s while a worker sends."""
    with _bus() as bus:
        gateway, agent = bus.service(Role.GATEWAY), bus.agent()
        sink = Sink()
        source = Source(gateway.spawn(sink), STREAM, burst=100, every_ms=10)
        bus.until(lambda: gateway.node.link.up and agent.node.link.up, LIMIT_S)
        agent.spawn(source)
        until = time.monotonic() + STALL_S
        while time.monotonic() < until:
            bus.pump(agent)
        bus.until(lambda: len(sink.got) + len(source.failed) >= STREAM, LIMIT_S)
        return STREAM - len(set(sink.got))


def lost_on_router_restart() -> int:
    """SIGKILL of the router in mid-stream, half a second without one."""
    with _bus() as bus:
        gateway, agent = bus.service(Role.GATEWAY), bus.agent()
        sink = Sink()
        source = Source(gateway.spawn(sink), STREAM, burst=20, every_ms=5)
        agent.spawn(source)
        bus.until(lambda: len(sink.got) >= STREAM // 4, LIMIT_S)
        bus.kill(Role.ROUTER)
        until = time.monotonic() + 0.5
        while time.monotonic() < until:
            bus.pump()
        bus.start(Role.ROUTER)
        bus.until(lambda: len(sink.got) + len(source.failed) >= STREAM, LIMIT_S)
        return STREAM - len(set(sink.got))


def run(arguments: argparse.Namespace) -> dict[str, object]:
    """All figures."""
    return {
        **ratio(arguments.rounds),
        **flow(arguments.rounds, arguments.envelopes),
        "lost_on_stall": lost_on_stall(),
        "lost_on_router_restart": lost_on_router_restart(),
    }
