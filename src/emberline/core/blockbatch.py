"""BlockBatch: one numbered change to the set of KV blocks that a worker has cached.

It is plain data, and its JSON has the same fields. Batches with changes are numbered 1, 2, 3, ... during one run of
a worker process (its incarnation), so a subscriber notices if it missed a batch. A batch without changes repeats the
latest number. A snapshot lists all blocks that were cached right after the batch with the snapshot's number. A large
snapshot is sent as several BlockBatch objects."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class BlockBatch:
    incarnation: str  # id of the engine process; a new process has other blocks and starts counting again
    seq: int
    # Block hash, hash of the block before it (tokens/blockhash.py). If the worker has the block, but not the recurrent
    # states after it, the second hash is marked (`mark_without_states`). A block is listed again if that changes.
    stored: list[tuple[bytes, bytes]] = field(default_factory=list)
    removed: list[bytes] = field(default_factory=list)
    part: int = 0
    parts: int = 0  # parts of the snapshot; 0: this batch is not part of one

    @property
    def has_changes(self) -> bool:
        return bool(self.stored or self.removed)
