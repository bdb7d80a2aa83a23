"""raise_descriptor_limit: lets a server process open as many files and connections as the system permits."""

from __future__ import annotations

import resource


def raise_descriptor_limit(wanted: int = 65_536) -> None:
    """Raise the process's soft limit of file descriptors to `wanted`, or as far as its hard limit permits."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    target = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < target:
        resource.setrlimit(resource.RLIMIT_NOFILE, (target, hard))
