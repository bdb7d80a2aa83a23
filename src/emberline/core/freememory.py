"""free_memory: how much memory this process may still allocate without swapping.

The memory limits of the process's control groups (cgroups) are respected."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

# For each version of control groups: directory, file of the limit, file of the usage, prefix of names in memory.stat.
CGROUP_V2 = ("sys/fs/cgroup", "memory.max", "memory.current", "")
CGROUP_V1 = ("sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_")


def free_memory(filesystem_root: Path = Path("/")) -> int:
    """Return the bytes that this process may still allocate.

    On systems without /proc and control groups, such as macOS, this is half of the machine's memory. `filesystem_root`:
    the directory that contains proc and sys; tests pass another one."""
    limits = []
    with suppress(OSError, ValueError, IndexError):
        lines = (filesystem_root / "proc/meminfo").read_text().splitlines()
        limits += [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable")]
    for top, limit, used, prefix in (CGROUP_V2, CGROUP_V1):
        for group in _control_groups(filesystem_root, filesystem_root / top, "" if top == CGROUP_V2[0] else "memory"):
            with suppress(OSError, ValueError, KeyError):  # "max" is not a number: there is no limit
                kinds = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
                # The kernel frees these pages on demand.
                cached = sum(int(kinds[f"{prefix}{kind}_file"]) for kind in ("active", "inactive"))
                limits.append(int((group / limit).read_text()) - int((group / used).read_text()) + cached)
    return max(0, min(limits)) if limits else physical_memory() // 2


def physical_memory() -> int:
    """Return the machine's memory in bytes; 0 if the system does not report it."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (OSError, ValueError):
        return 0


def _control_groups(filesystem_root: Path, cgroup_mount: Path, controller: str) -> Iterator[Path]:
    """Yield the directory of this process's control group, and those of all its parent groups."""
    yield cgroup_mount
    with suppress(OSError):
        for line in (filesystem_root / "proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controller in controllers.split(","):
                parts = [part for part in path.split("/") if part not in ("", "..")]
                yield from (cgroup_mount.joinpath(*parts[: i + 1]) for i in range(len(parts)))
