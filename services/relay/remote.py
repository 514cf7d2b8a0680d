"""`mvp-relay --allow-operator KEY --state FILE`: a relay on somebody else's machine (design.md 3; RELAY.md).

It serves any number of operators, each known by its key, and keeps them apart: nodes reach only their own operator's.
"""

from __future__ import annotations

import argparse
import os
import re
import socket
import sys
from pathlib import Path
from typing import NoReturn

from common.addresses import Role
from common.broker_host import BrokerHost
from common.bus import BindError
from common.door import PORTS, tcp_endpoints
from common.operator_key import OperatorKeyError, operator_key, operator_key_path
from common.security import BusFile, SecurityError
from services.relay.core import SAVE_JOB, RelayActor
from services.relay.state import RelayState

PROGRAM = "mvp-relay"
DEFAULT_BIND = "0.0.0.0:19800"
ADDRESS = re.compile(r"(\[[0-9a-fA-F:.]+\]|[A-Za-z0-9.-]+):([0-9]{1,5})")


class _Parser(argparse.ArgumentParser):
    """Usage errors are one sentence and status 1, as all errors of this program."""

    def error(self, message: str) -> NoReturn:
        self.exit(1, f"{PROGRAM}: {message}; try {PROGRAM} --help\n")


def _operator(text: str) -> bytes:
    if not re.fullmatch(r"[0-9a-f]{64}", text):
        raise argparse.ArgumentTypeError(
            f"{text[:80]!r} is no operator key: it is 64 hex digits, as `{PROGRAM} --operator-key` prints them on the "
            "operator's machine"
        )
    return bytes.fromhex(text)


def _address(text: str) -> str:
    matched = ADDRESS.fullmatch(text)
    if matched is None or not 1 <= int(matched[2]) <= 65536 - PORTS:
        raise argparse.ArgumentTypeError(f"{text[:80]!r} is no host:port with room for {PORTS} ports from there on")
    return text


def _arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = _Parser(
        prog=PROGRAM,
        description="The door for workers that cannot be reached and for operators who have no address of their own.",
        epilog="RELAY.md is the guide. example: mvp-relay --allow-operator KEY --state relay.json, with the KEY that "
        "`mvp-relay --operator-key` prints on the operator's machine",
    )
    parser.add_argument(
        "--operator-key", action="store_true", help="print this user's operator key (made on first use) and end"
    )
    parser.add_argument(
        "--allow-operator",
        action="append",
        type=_operator,
        metavar="KEY",
        help="whose runs may use this relay; repeat it for more than one",
    )
    parser.add_argument("--state", type=Path, metavar="FILE", help="the relay's key and admissions; made if missing")
    parser.add_argument(
        "--bind",
        type=_address,
        default=DEFAULT_BIND,
        metavar="HOST:PORT",
        help=f"four ports from here ({DEFAULT_BIND})",
    )
    parser.add_argument(
        "--advertise",
        type=_address,
        metavar="HOST:PORT",
        help="what others dial, for the URL that is printed",
    )
    arguments = parser.parse_args(argv)
    if not arguments.operator_key and (arguments.state is None or not arguments.allow_operator):
        parser.error("--state FILE and at least one --allow-operator KEY are needed")
    return arguments


def main(argv: list[str] | None = None) -> int:
    """Exit status: 0 after a stop, 1 after an error, which is one sentence on stderr."""
    arguments = _arguments(argv)
    try:
        if arguments.operator_key:
            sys.stdout.write(operator_key(operator_key_path(os.environ)).public.hex() + "\n")
            return 0
        host, url = make(
            arguments.state.absolute(), arguments.allow_operator, arguments.bind, arguments.advertise or ""
        )
    except (SecurityError, OperatorKeyError, BindError) as error:
        sys.stderr.write(f"{PROGRAM}: {error}\n")
        return 1
    sys.stdout.write(f"relay {url}\n")
    sys.stdout.flush()
    return host.run()


def make(state_path: Path, operators: list[bytes], bind: str, advertise: str = "") -> tuple[BrokerHost, str]:
    """The relay, bound, and the URL for [relay] url. Raises SecurityError, BindError."""
    state = RelayState(state_path)
    bus_file = BusFile(
        role=Role.RELAY,
        logical_id=Role.RELAY,
        run_dir=state_path.parent,
        broker_key=state.keys.public,
        endpoints=tcp_endpoints(bind),
        keys=state.keys,
        # Nobody listens: a tap would show every operator's traffic to whoever runs this machine.
        tap="inproc://tap",
        allow=dict.fromkeys(operators, Role.ROUTER) | {state.keys.public: Role.RELAY},
    )
    host = BrokerHost(bus_file, Role.RELAY, lambda broker, _: RelayActor(broker, persistent=True))
    host.jobs[SAVE_JOB] = state.save
    allowed = set(operators)
    for key, worker in state.workers.items():
        if worker.operator in allowed and key not in host.broker.admitted:
            host.broker.admit(key, worker)
    shown, _, port = (advertise or bind).rpartition(":")
    if not advertise and shown in ("0.0.0.0", "[::]"):
        shown = socket.getfqdn()
    return host, f"curve://{state.keys.public.hex()}@{shown}:{port}"
