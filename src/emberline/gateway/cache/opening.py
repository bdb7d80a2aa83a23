"""Where replies are kept, chosen by an address: none (this process's memory), `sqlite:PATH`, or a Redis; and who finds
those that mean the same."""

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
from emberline.gateway.upstream.upstream import Upstream

if TYPE_CHECKING:
    from emberline.gateway.cache.semantic import Semantic

PATIENCE = 0.2  # seconds: entries are larger than counters


async def open_cache(url: str | None, clock: Clock, wall: Clock, stack: AsyncExitStack) -> CacheStore:
    """`stack` closes it. `clock` is monotonic, `wall` tells seconds since 1970."""
    store: CacheStore
    if url is None:
        store = MemoryCache(clock)
    elif url.startswith("sqlite:"):
        store = SqliteCache(Path(url.removeprefix("sqlite:")), wall)
    elif url.startswith(("redis://", "rediss://")):
        from emberline.gateway.cache.redis import RedisCache
        from emberline.gateway.redislink import RedisLink

        link = RedisLink(url, clock, patience=PATIENCE)
        await link.start()
        stack.push_async_callback(link.close)
        store = RedisCache(link)
    else:
        raise InvalidRequest("a cache is at sqlite:PATH or redis://HOST:PORT", param="cache")
    stack.push_async_callback(store.close)
    return store


def semantic_by(upstream: Upstream, url: str, model: str, clock: Clock) -> Callable[[], Semantic]:
    """On an embedder at this address. Made, and numpy with it, when somebody wants it."""

    def make() -> Semantic:
        from emberline.gateway.cache.embedder import HttpEmbedder
        from emberline.gateway.cache.semantic import Semantic

        return Semantic(HttpEmbedder(upstream, url, model), clock)

    return make
