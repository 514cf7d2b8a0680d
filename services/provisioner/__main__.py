"""`python -m services.provisioner --bus FILE [--owner-fd N]`, or `--cleanup` alone (design.md 2)."""

from __future__ import annotations

import os
import sys

from common.addresses import Role
from common.host import service_main
from services.provisioner.service import build, cleanup


def main(argv: list[str] | None = None) -> int:
    """The exit status."""
    args = sys.argv[1:] if argv is None else argv
    if "--cleanup" in args:
        return cleanup(os.environ)
    return service_main(Role.PROVISIONER, build, args)


if __name__ == "__main__":
    sys.exit(main())
