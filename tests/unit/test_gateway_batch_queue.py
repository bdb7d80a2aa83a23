"""Batches: every request is sent once by any number of processes; limits, priority and expiry."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from blocked_executor import BlockedExecutor

from emberline.core.clock import ManualClock
from emberline.core.errors import InvalidRequest, NotFound, Overloaded
from emberline.gateway.core.identity import ANONYMOUS, Identity
from emberline.gateway.core.request import GatewayReply
from emberline.gateway.gateway import InboundRequest
from emberline.gateway.run import batch_queue as queues
from emberline.gateway.run import batch_store as batches
from emberline.gateway.run.batch_queue import BatchQueue, check_requests
from emberline.gateway.store.sqlite import SQLiteStore
from emberline.wire import sse

WHO = Identity("k1", "a key", "virtual")
REQUESTS = [{"prompt": str(i)} for i in range(12)]


class Model:
    """Answers with the prompt."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.who: list[str] = []
        self.busy: list[str] = []  # errors before the first answer
        self.pause = 0.0
        self.odd: dict[str, Any] = {}  # prompt -> reply, or exception to raise

    async def __call__(self, request: InboundRequest, key_id: str) -> GatewayReply:
        text = msgspec.json.decode(request.body)["messages"][0]["content"]
        await asyncio.sleep(self.pause)
        if self.busy:
            return GatewayReply(429, {}, b"{}", error=self.busy.pop())
        self.asked.append(text)
        self.who.append(key_id)
        if isinstance(odd := self.odd.get(text, text), Exception):
            raise odd
        assert request.headers["cf-aig-gateway-id"] == "g" and request.path == "/accounts/a/ai/v1/chat/completions"
        usage = {"prompt_tokens": 1, "completion_tokens": 2, "total_tokens": 3}
        return GatewayReply(200, {}, sse.dumps({"choices": [{"message": {"content": odd}}], "usage": usage}))


def run_async(home: Path, play: Callable[[SQLiteStore, Model, ManualClock], Awaitable[None]]) -> None:
    async def run() -> None:
        store = await SQLiteStore.open(home)
        try:
            async with asyncio.timeout(20):
                await play(store, Model(), ManualClock(1e9))
        finally:
            await store.close()

    asyncio.run(run())


async def wait_until_done(queue: BatchQueue, id: str) -> dict[str, Any]:
    while "responses" not in (found := await queue.read_result("a", id, WHO)):
        await asyncio.sleep(0.01)
    return found


def test_two_processes_send_each_request_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queues, "POLL_INTERVAL_S", 0.01)

    async def play(store: SQLiteStore, model: Model, wall: ManualClock) -> None:
        model.pause = 0.005
        one, two = (BatchQueue(store, model, lambda: 0, wall) for _ in range(2))
        ids = []
        for _ in range(3):
            wall.advance(0.002)
            ids.append((await one.add("a", "g", "m", "k1", check_requests("m", REQUESTS))).id)
        assert ids == sorted(ids), "the oldest batch is first"
        async with one.run_in_background(), two.run_in_background():
            found = [await wait_until_done(two, id) for id in ids]
        assert sorted(model.asked, key=int) == sorted([r["prompt"] for r in REQUESTS] * 3, key=int)
        assert all(each["usage"]["total_tokens"] == 36 for each in found)
        assert [row["result"]["response"] for row in found[0]["responses"]] == [str(i) for i in range(12)]
        assert set(model.who) == {WHO.key_id}, "with the caller's key"

    run_async(tmp_path, play)


def test_batch_of_a_dead_process_is_continued(tmp_path: Path) -> None:
    async def play(store: SQLiteStore, model: Model, wall: ManualClock) -> None:
        model.pause = 3600
        dead, alive = (BatchQueue(store, model, lambda: 0, wall) for _ in range(2))
        batch = await dead.add("a", "g", "m", "k1", check_requests("m", REQUESTS))
        claimed = asyncio.create_task(dead._process_oldest_batch())
        while (await alive.read_result("a", batch.id, WHO))["status"] != "running":
            await asyncio.sleep(0.01)
        assert not await alive._process_oldest_batch(), "another process has the lease"
        wall.advance(queues.LEASE_S + 1)
        model.pause = 0
        assert await alive._process_oldest_batch() and len((await wait_until_done(alive, batch.id))["responses"]) == 12
        claimed.cancel()  # too late: the lease has expired
        await asyncio.gather(claimed, return_exceptions=True)
        assert len((await wait_until_done(alive, batch.id))["responses"]) == 12

    run_async(tmp_path, play)


