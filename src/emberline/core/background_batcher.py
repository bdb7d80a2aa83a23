"""BackgroundBatcher: collects items in a bounded queue; a background task writes them in batches.

The code that adds an item never waits. An item that does not fit into the queue is dropped and counted.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import Generic, TypeVar

log = logging.getLogger("emberline.core")

T = TypeVar("T")


class BackgroundBatcher(Generic[T]):
    """An async context manager. Leaving it writes the queued items, for at most `close_timeout_s`."""

    def __init__(
        self,
        write_batch: Callable[[list[T]], Awaitable[int]],
        *,
        max_batch_items: int,
        delay_s: float,
        max_queued_items: int,
        max_queued_bytes: int,
        close_timeout_s: float,
    ) -> None:
        """`write_batch` returns how many items of the batch were written. The other items count as dropped.

        A batch is written `delay_s` after its first item. It is written without this delay if `max_batch_items` items
        are already queued when the previous batch has been written.
        """
        self._write_batch = write_batch
        self._max_batch_items, self._delay_s = max_batch_items, delay_s
        self._max_queued_items, self._max_queued_bytes = max_queued_items, max_queued_bytes
        self._close_timeout_s = close_timeout_s
        self._queue: deque[tuple[T, int]] = deque()  # items and their bytes
        self._bytes = 0  # of queued items
        self._has_items, self._closing = asyncio.Event(), asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self.written = 0  # items
        self.dropped = 0  # items

    @property
    def queue_length(self) -> int:
        """Return the number of queued items."""
        return len(self._queue)

    def has_room_for(self, size_bytes: int) -> bool:
        """Return whether the queue can take this many more bytes."""
        return self._bytes + size_bytes <= self._max_queued_bytes

    def put(self, item: T, size_bytes: int = 0) -> None:
        """Queue an item without waiting. The item is dropped if the queue is full or this object is closed."""
        is_full = len(self._queue) >= self._max_queued_items or not self.has_room_for(size_bytes)
        if is_full or self._closing.is_set():
            self.dropped += 1
            return
        self._queue.append((item, size_bytes))
        self._bytes += size_bytes
        if not self._has_items.is_set():
            self._has_items.set()

    async def sleep(self, seconds: float) -> None:
        """Wait this long, or until this object is closed."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._closing.wait(), seconds)

    async def __aenter__(self) -> BackgroundBatcher[T]:
        self._task = asyncio.create_task(self._run())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, e: BaseException | None, tb: TracebackType | None
    ) -> None:
        assert self._task is not None
        self._closing.set()
        self._has_items.set()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._close_timeout_s):
                await self._task
        self.dropped += len(self._queue)
        self._queue.clear()

    async def _run(self) -> None:
        while await self._has_items.wait() and self._queue:  # set with an empty queue: closed
            if len(self._queue) < self._max_batch_items:
                await self.sleep(self._delay_s)
            entries = [self._queue.popleft() for _ in range(min(self._max_batch_items, len(self._queue)))]
            self._bytes -= sum(size_bytes for _, size_bytes in entries)
            if not (self._queue or self._closing.is_set()):
                self._has_items.clear()
            written = 0
            try:
                written = await self._write_batch([item for item, _ in entries])
            except Exception:
                log.exception("Writing a batch failed: dropped=%d", len(entries))
            finally:  # also if the close timeout cancels this task
                self.written += written
                self.dropped += len(entries) - written
