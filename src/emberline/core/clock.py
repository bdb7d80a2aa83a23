"""Clocks that are passed to policy code, so that tests and the simulator can control the time."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    def now(self) -> float:
        """Return the time in seconds; it never goes back."""
        ...


class SystemClock:
    now = staticmethod(time.monotonic)


class WallClock:
    """Seconds since 1970, for times that leave the process. It may jump when the system clock is set."""

    now = staticmethod(time.time)


class ManualClock:
    """A clock for tests and the simulator: its time changes only by `advance`."""

    def __init__(self, start: float = 0.0) -> None:
        self.time = start

    def now(self) -> float:
        return self.time

    def advance(self, seconds: float) -> None:
        assert seconds >= 0
        self.time += seconds
