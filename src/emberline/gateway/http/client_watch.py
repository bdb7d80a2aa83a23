"""ClientWatch: cancels the task that serves a client when the client disconnects or a timeout passes.

Watching starts after 50 ms. Most replies are complete by then, and watching would take longer than serving a short
reply.
"""

from __future__ import annotations

import asyncio
import math
from types import TracebackType

from emberline.net.deadline_timer import DeadlineTimer
from emberline.server.exchange import ClientDisconnected, Receive

WATCH_DELAY_S = 0.05


class ClientWatch:
    """A context manager that cancels the code inside it when the client disconnects or a timeout passes.

    It then raises ClientDisconnected or TimeoutError. One timer serves both the timeout and the delayed start of
    watching.
    """

    def __init__(self, receive: Receive) -> None:
        """Create a watch on a client, whose request's body must have been read before the watch is entered."""
        self._receive = receive
        self._is_watching = True
        self._disconnected = self._timed_out = False
        self._watcher: asyncio.Task[None] | None = None

    def __enter__(self) -> ClientWatch:
        task = asyncio.current_task()
        assert task is not None
        self._task = task
        self._loop = task.get_loop()
        self._deadline = math.inf
        self._timer = DeadlineTimer(self._loop, self._on_timer)
        self._timer.set(self._loop.time() + WATCH_DELAY_S)
        return self

    def set_timeout(self, seconds: float) -> None:
        """Replace the timeout by a new one that starts now."""
        self._deadline = self._loop.time() + seconds
        self._timer.set(min(self._timer.deadline, self._deadline))

    def stop_watching(self) -> None:
        """Stop watching for a disconnect.

        Call this method before the last part of a reply is sent: servers report the end of a reply as a disconnect,
        too.
        """
        self._is_watching = False
        if self._watcher is not None:
            self._watcher.cancel()

    @property
    def has_ended(self) -> bool:
        """Return whether the client disconnected or the timeout passed."""
        return self._disconnected or self._timed_out

    def finish(self) -> None:
        """Stop watching and cancel the timeout."""
        self.stop_watching()
        self._timer.cancel()

    def _on_timer(self) -> None:
        if self._loop.time() >= self._deadline:
            self._timed_out = True
            self._task.cancel()
            return
        if self._is_watching and self._watcher is None:
            self._watcher = asyncio.create_task(self._wait_for_disconnect())
        self._timer.set(self._deadline)

    async def _wait_for_disconnect(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self._disconnected = True
        self._task.cancel()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.finish()
        if self.has_ended and kind is asyncio.CancelledError and not self._task.uncancel():
            raise (ClientDisconnected if self._disconnected else TimeoutError) from None
