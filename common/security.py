"""Keys, the allow-list and the bus files (design.md 2): `python -m common.security init DIR` writes them all.

Write access to that 0700 directory is the trust: who can read a key file there may be that service.
"""

from __future__ import annotations

import argparse
import json
import os
import stat
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from common.addresses import KEY_BYTES, SERVICES, Plane, Role
from common.bus import KeyPair, mint_keypair, public_of
from common.door import Door, DoorError, remote_door
from common.operator_key import OperatorKeyError, operator_key, operator_key_path

SOCKET_PATH_BYTES_MAX = 100  # AF_UNIX allows 107; a path over it fails in libzmq with an unhelpful errno


class SecurityError(ValueError):
    """Keys, a bus file or the run directory are unusable; one sentence."""


@dataclass(frozen=True, slots=True)
class BusFile:
    """What a process needs to join: its role and key, its door broker, and where the run's files are.

    For a broker, `endpoints` are what it binds, `door` what it binds for workers elsewhere (the
    provisioner knows it as well), `allow` the static keys by
    role, `uplink` (router only) the relay's endpoints and key.
    """

    role: Role
    logical_id: str
    run_dir: Path
    broker_key: bytes
    endpoints: dict[Plane, str]
    keys: KeyPair
    tap: str = ""
    allow: dict[bytes, Role] = field(default_factory=dict)
    uplink_key: bytes = b""
    uplink_endpoints: dict[Plane, str] = field(default_factory=dict)
    worker_key: bytes = b""
    worker_endpoints: dict[Plane, str] = field(default_factory=dict)
    taps: dict[str, tuple[str, bytes]] = field(default_factory=dict)
    """For the tap's own file: broker → (endpoint of its tap, its key)."""
    door: dict[Plane, str] = field(default_factory=dict)
    operator_key_file: str = ""
    """Router of a run whose relay is elsewhere: the lasting key that it uses, one router at a time."""

    @property
    def secrets_dir(self) -> Path:
        """Where the resolver puts secret files (0600)."""
        return self.run_dir / "secrets"

    @property
    def nodes_dir(self) -> Path:
        """Where the provisioner puts launch files."""
        return self.run_dir / "nodes"


def planes_to_json(endpoints: dict[Plane, str]) -> dict[str, str]:
    """By plane name."""
    return {plane.name.lower(): endpoint for plane, endpoint in endpoints.items()}


def planes_from_json(value: dict[str, str]) -> dict[Plane, str]:
    """The inverse of planes_to_json. Raises KeyError for an unknown plane."""
    return {Plane[name.upper()]: endpoint for name, endpoint in value.items()}


def read_secret_file(path: Path) -> bytes:
    """The bytes of a private file. Raises SecurityError if others can read it."""
    try:
        mode = path.stat().st_mode
        data = path.read_bytes()
    except OSError as error:
        raise SecurityError(f"{path}: {error.strerror}") from None
    if mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise SecurityError(f"{path}: others can read this key file; run chmod 600 on it")
    return data


