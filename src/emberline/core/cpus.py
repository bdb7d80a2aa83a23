"""core_count: how many cores this process may use, by its CPU affinity and by the quota of its container."""

from __future__ import annotations

import math
import os
from pathlib import Path

CGROUP_FILE, CGROUP_MOUNT = Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")


def core_count() -> int:
    """Return how many cores this process may use: those of its CPU affinity, or fewer with a CPU quota.

    A quota is rounded up: some CPU time would be lost otherwise."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = read_cpu_quota()
    return cores if quota is None else max(1, min(cores, math.ceil(quota)))


def read_cpu_quota() -> float | None:
    """Return how many cores' worth of CPU time this process may use; None: there is no limit.

    A container or a systemd unit sets a limit for its control group. The smallest limit of this group and of the groups
    around it is returned. Only Linux has such groups."""
    try:
        lines = CGROUP_FILE.read_text().splitlines()
    except OSError:
        return None
    limits = []
    for line in lines:
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0" and not controllers:
            limits += [_read_limit_v2(each) for each in _list_groups(CGROUP_MOUNT, path)]
        elif "cpu" in controllers.split(","):
            limits += [_read_limit_v1(each) for each in _list_groups(CGROUP_MOUNT / "cpu", path)]
    return min((limit for limit in limits if limit is not None), default=None)


def _list_groups(mount: Path, path: str) -> list[Path]:
    """Return the directories of a control group and of all groups around it.

    In a container, `path` may be that on the host, which does not exist here. The mount is then that of the
    container's group."""
    group = mount / path.lstrip("/")
    return [group, *(parent for parent in group.parents if parent == mount or mount in parent.parents)]


def _read_limit_v2(group: Path) -> float | None:
    try:
        quota, period = (group / "cpu.max").read_text().split()
        return None if quota == "max" else int(quota) / int(period)
    except (OSError, ValueError, ZeroDivisionError):
        return None


def _read_limit_v1(group: Path) -> float | None:
    try:
        quota, period = (int((group / f"cpu.cfs_{name}_us").read_text()) for name in ("quota", "period"))
        return quota / period if quota > 0 else None
    except (OSError, ValueError, ZeroDivisionError):
        return None
