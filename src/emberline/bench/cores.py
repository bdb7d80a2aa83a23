"""CPU pinning for benchmarks: the measured process has one core to itself, all other processes use the other cores.

So the CPU time of the measured process does not depend on the other processes. Processes that are compared run on the
same core, one after the other.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def reserve_core() -> Iterator[int | None]:
    """Keep one CPU core free of this process and yield the core's number.

    Yield None if there is only one core, or if the system does not support pinning.
    """
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
    """Pin a newly started process to the core. With `core` None, do nothing."""
    if core is not None:
        os.sched_setaffinity(pid, {core})
