"""`python -P -m services.membership --bus FILE [--owner-fd N]`."""

import sys

from common.addresses import Role
from common.host import service_main
from services.membership.service import build

if __name__ == "__main__":
    sys.exit(service_main(Role.MEMBERSHIP, build))
