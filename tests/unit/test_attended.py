"""Work for a client is cancelled when the client disconnects or a deadline passes, and only then."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from emberline.gateway.http.client_watch import WATCH_DELAY_S, ClientWatch
from emberline.server.exchange import ClientDisconnected

Message = dict[str, Any]


async def never() -> Message:
    await asyncio.sleep(3600)
    raise AssertionError


async def reply_immediately() -> Message:
    return {"type": "http.disconnect"}


def run(receive: Callable[[], Awaitable[Message]], work: Callable[[ClientWatch], Awaitable[None]]) -> None:
    async def main() -> None:
        with ClientWatch(receive) as attended:
            await work(attended)
        await asyncio.sleep(2 * WATCH_DELAY_S)  # nothing rings any more

    asyncio.run(asyncio.wait_for(main(), 20))


async def _long(attended: ClientWatch) -> None:
    await asyncio.sleep(3600)


async def _finish_late(attended: ClientWatch) -> None:
    attended.set_timeout(0.01)
    await asyncio.sleep(3600)


async def _finish_late_after_output(attended: ClientWatch) -> None:
    await asyncio.sleep(2 * WATCH_DELAY_S)
    attended.set_timeout(0.01)
    await asyncio.sleep(3600)


def test_disconnect_cancels_work() -> None:
    with pytest.raises(ClientDisconnected):
        run(reply_immediately, _long)


@pytest.mark.parametrize("work", [_finish_late, _finish_late_after_output])
def test_deadline_cancels_work(work: Callable[[ClientWatch], Awaitable[None]]) -> None:
    with pytest.raises(TimeoutError):
        run(never, work)


def test_disconnect_is_not_watched_after_the_end() -> None:
    async def finishes(attended: ClientWatch) -> None:
        attended.stop_watching()
        await asyncio.sleep(3 * WATCH_DELAY_S)

    run(reply_immediately, finishes)


def test_final_part_has_its_own_time_limit() -> None:
    async def sends(attended: ClientWatch) -> None:
        attended.set_timeout(0.01)
        attended.stop_watching()
        await asyncio.sleep(3600)

    with pytest.raises(TimeoutError):
        run(never, sends)


def test_outer_cancellation_propagates() -> None:
    async def work(attended: ClientWatch) -> None:
        task = asyncio.current_task()
        assert task is not None
        task.cancel()
        await asyncio.sleep(3600)

    with pytest.raises(asyncio.CancelledError):
        run(never, work)
