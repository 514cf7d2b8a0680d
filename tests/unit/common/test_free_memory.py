"""Free memory from files as a machine, a container of either kind of control group, and another system have them."""

from __future__ import annotations

from pathlib import Path

import pytest

from common.free_memory import free_memory

MEMINFO = "MemTotal:       8000 kB\nMemFree:         100 kB\nMemAvailable:   4000 kB\n"
V1 = ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes")
V2 = ("memory.max", "memory.current")


@pytest.mark.parametrize(
    ("meminfo", "names", "limit", "usage", "expected"),
    [
        (MEMINFO, V2, None, None, 4_096_000),  # no control group
        (MEMINFO, V2, "max\n", "5000\n", 4_096_000),
        (MEMINFO, V2, "1000000\n", "400000\n", 600_000),
        (MEMINFO, V1, "1000000\n", "400000\n", 600_000),
        (MEMINFO, V1, "9223372036854771712\n", "400000\n", 4_096_000),  # how version 1 says "no limit"
        (MEMINFO, V2, "9000000\n", "1000000\n", 4_096_000),
        (MEMINFO, V2, "1000000\n", "1000000\n", 1),  # full, which is known
        (MEMINFO, V1, "1000000\n", "1200000\n", 1),
        (MEMINFO, V2, "garbage\n", "1\n", 4_096_000),
        ("MemAvailable: 0 kB\n", V2, None, None, 1),
        ("MemFree: 100 kB\n", V2, "1000000\n", "400000\n", 600_000),
        ("MemAvailable:\n", V2, None, None, 0),
        (None, V2, None, None, 0),
    ],
)
def test_the_least_that_anybody_says(
    tmp_path: Path, meminfo: str | None, names: tuple[str, str], limit: str | None, usage: str | None, expected: int
) -> None:
    for name, text in (("meminfo", meminfo), (names[0], limit), (names[1], usage)):
        if text is not None:
            (tmp_path / name).parent.mkdir(exist_ok=True)
            (tmp_path / name).write_text(text)
    assert free_memory(tmp_path, tmp_path) == expected


def test_this_machine_says() -> None:
    assert free_memory() > 1
