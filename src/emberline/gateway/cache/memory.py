"""MemoryCache: cache entries in this process's memory. The least recently used entry is evicted first."""

from __future__ import annotations

from collections import OrderedDict

from emberline.core.clock import Clock
from emberline.gateway.cache.base import MAX_ENTRY_BYTES

ENTRY_OVERHEAD_BYTES = 200  # approximate


class MemoryCache:
    def __init__(self, clock: Clock, max_bytes: int = 64 << 20, max_entry_bytes: int = MAX_ENTRY_BYTES) -> None:
        """Create an empty cache of at most `max_bytes`. An entry above `max_entry_bytes` is not stored."""
        self._clock, self._max_bytes, self._max_entry_bytes = clock, max_bytes, min(max_bytes, max_entry_bytes)
        self._entries: OrderedDict[str, tuple[float, bytes]] = OrderedDict()  # key -> expiry, entry
        self.size = self.failures = 0

    async def get(self, key: str) -> bytes | None:
        found = self._entries.get(key)
        if found is None:
            return None
        if found[0] <= self._clock.now():
            self._remove_entry(key)
            return None
        self._entries.move_to_end(key)
        return found[1]

    async def put(self, key: str, value: bytes, ttl_s: float) -> None:
        if key in self._entries:
            self._remove_entry(key)
        if len(value) + ENTRY_OVERHEAD_BYTES > self._max_entry_bytes:
            return
        self._entries[key] = (self._clock.now() + ttl_s, value)
        self.size += len(value) + ENTRY_OVERHEAD_BYTES
        while self.size > self._max_bytes:
            self._remove_entry(next(iter(self._entries)))

    async def close(self) -> None:
        self._entries.clear()
        self.size = 0

    def _remove_entry(self, key: str) -> None:
        self.size -= len(self._entries.pop(key)[1]) + ENTRY_OVERHEAD_BYTES
