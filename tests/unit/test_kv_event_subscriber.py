"""Which workers' block events the router subscribes to, and for how long."""

from __future__ import annotations

import asyncio
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from emberline.core.blockbatch import BlockBatch
from emberline.router.http import kv_event_subscriber
from emberline.router.http.kv_event_subscriber import KVEventSubscriber
from emberline.router.kvindex import KVIndex

WORKER: Any = SimpleNamespace(id="w", name="w")


class ScriptedEvents:
    """A worker that tells all it holds, and hangs up; and how often it was asked."""

    def __init__(self, blocks: int) -> None:
        stored = [(bytes([i]), bytes([i - 1]) if i else b"") for i in range(blocks)]
        self.asked = 0
        self._line = msgspec.json.encode(BlockBatch("i", 0, stored, parts=1)) + b"\n"

    async def request(self, url: str, call: object) -> Any:
        self.asked += 1
        pieces = iter([self._line, b""])

        async def read() -> bytes:
            return next(pieces)

        return SimpleNamespace(status=200, read=read, close=lambda: None)


@pytest.mark.parametrize(("blocks", "often"), [(2, True), (3, False)])
def test_worker_exceeding_index_is_subscribed_once(blocks: int, often: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_event_subscriber, "RECONNECT_PAUSE_S", 0.001)
    worker: Any = ScriptedEvents(blocks)
    dispatch: Any = SimpleNamespace(worker_url=lambda worker: "http://w")

    async def follow() -> None:
        with pytest.raises(TimeoutError) if often else nullcontext():
            async with asyncio.timeout(0.5):
                await KVEventSubscriber(dispatch, KVIndex(2, 8), worker, None)._subscribe(WORKER)

    asyncio.run(follow())
    assert worker.asked > 1 if often else worker.asked == 1
