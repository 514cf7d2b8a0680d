"""The loop: descriptors, threads, children and signals come together in one thread."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from common.bus import Poller
from common.limits import HANDLER_MS_MAX
from common.loop import POOL_THREADS, Loop


@pytest.fixture
def loop() -> Iterator[Loop]:
    made = Loop(Poller())
    yield made
    made.close()


def until(loop: Loop, fact: Callable[[], object], limit_s: float = 60) -> None:
    end = time.monotonic() + limit_s
    while not fact():
        assert time.monotonic() < end
        loop.turn(20)


def test_descriptors_wake_the_loop_and_stop_when_removed(loop: Loop) -> None:
    reader, writer = os.pipe()
    got: list[bytes] = []
    loop.add_fd(reader, lambda: got.append(os.read(reader, 10)))
    os.write(writer, b"a")
    until(loop, lambda: got == [b"a"])
    loop.remove_fd(reader)
    loop.remove_fd(reader)
    os.write(writer, b"b")
    loop.turn(0)
    assert got == [b"a"]
    os.close(reader), os.close(writer)


def test_a_handler_may_remove_another_ones_descriptor(loop: Loop) -> None:
    pairs = [os.pipe() for _ in range(2)]
    got: list[int] = []

    def handler(mine: int, other: int) -> Callable[[], None]:
        def readable() -> None:
            got.append(mine)
            loop.remove_fd(pairs[mine][0])
            loop.remove_fd(pairs[other][0])

        return readable

    for mine, other in ((0, 1), (1, 0)):
        loop.add_fd(pairs[mine][0], handler(mine, other))
        os.write(pairs[mine][1], b"x")
    loop.turn(100)
    loop.turn(0)
    assert len(got) == 1
    for pair in pairs:
        os.close(pair[0]), os.close(pair[1])


def test_writing_is_watched_only_when_asked_for(loop: Loop) -> None:
    import socket

    near, far = socket.socketpair()
    ready: list[str] = []
    loop.add_fd(near.fileno(), lambda: ready.append("r"), lambda: ready.append("w"))
    loop.turn(0)
    assert ready == []
    loop.modify(near.fileno(), readable=False, writable=True)
    far.send(b"x")
    loop.turn(0)
    assert ready == ["w"]
    loop.remove_fd(near.fileno())
    near.close(), far.close()


def test_calls_from_threads_run_in_the_loop(loop: Loop) -> None:
    ran: list[int] = []
    threads = [
        threading.Thread(target=lambda: loop.call_soon(lambda: ran.append(threading.get_ident()))) for _ in range(20)
    ]
    for thread in threads:
        thread.start()
    until(loop, lambda: len(ran) == 20)
    assert set(ran) == {threading.get_ident()}


def test_jobs_report_results_and_errors_in_one_sentence(loop: Loop) -> None:
    done: list[tuple[object, str]] = []

    def job(value: int) -> int:
        if value < 0:
            raise ValueError("negative")
        if not value:
            raise KeyError
        return value + 1

    for value in (1, -1, 0):
        loop.run_job("misc", job, {"value": value}, lambda result, error: done.append((result, error)))
    until(loop, lambda: len(done) == 3)
    assert sorted(done, key=str) == sorted([(2, ""), (None, "negative"), (None, "KeyError")], key=str)


def test_a_stop_never_queues_behind_starts(loop: Loop) -> None:
    held = threading.Event()
    stopped: list[str] = []
    for _ in range(POOL_THREADS["start"] * 2):
        loop.run_job("start", held.wait, {"timeout": 90}, lambda result, error: None)
    loop.run_job("stop", lambda: "stopped", {}, lambda result, error: stopped.append(result))
    until(loop, lambda: stopped == ["stopped"])
    held.set()


def test_what_hangs_alone_does_not_hold_the_end_of_the_process() -> None:
    code = (
        "import time\nfrom common.bus import Poller\nfrom common.loop import ALONE, Loop\nloop = Loop(Poller())\n"
        "loop.run_job(ALONE, lambda: time.sleep(600), {}, print)\nloop.close()"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_a_child_that_ends_is_noticed_with_its_status(loop: Loop) -> None:
    exits: list[int] = []
    for code in ("import sys; sys.exit(3)", "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"):
        loop.watch_pid(subprocess.Popen([sys.executable, "-c", code]).pid, exits.append)
    until(loop, lambda: len(exits) == 2)
    assert sorted(exits) == [-signal.SIGKILL, 3]


def test_signals_are_calls_in_the_loop(loop: Loop) -> None:
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    heard: list[str] = []
    try:
        loop.watch_signals(heard.append)
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGINT)
        until(loop, lambda: len(heard) == 2)
    finally:
        signal.set_wakeup_fd(-1)
        for number, handler in before.items():
            signal.signal(number, handler)
    assert sorted(heard) == ["SIGINT", "SIGTERM"]


@pytest.mark.spec("S1 9.14")
def test_a_turn_that_blocks_too_long_is_counted(loop: Loop) -> None:
    assert not loop.note_turn(HANDLER_MS_MAX) and loop.note_turn(HANDLER_MS_MAX + 1)
    assert loop.slow_turns == 1


def test_time_does_not_go_back(loop: Loop) -> None:
    assert 0 <= loop.now_ms() <= loop.now_ms() and loop.wall_ms() > 1_600_000_000_000
