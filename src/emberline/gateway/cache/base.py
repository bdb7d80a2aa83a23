"""CacheStore: the interface that every cache backend implements.

A backend that fails behaves like an empty cache and raises no error.
"""

from __future__ import annotations

from typing import Protocol

MAX_ENTRY_BYTES = 25 << 20


class CacheStore(Protocol):
    failures: int

    async def get(self, key: str) -> bytes | None: ...

    async def put(self, key: str, value: bytes, ttl_s: float) -> None:
        """Store `value` under `key` for `ttl_s` seconds. A value that exceeds the size limit is not stored."""
        ...

    async def close(self) -> None: ...
