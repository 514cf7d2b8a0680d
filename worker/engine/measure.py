"""What this worker can do, for a placement by measure: how fast one thread reads its memory.

It takes some 70 ms before an engine is ready, so that only a run with that placement asks for it. It stands for the
speed of decoding, which reads all weights for each token; on other devices than the CPU it would say nothing, so that
nothing is said.
"""

from __future__ import annotations

import time

import numpy as np

SAMPLE_BYTES = 32 * 2**20  # beyond the caches of most processors, and read within some milliseconds
ROUNDS = 3  # the best counts: others may have the core for a moment


def read_speed(sample_bytes: int = SAMPLE_BYTES) -> int:
    """Bytes a second that one thread reads and adds up."""
    sample = np.ones(sample_bytes // 4, np.float32)
    best = float("inf")
    for _ in range(ROUNDS):
        started = time.perf_counter()
        sample.sum()
        best = min(best, time.perf_counter() - started)
    return int(sample_bytes / best)
