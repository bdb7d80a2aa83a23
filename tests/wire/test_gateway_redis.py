"""Limits shared through a real Redis: equal to local limits, atomic over replicas, and degraded without Redis."""

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
from emberline.gateway.core.errors import LimitExceeded, StoreFailed
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
async def connect(url: str, timeout_s: float = 20.0) -> AsyncIterator[RedisClient]:
    client = RedisClient(url, SystemClock(), timeout_s=timeout_s)
    try:
        assert await client.start(20.0)
        yield client
    finally:
        await client.close()


async def until(condition: Any) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline, "the condition was not met in time"
        await asyncio.sleep(0.02)


def with_test_clock(script: RedisScript) -> RedisScript:
    """Return the script with a clock that the test sets, and without key expiry, which uses the clock of Redis."""
    assert "redis.call('TIME')" in script.text
    text = script.text.replace("redis.call('TIME')", "redis.call('HMGET', 'test:clock', 's', 'us')")
    return RedisScript(text.replace("'PEXPIRE'", "'EXISTS'"))


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(RULES, STEPS)
def test_redis_limiter_matches_the_oracle(
    server: RedisServer, rule: LimitRule, steps: list[tuple[str, int, int, int]]
) -> None:
    async def run() -> None:
        async with connect(server.url) as client:
            limiter = RedisLimiter(client)
            limiter._reserve_script, limiter._settle_script = (
                with_test_clock(limiter._reserve_script),
                with_test_clock(limiter._settle_script),
            )
            limiter._usage_script = with_test_clock(limiter._usage_script)

            async def set_time(now: int) -> None:
                await client.run_command("HSET", "test:clock", "s", now // 1000, "us", now % 1000 * 1000)

            await client.run_command("FLUSHALL")
            await compare(limiter, rule, steps, set_time)
            assert limiter.stats.degraded == 0

    asyncio.run(run())


def test_lua_months_match_python(server: RedisServer) -> None:
    moments = [
        int(1000 * time.mktime((year, month, day, 12, 0, 0, 0, 0, 0)))
        for year in (1970, 1999, 2000, 2023, 2024, 2026, 2100)
        for month in range(1, 13)
        for day in (1, 2, 28, 31)
    ]
    month = LimitWindow.for_period("month", "fixed")

    async def run() -> None:
        async with connect(server.url) as client:
            text = RedisLimiter(client)._reserve_script.text.split("-- Reserve all claims")[0]
            text += "local s = slot_of(tonumber(ARGV[1]), 0, 0) return {s, ends_of(s, 0, 1, 0)}"
            for now in moments:
                slot = month.slot_at(now)
                assert await client.run_script(RedisScript(text), [], [now]) == [slot, month.usage_end_ms(slot)]

    uvloop.run(run())


def replicas(url: str, clients: list[int], rule: LimitRule, amount: int = 1) -> list[dict[str, int]]:
    rule_json = json.dumps({"name": rule.name, "limit": rule.limit, "amount": rule.amount, "per": rule.per,
                        "technique": rule.technique})  # fmt: skip
    environment = {**os.environ, "PYTHONPATH": str(TESTS.parent / "src")}
    started = [
        subprocess.Popen(
            [sys.executable, str(TESTS / "limit_replica.py"), url, str(count), rule_json, str(amount)],
            stdout=subprocess.PIPE,
            env=environment,
        )
        for count in clients
    ]
    return [json.loads(process.communicate(timeout=100)[0]) for process in started]


@pytest.mark.parametrize("technique", ["fixed", "sliding"])
def test_exactly_the_limit_passes_over_three_replicas(server: RedisServer, technique: Any) -> None:
    rule = LimitRule(name=f"requests-{technique}", limit=73, per="day", technique=technique)
    results = replicas(server.url, [67, 67, 66], rule)
    assert sum(one["passed"] for one in results) == 73


def test_budget_over_three_replicas_is_exceeded_by_less_than_one_reservation(server: RedisServer) -> None:
    rule = LimitRule(name="budget", limit=10_000, amount="micros", per="month")
    results = replicas(server.url, [40, 40, 40], rule, amount=300)
    used = sum(one["used"] for one in results)
    assert 5_000 < used < 10_000 + 300


def test_reservation_of_a_dead_replica_expires(server: RedisServer) -> None:
    rule = LimitRule(name="crash", limit=1, per="day")

    async def run() -> None:
        async with connect(server.url) as client:
            dead, alive = RedisLimiter(client), RedisLimiter(client)
            claims = [rule.make_claim({}, 1)]
            late = await dead.reserve(claims, 0, 2)
            with pytest.raises(LimitExceeded):
                await alive.reserve(claims, 0, 60)
            await asyncio.sleep(2.01)
            reservation = await alive.reserve(claims, 0, 60)
            # The replica was only slow: its usage counts all the same.
            dead.settle(late, {"requests": 1})
            alive.settle(reservation, {"requests": 0})
            await asyncio.gather(dead.close(), alive.close())
            with pytest.raises(LimitExceeded):
                await alive.reserve(claims, 0, 60)

    uvloop.run(run())


def test_repeated_settlement_counts_once_and_keys_expire(server: RedisServer) -> None:
    rule = LimitRule(name="twice", limit=10, amount="tokens", per="hour")

    async def run() -> None:
        async with connect(server.url) as client:
            limiter = RedisLimiter(client)
            claims = [rule.make_claim({"gateway": "acc/gw"}, 5)]
            reservation = await limiter.reserve(claims, 0, 60)
            for _ in range(2):
                reservation.is_settled = False
                limiter.settle(reservation, {"tokens": 2})
            await limiter.close()
            after = await limiter.reserve(claims, 0, 60)
            assert after.grants[0].remaining == 10 - 2 - 5
            for key in limiter._redis_keys(claims):
                assert key.startswith("emberline:{acc/gw}:twice:")
                assert 0 < await client.run_command("PTTL", key) <= 3_600_000

    uvloop.run(run())


@pytest.mark.parametrize("degraded", ["local", "closed"])
def test_hanging_redis_degrades(degraded: DegradedMode) -> None:
    with redis_server() as server:

        async def run() -> None:
            async with connect(server.url, timeout_s=0.05) as client:
                limiter = RedisLimiter(client, degraded_mode=degraded)
                claims = [RULE.make_claim({"gateway": "g"}, 1)]
                server.process.send_signal(signal.SIGSTOP)
                for _ in range(20):  # three wait 50 ms each, the others fail at once
                    try:
                        limiter.settle(await limiter.reserve(claims, 0, 60), {"requests": 1})
                    except LimitExceeded:
                        assert degraded == "local" and limiter.stats.degraded > RULE.limit
                    except StoreFailed:
                        assert degraded == "closed"
                assert limiter.stats.degraded == 20
                assert 3 <= client.stats.timeouts <= 6 and client.stats.rejected >= 14
                server.process.send_signal(signal.SIGCONT)
                client.timeout_s = 20.0
                await until(lambda: client.is_healthy)
                await limiter.reserve(claims, 0, 60)
                assert limiter.stats.reserved == 1

        uvloop.run(run())


def test_settlements_are_sent_after_a_redis_outage() -> None:
    server = start_redis()

    async def run() -> None:
        nonlocal server
        async with connect(server.url) as client:
            limiter = RedisLimiter(client)
            rule = LimitRule(name="owed", limit=100, amount="tokens", per="day")
            claims = [rule.make_claim({}, 10)]
            reservation = await limiter.reserve(claims, 0, 0.001)  # expires: the new Redis does not have it
            server.process.kill()
            server.process.wait()
            await until(lambda: not client.is_healthy)
            limiter.settle(reservation, {"tokens": 7})
            assert limiter.stats.pending_settlements == 1
            server = start_redis(server.port)
            await until(lambda: client.is_healthy)
            limiter.settle(await limiter.reserve(claims, 0, 60), {"tokens": 0})
            await limiter.close()
            assert limiter.stats.pending_settlements == 0
            assert (await limiter.reserve(claims, 0, 60)).grants[0].remaining == 100 - 7 - 10

    try:
        uvloop.run(run())
    finally:
        server.process.kill()
        server.process.wait()


@pytest.mark.parametrize("degraded", ["local", "closed"])
def test_read_only_redis_degrades(server: RedisServer, degraded: DegradedMode) -> None:
    async def run() -> None:
        async with connect(server.url) as client:
            limiter = RedisLimiter(client, degraded_mode=degraded, prefix=f"refused-{degraded}")
            claims = [LimitRule(name="r", limit=100, amount="tokens", per="day").make_claim({}, 10)]
            reservation = await limiter.reserve(claims, 0, 60)
            await client.run_command("REPLICAOF", "127.0.0.1", 1)  # of an unreachable server: it becomes read-only
            try:
                limiter.settle(reservation, {"tokens": 7})
                await until(lambda: limiter.stats.pending_settlements == 1)
                if degraded == "local":
                    assert (await limiter.reserve(claims, 0, 60)).is_local
                else:
                    with pytest.raises(StoreFailed):
                        await limiter.reserve(claims, 0, 60)
            finally:
                await client.run_command("REPLICAOF", "NO", "ONE")
            limiter.settle(await limiter.reserve(claims, 0, 60), {"tokens": 0})
            await limiter.close()
            assert (limiter.stats.degraded, limiter.stats.pending_settlements, limiter.stats.lost_settlements) == (
                1,
                0,
                0,
            )
            assert (await limiter.reserve(claims, 0, 60)).grants[0].remaining == 100 - 7 - 10

    uvloop.run(run())


def test_settlement_that_redis_always_refuses_is_given_up(server: RedisServer) -> None:
    async def run() -> None:
        async with connect(server.url) as client:
            limiter = RedisLimiter(client, prefix="spoiled")
            one, other = ([LimitRule(name=name, limit=9).make_claim({}, 1)] for name in ("one", "other"))
            reservation = await limiter.reserve(one, 0, 60)
            await client.run_command("SET", limiter._redis_keys(one)[1], "wrong type")
            limiter.settle(reservation, {"requests": 1})
            await until(lambda: limiter.stats.pending_settlements == 1)
            limiter.settle(await limiter.reserve(other, 0, 60), {"requests": 1})
            await until(lambda: limiter.stats.lost_settlements == 1)
            assert limiter.stats.pending_settlements == 0

    uvloop.run(run())


def test_redis_client_protocol(server: RedisServer) -> None:
    async def run() -> None:
        async with connect(f"{server.url}/3") as client:
            assert await client.run_command("SET", "k", b"\x00\r\nv") == b"OK"
            answers = await asyncio.gather(*(client.run_command("ECHO", i) for i in range(300)))
            assert answers == [str(i).encode() for i in range(300)]
            assert (
                await client.run_command("GET", "k") == b"\x00\r\nv" and await client.run_command("GET", "none") is None
            )
            with pytest.raises(RedisErrorReply, match="unknown command"):
                await client.run_command("FROB")
            await client.run_command("SCRIPT", "FLUSH")
            assert await client.run_script(RedisScript("return {KEYS[1], ARGV[1]}"), ["a"], [7]) == [b"a", b"7"]
        async with connect(server.url) as other:
            assert await other.run_command("GET", "k") is None
        with pytest.raises(RedisUnavailable):
            await RedisClient(server.url, SystemClock()).run_command("PING")

    uvloop.run(run())


def test_redis_cache_is_shared_and_empty_without_redis(server: RedisServer) -> None:
    async def run() -> None:
        async with connect(server.url) as one, connect(server.url) as two:
            await RedisCache(one).put("k", b"\x00reply", 60)
            assert await RedisCache(two).get("k") == b"\x00reply" and await RedisCache(two).get("other") is None
            assert 0 < await one.run_command("PTTL", "emberline:cache:k") <= 60_000
            small = RedisCache(one, max_entry_bytes=3)
            await small.put("large", b"1234", 60)
            assert await small.get("large") is None and small.failures == 0
        cache = RedisCache(RedisClient(server.url, SystemClock()))
        await cache.put("k", b"x", 60)
        assert await cache.get("k") is None and cache.failures == 2

    uvloop.run(run())


@pytest.mark.parametrize("is_running", [True, False])
def test_limiter_and_cache_open_by_address(server: RedisServer, tmp_path: Path, is_running: bool) -> None:
    async def run() -> None:
        url, clock = server.url if is_running else "redis://127.0.0.1:9", SystemClock()
        async with AsyncExitStack() as stack:
            for limiter in (await open_limiter(None, clock, stack), await open_limiter(url, clock, stack)):
                reservation = await limiter.reserve(
                    [LimitRule(name="opened", limit=9).make_claim({}, 1)], time.time(), 9
                )
                limiter.settle(reservation, {})
                assert reservation.is_local is not (is_running and isinstance(limiter, RedisLimiter))
            for address in (None, f"sqlite:{tmp_path}/cache.db", url):
                cache = await open_cache(address, clock, clock, stack)
                await cache.put("opened", b"x", 9)
                assert await cache.get("opened") == (b"x" if is_running or address != url else None)
            with pytest.raises(InvalidRequest):
                await open_cache("ftp://x", clock, clock, stack)

    uvloop.run(run())


def test_redis_url_options() -> None:
    assert RedisClient("redis://h", SystemClock()).timeout_s == 0.05
    assert RedisClient("redis://h:1/2?patience=75", SystemClock()).timeout_s == 0.075
    for wrong in ("http://h", "redis://", "redis://h?patience=0", "redis://h?patience=x", "redis://h?db=1"):
        with pytest.raises(InvalidRequest):
            RedisClient(wrong, SystemClock())


def test_redis_password(server: RedisServer) -> None:
    async def run() -> None:
        async with connect(server.url) as client:
            await client.run_command("ACL", "SETUSER", "gate", "on", ">p@ss/1", "+@all", "~*")
        async with connect(f"redis://gate:p%40ss%2F1@127.0.0.1:{server.port}") as client:
            assert await client.run_command("ACL", "WHOAMI") == b"gate"

    uvloop.run(run())
