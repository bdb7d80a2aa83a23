"""RedisCache: a cache in Redis that all gateway replicas share.

Redis evicts entries by its `maxmemory-policy`.
"""

from __future__ import annotations

from emberline.gateway.redis_client import RedisClient, RedisErrorReply, RedisUnavailable

MAX_ENTRY_BYTES = 1 << 20  # a larger entry would delay the commands after it


class RedisCache:
    def __init__(self, client: RedisClient, prefix: str = "emberline", max_entry_bytes: int = MAX_ENTRY_BYTES) -> None:
        """Create a cache that sends its commands through `client`.

        The limiter must use a different client: otherwise its commands would wait behind large cache entries.
        """
        self._client, self._prefix, self._max_entry_bytes = client, prefix, max_entry_bytes
        self.failures = 0

    async def get(self, key: str) -> bytes | None:
        try:
            value: bytes | None = await self._client.run_command("GET", f"{self._prefix}:cache:{key}")
        except (RedisUnavailable, RedisErrorReply):
            self.failures += 1
            return None
        return value

    async def put(self, key: str, value: bytes, ttl_s: float) -> None:
        if len(value) > self._max_entry_bytes:
            return
        try:
            await self._client.run_command(
                "SET", f"{self._prefix}:cache:{key}", value, "PX", max(1, round(ttl_s * 1000))
            )
        except (RedisUnavailable, RedisErrorReply):
            self.failures += 1

    async def close(self) -> None:
        pass
