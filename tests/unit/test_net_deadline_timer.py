"""DeadlineTimer calls its function once for each deadline that passes, with one timer of the event loop."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import Callable
from typing import Any

import uvloop

from emberline.net.deadline_timer import DeadlineTimer


class FakeLoop:
    """A loop with a settable time that keeps the timers to fire."""

    def __init__(self) -> None:
        self.now = 0.0
        self.timers: list[FakeHandle] = []
        self.num_started = 0

    def time(self) -> float:
        return self.now

    def call_at(self, when: float, callback: Callable[[], None]) -> FakeHandle:
        self.num_started += 1
        self.timers.append(handle := FakeHandle(self, when, callback))
        return handle

    def advance_to(self, now: float) -> None:
        while due := [each for each in self.timers if each.when() <= now]:
            first = min(due, key=FakeHandle.when)
            self.timers.remove(first)
            self.now = first.when()
            first.callback()
        self.now = now


class FakeHandle:
    def __init__(self, loop: FakeLoop, when: float, callback: Callable[[], None]) -> None:
        self._loop, self._when, self.callback = loop, when, callback

    def when(self) -> float:
        return self._when

    def cancel(self) -> None:
        if self in self._loop.timers:
            self._loop.timers.remove(self)


def make_timer() -> tuple[Any, DeadlineTimer, list[float]]:
    loop: Any = FakeLoop()
    fired: list[float] = []
    return loop, DeadlineTimer(loop, lambda: fired.append(loop.now)), fired


def test_deadline_fires_once() -> None:
    loop, timer, fired = make_timer()
    timer.set(3.0)
    loop.advance_to(10.0)
    assert fired == [3.0]


def test_later_deadline_does_not_start_a_timer() -> None:
    loop, timer, fired = make_timer()
    for step in range(100):  # as for the events of a stream
        loop.advance_to(step / 100)
        timer.set(step / 100 + 5.0)
    assert loop.num_started == 1
    loop.advance_to(20.0)
    assert fired == [5.99]
    assert loop.num_started == 2


def test_earlier_deadline_moves_the_timer() -> None:
    loop, timer, fired = make_timer()
    timer.set(5.0)
    timer.set(1.0)
    loop.advance_to(10.0)
    assert fired == [1.0]


def test_cleared_or_cancelled_deadline_does_not_fire() -> None:
    loop, timer, fired = make_timer()
    timer.set(5.0)
    timer.clear()
    loop.advance_to(6.0)
    timer.set(8.0)
    timer.cancel()
    loop.advance_to(10.0)
    assert fired == []


def test_cancelled_timer_does_not_keep_its_owner() -> None:
    class Owner:
        def __init__(self) -> None:
            self.timer = DeadlineTimer(loop, self.on_deadline)

        def on_deadline(self) -> None: ...

    loop = asyncio.new_event_loop()
    gc.disable()
    try:
        owner = Owner()
        owner.timer.set(loop.time() + 1.0)
        owner.timer.cancel()
        reference = weakref.ref(owner)
        del owner
        assert reference() is None
    finally:
        gc.enable()
        loop.close()


def test_deadline_in_the_past_can_be_moved_before_it_is_handled() -> None:
    """uvloop has no TimerHandle for it."""
    fired: list[float] = []

    async def set_twice() -> None:
        loop = asyncio.get_running_loop()
        timer = DeadlineTimer(loop, lambda: fired.append(loop.time()))
        timer.set(loop.time() - 1)
        timer.set(loop.time() + 0.01)
        timer.set(loop.time() - 1)
        await asyncio.sleep(0.05)
        timer.cancel()

    for loop_factory in (asyncio.new_event_loop, uvloop.new_event_loop):
        with asyncio.Runner(loop_factory=loop_factory) as runner:
            runner.run(set_twice())
    assert len(fired) == 2