def read_bus_file(path: Path) -> BusFile:
    """Parse a bus file. Raises SecurityError with one sentence."""
    try:
        raw: dict[str, Any] = json.loads(path.read_text())
        directory = path.parent.parent
        secret = _key(read_secret_file(directory / raw["key_file"]).decode().strip())
        return BusFile(
            role=Role(raw["role"]),
            logical_id=raw["logical_id"],
            run_dir=directory,
            broker_key=_key(raw["broker_key"]),
            endpoints=planes_from_json(raw["endpoints"]),
            keys=KeyPair(public_of(secret), secret),
            tap=raw.get("tap", ""),
            allow={_key(key): Role(role) for key, role in raw.get("allow", {}).items()},
            uplink_key=_key(raw["uplink_key"]) if raw.get("uplink_key") else b"",
            uplink_endpoints=planes_from_json(raw.get("uplink_endpoints", {})),
            worker_key=_key(raw["worker_key"]) if raw.get("worker_key") else b"",
            worker_endpoints=planes_from_json(raw.get("worker_endpoints", {})),
            taps={name: (tap["endpoint"], _key(tap["key"])) for name, tap in raw.get("taps", {}).items()},
            door=planes_from_json(raw.get("door", {})),
            operator_key_file=raw.get("operator_key_file", ""),
        )
    except OSError as error:
        raise SecurityError(f"bus file {path}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        if isinstance(error, SecurityError):
            raise
        raise SecurityError(
            f"bus file {path} is damaged ({error}); write it anew with python -m common.security"
        ) from None


def _key(text: str) -> bytes:
    key = bytes.fromhex(text)
    if len(key) != KEY_BYTES:
        raise ValueError(f"a key of {len(key)} bytes, {KEY_BYTES} are needed")
    return key


def write_private(path: Path, data: bytes) -> None:
    """Create or replace a 0600 file atomically."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        os.write(fd, data)
    finally:
        os.close(fd)
    temporary.rename(path)


def socket_path_bytes(directory: Path) -> int:
    """How long the longest path of a socket in this run directory is; at most SOCKET_PATH_BYTES_MAX will do."""
    return len(os.fsencode(directory / "relay-control.sock"))


def init(directory: Path, *, relay: bool, door: Door | None = None) -> dict[Role, Path]:
    """Write keys/, bus/, secrets/ and nodes/ below a run directory; returns the bus file of each service.

    All endpoints are ipc sockets in the directory: nothing listens on a network, except where a `door` lets in workers
    from elsewhere. Workers dial the relay when there is one (here, or the door's), else the router. Raises
    SecurityError when the directory cannot hold sockets or cannot be written.
    """
    if (size := socket_path_bytes(directory)) > SOCKET_PATH_BYTES_MAX:
        raise SecurityError(
            f"run directory {directory} is too long for sockets ({size} bytes, at most "
            f"{SOCKET_PATH_BYTES_MAX}); set [runtime] run_dir to a shorter path"
        )
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = directory.stat()
        if status.st_uid != os.geteuid() or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise SecurityError(
                f"others can write to the run directory {directory}, which holds the keys; "
                "use one that is yours alone (chmod 700)"
            )
        for name in ("keys", "bus", "secrets", "nodes"):
            (directory / name).mkdir(mode=0o700, exist_ok=True)
            (directory / name).chmod(0o700)
        return _write(directory, relay, door or Door())
    except OperatorKeyError as error:
        raise SecurityError(str(error)) from None
    except OSError as error:
        raise SecurityError(f"run directory {directory} is not writable: {error.strerror}") from None


def _write(directory: Path, relay: bool, public: Door) -> dict[Role, Path]:
    roles = sorted((SERVICES | {Role.TAP}) - (set() if relay else {Role.RELAY}))
    pairs: dict[Role, KeyPair] = {}
    lasting = operator_key_path(os.environ) if public.remote else None
    for role in roles:
        path = directory / "keys" / f"{role}.key"
        if role is Role.ROUTER and lasting is not None:
            # A relay elsewhere knows this operator by it, from one run to the next.
            pairs[role] = operator_key(lasting)
            write_private(path, pairs[role].secret.hex().encode() + b"\n")
        elif path.exists():
            secret = bytes.fromhex(read_secret_file(path).decode().strip())
            pairs[role] = KeyPair(public_of(secret), secret)
        else:
            pairs[role] = mint_keypair()
            write_private(path, pairs[role].secret.hex().encode() + b"\n")
    router = _sockets(directory, "router")
    door = _sockets(directory, "relay") if relay else router
    files: dict[Role, Path] = {}
    for role in roles:
        content: dict[str, Any] = {
            "role": role,
            "logical_id": role.value,
            "key_file": f"keys/{role}.key",
            "broker_key": pairs[Role.ROUTER].public.hex(),
            "endpoints": planes_to_json(router),
            "tap": f"ipc://{directory}/router-tap.sock",
        }
        if role is Role.PROVISIONER:
            key = public.key if public.remote else pairs[Role.RELAY if relay else Role.ROUTER].public
            content["worker_key"] = key.hex()
            content["door"] = planes_to_json(public.bound())
            content["worker_endpoints"] = planes_to_json(public.dialled() if public.advertise or public.bind else door)
        if role is Role.ROUTER:
            content["allow"] = {pairs[other].public.hex(): other for other in roles if other is not Role.RELAY}
            if public.remote:
                content["uplink_key"] = public.key.hex()
                content["uplink_endpoints"] = planes_to_json(public.dialled())
                content["operator_key_file"] = str(lasting)
            elif relay:
                content["uplink_key"] = pairs[Role.RELAY].public.hex()
                content["uplink_endpoints"] = planes_to_json(door)
            else:
                content["door"] = planes_to_json(public.bound())
        if role is Role.TAP:
            brokers = (Role.ROUTER, Role.RELAY) if relay else (Role.ROUTER,)
            content["taps"] = {
                broker.value: {"endpoint": f"ipc://{directory}/{broker}-tap.sock", "key": pairs[broker].public.hex()}
                for broker in brokers
            }
        if role is Role.RELAY:
            content["broker_key"] = pairs[Role.RELAY].public.hex()
            content["endpoints"] = planes_to_json(door)
            content["door"] = planes_to_json(public.bound())
            content["tap"] = f"ipc://{directory}/relay-tap.sock"
            content["allow"] = {pairs[other].public.hex(): other for other in (Role.ROUTER, Role.TAP, Role.RELAY)}
        files[role] = directory / "bus" / f"{role}.json"
        write_private(files[role], json.dumps(content, indent=1).encode() + b"\n")
    return files


def _sockets(directory: Path, name: str) -> dict[Plane, str]:
    return {plane: f"ipc://{directory}/{name}-{plane.name.lower()}.sock" for plane in Plane}


def main(argv: list[str] | None = None) -> int:
    """`python -m common.security init DIR`; see --help."""
    parser = argparse.ArgumentParser(prog="python -m common.security", description="Keys and bus files of a run.")
    parser.add_argument("command", choices=["init"])
    parser.add_argument("directory", type=Path, metavar="DIR")
    parser.add_argument("--relay", action="store_true", help="workers dial a relay, which is started beside the router")
    parser.add_argument("--bind", default="", metavar="HOST:PORT", help="let workers in at four ports from PORT on")
    parser.add_argument("--advertise", default="", metavar="HOST:PORT", help="what workers dial instead")
    parser.add_argument("--relay-url", default="", metavar="URL", help="a relay elsewhere, curve://<key>@host:port")
    args = parser.parse_args(argv)
    try:
        door = remote_door(args.relay_url) if args.relay_url else Door(args.bind, args.advertise or args.bind)
        files = init(args.directory.absolute(), relay=args.relay and not args.relay_url, door=door)
    except (SecurityError, DoorError) as error:
        sys.stderr.write(f"security: {error}\n")
        return 1
    sys.stdout.writelines(f"{path}\n" for path in files.values())
    return 0


if __name__ == "__main__":
    sys.exit(main())
