"""How much memory this process may still take: of the machine, and within the control group of a container."""

from __future__ import annotations

from pathlib import Path

_CGROUP = (  # limit and usage, of version 2 and of version 1; a container sees its own group at the root
    ("memory.max", "memory.current"),
    ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
)


def free_memory(proc: Path = Path("/proc"), cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """Bytes: MemAvailable, or what the control group leaves if that is less. 0 where nobody says; so that this cannot
    be mistaken for a full machine, that one has 1."""
    found = []
    try:
        for line in (proc / "meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                found.append(int(line.split()[1]) * 1024)
    except (OSError, ValueError, IndexError):
        pass
    for limit, usage in _CGROUP:
        try:
            found.append(int((cgroup / limit).read_text()) - int((cgroup / usage).read_text()))
        except (OSError, ValueError):
            continue  # no such group, or "max"
    return max(1, min(found)) if found else 0
