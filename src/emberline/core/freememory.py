"""free_memory: what this process may still take of the machine's, without swapping and within its container's limit."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

# Of each version of control groups: the folder, the limit, what is used, and what is before the names in memory.stat.
GROUPS = (
    ("sys/fs/cgroup", "memory.max", "memory.current", ""),
    ("sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_"),
)


def free_memory(root: Path = Path("/")) -> int:
    """Bytes; 0 where nobody says."""
    found = []
    with suppress(OSError, ValueError, IndexError):
        lines = (root / "proc/meminfo").read_text().splitlines()
        found += [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable")]
    for folder, limit, used, prefix in GROUPS:
        with suppress(OSError, ValueError, KeyError):  # such as of "max": no limit
            group = root / folder
            kinds = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
            cached = sum(int(kinds[f"{prefix}{kind}_file"]) for kind in ("active", "inactive"))  # given back when asked
            found.append(int((group / limit).read_text()) - int((group / used).read_text()) + cached)
    return max(0, min(found, default=0))
