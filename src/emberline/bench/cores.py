"""CPU pinning: the measured process gets a core of its own and all other processes share the rest.

So its CPU time does not depend on the others, and two processes that are compared run on the same core.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def reserve_core() -> Iterator[int | None]:
    """Move this process off one core and return that core; None if there is only one, or pinning is not allowed."""
    every = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set[int]()
    if len(every) < 2:
        yield None
        return
    measured = max(every)
    os.sched_setaffinity(0, every - {measured})
    try:
        yield measured
    finally:
        os.sched_setaffinity(0, every)


def pin_process(pid: int, core: int | None) -> None:
    """Pin a newly started process to the core."""
    if core is not None:
        os.sched_setaffinity(pid, {core})
