"""One replica's limiter: many concurrent clients against one rule. It prints the outcome.

python limit_replica.py URL CLIENTS RULE(JSON) AMOUNT
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
import time

import uvloop

from emberline.core.clock import SystemClock
from emberline.gateway.core.errors import LimitExceeded
from emberline.gateway.limits.redis import RedisLimiter
from emberline.gateway.limits.rule import LimitRule
from emberline.gateway.redis_client import RedisClient


async def main(url: str, clients: int, rule: LimitRule, amount: int) -> None:
    link = RedisClient(url, SystemClock(), timeout_s=20.0)  # so that a loaded machine does not change the outcome
    assert await link.start(20.0)
    limiter = RedisLimiter(link, degraded_mode="closed")
    passed = used = 0

    async def client() -> None:
        nonlocal passed, used
        await asyncio.sleep(random.random() / 20)
        try:
            made = await limiter.reserve([rule.make_claim({"gateway": "a/g"}, amount)], time.time(), 60)
        except LimitExceeded:
            return
        await asyncio.sleep(random.random() / 50)
        actual = 1 if rule.amount == "requests" else random.randint(0, amount)
        limiter.settle(made, {rule.amount: actual})
        passed, used = passed + 1, used + actual

    for _ in range(3 if rule.amount == "micros" else 1):
        await asyncio.gather(*(client() for _ in range(clients)))
    await limiter.close()
    await link.close()
    print(json.dumps({"passed": passed, "used": used}))


if __name__ == "__main__":
    uvloop.run(main(sys.argv[1], int(sys.argv[2]), LimitRule.parse([json.loads(sys.argv[3])])[0], int(sys.argv[4])))
