"""Opens the cache store that an address names: none (memory of this process), `sqlite:PATH` or Redis.

It also makes the semantic cache on first use."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from emberline.core.clock import Clock
from emberline.core.errors import InvalidRequest
from emberline.gateway.cache.base import CacheStore
from emberline.gateway.cache.memory import MemoryCache
from emberline.gateway.cache.sqlite import SqliteCache
from emberline.gateway.upstream.client import UpstreamClient

if TYPE_CHECKING:
    from emberline.gateway.cache.semantic import SemanticCache

REDIS_TIMEOUT_S = 0.2  # longer than for counters, because entries are larger


async def open_cache(url: str | None, clock: Clock, wall: Clock, stack: AsyncExitStack) -> CacheStore:
    """Open a cache store, which `stack` closes. Raises InvalidRequest for an unknown kind of address.

    `clock` is monotonic; `wall` is in seconds since the epoch.
    """
    store: CacheStore
    if url is None:
        store = MemoryCache(clock)
    elif url.startswith("sqlite:"):
        store = SqliteCache(Path(url.removeprefix("sqlite:")), wall)
    elif url.startswith(("redis://", "rediss://")):
        from emberline.gateway.cache.redis import RedisCache
        from emberline.gateway.redis_client import RedisClient

        client = RedisClient(url, clock, timeout_s=REDIS_TIMEOUT_S)
        await client.start()
        stack.push_async_callback(client.close)
        store = RedisCache(client)
    else:
        raise InvalidRequest(
            f"unknown kind of cache address {url[:80]!r}", param="cache", hint="use sqlite:PATH or redis://HOST:PORT"
        )
    stack.push_async_callback(store.close)
    return store


def semantic_cache_factory(upstream: UpstreamClient, url: str, model: str, clock: Clock) -> Callable[[], SemanticCache]:
    """Return a function that makes the semantic cache; it imports numpy when it is called."""

    def make() -> SemanticCache:
        from emberline.gateway.cache.embedder import HttpEmbedder
        from emberline.gateway.cache.semantic import SemanticCache

        return SemanticCache(HttpEmbedder(upstream, url, model), clock)

    return make
