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


async def _finish_late(attended: ClientWatch) -> None:
    attended.set_timeout(0.01)
    await asyncio.sleep(3600)


async def _finish_late_after_output(attended: ClientWatch) -> None:
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
def test_disconnect_cancels_work(work: Callable[[ClientWatch], Awaitable[None]]) -> None:
    with pytest.raises(ClientDisconnected):
        run(reply_immediately, work)


@pytest.mark.parametrize("work", [_finish_late, _finish_late_after_output])
def test_deadline_cancels_work(work: Callable[[ClientWatch], Awaitable[None]]) -> None:
    with pytest.raises(TimeoutError):
        run(never, work)


def test_slow_request_body_times_out() -> None:
    with pytest.raises(TimeoutError):
        run(never, lambda attended: asyncio.sleep(3600), seconds=2 * WATCH_DELAY_S)


def test_disconnect_is_watched_only_between_body_and_end() -> None:
    async def reads(attended: ClientWatch) -> None:
        await asyncio.sleep(3 * WATCH_DELAY_S)  # `receive` is the body's
        attended.start_watching()
        attended.stop_watching()
        await asyncio.sleep(3 * WATCH_DELAY_S)

    run(reply_immediately, reads)


def test_final_part_has_its_own_time_limit() -> None:
    async def sends(attended: ClientWatch) -> None:
        attended.start_watching()
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
