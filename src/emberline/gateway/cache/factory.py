"""Opens the cache store for a URL: `sqlite:PATH`, `redis://HOST:PORT`, or memory if there is no URL.

The module also creates the semantic cache.
"""

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


async def open_cache(url: str | None, clock: Clock, wall_clock: Clock, exit_stack: AsyncExitStack) -> CacheStore:
    """Open the cache store that `url` names. `exit_stack` closes it.

    `clock` is monotonic; `wall_clock` returns seconds since 1970. Raise InvalidRequest if the URL has an unknown
    scheme.
    """
    store: CacheStore
    if url is None:
        store = MemoryCache(clock)
    elif url.startswith("sqlite:"):
        store = SqliteCache(Path(url.removeprefix("sqlite:")), wall_clock)
    elif url.startswith(("redis://", "rediss://")):
        from emberline.gateway.cache.redis import RedisCache
        from emberline.gateway.redis_client import RedisClient

        client = RedisClient(url, clock, timeout_s=REDIS_TIMEOUT_S)
        await client.start()
        exit_stack.push_async_callback(client.close)
        store = RedisCache(client)
    else:
        raise InvalidRequest(
            f"the cache URL {url[:80]!r} has an unknown scheme",
            param="cache",
            hint="use sqlite:PATH or redis://HOST:PORT",
        )
    exit_stack.push_async_callback(store.close)
    return store


def semantic_cache_factory(
    upstream: UpstreamClient, url: str, model: str, clock: Clock, *, key: str | None = None
) -> Callable[[], SemanticCache]:
    """Return a function that creates the semantic cache.

    `key`: the API key of the server at `url`, which serves the embedding model.
    numpy is imported only when the returned function is called.
    """

    def create_semantic_cache() -> SemanticCache:
        from emberline.gateway.cache.embedder import HttpEmbedder

        try:
            from emberline.gateway.cache.semantic import SemanticCache
        except ModuleNotFoundError as e:
            message = f"the semantic cache needs a package that is not installed: {e.name}"
            raise InvalidRequest(message, param="semantic", hint=f"pip install {e.name}") from e
        return SemanticCache(HttpEmbedder(upstream, url, model, key=key), clock)

    return create_semantic_cache
