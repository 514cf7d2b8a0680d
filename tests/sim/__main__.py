"""`python -m tests.sim`, which is `./dev sim`."""

import sys

from tests.sim.cluster_main import main

if __name__ == "__main__":
    sys.exit(main())
