"""CacheStore: where entries are. A store that fails has nothing and keeps nothing: it is never a call's trouble."""

from __future__ import annotations

from typing import Protocol

LARGEST = 25 << 20  # bytes of an entry


class CacheStore(Protocol):
    failures: int

    async def get(self, key: str) -> bytes | None: ...

    async def put(self, key: str, value: bytes, seconds: float) -> None:
        """For so long, if there is room. What does not fit is not kept."""
        ...

    async def close(self) -> None: ...
