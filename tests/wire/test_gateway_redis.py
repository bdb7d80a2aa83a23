"""Limits shared through a real Redis: the same as in one process, atomic over replicas, and no outage without it."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import uvloop
from hypothesis import HealthCheck, given, settings
from limits_oracle import RULES, STEPS, compare
from redis_server import RedisServer, redis_server, start_redis

from emberline.core.clock import SystemClock
from emberline.core.errors import InvalidRequest
from emberline.gateway.cache.factory import open_cache
from emberline.gateway.cache.redis import RedisCache
from emberline.gateway.errors import LimitExceeded, StoreFailed
from emberline.gateway.limits.factory import open_limiter
from emberline.gateway.limits.redis import DegradedMode, RedisLimiter
from emberline.gateway.limits.rule import LimitRule
from emberline.gateway.limits.window import LimitWindow
from emberline.gateway.redis_client import RedisClient, RedisErrorReply, RedisScript, RedisUnavailable

TESTS = Path(__file__).parents[1]
RULE = LimitRule(name="r", limit=3)


@pytest.fixture(scope="module")
def server() -> Iterator[RedisServer]:
    with redis_server() as started:
        yield started


@asynccontextmanager
async def linked(url: str, patience: float = 20.0) -> AsyncIterator[RedisClient]:
    link = RedisClient(url, SystemClock(), timeout_s=patience)
    try:
        assert await link.start(20.0)
        yield link
    finally:
        await link.close()


async def until(what: Any) -> None:
    deadline = time.monotonic() + 20
    while not what():
        assert time.monotonic() < deadline, "it did not come to pass"
        await asyncio.sleep(0.02)


def told(script: RedisScript) -> RedisScript:
    """The script by a clock that the test sets; its keys last, because Redis would expire them by its own."""
    assert "redis.call('TIME')" in script.text
    text = script.text.replace("redis.call('TIME')", "redis.call('HMGET', 'test:clock', 's', 'us')")
    return RedisScript(text.replace("'PEXPIRE'", "'EXISTS'"))


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(RULES, STEPS)
def test_the_script_says_what_the_oracle_says(
    server: RedisServer, rule: LimitRule, steps: list[tuple[str, int, int, int]]
) -> None:
    async def go() -> None:
        async with linked(server.url) as link:
            limiter = RedisLimiter(link)
            limiter._reserve_script, limiter._settle_script = (
                told(limiter._reserve_script),
                told(limiter._settle_script),
            )
            limiter._usage_script = told(limiter._usage_script)

            async def move(now: int) -> None:
                await link.call("HSET", "test:clock", "s", now // 1000, "us", now % 1000 * 1000)

            await link.call("FLUSHALL")
            await compare(limiter, rule, steps, move)
            assert limiter.stats.degraded == 0

    asyncio.run(go())


def test_months_are_the_same_in_both_languages(server: RedisServer) -> None:
    moments = [
        int(1000 * time.mktime((year, month, day, 12, 0, 0, 0, 0, 0)))
        for year in (1970, 1999, 2000, 2023, 2024, 2026, 2100)
        for month in range(1, 13)
        for day in (1, 2, 28, 31)
    ]
    month = LimitWindow.for_period("month", "fixed")

    async def go() -> None:
        async with linked(server.url) as link:
            text = RedisLimiter(link)._reserve_script.text.split("-- Reserve all claims")[0]
            text += "local s = slot_of(tonumber(ARGV[1]), 0, 0) return {s, ends_of(s, 0, 1, 0)}"
            for now in moments:
                slot = month.slot(now)
                assert await link.run_script(RedisScript(text), [], [now]) == [slot, month.slot_end(slot)]

    uvloop.run(go())


def replicas(url: str, clients: list[int], rule: LimitRule, amount: int = 1) -> list[dict[str, int]]:
    given = json.dumps({"name": rule.name, "limit": rule.limit, "amount": rule.amount, "per": rule.per,
                        "technique": rule.technique})  # fmt: skip
    environment = {**os.environ, "PYTHONPATH": str(TESTS.parent / "src")}
    started = [
        subprocess.Popen(
            [sys.executable, str(TESTS / "limit_replica.py"), url, str(count), given, str(amount)],
            stdout=subprocess.PIPE,
            env=environment,
        )
        for count in clients
    ]
    return [json.loads(process.communicate(timeout=100)[0]) for process in started]


@pytest.mark.parametrize("technique", ["fixed", "sliding"])
def test_of_200_clients_on_three_replicas_exactly_n_pass(server: RedisServer, technique: Any) -> None:
    rule = LimitRule(name=f"requests-{technique}", limit=73, per="day", technique=technique)
    said = replicas(server.url, [67, 67, 66], rule)
    assert sum(one["passed"] for one in said) == 73


def test_a_budget_on_three_replicas_is_overshot_by_less_than_one_reservation(server: RedisServer) -> None:
    rule = LimitRule(name="budget", limit=10_000, amount="micros", per="month")
    said = replicas(server.url, [40, 40, 40], rule, amount=300)
    used = sum(one["used"] for one in said)
    assert 5_000 < used < 10_000 + 300


def test_what_a_dead_replica_held_comes_back(server: RedisServer) -> None:
    rule = LimitRule(name="crash", limit=1, per="day")

    async def go() -> None:
        async with linked(server.url) as link:
            dead, alive = RedisLimiter(link), RedisLimiter(link)
            claims = [rule.make_claim({}, 1)]
            late = await dead.reserve(claims, 0, 2)
            with pytest.raises(LimitExceeded):
                await alive.reserve(claims, 0, 60)
            await asyncio.sleep(2.01)
            made = await alive.reserve(claims, 0, 60)
            # It was not dead, only late: what it used counts all the same.
            dead.settle(late, {"requests": 1})
            alive.settle(made, {"requests": 0})
            await asyncio.gather(dead.close(), alive.close())
            with pytest.raises(LimitExceeded):
                await alive.reserve(claims, 0, 60)

    uvloop.run(go())


def test_a_settlement_sent_twice_counts_once_and_keys_expire(server: RedisServer) -> None:
    rule = LimitRule(name="twice", limit=10, amount="tokens", per="hour")

    async def go() -> None:
        async with linked(server.url) as link:
            limiter = RedisLimiter(link)
            claims = [rule.make_claim({"gateway": "acc/gw"}, 5)]
            made = await limiter.reserve(claims, 0, 60)
            for _ in range(2):
                made.is_settled = False
                limiter.settle(made, {"tokens": 2})
            await limiter.close()
            after = await limiter.reserve(claims, 0, 60)
            assert after.grants[0].remaining == 10 - 2 - 5
            for key in limiter._redis_keys(claims):
                assert key.startswith("emberline:{acc/gw}:twice:")
                assert 0 < await link.call("PTTL", key) <= 3_600_000

    uvloop.run(go())


@pytest.mark.parametrize("degraded", ["local", "closed"])
def test_a_redis_that_hangs_is_no_outage(degraded: DegradedMode) -> None:
    with redis_server() as server:

        async def go() -> None:
            async with linked(server.url, patience=0.05) as link:
                limiter = RedisLimiter(link, degraded=degraded)
                claims = [RULE.make_claim({"gateway": "g"}, 1)]
                server.process.send_signal(signal.SIGSTOP)
                for _ in range(20):  # three wait 50 ms, the others not at all
                    try:
                        limiter.settle(await limiter.reserve(claims, 0, 60), {"requests": 1})
                    except LimitExceeded:
                        assert degraded == "local" and limiter.stats.degraded > RULE.limit
                    except StoreFailed:
                        assert degraded == "closed"
                assert limiter.stats.degraded == 20
                assert 3 <= link.stats.timeouts <= 6 and link.stats.rejected >= 14
                server.process.send_signal(signal.SIGCONT)
                link.timeout_s = 20.0
                await until(lambda: link.is_healthy)
                await limiter.reserve(claims, 0, 60)
                assert limiter.stats.reserved == 1

        uvloop.run(go())


def test_what_was_settled_while_redis_was_gone_is_sent_when_it_is_back() -> None:
    server = start_redis()

    async def go() -> None:
        nonlocal server
        async with linked(server.url) as link:
            limiter = RedisLimiter(link)
            rule = LimitRule(name="owed", limit=100, amount="tokens", per="day")
            claims = [rule.make_claim({}, 10)]
            made = await limiter.reserve(claims, 0, 0.001)  # it will have come back: the new Redis never knew of it
            server.process.kill()
            server.process.wait()
            await until(lambda: not link.is_healthy)
            limiter.settle(made, {"tokens": 7})
            assert limiter.stats.pending_settlements == 1
            server = start_redis(server.port)
            await until(lambda: link.is_healthy)
            limiter.settle(await limiter.reserve(claims, 0, 60), {"tokens": 0})
            await limiter.close()
            assert limiter.stats.pending_settlements == 0
            assert (await limiter.reserve(claims, 0, 60)).grants[0].remaining == 100 - 7 - 10

    try:
        uvloop.run(go())
    finally:
        server.process.kill()
        server.process.wait()


@pytest.mark.parametrize("degraded", ["local", "closed"])
def test_a_redis_that_takes_nothing_is_no_outage(server: RedisServer, degraded: DegradedMode) -> None:
    async def go() -> None:
        async with linked(server.url) as link:
            limiter = RedisLimiter(link, degraded=degraded, prefix=f"refused-{degraded}")
            claims = [LimitRule(name="r", limit=100, amount="tokens", per="day").make_claim({}, 10)]
            made = await limiter.reserve(claims, 0, 60)
            await link.call("REPLICAOF", "127.0.0.1", 1)  # of nobody: from now on it only reads
            try:
                limiter.settle(made, {"tokens": 7})
                await until(lambda: limiter.stats.pending_settlements == 1)
                if degraded == "local":
                    assert (await limiter.reserve(claims, 0, 60)).is_local
                else:
                    with pytest.raises(StoreFailed):
                        await limiter.reserve(claims, 0, 60)
            finally:
                await link.call("REPLICAOF", "NO", "ONE")
            limiter.settle(await limiter.reserve(claims, 0, 60), {"tokens": 0})
            await limiter.close()
            assert (limiter.stats.degraded, limiter.stats.pending_settlements, limiter.stats.lost_settlements) == (
                1,
                0,
                0,
            )
            assert (await limiter.reserve(claims, 0, 60)).grants[0].remaining == 100 - 7 - 10

    uvloop.run(go())


def test_a_settlement_that_is_never_taken_is_given_up(server: RedisServer) -> None:
    async def go() -> None:
        async with linked(server.url) as link:
            limiter = RedisLimiter(link, prefix="spoiled")
            one, other = ([LimitRule(name=name, limit=9).make_claim({}, 1)] for name in ("one", "other"))
            made = await limiter.reserve(one, 0, 60)
            await link.call("SET", limiter._redis_keys(one)[1], "of somebody else")
            limiter.settle(made, {"requests": 1})
            await until(lambda: limiter.stats.pending_settlements == 1)
            limiter.settle(await limiter.reserve(other, 0, 60), {"requests": 1})
            await until(lambda: limiter.stats.lost_settlements == 1)
            assert limiter.stats.pending_settlements == 0

    uvloop.run(go())


def test_the_link_speaks_redis(server: RedisServer) -> None:
    async def go() -> None:
        async with linked(f"{server.url}/3") as link:
            assert await link.call("SET", "k", b"\x00\r\nv") == b"OK"
            answers = await asyncio.gather(*(link.call("ECHO", i) for i in range(300)))
            assert answers == [str(i).encode() for i in range(300)]
            assert await link.call("GET", "k") == b"\x00\r\nv" and await link.call("GET", "none") is None
            with pytest.raises(RedisErrorReply, match="unknown command"):
                await link.call("FROB")
            await link.call("SCRIPT", "FLUSH")
            assert await link.run_script(RedisScript("return {KEYS[1], ARGV[1]}"), ["a"], [7]) == [b"a", b"7"]
        async with linked(server.url) as other:
            assert await other.call("GET", "k") is None
        with pytest.raises(RedisUnavailable):
            await RedisClient(server.url, SystemClock()).call("PING")

    uvloop.run(go())


def test_replies_are_cached_for_all_replicas_and_without_redis_for_none(server: RedisServer) -> None:
    async def go() -> None:
        async with linked(server.url) as one, linked(server.url) as two:
            await RedisCache(one).put("k", b"\x00reply", 60)
            assert await RedisCache(two).get("k") == b"\x00reply" and await RedisCache(two).get("other") is None
            assert 0 < await one.call("PTTL", "emberline:cache:k") <= 60_000
            small = RedisCache(one, max_entry_bytes=3)
            await small.put("large", b"1234", 60)
            assert await small.get("large") is None and small.failures == 0
        cache = RedisCache(RedisClient(server.url, SystemClock()))
        await cache.put("k", b"x", 60)
        assert await cache.get("k") is None and cache.failures == 2

    uvloop.run(go())


@pytest.mark.parametrize("there", [True, False])
def test_a_gateway_opens_them_by_address(server: RedisServer, tmp_path: Path, there: bool) -> None:
    async def go() -> None:
        url, clock = server.url if there else "redis://127.0.0.1:9", SystemClock()
        async with AsyncExitStack() as stack:
            for limiter in (await open_limiter(None, clock, stack), await open_limiter(url, clock, stack)):
                made = await limiter.reserve([LimitRule(name="opened", limit=9).make_claim({}, 1)], time.time(), 9)
                limiter.settle(made, {})
                assert made.is_local is not (there and isinstance(limiter, RedisLimiter))
            for place in (None, f"sqlite:{tmp_path}/cache.db", url):
                cache = await open_cache(place, clock, clock, stack)
                await cache.put("opened", b"x", 9)
                assert await cache.get("opened") == (b"x" if there or place != url else None)
            with pytest.raises(InvalidRequest):
                await open_cache("ftp://x", clock, clock, stack)

    uvloop.run(go())


def test_addresses() -> None:
    assert RedisClient("redis://h", SystemClock()).timeout_s == 0.05
    assert RedisClient("redis://h:1/2?patience=75", SystemClock()).timeout_s == 0.075
    for wrong in ("http://h", "redis://", "redis://h?patience=0", "redis://h?patience=x", "redis://h?db=1"):
        with pytest.raises(InvalidRequest):
            RedisClient(wrong, SystemClock())


def test_a_password_is_given(server: RedisServer) -> None:
    async def go() -> None:
        async with linked(server.url) as link:
            await link.call("ACL", "SETUSER", "gate", "on", ">p@ss/1", "+@all", "~*")
        async with linked(f"redis://gate:p%40ss%2F1@127.0.0.1:{server.port}") as link:
            assert await link.call("ACL", "WHOAMI") == b"gate"

    uvloop.run(go())
