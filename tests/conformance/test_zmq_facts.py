"""What the network model of tests/sim assumes of ZeroMQ, each fact once on real sockets (anchors.md A4, A5, E2).

bus_world and edge_net are built on these; if one fails, the simulation proves nothing there.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq
from zmq.auth.thread import ThreadAuthenticator
from zmq.utils.monitor import recv_monitor_message

from common.bus import RECONNECT_MS
from common.limits import LINGER_MS

LIMIT_S = 30.0  # other tests share the machine
ROUTER_PROCESS = """
import sys, zmq
router = zmq.Context().socket(zmq.ROUTER)
router.bind(sys.argv[1])
print("bound", flush=True)
while True:
    conn, data = router.recv_multipart()
    if sys.argv[2] == "print":
        print(data.decode(), flush=True)
    else:
        router.send_multipart([conn, data])
"""
DEALER_PROCESS = """
import sys, time, zmq
dealer = zmq.Context().socket(zmq.DEALER)
dealer.connect(sys.argv[1])
dealer.send(b"hello")
while True:
    dealer.recv() if sys.argv[2] == "read" else time.sleep(1)
"""


class Lab:
    """One context with its sockets, and the processes of a test."""

    def __init__(self, directory: Path) -> None:
        self.context = zmq.Context()
        self.endpoint = f"ipc://{directory}/s"
        self.processes: list[subprocess.Popen[str]] = []

    def socket(self, kind: int, **options: int) -> Any:
        socket = self.context.socket(kind)
        socket.setsockopt(zmq.LINGER, 0)
        for name, value in options.items():
            socket.setsockopt(getattr(zmq, name), value)
        return socket

    def dealer(self, **options: int) -> Any:
        """As common/bus.py makes them."""
        dealer = self.socket(zmq.DEALER, **{"IMMEDIATE": 1, "RECONNECT_IVL": RECONNECT_MS, **options})
        dealer.connect(self.endpoint)
        return dealer

    def router(self, **options: int) -> Any:
        router = self.socket(zmq.ROUTER, **{"ROUTER_MANDATORY": 1, **options})
        router.bind(self.endpoint)
        return router

    def start(self, source: str, *arguments: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", source, *arguments]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        self.processes.append(process)
        return process

    def start_router(self, what: str) -> subprocess.Popen[str]:
        process = self.start(ROUTER_PROCESS, self.endpoint, what)
        assert process.stdout is not None and process.stdout.readline() == "bound\n"
        return process

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()
        self.context.destroy(0)


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[Lab]:
    made = Lab(tmp_path)
    yield made
    made.close()


def until(fact: Callable[[], Any], limit_s: float = LIMIT_S) -> Any:
    """Its first true value."""
    end = time.monotonic() + limit_s
    while time.monotonic() < end:
        if found := fact():
            return found
        time.sleep(0.005)
    raise AssertionError(f"not true within {limit_s} s")


def sent(socket: Any, *frames: bytes) -> bool:
    """Whether libzmq took it."""
    try:
        socket.send_multipart(list(frames), zmq.DONTWAIT)
    except zmq.Again:
        return False
    return True


def received(socket: Any) -> list[bytes] | None:
    try:
        found: list[bytes] = socket.recv_multipart(zmq.DONTWAIT)
    except zmq.Again:
        return None
    return found


def test_a_connection_is_first_in_first_out_without_loss_or_repetition(lab: Lab) -> None:
    router, dealer = lab.router(), lab.dealer()
    until(lambda: sent(dealer, b"0"))
    got: list[int] = []
    for number in range(1, 3000):
        until(lambda number=number: sent(dealer, b"%d" % number))
        while (frames := received(router)) is not None:
            got.append(int(frames[1]))
    while len(got) < 3000:
        got.append(int(until(lambda: received(router))[1]))
    assert got == list(range(3000))


def test_an_immediate_dealer_takes_nothing_before_it_is_connected(lab: Lab) -> None:
    dealer = lab.dealer()
    assert not sent(dealer, b"lost")
    router = lab.router()
    until(lambda: sent(dealer, b"first"))
    assert until(lambda: received(router))[1] == b"first"


def test_a_dealer_of_an_edge_keeps_what_it_is_given_for_the_connection(lab: Lab) -> None:
    dealer = lab.dealer(IMMEDIATE=0)
    assert all(sent(dealer, b"%d" % number) for number in range(100))
    router = lab.router()
    assert [until(lambda: received(router))[1] for _ in range(100)] == [b"%d" % number for number in range(100)]


def test_a_router_says_that_nobody_is_there(lab: Lab) -> None:
    router = lab.router()
    with pytest.raises(zmq.ZMQError) as error:
        router.send_multipart([b"\x00abcd", b"x"], zmq.DONTWAIT)
    assert error.value.errno == zmq.EHOSTUNREACH


def test_a_router_takes_its_high_water_mark_and_then_says_full(lab: Lab) -> None:
    """The model's mark is a plain count; the real one is this much or more, never less."""
    router = lab.router(SNDHWM=100)
    lab.start(DEALER_PROCESS, lab.endpoint, "sleep")
    conn, _ = until(lambda: received(router))
    count = 0
    while sent(router, conn, bytes(2000)):
        count += 1
    assert count >= 100


