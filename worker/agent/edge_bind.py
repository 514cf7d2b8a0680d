"""Where this worker's engine takes edges: beside an ipc door another ipc socket, else any tcp port (design.md 3)."""

from __future__ import annotations

import re
import socket
from pathlib import Path

from common.bus import KeyPair
from common.launch_file import LaunchFile
from common.messages.engine import EdgeBind

IPC_PATH_BYTES_MAX = 107  # sun_path without its zero
TCP = re.compile(r"tcp://(\[[0-9a-fA-F:.]+\]|[^\s:/]+):([0-9]{1,5})")


def edge_bind(launch: LaunchFile, keys: KeyPair) -> EdgeBind:
    """The engine's edge endpoint. Never fails: without a way in, edges go over the bus."""
    door = launch.endpoints["control"]
    addresses, advertise = ["tcp://127.0.0.1:*"], "127.0.0.1"
    if door.startswith("ipc://"):
        path = Path(door.removeprefix("ipc://")).parent / f"edge{launch.node_id}.sock"
        if len(str(path).encode()) <= IPC_PATH_BYTES_MAX:
            addresses = [f"ipc://{path}"]
    elif found := TCP.fullmatch(door):
        own = _own_address(found[1].strip("[]"), int(found[2]))
        if own and own != "127.0.0.1":
            addresses, advertise = ["tcp://0.0.0.0:*"], own
    return EdgeBind(
        run=bytes.fromhex(launch.run),
        public_key=keys.public,
        secret_key=keys.secret,
        addresses=addresses,
        advertise=advertise,
    )


def _own_address(host: str, port: int) -> str:
    """The address of the interface that leads to the door; a datagram socket that is connected sends nothing."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((host, port))
            return str(probe.getsockname()[0])
    except OSError:
        return ""
