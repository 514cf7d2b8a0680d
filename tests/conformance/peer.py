"""An agent of its own process for the conformance scenarios: an Answerer, until it is killed."""

from __future__ import annotations

import json
import os

from common.addresses import Plane, Role
from common.bus import KeyPair
from common.host import Host, new_boot
from common.node import Identity
from tests.conformance.scenario import Answerer


def main() -> None:
    told = json.loads(os.environ["PEER"])
    public, secret = (bytes.fromhex(key) for key in told["keys"])
    host = Host(
        Identity(public, Role.AGENT, new_boot(), "agent 1"),
        broker_key=bytes.fromhex(told["broker"]),
        endpoints={Plane(int(plane)): endpoint for plane, endpoint in told["endpoints"].items()},
        keys=KeyPair(public, secret),
    )
    host.node.spawn(Answerer(), address=bytes.fromhex(told["address"]))
    parent = os.getppid()
    while os.getppid() == parent:
        host.turn()


if __name__ == "__main__":
    main()
