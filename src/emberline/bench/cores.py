"""Cores: whoever is measured has one to itself, and everybody else the others. So it takes the same whoever else is
there, and two that are compared are compared on the same one."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def split_cores() -> Iterator[int | None]:
    """Which one that is, with us and whom we start on the others. None: there is only one, or we may not choose."""
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


def pin_process(process: int, core: int | None) -> None:
    """A process that has just begun."""
    if core is not None:
        os.sched_setaffinity(process, {core})
