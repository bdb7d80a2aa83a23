"""CacheStore: the interface of stores for cache entries. A failing store acts as an empty one."""

from __future__ import annotations

from typing import Protocol

MAX_ENTRY_BYTES = 25 << 20


class CacheStore(Protocol):
    failures: int

    async def get(self, key: str) -> bytes | None: ...

    async def put(self, key: str, value: bytes, ttl_s: float) -> None:
        """Store an entry for so many seconds. An entry that is too large is not stored."""
        ...

    async def close(self) -> None: ...