def test_after_a_kill_a_router_still_takes_some_then_says_gone(lab: Lab) -> None:
    router = lab.router()
    peer = lab.start(DEALER_PROCESS, lab.endpoint, "read")
    conn, _ = until(lambda: received(router))
    peer.send_signal(signal.SIGSTOP)
    assert all(sent(router, conn, b"%d" % number) for number in range(10)), "silently accepted"
    peer.kill()
    peer.wait()

    def is_gone() -> bool:
        try:
            router.send_multipart([conn, b"x"], zmq.DONTWAIT)
        except zmq.ZMQError as error:
            return error.errno == zmq.EHOSTUNREACH
        return False

    until(is_gone)


def test_a_stopped_peer_gets_everything_at_once_and_in_order_when_it_goes_on(lab: Lab) -> None:
    process = lab.start_router("echo")
    dealer = lab.dealer()
    until(lambda: sent(dealer, b"0"))
    assert until(lambda: received(dealer)) == [b"0"]
    os.kill(process.pid, signal.SIGSTOP)
    until(lambda: Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0] == "T")
    assert all(sent(dealer, b"%d" % number) for number in range(1, 500))
    time.sleep(0.3)
    assert received(dealer) is None
    os.kill(process.pid, signal.SIGCONT)
    assert [int(until(lambda: received(dealer))[0]) for _ in range(499)] == list(range(1, 500))


def test_a_killed_router_loses_a_contiguous_tail_and_the_dealer_comes_back_by_itself(lab: Lab) -> None:
    first = lab.start_router("print")
    dealer = lab.dealer()
    number = 0

    def send_one() -> None:
        nonlocal number
        if sent(dealer, b"%d" % number):
            number += 1

    while number < 200:
        send_one()
    first.kill()
    killed_at = number
    for _ in range(100):
        send_one()  # accepted by nobody, or refused
        time.sleep(0.001)
    assert first.stdout is not None
    before = [int(line) for line in first.stdout if line.endswith("\n")]
    second = lab.start_router("print")
    back_at = number
    until(lambda: (send_one(), number >= back_at + 50)[1])
    assert second.stdout is not None
    after = [int(second.stdout.readline()) for _ in range(40)]
    assert before == list(range(len(before))), "a prefix arrived"
    assert after == list(range(after[0], after[0] + 40)), "and, with nothing in between, what was sent on the new one"
    assert len(before) <= killed_at + 100 and after[0] >= len(before)


