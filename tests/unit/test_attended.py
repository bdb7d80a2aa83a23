"""Who works for a client is stopped when it leaves or takes too long, and not otherwise."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from emberline.server.exchange import ClientDisconnected
from emberline.server.gateway.client_watch import WATCH_DELAY_S, ClientWatch

Message = dict[str, Any]


async def never() -> Message:
    await asyncio.sleep(3600)
    raise AssertionError


async def at_once() -> Message:
    return {"type": "http.disconnect"}


def run(
    receive: Callable[[], Awaitable[Message]], work: Callable[[ClientWatch], Awaitable[None]], seconds: float = 3600
) -> None:
    async def main() -> None:
        with ClientWatch(receive, seconds) as attended:
            await work(attended)
        await asyncio.sleep(2 * WATCH_DELAY_S)  # nothing rings any more

    asyncio.run(asyncio.wait_for(main(), 20))


async def _long(attended: ClientWatch) -> None:
    attended.start_watching()
    await asyncio.sleep(3600)


async def _late(attended: ClientWatch) -> None:
    attended.set_timeout(0.01)
    await asyncio.sleep(3600)


async def _late_after_a_moment(attended: ClientWatch) -> None:
    await asyncio.sleep(2 * WATCH_DELAY_S)  # the body came slowly
    attended.start_watching()
    await asyncio.sleep(2 * WATCH_DELAY_S)
    attended.set_timeout(0.01)
    await asyncio.sleep(3600)


async def _slow_body(attended: ClientWatch) -> None:
    await asyncio.sleep(2 * WATCH_DELAY_S)
    attended.start_watching()
    await asyncio.sleep(3600)


@pytest.mark.parametrize("work", [_long, _slow_body])
def test_a_client_that_leaves(work: Callable[[ClientWatch], Awaitable[None]]) -> None:
    with pytest.raises(ClientDisconnected):
        run(at_once, work)


@pytest.mark.parametrize("work", [_late, _late_after_a_moment])
def test_a_time_that_is_over(work: Callable[[ClientWatch], Awaitable[None]]) -> None:
    with pytest.raises(TimeoutError):
        run(never, work)


def test_a_body_that_does_not_come() -> None:
    with pytest.raises(TimeoutError):
        run(never, lambda attended: asyncio.sleep(3600), seconds=2 * WATCH_DELAY_S)


def test_before_the_body_is_read_and_at_the_end_nobody_watches() -> None:
    async def reads(attended: ClientWatch) -> None:
        await asyncio.sleep(3 * WATCH_DELAY_S)  # `receive` is the body's
        attended.start_watching()
        attended.stop_watching()
        await asyncio.sleep(3 * WATCH_DELAY_S)

    run(at_once, reads)


def test_the_last_part_has_its_time_too() -> None:
    async def sends(attended: ClientWatch) -> None:
        attended.start_watching()
        attended.set_timeout(0.01)
        attended.stop_watching()
        await asyncio.sleep(3600)

    with pytest.raises(TimeoutError):
        run(never, sends)


def test_a_cancellation_by_others_stays_one() -> None:
    async def work(attended: ClientWatch) -> None:
        task = asyncio.current_task()
        assert task is not None
        task.cancel()
        await asyncio.sleep(3600)

    with pytest.raises(asyncio.CancelledError):
        run(never, work)
