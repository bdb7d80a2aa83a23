"""DeadlineTimer: calls a function when a deadline passes. The deadline can be moved often at little cost."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable


class DeadlineTimer:
    """A deadline with one timer of the event loop.

    Moving the deadline later does not restart the timer. If the timer fires before the new deadline, it is started
    again for the remaining time.
    """

    __slots__ = ("_fires_at", "_loop", "_on_deadline", "_timer", "deadline")

    def __init__(self, loop: asyncio.AbstractEventLoop, on_deadline: Callable[[], None]) -> None:
        self._loop = loop
        self._on_deadline = on_deadline
        # For a time that has passed, uvloop returns a plain Handle, which does not know its time.
        self._timer: asyncio.Handle | None = None
        self._fires_at = math.inf
        self.deadline = math.inf  # time of the event loop; infinity: no deadline is set

    def set(self, deadline: float) -> None:
        self.deadline = deadline
        if deadline < math.inf and (self._timer is None or deadline < self._fires_at):
            self._start_timer()

    def clear(self) -> None:
        """Remove the deadline. A new one can be set later."""
        self.deadline = math.inf

    def cancel(self) -> None:
        """Stop the timer for good and drop the function, so that no reference cycle keeps the owner in memory."""
        self.deadline, self._on_deadline = math.inf, _do_nothing
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _start_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer, self._fires_at = self._loop.call_at(self.deadline, self._on_timer), self.deadline

    def _on_timer(self) -> None:
        self._timer = None
        if self._loop.time() >= self.deadline:
            self.deadline = math.inf
            self._on_deadline()
        elif self.deadline < math.inf:
            self._start_timer()


def _do_nothing() -> None:
    pass
