"""`python -m services.prompt_gateway --bus FILE [--owner-fd N]`."""

from __future__ import annotations

import sys

from common.addresses import Role
from common.host import Host, service_main
from services.prompt_gateway.service import build


def _build(host: Host) -> None:
    build(host)


if __name__ == "__main__":
    sys.exit(service_main(Role.GATEWAY, _build))
