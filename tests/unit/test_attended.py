"""Who works for a client is stopped when it leaves or takes too long, and not otherwise."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from emberline.server.exchange import ClientGone
from emberline.server.gateway.attended import MOMENT, Attended

Message = dict[str, Any]


async def never() -> Message:
    await asyncio.sleep(3600)
    raise AssertionError


async def at_once() -> Message:
    return {"type": "http.disconnect"}


def run(
    receive: Callable[[], Awaitable[Message]], work: Callable[[Attended], Awaitable[None]], seconds: float = 3600
) -> None:
    async def main() -> None:
        with Attended(receive, seconds) as attended:
            await work(attended)
        await asyncio.sleep(2 * MOMENT)  # nothing rings any more

    asyncio.run(asyncio.wait_for(main(), 20))


async def _long(attended: Attended) -> None:
    attended.watch()
    await asyncio.sleep(3600)


async def _late(attended: Attended) -> None:
    attended.within(0.01)
    await asyncio.sleep(3600)


async def _late_after_a_moment(attended: Attended) -> None:
    await asyncio.sleep(2 * MOMENT)  # the body came slowly
    attended.watch()
    await asyncio.sleep(2 * MOMENT)
    attended.within(0.01)
    await asyncio.sleep(3600)


async def _slow_body(attended: Attended) -> None:
    await asyncio.sleep(2 * MOMENT)
    attended.watch()
    await asyncio.sleep(3600)


@pytest.mark.parametrize("work", [_long, _slow_body])
def test_a_client_that_leaves(work: Callable[[Attended], Awaitable[None]]) -> None:
    with pytest.raises(ClientGone):
        run(at_once, work)


@pytest.mark.parametrize("work", [_late, _late_after_a_moment])
def test_a_time_that_is_over(work: Callable[[Attended], Awaitable[None]]) -> None:
    with pytest.raises(TimeoutError):
        run(never, work)


def test_a_body_that_does_not_come() -> None:
    with pytest.raises(TimeoutError):
        run(never, lambda attended: asyncio.sleep(3600), seconds=2 * MOMENT)


def test_before_the_body_is_read_and_at_the_end_nobody_watches() -> None:
    async def reads(attended: Attended) -> None:
        await asyncio.sleep(3 * MOMENT)  # `receive` is the body's
        attended.watch()
        attended.unwatch()
        await asyncio.sleep(3 * MOMENT)

    run(at_once, reads)


def test_the_last_part_has_its_time_too() -> None:
    async def sends(attended: Attended) -> None:
        attended.watch()
        attended.within(0.01)
        attended.unwatch()
        await asyncio.sleep(3600)

    with pytest.raises(TimeoutError):
        run(never, sends)


def test_a_cancellation_by_others_stays_one() -> None:
    async def work(attended: Attended) -> None:
        task = asyncio.current_task()
        assert task is not None
        task.cancel()
        await asyncio.sleep(3600)

    with pytest.raises(asyncio.CancelledError):
        run(never, work)
