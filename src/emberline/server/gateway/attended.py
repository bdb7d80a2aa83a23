"""Attended: while it lasts, a client that leaves, or a time that is over, stops the task that works for it. Nobody
looks out for the first moment: most replies are over by then, and to look costs more than some of them."""

from __future__ import annotations

import asyncio
import math
from types import TracebackType

from emberline.server.exchange import ClientGone, Receive

MOMENT = 0.05  # seconds


class Attended:
    """A context. What stops the task inside is told outside: ClientGone, or TimeoutError. One timer serves all."""

    def __init__(self, receive: Receive, seconds: float) -> None:
        """`seconds` for the request's body to be read."""
        self._receive = receive
        self._watches = False  # the request's body has been read
        self._left = self._late = False
        self._seconds = seconds
        self._watcher: asyncio.Task[None] | None = None

    def __enter__(self) -> Attended:
        task = asyncio.current_task()
        assert task is not None
        self._task = task
        self._loop = task.get_loop()
        self._due = self._loop.time() + self._seconds
        self._timer: asyncio.TimerHandle | None = self._loop.call_later(MOMENT, self._rings)
        return self

    def within(self, seconds: float) -> None:
        """What follows may take so long."""
        self._due = self._loop.time() + seconds
        if self._timer is None or self._timer.when() > self._due:
            self._set(self._due)

    def watch(self) -> None:
        """The body has been read: what comes now is that the client leaves. What follows may take its time."""
        self._watches, self._due = True, math.inf
        if self._timer is None or self._timer.when() > self._loop.time() + MOMENT:
            self._set(self._loop.time() + MOMENT)

    def unwatch(self) -> None:
        """What follows is the reply's last part: a server tells of its end as of a client that left."""
        self._watches = False
        if self._watcher is not None:
            self._watcher.cancel()

    @property
    def has_ended(self) -> bool:
        """Whether the client left, or its time is up."""
        return self._left or self._late

    def over(self) -> None:
        """From here on nobody needs to be there, and nothing has to be in time."""
        self.unwatch()
        if self._timer is not None:
            self._timer.cancel()

    def _set(self, when: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_at(when, self._rings)

    def _rings(self) -> None:
        self._timer = None
        if self._loop.time() >= self._due:
            self._late = True
            self._task.cancel()
            return
        if self._watches and self._watcher is None:
            self._watcher = asyncio.create_task(self._watch())
        if self._due < math.inf:
            self._set(self._due)

    async def _watch(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self._left = True
        self._task.cancel()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.over()
        if (self._left or self._late) and kind is asyncio.CancelledError and not self._task.uncancel():
            raise (ClientGone if self._left else TimeoutError) from None
