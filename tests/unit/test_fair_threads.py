"""FairThreads: tenants take turns, waiting calls are bounded, and cancelled ones are dropped."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable

import pytest

from emberline.core.errors import EngineUnavailable, Overloaded
from emberline.core.fair_threads import FairThreads
from emberline.core.tenants import make_tenant

TIMEOUT_S = 20.0


class Work:
    """Calls that wait until the test lets them end, and the order in which they started."""

    def __init__(self) -> None:
        self.started: list[str] = []
        self.may_end = threading.Event()

    def call(self, name: str) -> str:
        self.started.append(name)
        assert self.may_end.wait(TIMEOUT_S)
        return name


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def run(test: Callable[[FairThreads, Work], object], threads: int = 1, **limits: int) -> None:
    async def run_test() -> None:
        pool, work = FairThreads("calls", threads, **limits), Work()
        try:
            await asyncio.wait_for(test(pool, work), TIMEOUT_S)  # type: ignore[arg-type]
        finally:
            work.may_end.set()
            pool.close()

    asyncio.run(run_test())


def start(pool: FairThreads, work: Work, tenant: str, *names: str) -> list[asyncio.Task[str]]:
    return [asyncio.create_task(pool.run(tenant, work.call, name)) for name in names]


def test_tenants_take_turns() -> None:
    async def test(pool: FairThreads, work: Work) -> None:
        waiting = {"a": ["a1", "a2", "a3", "a4"], "b": ["b1", "b2"], "c": ["c1"]}
        tasks = [task for tenant, names in waiting.items() for task in start(pool, work, tenant, *names)]
        await settle()
        work.may_end.set()
        assert await asyncio.gather(*tasks) == ["a1", "a2", "a3", "a4", "b1", "b2", "c1"]
        assert work.started == ["a1", "a2", "b1", "c1", "a3", "b2", "a4"]

    run(test)


def test_tenant_never_occupies_all_threads() -> None:
    async def test(pool: FairThreads, work: Work) -> None:
        hanging = start(pool, work, "a", *"12345")
        await settle()
        pool_work = Work()
        pool_work.may_end.set()
        assert await pool.run("b", pool_work.call, "b") == "b"
        assert pool.num_waiting == 4
        work.may_end.set()
        await asyncio.gather(*hanging)

    run(test, threads=2)


def test_full_queue_rejects_the_tenant_that_waits_most() -> None:
    async def test(pool: FairThreads, work: Work) -> None:
        running = start(pool, work, "a", "running")
        await settle()
        many = start(pool, work, "a", *"12345")
        await settle()
        assert [task.done() for task in many] == [False, False, False, True, True]  # at most 3 of a tenant wait
        for rejected in many[3:]:
            with pytest.raises(Overloaded, match="too many calls: 3 of this API key and 3 of all keys"):
                rejected.result()
        others = start(pool, work, "b", "b1") + start(pool, work, "c", "c1")
        await settle()
        assert isinstance(many[2].exception(), Overloaded)  # dropped for c1
        assert not any(task.done() for task in others) and pool.num_waiting == 4
        late = start(pool, work, "b", "b2") + start(pool, work, "d", "d1")
        await settle()
        assert isinstance(late[0].exception(), Overloaded)
        assert isinstance(many[1].exception(), Overloaded) and not late[1].done()
        work.may_end.set()
        await asyncio.gather(*running, many[0], *others, late[1])

    run(test, max_waiting_per_tenant=3, max_waiting=4)


def test_cancelled_call_is_dropped_and_errors_are_raised() -> None:
    async def test(pool: FairThreads, work: Work) -> None:
        first, second = start(pool, work, "a", "1", "2")
        await settle()
        second.cancel()
        await settle()
        assert pool.num_waiting == 0
        first.cancel()  # it runs on, and its thread is used again
        work.may_end.set()
        with pytest.raises(ZeroDivisionError):
            await pool.run("a", lambda: 1 // 0)
        assert await pool.run("a", work.call, "3") == "3" and work.started == ["1", "3"]

    run(test)


def test_close_ends_waiting_calls() -> None:
    async def test(pool: FairThreads, work: Work) -> None:
        _, waiting = start(pool, work, "a", "1", "2")
        await settle()
        pool.close()
        with pytest.raises(EngineUnavailable, match="shutting down"):
            await waiting
        with pytest.raises(EngineUnavailable, match="shutting down"):
            await pool.run("b", work.call, "late")

    run(test)


def test_call_that_outlives_its_event_loop_delays_the_next_loop_only_until_it_ends() -> None:
    pool, work = FairThreads("calls", 1), Work()

    async def leave_running() -> None:
        start(pool, work, "a", "1")
        await settle()

    asyncio.run(leave_running())
    work.may_end.set()
    assert asyncio.run(asyncio.wait_for(pool.run("a", work.call, "2"), TIMEOUT_S)) == "2"
    assert work.started == ["1", "2"]
    pool.close()


def test_key_gets_no_more_turns_by_splitting_itself_into_tenants() -> None:
    split = [make_tenant("a", str(salt)) for salt in range(4)]

    async def test(pool: FairThreads, work: Work) -> None:
        tasks = [task for tenant in split for task in start(pool, work, tenant, tenant)]
        tasks += start(pool, work, make_tenant("b", ""), "b1", "b2")
        await settle()
        tasks += start(pool, work, make_tenant("c", "x"), "c1")  # the queue is full: a call of key a is dropped
        await settle()
        assert isinstance(tasks[1].exception(), Overloaded)
        work.may_end.set()
        await asyncio.gather(*(each for each in tasks if each is not tasks[1]))
        assert work.started == [split[0], split[2], "b1", "c1", split[3], "b2"]

    run(test, max_waiting=5)
