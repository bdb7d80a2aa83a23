"""Attended: while it lasts, a client that leaves stops the task that works for it. Nobody looks out for the first
moment: most replies are over by then, and to look costs more than some of them."""

from __future__ import annotations

import asyncio
from types import TracebackType

from emberline.server.exchange import ClientGone, Receive

MOMENT = 0.05  # seconds


class Attended:
    """A context, in which the request's body has been read. Leaving it because of the client raises ClientGone."""

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._left = False
        self._watcher: asyncio.Task[None] | None = None

    def __enter__(self) -> Attended:
        task = asyncio.current_task()
        assert task is not None
        self._task = task
        self._timer = task.get_loop().call_later(MOMENT, self._look_out)
        return self

    def _look_out(self) -> None:
        self._watcher = asyncio.create_task(self._watch())

    async def _watch(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self._left = True
        self._task.cancel()

    def over(self) -> None:
        """All is said: from here on nobody needs to be there."""
        self._timer.cancel()
        if self._watcher is not None:
            self._watcher.cancel()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.over()
        if self._left and kind is asyncio.CancelledError and not self._task.uncancel():
            raise ClientGone from None
