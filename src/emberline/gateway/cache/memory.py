"""MemoryCache: cache entries in this process, limited in bytes; the least recently used are evicted first."""

from __future__ import annotations

from collections import OrderedDict

from emberline.core.clock import Clock
from emberline.gateway.cache.base import LARGEST

OVERHEAD = 200  # approximate


class MemoryCache:
    def __init__(self, clock: Clock, most: int = 64 << 20, largest: int = LARGEST) -> None:
        """`max_bytes` limits all entries together, `max_entry_bytes` each one."""
        self._clock, self._most, self._largest = clock, most, min(most, largest)
        self._entries: OrderedDict[str, tuple[float, bytes]] = OrderedDict()  # key -> expiry, entry
        self.size = self.failures = 0

    async def get(self, key: str) -> bytes | None:
        found = self._entries.get(key)
        if found is None:
            return None
        if found[0] <= self._clock.now():
            self._drop(key)
            return None
        self._entries.move_to_end(key)
        return found[1]

    async def put(self, key: str, value: bytes, seconds: float) -> None:
        if key in self._entries:
            self._drop(key)
        if len(value) + OVERHEAD > self._largest:
            return
        self._entries[key] = (self._clock.now() + seconds, value)
        self.size += len(value) + OVERHEAD
        while self.size > self._most:
            self._drop(next(iter(self._entries)))

    async def close(self) -> None:
        self._entries.clear()
        self.size = 0

    def _drop(self, key: str) -> None:
        self.size -= len(self._entries.pop(key)[1]) + OVERHEAD
