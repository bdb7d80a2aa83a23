"""Closing a reply calls every close callback, even if another one fails or the caller is cancelled."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from gateway_requests import Pieces, call

from emberline.core.clock import ManualClock
from emberline.gateway.core.request import GatewayReply
from emberline.gateway.keys.provider_keys import ProviderKeySelector
from emberline.gateway.providers.breakers import ProviderBreakers
from emberline.gateway.providers.registry import ProviderRegistry
from emberline.gateway.realtime import handler
from emberline.gateway.realtime.handler import RealtimeHandler


class RecordingCallback:
    """A close callback that records the reply's outcome."""

    def __init__(self) -> None:
        self.ended: list[str] = []

    async def __call__(self, reply: GatewayReply) -> None:
        self.ended.append(reply.ended)


async def _raise_error(reply: GatewayReply) -> None:
    raise OSError("no room")


async def _wait(reply: GatewayReply) -> None:
    await asyncio.sleep(3600)


def test_failing_callback_does_not_skip_others() -> None:
    first, last = RecordingCallback(), RecordingCallback()
    reply = GatewayReply(200, {}, b"{}", close_callbacks=[first, _raise_error, last])
    with pytest.raises(OSError, match="no room"):
        asyncio.run(reply.close())
    assert first.ended == last.ended == ["complete"] and not reply.close_callbacks


def test_cancelled_close_calls_all_callbacks() -> None:
    last = RecordingCallback()

    async def run() -> None:
        task = asyncio.ensure_future(GatewayReply(200, {}, b"{}", close_callbacks=[_wait, last]).close())
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(run())
    assert last.ended == ["complete"]


def test_failing_stream_close_still_calls_callbacks() -> None:
    class Stuck(Pieces):
        async def aclose(self) -> None:
            raise OSError("stuck")

    callback = RecordingCallback()
    reply = GatewayReply(200, {}, b"", close_callbacks=[callback])
    reply.body = Stuck(b"x")
    with pytest.raises(OSError, match="stuck"):
        asyncio.run(reply.close())
    assert callback.ended == [""]


class FakeWebSocket:
    subprotocol = None

    def __init__(self) -> None:
        self.closed: list[int] = []

    async def close(self, code: int, reason: str = "") -> None:
        self.closed.append(code)
        raise OSError("it is gone")


class Prices:
    def price(self, *about: Any) -> None:
        return None


def test_realtime_close_closes_websocket_and_calls_callbacks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    websocket, callback = FakeWebSocket(), RecordingCallback()

    async def dial(*about: Any, **more: Any) -> Any:
        return websocket

    async def run() -> None:
        clock = ManualClock()
        opens: Any = RealtimeHandler(
            ProviderRegistry(),
            ProviderKeySelector(),
            None,
            Prices(),
            clock,
            ProviderBreakers(clock),
            max_message_bytes=1,
        )  # type: ignore[arg-type]
        reply = await opens(call(headers={"authorization": "Bearer k"}, endpoint="realtime", stream=True))
        reply.close_callbacks.append(callback)
        with pytest.raises(OSError, match="gone"):
            await reply.close()

    monkeypatch.setattr(handler, "open_websocket", dial)
    asyncio.run(run())
    assert websocket.closed == [1001] and callback.ended == ["left"]
