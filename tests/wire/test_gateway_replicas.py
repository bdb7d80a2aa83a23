"""Three real gateways with one Redis and 200 concurrent clients: exactly the limit passes."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from redis_server import redis_server
from routers import get, spawn, stop, until

from emberline.core.freeport import free_port
from emberline.net.connection_pool import HTTPConnectionPool

LIMIT = 73
BUDGET = 5_000  # micro-dollars
KEY = "a-key-of-the-tests"
PRICE = {
    "cf-aig-custom-cost": '{"per_token_in": 0.000003, "per_token_out": 0.000007}',
    "cf-aig-authorization": f"Bearer {KEY}",
}
WORDS = 8
USED = 11 * 3 + WORDS * 7  # micro-dollars of a reply of the fake
BODY = {"model": "fake/m", "messages": [{"role": "user", "content": "hello"}], "max_tokens": WORDS}
RESERVED = len(json.dumps(BODY)) // 4 * 3 + WORDS * 7

CONFIG = """
redis = "{redis}?patience=20000"
[gateways.default.providers.fake]
base_url = "{fake}/v1"
[[gateways.default.limits]]
name = "day"
limit = {limit}
per = "day"
technique = "sliding"
only = {{ "metadata.test" = ["requests"] }}
[[gateways.default.budgets]]
name = "month"
limit = {budget}
per = "month"
only = {{ "metadata.test" = ["money"] }}
"""


@dataclass(frozen=True, slots=True)
class ObservedReply:
    status: int
    headers: dict[str, str]
    body: Any


@pytest.fixture(scope="module")
def replicas(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[str]]:
    directory, fake_port = tmp_path_factory.mktemp("replicas"), free_port()
    with redis_server() as redis:
        fake = spawn(directory / "fake.log", "-m", "emberline.gateway.fakes.provider", "--port", str(fake_port))
        urls = [start(directory, i, redis.url, f"http://127.0.0.1:{fake_port}") for i in range(3)]
        try:
            for url, _ in urls:
                until(lambda url=url: get(f"{url}/health/live"))  # type: ignore[misc]
            yield [url for url, _ in urls]
        finally:
            stop(fake, *(process for _, process in urls))


def start(directory: Path, number: int, redis: str, fake: str) -> tuple[str, Any]:
    config = directory / f"gateway{number}.toml"
    config.write_text(CONFIG.format(redis=redis, fake=fake, limit=LIMIT, budget=BUDGET))
    port = free_port()
    options = ["--config", str(config), "--port", str(port), "--store", f"sqlite:{directory / str(number)}"]
    options += ["--api-key", KEY]
    return f"http://127.0.0.1:{port}", spawn(directory / f"{number}.log", "-m", "emberline.cli", "gateway", *options)


async def ask(pool: HTTPConnectionPool, url: str, test: str) -> ObservedReply:
    headers = {**PRICE, "content-type": "application/json", "cf-aig-metadata": json.dumps({"test": test})}
    reply = await pool.fetch("POST", f"{url}/v1/chat/completions", headers, json.dumps(BODY).encode())
    return ObservedReply(reply.status, dict(reply.headers), json.loads(reply.body))


async def send_concurrently(urls: list[str], test: str) -> list[ObservedReply]:
    """Send 200 concurrent requests to all replicas, then more until five in a row are refused. Return all replies.

    A gateway records the cost of a reply after sending it: until then the larger reservation counts, and a request
    may be refused that passes a moment later."""
    with closing(HTTPConnectionPool(connect_timeout_s=60.0, idle_timeout_s=4.0, retries_stale=True)) as pool:
        replies = await asyncio.gather(*(ask(pool, urls[i % 3], test) for i in range(200)))
        refused_in_a_row = 0
        while refused_in_a_row < 5:
            replies.append(await ask(pool, urls[0], test))
            refused_in_a_row = 0 if replies[-1].status == 200 else refused_in_a_row + 1
            await asyncio.sleep(0.1 if refused_in_a_row else 0)
    return replies


def test_exactly_the_limit_passes(replicas: list[str]) -> None:
    replies = asyncio.run(send_concurrently(replicas, "requests"))
    assert [one for one in replies if one.status not in (200, 429)] == []
    assert Counter(one.status for one in replies) == {200: LIMIT, 429: len(replies) - LIMIT}
    left = sorted(int(one.headers["x-ratelimit-remaining-requests"]) for one in replies if one.status == 200)
    assert left == list(range(LIMIT)), "each reply has another remaining count"
    for one in replies:
        if one.status == 429:
            assert int(one.headers["retry-after"]) > 80_000 and one.headers["x-ratelimit-limit-requests"] == str(LIMIT)
            assert one.body["error"]["code"] == "rate_limit_exceeded"


def test_budget_is_exceeded_by_less_than_one_reservation(replicas: list[str]) -> None:
    replies = asyncio.run(send_concurrently(replicas, "money"))
    assert [one for one in replies if one.status not in (200, 429)] == []
    cost = USED * sum(one.status == 200 for one in replies)
    assert BUDGET <= cost < BUDGET + RESERVED
    assert {one.body["error"]["code"] for one in replies if one.status == 429} == {"budget_exceeded"}
