"""`python -m services.datastream_collector --bus FILE [--owner-fd N]`."""

from __future__ import annotations

import sys

from common.addresses import Role
from common.host import service_main
from services.datastream_collector.service import build


def main() -> int:
    """Run the datastream collector until it is stopped."""
    return service_main(Role.COLLECTOR, build)


if __name__ == "__main__":
    sys.exit(main())
