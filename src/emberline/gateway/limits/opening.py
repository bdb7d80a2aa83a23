"""Who counts limits, chosen by an address: none, for this process alone, or a Redis, for all that name it."""

from __future__ import annotations

from contextlib import AsyncExitStack
from typing import Literal

from emberline.core.clock import Clock
from emberline.gateway.limits.base import Limiter
from emberline.gateway.limits.local import LocalLimiter


async def open_limiter(
    url: str | None, clock: Clock, stack: AsyncExitStack, *, degraded: Literal["local", "closed"] = "local"
) -> Limiter:
    """`stack` closes it. A Redis that is not there yet is no reason not to start."""
    if url is None:
        return LocalLimiter()
    from emberline.gateway.limits.redis import RedisLimiter
    from emberline.gateway.redislink import RedisLink

    link = RedisLink(url, clock)
    await link.start()
    stack.push_async_callback(link.close)
    limiter = RedisLimiter(link, degraded=degraded)
    stack.push_async_callback(limiter.close)
    return limiter
