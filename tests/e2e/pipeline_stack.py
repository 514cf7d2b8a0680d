"""What the tests of planned runs share: the processes of a stage, and harm to what connects them."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path

from tests.e2e.stack import Stack, StackError
from tests.support.socket_proxy import SocketProxy

PARAGRAPH = (
    "The keeper of the lighthouse climbed the stairs each evening, counted the ships on the horizon, "
    "trimmed the wick and wrote one line into the book that nobody had ever asked to read. "
)


def stage_pids(stack: Stack, part: str) -> list[int]:
    """The processes of a part in the order of the stages: node ids stand in the paths of their launch files. Between
    fork and exec an engine looks like its agent, and one that has lost its agent is on its way out: neither counts."""
    left = sorted(stack.left(), key=lambda process: process.command)
    agents = [process.pid for process in left if process.part == "agent"]
    agents = [pid for pid in agents if _parent(pid) not in agents]
    if part == "agent":
        return agents
    found = [process.pid for process in left if process.part == part]
    if part == "engine":
        of_agent = {_parent(pid): pid for pid in found}
        return [of_agent[agent] for agent in agents if agent in of_agent]
    return found


def stage_pid(stack: Stack, part: str, stage: int, limit_s: float = 30) -> int:
    """One process of a part; waits until all of them are there. Raises StackError."""
    until = time.monotonic() + limit_s
    while True:
        pids = stage_pids(stack, part)
        if len(pids) > stage:
            return pids[stage]
        if time.monotonic() > until:
            raise StackError(f"no {part} of stage {stage}: {stack.left()}")
        time.sleep(0.02)


def _parent(pid: int) -> int:
    """0 for a process that has just ended."""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/stat") as file:
        return int(file.read().rpartition(")")[2].split()[1])
    return 0


class ProcessHarm:
    """A process that ends, or stops for a while."""

    def __init__(self, pid: int) -> None:
        self.pid = pid

    def kill(self) -> None:
        """SIGKILL."""
        os.kill(self.pid, signal.SIGKILL)

    def freeze(self) -> None:
        """SIGSTOP."""
        os.kill(self.pid, signal.SIGSTOP)

    def thaw(self) -> None:
        """SIGCONT."""
        os.kill(self.pid, signal.SIGCONT)


class ConnectionHarm:
    """The connections that go over some sockets: they end, hang, or carry damaged bytes."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self.proxies = [SocketProxy(path) for path in paths]

    def kill(self) -> None:
        """Every connection is cut; new ones are let through."""
        for proxy in self.proxies:
            proxy.cut()

    def freeze(self) -> None:
        """Nothing goes through any more, also not over new connections."""
        for proxy in self.proxies:
            proxy.freeze()

    def thaw(self) -> None:
        """It does again."""
        for proxy in self.proxies:
            proxy.thaw()

    def corrupt(self) -> None:
        """One byte each way arrives inverted."""
        for proxy in self.proxies:
            for way in ("there", "back"):
                proxy.flip(way)

    def close(self) -> None:
        """The end."""
        for proxy in self.proxies:
            proxy.close()

    @property
    def passed(self) -> int:
        """Bytes that went through here: none, where a connection was made before its socket could be taken."""
        return sum(proxy.passed for proxy in self.proxies)

    @property
    def flipped(self) -> int:
        """Bytes that were damaged so far."""
        return sum(proxy.flipped for proxy in self.proxies)
