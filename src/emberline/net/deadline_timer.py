"""DeadlineTimer: calls a function when a deadline passes that is set anew for each read or request."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable


class DeadlineTimer:
    """One timer of the event loop serves all deadlines.

    It is moved when it fires too early, not each time a deadline is set: that would cost time for every event of a
    stream.
    """

    __slots__ = ("_loop", "_on_deadline", "_timer", "deadline")

    def __init__(self, loop: asyncio.AbstractEventLoop, on_deadline: Callable[[], None]) -> None:
        self._loop = loop
        self._on_deadline = on_deadline
        self._timer: asyncio.TimerHandle | None = None
        self.deadline = math.inf  # time of the event loop; infinity: no deadline is set

    def set(self, deadline: float) -> None:
        self.deadline = deadline
        if deadline < math.inf and (self._timer is None or deadline < self._timer.when()):
            self._start()

    def clear(self) -> None:
        """Set no deadline. The timer stays, for the next deadline."""
        self.deadline = math.inf

    def cancel(self) -> None:
        """Stop the timer for good, and drop the reference to its owner: a cycle would wait for garbage collection."""
        self.deadline, self._on_deadline = math.inf, _do_nothing
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _start(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_at(self.deadline, self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        if self._loop.time() >= self.deadline:
            self.deadline = math.inf
            self._on_deadline()
        elif self.deadline < math.inf:
            self._start()


def _do_nothing() -> None:
    pass
