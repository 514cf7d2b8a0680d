"""The one loop: ZeroMQ sockets, descriptors, child exits, signals, timers and jobs in the main thread (design.md 4).

All plain descriptors live in one epoll nested in the poller, so that a thousand clients cost one entry there.
"""

from __future__ import annotations

import os
import select
import signal
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from common.bus import POLLIN, Poller
from common.limits import HANDLER_MS_MAX

POOL_THREADS = {"start": 8, "stop": 8, "follow": 32, "misc": 4}
"""Separate pools: a stop never queues behind a start (design.md 4)."""
ALONE = "alone"
"""A thread of its own: the interpreter does not end before the pools' threads do, whatever they hang in."""
READ, WRITE = select.EPOLLIN, select.EPOLLOUT


def stop_signals() -> tuple[signal.Signals, ...]:
    """What asks a process to end. SIGHUP, of a terminal that is closed, only where `nohup` has not said otherwise."""
    usual = (signal.SIGTERM, signal.SIGINT)
    return usual if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else (*usual, signal.SIGHUP)


class Loop:
    """Readiness, wake-ups and threads; it knows nothing of actors."""

    def __init__(self, poller: Poller) -> None:
        self._poller = poller
        self._epoll = select.epoll()
        self._poller.register(self._epoll.fileno(), POLLIN)
        self._handlers: dict[int, tuple[Callable[[], None], Callable[[], None] | None]] = {}
        self._wake_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._calls: list[Callable[[], None]] = []
        self._calls_lock = threading.Lock()
        self._pools: dict[str, ThreadPoolExecutor] = {}
        self._slow_turns = 0
        self.add_fd(self._wake_fd, self._run_calls)

    # --- time -------------------------------------------------------------------------------------------------
    @staticmethod
    def now_ms() -> int:
        """Monotonic milliseconds."""
        return time.monotonic_ns() // 1_000_000

    @staticmethod
    def wall_ms() -> int:
        """Unix milliseconds."""
        return time.time_ns() // 1_000_000

    # --- descriptors ------------------------------------------------------------------------------------------
    def add_fd(self, fd: int, on_readable: Callable[[], None], on_writable: Callable[[], None] | None = None) -> None:
        """Watch a descriptor for reading (and for writing after `modify`)."""
        self._handlers[fd] = (on_readable, on_writable)
        self._epoll.register(fd, READ)

    def modify(self, fd: int, *, readable: bool, writable: bool) -> None:
        """Choose what a watched descriptor waits for."""
        self._epoll.modify(fd, (READ if readable else 0) | (WRITE if writable else 0))

    def remove_fd(self, fd: int) -> None:
        """Stop watching; before the descriptor is closed."""
        if self._handlers.pop(fd, None) is not None:
            self._epoll.unregister(fd)

    def watch_pid(self, pid: int, on_exit: Callable[[int], None]) -> None:
        """Call on_exit(status) when a child ends: its exit code, or minus the signal."""
        fd = os.pidfd_open(pid)

        def ended() -> None:
            found, status = os.waitpid(pid, os.WNOHANG)
            if found:
                self.remove_fd(fd)
                os.close(fd)
                on_exit(os.waitstatus_to_exitcode(status))

        self.add_fd(fd, ended)

    def watch_signals(self, on_signal: Callable[[str], None]) -> None:
        """The stop signals arrive as calls in the loop."""
        reader, writer = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        wanted = stop_signals()
        for number in wanted:
            signal.signal(number, lambda *_: None)

        def readable() -> None:
            for number in os.read(reader, 64):
                if number in wanted:
                    on_signal(signal.Signals(number).name)

        self.add_fd(reader, readable)

    # --- threads ----------------------------------------------------------------------------------------------
    def call_soon(self, call: Callable[[], None]) -> None:
        """Run `call` in the loop's thread; from any thread."""
        with self._calls_lock:
            self._calls.append(call)
            if self._wake_fd >= 0:
                os.eventfd_write(self._wake_fd, 1)

    def _run_calls(self) -> None:
        os.eventfd_read(self._wake_fd)
        with self._calls_lock:
            calls, self._calls = self._calls, []
        for call in calls:
            call()

    def run_job(
        self, pool: str, job: Callable[..., Any], args: Mapping[str, Any], done: Callable[[Any, str], None]
    ) -> None:
        """Run job(**args) on a thread of `pool`; done(result, error) is called in the loop. error: one sentence."""

        def work() -> None:
            try:
                result, error = job(**args), ""
            except Exception as failure:
                result, error = None, str(failure) or type(failure).__name__
            self.call_soon(lambda: done(result, error))

        if pool == ALONE:
            threading.Thread(target=work, name="job-alone", daemon=True).start()
            return
        executor = self._pools.get(pool)
        if executor is None:
            executor = self._pools[pool] = ThreadPoolExecutor(POOL_THREADS[pool], thread_name_prefix=f"job-{pool}")
        executor.submit(work)

    # --- turning ----------------------------------------------------------------------------------------------
    def turn(self, timeout_ms: int) -> set[Any]:
        """Wait up to timeout_ms, run the handlers of ready descriptors, return the ready ZeroMQ sockets."""
        ready = dict(self._poller.poll(max(0, timeout_ms)))
        if ready.pop(self._epoll.fileno(), None):
            for fd, events in self._epoll.poll(0, 256):
                handlers = self._handlers.get(fd)
                if handlers is None:
                    continue
                if events & ~WRITE:
                    handlers[0]()
                if events & WRITE and fd in self._handlers and handlers[1] is not None:
                    handlers[1]()
        return set(ready)

    def note_turn(self, took_ms: int) -> bool:
        """Whether a turn blocked longer than S1 9.14 allows; counted for the watchdog in the tests."""
        slow = took_ms > HANDLER_MS_MAX
        self._slow_turns += slow
        return slow

    @property
    def slow_turns(self) -> int:
        """Turns over HANDLER_MS_MAX so far."""
        return self._slow_turns

    def close(self) -> None:
        """Stop the pools without waiting for what hangs, and give up the descriptors."""
        for executor in self._pools.values():
            executor.shutdown(wait=False, cancel_futures=True)
        self._epoll.close()
        with self._calls_lock:
            # A reader thread may still call: the number could belong to somebody else by then.
            wake_fd, self._wake_fd = self._wake_fd, -1
        os.close(wake_fd)
