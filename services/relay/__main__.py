"""`python -P -m services.relay --bus FILE [--owner-fd N]`, also installed as `mvp-relay`."""

import sys

from services.relay.service import main

if __name__ == "__main__":
    sys.exit(main())
