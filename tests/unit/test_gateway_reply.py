"""The end of a reply: everybody who waits for it is told, whatever happens to the others or to who closes it."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from gateway_calls import Pieces, call

from emberline.core.clock import ManualClock
from emberline.gateway.call import Reply
from emberline.gateway.keys.secrets import Secrets
from emberline.gateway.providers.breakers import Breakers
from emberline.gateway.providers.registry import Registry
from emberline.gateway.realtime import realtime
from emberline.gateway.realtime.realtime import Realtime


class Told:
    """An ending that remembers that it was told."""

    def __init__(self) -> None:
        self.ended: list[str] = []

    async def __call__(self, reply: Reply) -> None:
        self.ended.append(reply.ended)


async def _fails(reply: Reply) -> None:
    raise OSError("no room")


async def _waits(reply: Reply) -> None:
    await asyncio.sleep(3600)


def test_one_that_fails_keeps_nobody_from_being_told() -> None:
    first, last = Told(), Told()
    reply = Reply(200, {}, b"{}", endings=[first, _fails, last])
    with pytest.raises(OSError, match="no room"):
        asyncio.run(reply.close())
    assert first.ended == last.ended == ["complete"] and not reply.endings


def test_who_is_stopped_while_it_closes_a_reply_tells_all() -> None:
    last = Told()

    async def run() -> None:
        task = asyncio.ensure_future(Reply(200, {}, b"{}", endings=[_waits, last]).close())
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(run())
    assert last.ended == ["complete"]


def test_a_stream_that_cannot_be_closed_has_ended_all_the_same() -> None:
    class Stuck(Pieces):
        async def aclose(self) -> None:
            raise OSError("stuck")

    told = Told()
    reply = Reply(200, {}, b"", endings=[told])
    reply.body = Stuck(b"x")
    with pytest.raises(OSError, match="stuck"):
        asyncio.run(reply.close())
    assert told.ended == [""]


class Channel:
    subprotocol = None

    def __init__(self) -> None:
        self.closed: list[int] = []

    async def close(self, code: int, reason: str = "") -> None:
        self.closed.append(code)
        raise OSError("it is gone")


class Prices:
    def price(self, *about: Any) -> None:
        return None


def test_a_session_hangs_up_when_it_is_closed_and_is_told_of_even_if_that_fails(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    channel, told = Channel(), Told()

    async def dial(*about: Any, **more: Any) -> Any:
        return channel

    async def run() -> None:
        clock = ManualClock()
        opens: Any = Realtime(Registry(), Secrets(), None, Prices(), clock, Breakers(clock), largest=1)  # type: ignore[arg-type]
        reply = await opens(call(headers={"authorization": "Bearer k"}, endpoint="realtime", stream=True))
        reply.endings.append(told)
        with pytest.raises(OSError, match="gone"):
            await reply.close()

    monkeypatch.setattr(realtime, "dial", dial)
    asyncio.run(run())
    assert channel.closed == [1001] and told.ended == ["left"]
