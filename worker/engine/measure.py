"""What this worker can do, for a placement by measure: free memory, and how fast one thread reads it.

A few milliseconds at start-up. It stands for the speed of decoding, which reads all weights for each token; on other
devices than the CPU it would say nothing, so that nothing is said.
"""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np

SAMPLE_BYTES = 32 * 2**20  # beyond the caches of most processors, and read within some milliseconds
ROUNDS = 3  # the best counts: others may have the core for a moment

_CGROUP = (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes"))


def free_memory(proc: Path = Path("/proc"), cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """Bytes: MemAvailable, or what the control group leaves if that is less; 0 where nobody says."""
    found = []
    try:
        for line in (proc / "meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                found.append(int(line.split()[1]) * 1024)
    except (OSError, ValueError, IndexError):
        pass
    for limit, usage in _CGROUP:
        folder = cgroup if limit == "memory.max" else cgroup / "memory"
        try:
            found.append(max(0, int((folder / limit).read_text()) - int((folder / usage).read_text())))
        except (OSError, ValueError):
            continue  # no such group, or "max"
    return min(found, default=0)


def read_speed(sample_bytes: int = SAMPLE_BYTES) -> int:
    """Bytes a second that one thread reads and adds up."""
    sample = np.ones(sample_bytes // 4, np.float32)
    best = float("inf")
    for _ in range(ROUNDS):
        started = time.perf_counter()
        sample.sum()
        best = min(best, time.perf_counter() - started)
    return int(sample_bytes / best)
