"""open_limiter: opens the configured limiter.

It counts in Redis for all replicas, or in the memory of this process.
"""

from __future__ import annotations

from contextlib import AsyncExitStack
from pathlib import Path
from typing import Literal

from emberline.core.clock import Clock, WallClock
from emberline.gateway.limits.base import Limiter
from emberline.gateway.limits.journal import CounterJournal
from emberline.gateway.limits.local import LocalLimiter
from emberline.gateway.limits.stored import CounterStore, StoredLimiter


async def open_limiter(
    url: str | None,
    clock: Clock,
    exit_stack: AsyncExitStack,
    *,
    degraded_mode: Literal["local", "closed"] = "local",
    store: CounterStore | None = None,
    journal_directory: Path | None = None,
    store_interval_s: float = 1.0,
) -> Limiter:
    """Open a limiter. `exit_stack` closes it. If Redis cannot be reached, the gateway starts nevertheless.

    Without Redis, `store` keeps the counters over restarts. Changes of counters are written to the store every
    `store_interval_s` seconds; until then, files in `journal_directory` keep the changes.
    """
    if url is None and store is not None and journal_directory is not None:
        stored = StoredLimiter(store, CounterJournal(journal_directory), WallClock(), store_interval_s)
        await stored.start()
        exit_stack.push_async_callback(stored.close)
        return stored
    if url is None:
        return LocalLimiter()
    from emberline.gateway.limits.redis import RedisLimiter
    from emberline.gateway.redis_client import RedisClient

    client = RedisClient(url, clock)
    await client.start()
    exit_stack.push_async_callback(client.close)
    limiter = RedisLimiter(client, degraded_mode=degraded_mode)
    exit_stack.push_async_callback(limiter.close)
    return limiter
