"""SharedStore: a simulated KV tier that records block hashes, with LRU eviction, but no content."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from emberline.core.events import TierStats


class SharedStore:
    name = "store"

    def __init__(self, blocks: int) -> None:
        self._most = blocks
        self._held: OrderedDict[bytes, None] = OrderedDict()
        self._stats = TierStats(capacity=blocks)

    def lookup(self, hashes: Sequence[bytes]) -> int:
        for count, digest in enumerate(hashes):
            if digest not in self._held:
                return count
        return len(hashes)

    def guess(self, hashes: Sequence[bytes]) -> int:
        return self.lookup(hashes)

    def load(self, hashes: Sequence[bytes], into: Sequence[memoryview]) -> int:
        count = self.lookup(hashes)
        for digest in hashes[:count]:
            self._held.move_to_end(digest)
        self._stats.loaded_blocks += count
        return count

    def store(self, hashes: Sequence[bytes], buffers: Sequence[memoryview]) -> int:
        for digest in hashes:
            self._held[digest] = None
        self._stats.stored_blocks += len(hashes)
        while len(self._held) > self._most:
            self._held.popitem(last=False)
            self._stats.evicted_blocks += 1
        return len(hashes)

    def forget(self, hashes: Sequence[bytes]) -> None:
        for digest in hashes:
            self._held.pop(digest, None)

    def refresh(self) -> None:
        pass

    def stats(self) -> TierStats:
        stats = self._stats.copy()
        stats.blocks = len(self._held)
        return stats

    def close(self) -> None:
        pass
