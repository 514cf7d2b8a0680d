"""`mvp-orchestrator [ARGUMENTS]` (embedded), or `python -P -m services.orchestrator --bus FILE` (hosted)."""

from __future__ import annotations

import sys
from pathlib import Path

from services.orchestrator import launcher
from services.orchestrator.service import hosted


def main(argv: list[str] | None = None) -> int:
    """The exit status."""
    args = sys.argv[1:] if argv is None else argv
    if len(args) == 2 and args[0] == "--bus":
        return hosted(Path(args[1]))
    return launcher.main(args)


if __name__ == "__main__":
    sys.exit(main())
