"""BlockBatch: what became of the blocks that a worker's caches hold, numbered, so that who follows knows what it has
missed. Plain data, the same in JSON.

Batches that change something are numbered from 1 on, without gaps, in each incarnation. One that changes nothing says
which was the last. A snapshot comes in parts: all that was held after the batch of its number.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class BlockBatch:
    incarnation: str  # of who counts: another one has other blocks, and counts anew
    seq: int
    stored: list[tuple[bytes, bytes]] = field(default_factory=list)  # hash, and its parent's: tokens/blockhash.py
    removed: list[bytes] = field(default_factory=list)
    part: int = 0
    parts: int = 0  # above 0: of a snapshot

    @property
    def changes(self) -> bool:
        return bool(self.stored or self.removed)
