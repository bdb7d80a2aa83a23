"""Tier: the interface of a place that keeps KV blocks, addressed by their block hash.

A block hash covers the block's tokens, all tokens before them, the memory layout of the cache, and the tenant's salt
(tokens/blockhash.py). So only a request of the same tenant with the same prefix can name a block, and a tier needs no
other access check.

A block is usable only together with all blocks before it, so lookups and loads return the number of leading blocks. A
tier does not raise for its own failures. A block that cannot be read counts as missing, and the engine computes it
again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from emberline.core.events import TierStats

PAGE_BYTES = 4096  # buffers start and end on page boundaries, for pinning and for direct disk I/O


def buffer_bytes_for(block_bytes: int) -> int:
    """Return the size of a host buffer for one block: the block's size, rounded up to whole memory pages."""
    return -(-block_bytes // PAGE_BYTES) * PAGE_BYTES


class Tier(Protocol):
    name: str

    def lookup(self, hashes: Sequence[bytes]) -> int:
        """Return how many leading blocks of the hash chain the tier certainly holds. Does not wait for I/O."""
        ...

    def lookup_optimistic(self, hashes: Sequence[bytes]) -> int:
        """Return how many leading blocks of the hash chain are worth trying to load. Does not wait for I/O.

        The number is larger than that of `lookup` for a tier that must ask over the network what it holds.
        """
        ...

    def load(self, hashes: Sequence[bytes], buffers: Sequence[memoryview]) -> int:
        """Copy blocks into the buffers and return how many leading blocks were copied.

        The content of the buffers after those is undefined.
        """
        ...

    def store(self, hashes: Sequence[bytes], buffers: Sequence[memoryview]) -> int:
        """Store copies of the blocks and return how many were stored. Older blocks are evicted if needed."""
        ...

    def discard(self, hashes: Sequence[bytes]) -> None: ...

    def refresh(self) -> None:
        """Update the tier's index with the changes that other processes made to shared storage."""
        ...

    def stats(self) -> TierStats: ...

    def close(self) -> None: ...