def test_batches_are_listed_only_after_a_change_or_an_expiry(tmp_path: Path) -> None:
    async def play(store: SQLiteStore, model: Model, wall: ManualClock) -> None:
        queue, listed = BatchQueue(store, model, lambda: 0, wall), list[object]()
        list_batches = queue._batches.list_batches

        async def count_lists(*args: Any, **kwargs: Any) -> Any:
            listed.append(args)
            return await list_batches(*args, **kwargs)

        queue._batches.list_batches = count_lists  # type: ignore[method-assign]

        async def polls_list() -> bool:
            listed.clear()
            for _ in range(3):
                await queue._process_oldest_batch()
            return bool(listed)

        assert await polls_list() and not await polls_list(), "the feature was never used"
        batch = await queue.add("a", "g", "m", "k1", check_requests("m", REQUESTS))
        assert await polls_list() and not await polls_list()
        assert "responses" in await queue.read_result("a", batch.id, WHO)
        wall.advance(queues.RESULTS_KEPT_S + 1)
        assert await polls_list() and not await polls_list()
        with pytest.raises(NotFound):
            await queue.read_result("a", batch.id, WHO)

    run_async(tmp_path, play)


def test_batches_do_not_use_threads_of_other_work(tmp_path: Path) -> None:
    async def play(store: SQLiteStore, model: Model, wall: ManualClock) -> None:
        asyncio.get_running_loop().set_default_executor(BlockedExecutor())
        queue = BatchQueue(store, model, lambda: 0, wall)
        batch = await queue.add("a", "g", "m", "k1", check_requests("m", REQUESTS))
        async with queue.run_in_background():
            found = await wait_until_done(queue, batch.id)
            assert json.loads(await queue.encode("a", WHO, found)) == found

    run_async(tmp_path, play)


@pytest.mark.parametrize("page", [200, 1])
def test_number_of_waiting_batches_is_limited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, page: int) -> None:
    monkeypatch.setattr(queues, "MAX_WAITING_BATCHES", 2)
    monkeypatch.setattr(batches, "PAGE_SIZE", page)

    async def play(store: SQLiteStore, model: Model, wall: ManualClock) -> None:
        queue = BatchQueue(store, model, lambda: 0, wall)
        for _ in range(2):
            batch = await queue.add("a", "g", "m", "k1", check_requests("m", REQUESTS))
        with pytest.raises(Overloaded):
            await queue.add("a", "g", "m", "k1", check_requests("m", REQUESTS))
        await queue.add("b", "g", "m", "k1", check_requests("m", REQUESTS))
        for wrong in ([], "x", [1], [{"prompt": "x", "stream": True}], [{}], [{"prompt": "x"}] * 10_001):
            with pytest.raises(InvalidRequest):
                check_requests("m", wrong)
        for account, caller in (("b", WHO), ("a", ANONYMOUS)):
            with pytest.raises(NotFound):
                await queue.read_result(account, batch.id, caller)

    run_async(tmp_path, play)


def test_queue_retries_and_yields_to_other_requests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queues, "RETRY_DELAYS_S", (0.0,))
    others = [9, 9, 0]

    async def play(store: SQLiteStore, model: Model, wall: ManualClock) -> None:
        queue = BatchQueue(store, model, lambda: others.pop(0) if len(others) > 1 else others[0], wall)
        model.busy = ["upstream_refused", "rate_limit_exceeded", "store_failed"]
        batch = await queue.add("a", "g", "m", "k1", check_requests("m", REQUESTS))
        assert await queue._process_oldest_batch()
        assert all(row["success"] for row in (await wait_until_done(queue, batch.id))["responses"]) and others == [0]

    run_async(tmp_path, play)


def nest(depth: int) -> Any:
    return [nest(depth - 1)] if depth else []


@pytest.mark.parametrize("odd", [RuntimeError("as told"), nest(890)])
def test_failed_request_is_sent_once_and_blocks_no_other(tmp_path: Path, odd: Any) -> None:
    async def play(store: SQLiteStore, model: Model, wall: ManualClock) -> None:
        model.odd = {"3": odd}
        queue = BatchQueue(store, model, lambda: 0, wall)
        batch = await queue.add("a", "g", "m", "k1", check_requests("m", REQUESTS))
        assert await queue._process_oldest_batch() and not await queue._process_oldest_batch()
        rows = (await wait_until_done(queue, batch.id))["responses"]
        assert [row["id"] for row in rows if not row["success"]] == [3]
        assert rows[3]["error"]["code"] == 3043 and model.asked.count("3") == 1

    run_async(tmp_path, play)


def test_results_are_kept_for_a_day(tmp_path: Path) -> None:
    async def play(store: SQLiteStore, model: Model, wall: ManualClock) -> None:
        queue = BatchQueue(store, model, lambda: 0, wall)
        batch = await queue.add("a", "g", "m", "k1", check_requests("m", REQUESTS))
        assert await queue._process_oldest_batch() and not await queue._process_oldest_batch()
        await wait_until_done(queue, batch.id)
        wall.advance(queues.RESULTS_KEPT_S + 1)
        assert not await queue._process_oldest_batch()
        with pytest.raises(NotFound):
            await queue.read_result("a", batch.id, WHO)
        assert await store.list_documents("batch_part", "") == []

    run_async(tmp_path, play)
