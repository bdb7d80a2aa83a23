"""BackgroundBatcher: batches by size and delay, a bounded queue, counted drops, closing."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from emberline.core.background_batcher import BackgroundBatcher

LIMITS: dict[str, Any] = {
    "max_batch_items": 3,
    "delay_s": 0.0,
    "max_queued_items": 100,
    "max_queued_bytes": 1000,
    "close_timeout_s": 5.0,
}
Write = Callable[[list[int]], Awaitable[int]]


class Target:
    """Collects batches. `rejected` items are not written; an item in `failing` raises."""

    def __init__(self, rejected: tuple[int, ...] = (), failing: tuple[int, ...] = ()) -> None:
        self.batches: list[list[int]] = []
        self.rejected, self.failing = rejected, failing

    async def write(self, batch: list[int]) -> int:
        self.batches.append(batch)
        if any(item in self.failing for item in batch):
            raise ValueError("an item cannot be written")
        return sum(item not in self.rejected for item in batch)


def run(write: Write, items: list[tuple[int, int]], **limits: Any) -> BackgroundBatcher[int]:
    """Put items with their sizes, close, and return the batcher."""

    async def do() -> BackgroundBatcher[int]:
        async with BackgroundBatcher(write, **{**LIMITS, **limits}) as batcher:
            for item, size_bytes in items:
                batcher.put(item, size_bytes)
        return batcher

    return asyncio.run(do())


def numbered(count: int) -> list[tuple[int, int]]:
    return [(i, 1) for i in range(count)]


def test_closing_writes_all_items_in_batches() -> None:
    target = Target()
    batcher = run(target.write, numbered(7))
    assert target.batches == [[0, 1, 2], [3, 4, 5], [6]]
    assert (batcher.written, batcher.dropped, batcher.queue_length) == (7, 0, 0)


def test_full_batch_does_not_wait_for_the_delay() -> None:
    async def do() -> None:
        target = Target()
        async with BackgroundBatcher(target.write, **{**LIMITS, "delay_s": 3600.0}) as batcher:
            for i in range(3):
                batcher.put(i)
            await asyncio.sleep(0.01)
            assert target.batches == [[0, 1, 2]]
            batcher.put(3)
            await asyncio.sleep(0.01)
            assert len(target.batches) == 1
        assert target.batches[1:] == [[3]]

    asyncio.run(do())


@pytest.mark.parametrize("limits", [{"max_queued_items": 2}, {"max_queued_bytes": 2}])
def test_items_that_do_not_fit_are_dropped(limits: dict[str, int]) -> None:
    target = Target()
    batcher = run(target.write, numbered(5), **limits)
    assert target.batches == [[0, 1]]
    assert (batcher.written, batcher.dropped) == (2, 3)


def test_closed_batcher_drops_items() -> None:
    batcher = run(Target().write, [])
    batcher.put(1)
    assert (batcher.dropped, batcher.queue_length) == (1, 0)


def test_rejected_items_and_failed_batches_are_dropped_and_the_next_batch_is_written() -> None:
    target = Target(rejected=(0,), failing=(4,))
    batcher = run(target.write, numbered(9))
    assert len(target.batches) == 3
    assert (batcher.written, batcher.dropped) == (2 + 3, 1 + 3)


def test_close_timeout_drops_the_open_batch_and_the_queue() -> None:
    async def hang(batch: list[int]) -> int:
        await asyncio.sleep(3600)
        return len(batch)

    batcher = run(hang, numbered(5), close_timeout_s=0.05)
    assert (batcher.written, batcher.dropped) == (0, 5)


def test_written_bytes_make_room() -> None:
    async def do() -> None:
        target = Target()
        async with BackgroundBatcher(target.write, **{**LIMITS, "max_queued_bytes": 10}) as batcher:
            batcher.put(0, 10)
            assert not batcher.has_room_for(1)
            while not target.batches:
                await asyncio.sleep(0.001)
            assert batcher.has_room_for(10)

    asyncio.run(do())