def test_the_dialler_sees_a_killed_router_within_the_time_of_the_model(lab: Lab) -> None:
    took_ms = []
    while not took_ms or (min(took_ms) > 1500 and len(took_ms) < 5):  # a busy machine may be late, but not each time
        process = lab.start_router("echo")
        dealer = lab.dealer()
        monitor = dealer.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        until(lambda dealer=dealer: sent(dealer, b"0"))
        process.kill()
        process.wait()
        began = time.monotonic()
        assert monitor.poll(LIMIT_S * 1000)
        took_ms.append((time.monotonic() - began) * 1000)
        assert recv_monitor_message(monitor)["event"] == zmq.EVENT_DISCONNECTED
        dealer.disable_monitor()
        monitor.close(0)
        dealer.close(0)
    assert min(took_ms) <= 1500, "the model lets a dialler notice within 50-1500 ms"


def test_a_reconnected_dealer_is_another_connection_to_the_router(lab: Lab) -> None:
    router = lab.router()
    conns = []
    for _ in range(2):
        dealer = lab.dealer()
        until(lambda dealer=dealer: sent(dealer, b"x"))
        conns.append(until(lambda: received(router))[0])
        dealer.close(0)
    assert conns[0] != conns[1] and all(conn[0] == 0 for conn in conns)


def test_what_was_sent_before_a_close_with_linger_still_arrives(lab: Lab) -> None:
    router, dealer = lab.router(), lab.dealer()
    until(lambda: sent(dealer, b"0"))
    assert all(sent(dealer, b"%d" % number) for number in range(1, 200))
    dealer.close(LINGER_MS)
    assert [int(until(lambda: received(router))[1]) for _ in range(200)] == list(range(200))


def test_an_oversized_frame_ends_the_connection_and_takes_the_next_one_with_it(lab: Lab) -> None:
    """So no sender may try: the node refuses what is larger than ENVELOPE_BYTES_MAX."""
    router = lab.router(MAXMSGSIZE=1000)
    dealer = lab.dealer()
    monitor = dealer.get_monitor_socket(zmq.EVENT_DISCONNECTED)
    until(lambda: sent(dealer, b"small"))
    assert until(lambda: received(router))[1] == b"small"
    # On a busy machine the connection may have ended before there is a next one.
    until(lambda: sent(dealer, bytes(2000)) and sent(dealer, b"behind it"))
    assert monitor.poll(LIMIT_S * 1000)
    assert until(lambda: (sent(dealer, b"again"), received(router))[1])[1] == b"again", "what was behind it is lost"
    dealer.disable_monitor()
    monitor.close(0)


def test_a_refused_handshake_is_told_once_and_never_tried_again(lab: Lab) -> None:
    """The link rebuilds the socket itself (LinkReset); the model's dialler stays refused until then."""
    authenticator = ThreadAuthenticator(lab.context)
    authenticator.start()
    try:
        authenticator.configure_curve_callback("*", _NobodyMayEnter())
        public, secret = zmq.curve_keypair()
        mine_public, mine_secret = zmq.curve_keypair()
        router = lab.socket(zmq.ROUTER)
        router.setsockopt(zmq.CURVE_SERVER, 1)
        router.setsockopt(zmq.CURVE_SECRETKEY, secret)
        router.setsockopt(zmq.ZAP_DOMAIN, b"test")
        router.bind(lab.endpoint)
        dealer = lab.socket(zmq.DEALER, IMMEDIATE=1, RECONNECT_IVL=RECONNECT_MS)
        dealer.setsockopt(zmq.CURVE_SERVERKEY, public)
        dealer.setsockopt(zmq.CURVE_PUBLICKEY, mine_public)
        dealer.setsockopt(zmq.CURVE_SECRETKEY, mine_secret)
        monitor = dealer.get_monitor_socket(zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_CONNECTED)
        dealer.connect(lab.endpoint)
        events = []
        while not events or events[-1] != zmq.EVENT_HANDSHAKE_FAILED_AUTH:
            assert monitor.poll(LIMIT_S * 1000)
            events.append(recv_monitor_message(monitor)["event"])
        assert not monitor.poll(10 * RECONNECT_MS), "it would try again every RECONNECT_MS"
        assert not sent(dealer, b"x")
        dealer.disable_monitor()
        monitor.close(0)
    finally:
        authenticator.stop()


class _NobodyMayEnter:
    def callback(self, domain: str, key: bytes) -> bool:
        return False
