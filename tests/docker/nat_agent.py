"""Agents without an engine, one after the other, at one place: `python -m tests.docker.nat_agent`.

Each line on stdin is the path of a launch file, or "leave". Says "dial <monotonic ns>" right before it first dials.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

from common.actors import Inbox
from common.host import Host
from common.launch_file import LaunchFile
from common.swim.actor import SwimActor
from common.swim.config import PROFILES
from worker.agent.service import host_of


def main() -> None:
    """Until stdin ends."""
    os.set_blocking(0, False)
    host: Host | None = None
    print("here", flush=True)
    held = b""
    while True:
        try:
            data = os.read(0, 65536)
        except BlockingIOError:
            data = None
        if data == b"":
            break
        held += data or b""
        while b"\n" in held:
            line, _, held = held.partition(b"\n")
            if host is not None:
                host.close()
                host = None
            if line != b"leave":
                host = _join(Path(os.fsdecode(line)))
        if host is None:
            time.sleep(0.01)
        else:
            host.turn()
    if host is not None:
        host.close()


def _join(path: Path) -> Host:
    launch = LaunchFile.read(path)
    print(f"dial {time.monotonic_ns()}", flush=True)
    host = host_of(launch)
    host.loop.add_fd(0, lambda: None)  # so that a line ends the wait of a turn
    host.pump()
    host.spawn(SwimActor(logical_id=host.identity.logical_id, config=PROFILES[launch.profile]))
    host.spawn(Inbox())
    return host


if __name__ == "__main__":
    sys.exit(main())
