"""`python -P -m services.router --bus FILE [--owner-fd N]`."""

import sys

from services.router.service import main

if __name__ == "__main__":
    sys.exit(main())
