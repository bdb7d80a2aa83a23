"""CounterGrowth: how much workers' counters have grown, even if a worker was missing in the router's last status."""

from __future__ import annotations

from collections.abc import Hashable

FORGET_AFTER_S = 3600.0


class CounterGrowth:
    """Remembers the last value of each counter.

    A router that was restarted knows no workers for a moment. If their counters were forgotten then, all work since
    the start of a worker would count as new as soon as the router knows the worker again."""

    def __init__(self) -> None:
        self._last: dict[Hashable, tuple[int, float]] = {}  # value and time by counter

    def record(self, counter: Hashable, value: int, now: float, *, first_growth: int) -> int:
        """Return by how much a counter has grown; `first_growth` if it was never seen, 0 if it has shrunk."""
        before = self._last[counter][0] if counter in self._last else value - first_growth
        self._last[counter] = value, now
        return max(value - before, 0)

    def forget_old(self, now: float) -> None:
        """Forget the counters that were not recorded for FORGET_AFTER_S."""
        self._last = {key: last for key, last in self._last.items() if now - last[1] < FORGET_AFTER_S}
