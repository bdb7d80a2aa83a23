"""WorkerKVBlocks: the KV blocks that one worker holds, according to the batches of KV events that it has sent.

The set of blocks is exact only if no batch is missing."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from emberline.core.blockbatch import BlockBatch
from emberline.router.prefix_block_map import BlockPosition
from emberline.tokens.blockhash import read_listed_parent

MAX_ENDED_INCARNATIONS = 16


class WorkerKVBlocks:
    def __init__(self) -> None:
        self.incarnation = ""
        self.seq = 0  # number of the last batch applied
        self.held_blocks: dict[bytes, bytes] = {}  # block hash to the hash of its parent block
        self._without_states: set[bytes] = set()  # of these, the blocks after which no request can start
        self._highest_seq = 0  # highest batch number received
        self.is_complete = False  # `held_blocks` is complete as of `seq`
        self._snapshot_parts = 0  # parts of the current snapshot that were applied
        self._is_disconnected = False
        self._ended_incarnations: deque[str] = deque(maxlen=MAX_ENDED_INCARNATIONS)

    @property
    def is_exact(self) -> bool:
        return self.is_complete and self.seq == self._highest_seq and not self._is_disconnected

    def count_usable_blocks(self, last_block: BlockPosition) -> int:
        """Return how many blocks of a prefix that ends with `last_block` a request can skip on this worker."""
        digest = last_block.digest
        for count in range(last_block.block_count, 0, -1):
            if digest not in self.held_blocks:
                return 0
            if digest not in self._without_states:
                return count
            digest = self.held_blocks[digest]
        return 0

    def mark_disconnected(self) -> None:
        self._is_disconnected = True

    def apply_batch(self, batch: BlockBatch) -> None:
        if batch.incarnation in self._ended_incarnations:
            return
        if batch.incarnation != self.incarnation:
            self._start_incarnation(batch.incarnation)
        self._is_disconnected = False
        self._highest_seq = max(self._highest_seq, batch.seq)
        if batch.parts:
            self._apply_snapshot_part(batch)
        elif self.is_complete and batch.has_changes and batch.seq == self.seq + 1:
            self.seq = batch.seq
            self._add_blocks(batch.stored)
            for digest in batch.removed:
                self.held_blocks.pop(digest, None)
                self._without_states.discard(digest)

    def _start_incarnation(self, incarnation: str) -> None:
        if self.incarnation:
            self._ended_incarnations.append(self.incarnation)
        self.incarnation = incarnation
        self.seq = self._highest_seq = self._snapshot_parts = 0
        self.is_complete = False
        self.held_blocks, self._without_states = {}, set()

    def _add_blocks(self, stored: Iterable[tuple[bytes, bytes]]) -> None:
        for digest, listed_parent in stored:
            self.held_blocks[digest], lacks_states = read_listed_parent(digest, listed_parent)
            if lacks_states:
                self._without_states.add(digest)
            else:
                self._without_states.discard(digest)

    def _apply_snapshot_part(self, batch: BlockBatch) -> None:
        if self.is_complete and batch.seq <= self.seq:
            return  # the snapshot is older than the state
        if batch.part == 0:
            self.held_blocks, self.seq, self._snapshot_parts, self.is_complete = {}, batch.seq, 0, False
            self._without_states = set()
        if batch.seq == self.seq and batch.part == self._snapshot_parts and not self.is_complete:
            self._add_blocks(batch.stored)
            self._snapshot_parts += 1
            self.is_complete = self._snapshot_parts == batch.parts
