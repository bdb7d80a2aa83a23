"""Background tasks of the gateway continue after a failure."""

from __future__ import annotations

import asyncio
from datetime import date
from pathlib import Path
from typing import Any

import pytest

from emberline.core.clock import ManualClock, SystemClock
from emberline.core.errors import InvalidRequest
from emberline.gateway.costs.catalogue import CatalogueFiles
from emberline.gateway.logs import retention
from emberline.gateway.logs.retention import LogRetention
from emberline.gateway.redis_client import RedisClient


class Store:
    """A store whose first deletion fails."""

    def __init__(self) -> None:
        self.asked = 0
        self.dropped = asyncio.Event()

    async def list_documents(self, *about: Any, **more: Any) -> list[Any]:
        return []

    async def delete_days_before(self, day: date) -> list[date]:
        self.asked += 1
        if self.asked == 1:
            raise PermissionError("not yours")
        self.dropped.set()
        return []


def test_retention_retries_after_a_store_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retention, "RUN_INTERVAL_S", 0.0)

    async def run() -> None:
        store = Store()
        task = asyncio.create_task(LogRetention(store, {}, ManualClock(1e9)).run())  # type: ignore[arg-type]
        await asyncio.wait_for(store.dropped.wait(), 10)
        task.cancel()

    asyncio.run(run())


def test_catalogue_file_may_vanish_between_polls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = tmp_path / "own.toml"
    own.write_text("")
    files = CatalogueFiles(own)
    own.unlink()
    monkeypatch.setattr(Path, "exists", lambda path: True)  # as before the file vanished
    with pytest.raises(InvalidRequest, match="own"):
        files.refresh()
    assert files.current.price("openai", "gpt-4o-mini") is not None


def test_invalid_redis_host_is_retried() -> None:
    async def run() -> None:
        link = RedisClient("redis://no..name", SystemClock())
        assert not await link.start(0.2)
        assert link._connecting is not None and not link._connecting.done()
        await link.close()

    asyncio.run(run())


@pytest.mark.parametrize("wrong", ["redis://h:x", "redis://h:70000", "redis://[h"])
def test_invalid_redis_url_raises_at_once(wrong: str) -> None:
    with pytest.raises(InvalidRequest):
        RedisClient(wrong, SystemClock())
