"""Network namespaces with a delay between them, and a run across them (needs root; nothing of it leaves this machine).

Each namespace has one TUN interface, and a thread here is the router between them: it holds every packet back for the
one-way delay. So it does not depend on what queueing disciplines a kernel has (netem is often missing), and the delay
can be changed while everything runs. Whoever runs in a namespace sees an ordinary IP network.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import heapq
import os
import select
import statistics
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from bench._ask import STORY, ask
from tests.e2e.stack import Stack
from tools.prompt_client import PromptClient

SUBNET = "10.87.212"
_TUNSETIFF, _IFF_TUN, _IFF_NO_PI, _CLONE_NEWNET = 0x400454CA, 0x0001, 0x1000, 0x40000000
STAGES = 2
DELAYS_MS = (5, 25, 50)
TOKENS = {0: 64, 5: 48, 25: 24, 50: 16}


class DelayedNetwork:
    """Use as a context manager. Namespace i has the address SUBNET.(i + 1). Raises OSError, CalledProcessError."""

    def __init__(self, count: int) -> None:
        self.names = [f"smqb{os.getpid()}x{index}" for index in range(count)]
        self.delay_s = 0.0
        self._taps: list[int] = []
        self._end_read, self._end_write = os.pipe()
        self._thread = threading.Thread(target=self._route, daemon=True)

    def __enter__(self) -> DelayedNetwork:
        try:
            for index, name in enumerate(self.names):
                _ip("netns", "add", name)
                with self.inside(index):
                    self._taps.append(_tun("smq0"))
                for words in (
                    ("addr", "add", f"{self.address(index)}/24", "dev", "smq0"),
                    ("link", "set", "smq0", "up"),
                    ("link", "set", "lo", "up"),
                ):
                    _ip("-n", name, *words)
        except BaseException:
            self._remove()
            raise
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._end_write)
        self._thread.join()
        self._remove()

    def _remove(self) -> None:
        for tap in self._taps:
            os.close(tap)
        for name in self.names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)

    @staticmethod
    def address(index: int) -> str:
        """Of namespace `index`."""
        return f"{SUBNET}.{index + 1}"

    @contextlib.contextmanager
    def inside(self, index: int) -> Iterator[None]:
        """This thread, and what it starts, is in the namespace."""
        home = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
        try:
            with open(f"/run/netns/{self.names[index]}") as there:
                _setns(there.fileno())
            yield
        finally:
            _setns(home)
            os.close(home)

    def _route(self) -> None:
        waiting: list[tuple[float, int, int, bytes]] = []
        serial = 0
        while True:
            timeout = max(0.0, waiting[0][0] - time.monotonic()) if waiting else None
            ready, _, _ = select.select([*self._taps, self._end_read], [], [], timeout)
            if self._end_read in ready:
                return
            for tap in ready:
                packet = os.read(tap, 65536)
                if packet[0] >> 4 != 4:
                    continue
                to = packet[19] - 1
                if packet[16:19] == bytes(map(int, SUBNET.split("."))) and 0 <= to < len(self._taps):
                    serial += 1
                    heapq.heappush(waiting, (time.monotonic() + self.delay_s, serial, to, packet))
            while waiting and waiting[0][0] <= time.monotonic():
                _, _, to, packet = heapq.heappop(waiting)
                with contextlib.suppress(OSError):
                    os.write(self._taps[to], packet)


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], capture_output=True, text=True, check=True)


def _tun(name: str) -> int:
    tap = os.open("/dev/net/tun", os.O_RDWR | os.O_CLOEXEC)
    fcntl.ioctl(tap, _TUNSETIFF, struct.pack("16sH", name.encode(), _IFF_TUN | _IFF_NO_PI))
    return tap


def _setns(fd: int) -> None:
    if ctypes.CDLL(None, use_errno=True).setns(fd, _CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), "setns")


def why_not() -> str:
    """Why there can be no such network here; empty where there can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    try:
        with DelayedNetwork(1):
            return ""
    except (OSError, subprocess.CalledProcessError) as error:
        return f"no network namespaces with TUN interfaces here: {error}"


def worker_script(folder: Path, network: DelayedNetwork) -> Path:
    """What the process provider starts as a worker: stage i (node i + 2) in namespace i + 1, where it sees no socket of
    the run in folder/run, as on another machine."""
    script = folder / "worker"
    worker = Path(sys.executable).with_name("mvp-worker-node")
    spaces = "".join(f"  {index + 1}) space={name} ;;\n" for index, name in enumerate(network.names) if index)
    hidden = f"mount -t tmpfs tmpfs {folder}/run && exec {worker} --launch"
    script.write_text(
        f"""#!/bin/sh
node=$(basename "$(dirname "$2")")
case $node in
{spaces}esac
cp -p "$2" {folder}/launch-$node.json
exec ip netns exec $space unshare -m sh -c '{hidden} "$0"' {folder}/launch-$node.json
"""
    )
    script.chmod(0o700)
    return script


def measure(rounds: int, feedback: str) -> dict[str, object]:
    """wan_*_error of two stages in namespaces of their own, the run in a third; feedback: "gateway" or "direct".

    The formula: with the one-way delay d, a token takes t(d) = t(0) + crossings * d, where t(0) is measured on the same
    network without delay. Crossings: gateway to first stage, between the stages, last stage to gateway (stages + 1);
    with direct feedback last stage to first in place of the two with the gateway (stages).
    """
    suffix = "_direct" if feedback == "direct" else ""
    crossings = STAGES if feedback == "direct" else STAGES + 1
    out: dict[str, object] = {
        f"wan_formula{suffix}": f"t(d) = t(0) + {crossings} d seconds a token, error = |t(d) measured / formula - 1|",
        f"wan_crossings{suffix}": crossings,
    }
    with DelayedNetwork(STAGES + 1) as network, tempfile.TemporaryDirectory(prefix="smq-wan-", dir="/tmp") as name:
        folder = Path(name)
        door = f"{network.address(0)}:19800"
        stack = Stack(
            args=("--pipeline-stages", str(STAGES), "--worker-bin", str(worker_script(folder, network))),
            config=f'[relay]\nmode = "default"\nbind_addr = "{door}"\n[pipeline]\nfeedback = "{feedback}"\n',
            environ={"OMP_NUM_THREADS": "1"},
            run_dir=folder / "run",
        )
        with network.inside(0), stack, _ready(stack) as client:
            seconds: dict[int, list[float]] = {delay: [] for delay in TOKENS}
            for _ in range(rounds):
                for delay in TOKENS:
                    network.delay_s = delay / 1000
                    time.sleep(4 * network.delay_s)
                    seconds[delay].append(ask(client, STORY, TOKENS[delay])[2])
            network.delay_s = 0.0
            stack.say("stop\n")
            stack.assert_stopped("stdin")
    base = statistics.median(seconds[0])
    out[f"wan_0ms_token_s{suffix}"] = round(base, 5)
    for delay in DELAYS_MS:
        formula = base + crossings * delay / 1000
        errors = [abs(value / formula - 1) for value in seconds[delay]]
        key = f"wan_{delay}ms_error{suffix}"
        out[f"wan_{delay}ms_token_s{suffix}"] = round(statistics.median(seconds[delay]), 5)
        out[key] = round(abs(statistics.median(seconds[delay]) / formula - 1), 4)
        out[f"{key}_min"], out[f"{key}_max"] = round(min(errors), 4), round(max(errors), 4)
    return out


@contextlib.contextmanager
def _ready(stack: Stack) -> Iterator[PromptClient]:
    stack.addr()
    with stack.client() as client:
        client.complete(STORY, max_tokens=8)
        yield client
