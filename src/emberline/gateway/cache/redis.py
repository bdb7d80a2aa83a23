"""RedisCache: cache entries that all replicas share. Redis decides what is evicted (`maxmemory-policy`)."""

from __future__ import annotations

from emberline.gateway.redislink import LinkDown, RedisLink, RedisSaid

LARGEST = 1 << 20  # a larger entry would delay the commands after it


class RedisCache:
    def __init__(self, link: RedisLink, prefix: str = "emberline", largest: int = LARGEST) -> None:
        """`link` must not be shared with limits, which would wait behind large entries."""
        self._link, self._prefix, self._largest = link, prefix, largest
        self.failures = 0

    async def get(self, key: str) -> bytes | None:
        try:
            value: bytes | None = await self._link.call("GET", f"{self._prefix}:cache:{key}")
        except (LinkDown, RedisSaid):
            self.failures += 1
            return None
        return value

    async def put(self, key: str, value: bytes, seconds: float) -> None:
        if len(value) > self._largest:
            return
        try:
            await self._link.call("SET", f"{self._prefix}:cache:{key}", value, "PX", max(1, round(seconds * 1000)))
        except (LinkDown, RedisSaid):
            self.failures += 1

    async def close(self) -> None:
        pass
