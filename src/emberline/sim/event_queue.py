"""EventQueue: calls callbacks in the order of their virtual times, and sets a clock to the time of each callback."""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable

from emberline.core.clock import ManualClock

Callback = Callable[[], object]


class EventQueue:
    def __init__(self, clock: ManualClock) -> None:
        self._clock = clock
        self._events: list[tuple[float, int, Callback, bool]] = []
        self._event_ids = itertools.count()
        self._num_foreground = 0

    @property
    def has_work(self) -> bool:
        """Whether an event is left that is not a background event."""
        return self._num_foreground > 0

    def call_at(self, time: float, callback: Callback, *, is_background: bool = False) -> None:
        """Call `callback` at this virtual time, or now if that is past. Background events do not keep a run going."""
        heapq.heappush(self._events, (max(time, self._clock.time), next(self._event_ids), callback, is_background))
        self._num_foreground += not is_background

    def call_every(self, seconds: float, callback: Callback) -> None:
        """Call `callback` periodically, after every `seconds` of virtual time, as a background event."""
        assert seconds > 0

        def call_and_repeat() -> None:
            callback()
            self.call_at(self._clock.time + seconds, call_and_repeat, is_background=True)

        self.call_at(self._clock.time + seconds, call_and_repeat, is_background=True)

    def add_foreground_requests(self, count: int = 1) -> None:
        """Keep the run going, although only background events may be left.

        `count`: the number of requests that begin to wait for a background event; negative: that no longer wait."""
        self._num_foreground += count

    def run(self, until: float = math.inf) -> None:
        """Run all events up to the time `until`, or until only background events are left."""
        while self._num_foreground and self._events and self._events[0][0] <= until:
            self._clock.time, _, callback, is_background = heapq.heappop(self._events)
            self._num_foreground -= not is_background
            callback()
        if self._num_foreground:
            self._clock.time = until
