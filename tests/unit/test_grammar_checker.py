"""GrammarChecker: slow grammars of one tenant delay no other tenant, and cached verdicts never wait."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from typing import cast

import pytest

from emberline.core.errors import InvalidRequest, Overloaded
from emberline.core.params import GrammarSpec
from emberline.engine.grammar_guard import GrammarTrialProcess, GrammarVerdict
from emberline.worker import grammar_checker
from emberline.worker.grammar_checker import GrammarChecker

TIMEOUT_S = 20.0


class FakeProcess:
    """Accepts grammars, except those that start with `bad`; those that start with `slow` wait for the test."""

    def __init__(self) -> None:
        self.tried: list[str] = []
        self.may_end = threading.Event()

    def run(self, grammar: GrammarSpec) -> GrammarVerdict:
        self.tried.append(grammar.text)
        if grammar.text.startswith("slow"):
            assert self.may_end.wait(TIMEOUT_S)
        return GrammarVerdict(InvalidRequest("no", hint="simplify") if grammar.text.startswith("bad") else None)

    def close(self) -> None:
        self.may_end.set()


def regex(text: str) -> GrammarSpec:
    return GrammarSpec("regex", text)


def run(test: Callable[[GrammarChecker, FakeProcess], Awaitable[None]], processes: int = 2) -> None:
    async def run_test() -> None:
        process = FakeProcess()
        checker = GrammarChecker([cast("GrammarTrialProcess", process)] * processes)
        try:
            await asyncio.wait_for(test(checker, process), TIMEOUT_S)
        finally:
            checker.close()

    asyncio.run(run_test())


async def start(checker: GrammarChecker, tenant: str, *texts: str) -> list[asyncio.Task[None]]:
    tasks = [asyncio.create_task(checker.check(regex(text), "response_format", tenant)) for text in texts]
    for _ in range(5):
        await asyncio.sleep(0)
    return tasks


def test_slow_grammars_of_a_tenant_delay_no_other_tenant() -> None:
    async def test(checker: GrammarChecker, process: FakeProcess) -> None:
        await checker.check(regex("known"), "tools", "victim")
        attack = await start(checker, "attacker", *(f"slow{i}" for i in range(24)))
        await checker.check(regex("known"), "tools", "victim")
        await checker.check(regex("new"), "tools", "victim")
        with pytest.raises(InvalidRequest) as caught:
            await checker.check(regex("bad"), "tools", "victim")
        assert caught.value.param == "tools" and caught.value.hint == "simplify"
        assert not any(task.done() for task in attack)
        process.may_end.set()
        await asyncio.gather(*attack)
        assert process.tried.count("known") == 1

    run(test)


def test_cached_verdict_does_not_wait_for_a_process() -> None:
    async def test(checker: GrammarChecker, process: FakeProcess) -> None:
        await checker.check(regex("known"), "tools", "a")
        attack = await start(checker, "b", "slow0") + await start(checker, "c", "slow1")
        await checker.check(regex("known"), "tools", "d")
        process.may_end.set()
        await asyncio.gather(*attack)

    run(test, processes=1)


def test_too_many_grammars_of_a_tenant_are_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_checker, "MAX_WAITING_PER_TENANT", 2)

    async def test(checker: GrammarChecker, process: FakeProcess) -> None:
        tasks = await start(checker, "a", *(f"slow{i}" for i in range(5)))
        assert [task.done() for task in tasks] == [False] * 3 + [True] * 2
        error = tasks[4].exception()
        assert isinstance(error, Overloaded) and "too many grammar checks" in error.message and error.retry_after
        process.may_end.set()
        await asyncio.gather(*tasks[:3], tasks[3], return_exceptions=True)

    run(test)


def test_equal_grammars_of_a_tenant_share_a_trial() -> None:
    async def test(checker: GrammarChecker, process: FakeProcess) -> None:
        first, second, third = await start(checker, "a", "slow", "slow", "slow")
        second.cancel()
        await asyncio.wait([second])
        process.may_end.set()
        await asyncio.gather(first, third)
        assert process.tried == ["slow"]

    run(test)


def test_trial_without_a_request_that_waits_is_dropped() -> None:
    async def test(checker: GrammarChecker, process: FakeProcess) -> None:
        running, *dropped = await start(checker, "a", "slow", "x", "x", "y")
        for task in dropped[:2]:
            task.cancel()
        await asyncio.wait(dropped[:2])
        process.may_end.set()
        await asyncio.gather(running, dropped[2])
        assert process.tried == ["slow", "y"]

    run(test)
