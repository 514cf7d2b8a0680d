"""`python -m services.config_resolver`: see service.py."""

from __future__ import annotations

import sys

from services.config_resolver.service import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
