"""KVFeed: the KV blocks that one worker holds, according to its block event batches.

It is exact only if no batch is missing."""

from __future__ import annotations

from collections import deque

from emberline.core.blockbatch import BlockBatch

PAST = 16


class KVFeed:
    def __init__(self) -> None:
        self.incarnation = ""
        self.seq = 0  # number of the last batch applied
        self.held: dict[bytes, bytes] = {}  # block hash to the hash of its parent block
        self._heard = 0  # highest batch number received
        self.whole = False  # `held_blocks` is complete as of `seq`
        self._parts = 0  # parts of the current snapshot that were applied
        self._cut = False
        self._past: deque[str] = deque(maxlen=PAST)

    @property
    def exact(self) -> bool:
        return self.whole and self.seq == self._heard and not self._cut

    def cut(self) -> None:
        self._cut = True

    def take(self, batch: BlockBatch) -> None:
        if batch.incarnation in self._past:
            return
        if batch.incarnation != self.incarnation:
            self._begin(batch.incarnation)
        self._cut = False
        self._heard = max(self._heard, batch.seq)
        if batch.parts:
            self._load(batch)
        elif self.whole and batch.changes and batch.seq == self.seq + 1:
            self.seq = batch.seq
            self.held.update(batch.stored)
            for digest in batch.removed:
                self.held.pop(digest, None)

    def _begin(self, incarnation: str) -> None:
        if self.incarnation:
            self._past.append(self.incarnation)
        self.incarnation = incarnation
        self.seq = self._heard = self._parts = 0
        self.whole = False
        self.held = {}

    def _load(self, batch: BlockBatch) -> None:
        if self.whole and batch.seq <= self.seq:
            return  # the snapshot is older than the state
        if batch.part == 0:
            self.held, self.seq, self._parts, self.whole = {}, batch.seq, 0, False
        if batch.seq == self.seq and batch.part == self._parts and not self.whole:
            self.held.update(batch.stored)
            self._parts += 1
            self.whole = self._parts == batch.parts
