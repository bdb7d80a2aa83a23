"""Time, passed in: policy never reads the wall clock, so tests and the simulator own it."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    def now(self) -> float:
        """Seconds on a monotonic scale."""
        ...


class SystemClock:
    now = staticmethod(time.monotonic)


class WallClock:
    """Seconds since 1970, for what others read; it may jump."""

    now = staticmethod(time.time)


class ManualClock:
    """The fake: time moves when told to."""

    def __init__(self, start: float = 0.0) -> None:
        self.time = start

    def now(self) -> float:
        return self.time

    def advance(self, seconds: float) -> None:
        assert seconds >= 0
        self.time += seconds
