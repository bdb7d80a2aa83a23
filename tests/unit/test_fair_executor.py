"""Calls of several clients take turns in one thread."""

from __future__ import annotations

import asyncio
import threading

import pytest

from emberline.core.fair_executor import FairExecutor, current_client
from emberline.core.offload import OffloadProcess


def test_clients_take_turns() -> None:
    executor, may_run, order = FairExecutor("test"), threading.Event(), list[str]()
    executor.submit(may_run.wait)
    for client, name in ((b"a", "a1"), (b"a", "a2"), (b"a", "a3"), (b"b", "b1"), (b"c", "c1"), (b"b", "b2")):
        current_client.set(client)
        executor.submit(order.append, name)
    may_run.set()
    executor.shutdown()
    assert order == ["a1", "b1", "c1", "a2", "b2", "a3"]


def test_results_errors_and_cancelled_calls() -> None:
    executor, may_run = FairExecutor("test"), threading.Event()
    running = executor.submit(may_run.wait, 20)
    failing, cancelled, succeeding = (executor.submit(each) for each in (lambda: 1 // 0, lambda: 1, lambda: 2))
    assert cancelled.cancel()
    may_run.set()
    assert running.result(20) is True and succeeding.result(20) == 2
    with pytest.raises(ZeroDivisionError):
        failing.result(20)
    executor.shutdown()
    with pytest.raises(RuntimeError):
        executor.submit(may_run.wait)


def test_offloaded_work_of_another_client_waits_for_one_call_only() -> None:
    order: list[str] = []

    async def work(process: OffloadProcess, client: bytes, name: str) -> None:
        current_client.set(client)
        await process.run(int, "1")
        order.append(name)

    async def main() -> None:
        process = OffloadProcess("test")
        names = [(b"a", f"a{i}") for i in range(5)] + [(b"b", "b")]
        await asyncio.gather(*(work(process, *each) for each in names))
        process.close()

    asyncio.run(asyncio.wait_for(main(), 60))
    assert order.index("b") <= 2
