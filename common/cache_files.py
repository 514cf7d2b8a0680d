"""Files of the cache: what can be made or fetched again, and is kept because that takes long.

Only the standard library is used here: the build hook of the wheel runs this by itself.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from pathlib import Path


def cache_folder() -> Path:
    """$XDG_CACHE_HOME/swactor-mq; need not exist."""
    root = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(root) / "swactor-mq"


def write_whole(target: Path, data: bytes) -> None:
    """Appears under its name only when it is complete, whoever else writes it at the same time."""
    target.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        os.replace(temporary, target)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
