"""How the engine's main thread sleeps and is woken, and what becomes of what fails on the way."""

from __future__ import annotations

import select
import socket
import struct
import subprocess
import sys
import threading
import time

from common.messages.engine import Fatal
from worker.engine.mailbox import Mailbox
from worker.engine.port import decode_frame

LIMIT_S = 60
FAILS = """
import sys
from worker.engine import port, process
def fails(stage):
    raise RuntimeError("the fast path sent another frame")
port.StagePort.{method} = fails
process.serve(int(sys.argv[1]), None)
"""


def in_thread(mailbox: Mailbox) -> tuple[list[object], threading.Thread]:
    got: list[object] = []
    thread = threading.Thread(target=lambda: got.append(mailbox.get()), daemon=True)
    thread.start()
    return got, thread


def wait_until_waiting(mailbox: Mailbox) -> None:
    stop = time.monotonic() + LIMIT_S
    while not mailbox.is_waiting:
        assert time.monotonic() < stop
        time.sleep(0.002)


def test_commands_come_in_order_and_wake_who_waits() -> None:
    mailbox = Mailbox()
    got, thread = in_thread(mailbox)
    wait_until_waiting(mailbox)
    mailbox.put("first")
    mailbox.put("second")
    thread.join(LIMIT_S)
    assert got == ["first"] and not mailbox.is_waiting and mailbox.get() == "second"


def test_who_sleeps_on_the_fast_path_is_woken_by_the_same_descriptor_and_looks_again() -> None:
    """Not by what woke it before: each sleep begins with nothing left of the last."""
    mailbox = Mailbox()
    begun: list[int] = []
    slept: list[int] = []
    looks: list[bool] = []

    def fast_wait(wake: int) -> bool:
        begun.append(len(begun))
        select.select([wake], [], [], LIMIT_S)
        slept.append(len(slept))
        return True

    def before_wait() -> None:
        looks.append(bool(select.select([mailbox._event], [], [], 0)[0]))

    mailbox.before_wait, mailbox.fast_wait = before_wait, fast_wait
    got, thread = in_thread(mailbox)
    for count in range(4):
        # Not `is_waiting`: it still says so for a moment after it was woken.
        stop = time.monotonic() + LIMIT_S
        while len(begun) == count:
            assert time.monotonic() < stop
            time.sleep(0.002)
        if count < 3:
            mailbox.nudge()
    mailbox.put("at last")
    thread.join(LIMIT_S)
    assert got == ["at last"] and not any(looks) and len(looks) == len(slept) == 4


def test_without_a_fast_path_it_sleeps_on_what_it_is_told_to_watch() -> None:
    mailbox = Mailbox()
    watched, other = socket.socketpair()
    mailbox.fast_wait = lambda _wake: False
    turns = 0

    def before_wait() -> int:
        nonlocal turns
        if select.select([watched], [], [], 0)[0]:
            mailbox.put(watched.recv(9))
        turns += 1
        return watched.fileno()

    mailbox.before_wait = before_wait
    got, thread = in_thread(mailbox)
    wait_until_waiting(mailbox)
    other.send(b"here")
    thread.join(LIMIT_S)
    assert got == [b"here"] and turns == 2
    watched.close()
    other.close()


def test_what_fails_while_the_engine_waits_ends_it_with_a_sentence() -> None:
    """A step may be taken there; the agent must hear of it."""
    for method in ("take_over", "fast_wait"):
        ours, theirs = socket.socketpair()
        code = FAILS.format(method=method)
        if method == "fast_wait":
            code = code.replace("def fails(stage)", "def fails(stage, wake)")
        with ours, subprocess.Popen(
            [sys.executable, "-P", "-c", code, str(theirs.fileno())],
            pass_fds=[theirs.fileno()], stderr=subprocess.PIPE,
        ) as engine:  # fmt: skip
            theirs.close()
            ours.settimeout(LIMIT_S)
            size = struct.unpack("<I", ours.recv(4, socket.MSG_WAITALL))[0]
            message = decode_frame(ours.recv(size, socket.MSG_WAITALL))
            assert isinstance(message, Fatal) and "the fast path sent another frame" in message.error
            assert engine.wait(LIMIT_S) == 1
