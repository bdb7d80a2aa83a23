"""BlockBatch: a numbered change to the set of KV blocks in a worker's caches.

Plain data, the same in JSON.

Batches with changes are numbered from 1 without gaps within each incarnation, so a subscriber can detect that it missed
one. A batch without changes repeats the number of the latest batch. A snapshot is sent in parts and lists all blocks
that were cached after the batch of its number.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class BlockBatch:
    incarnation: str  # id of the engine process; a new process has other blocks and starts counting again
    seq: int
    # Block hash, hash of the block before it: tokens/blockhash.py.
    stored: list[tuple[bytes, bytes]] = field(default_factory=list)
    removed: list[bytes] = field(default_factory=list)
    part: int = 0
    parts: int = 0  # parts of the snapshot; 0: this batch is not part of one

    @property
    def has_changes(self) -> bool:
        return bool(self.stored or self.removed)
