"""BlockEventLog: recent changes to the KV caches of one engine process, for subscribers such as routers.

The log keeps the latest numbered batches of changes. A subscriber that missed older batches gets a snapshot."""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections import deque
from collections.abc import Iterable, Sequence
from itertools import chain

from emberline.core.blockbatch import BlockBatch

SNAPSHOT_PART_BLOCKS = 4096
MAX_LOGGED_CHANGES = 1 << 16  # changes in all batches that are kept


class BlockEventLog:
    def __init__(self, models: Iterable[str]) -> None:
        self._models = tuple(models)
        self._is_closed = False
        self._changed = asyncio.Event()
        self.restart()

    def restart(self) -> None:
        """Empty the log and begin a new incarnation, because a new engine process was started."""
        self.incarnation = uuid.uuid4().hex
        self.seq = 0
        self._blocks_by_model: dict[str, dict[bytes, bytes]] = {}  # by model: block hash, hash of the block before it
        self._batches: deque[BlockBatch] = deque()
        self._num_logged = 0  # changes in these batches
        self._wake_subscribers()

    @property
    def is_complete(self) -> bool:
        """Whether every model has reported its cached blocks since the engine process started."""
        return len(self._blocks_by_model) == len(self._models)

    @property
    def is_closed(self) -> bool:
        return self._is_closed

    def close(self) -> None:
        """Mark the log as closed, so that subscribers disconnect."""
        self._is_closed = True
        self._wake_subscribers()

    def record(
        self, model: str, is_snapshot: bool, stored: Sequence[tuple[bytes, bytes]], removed: Sequence[bytes]
    ) -> None:
        """Record changes of a model's cached blocks, in the order in which the engine reports them.

        `stored`: pairs of a new block's hash and the hash of the block before it. `removed`: hashes of evicted blocks.
        `is_snapshot`: `stored` lists all cached blocks of the model, and replaces earlier reports."""
        counts, blocks = self.is_complete, self._blocks_by_model.setdefault(model, {})
        if is_snapshot:
            current = dict(stored)
            stored = [(digest, parent) for digest, parent in stored if blocks.get(digest) != parent]
            removed = [digest for digest in blocks if digest not in current]
        # Two models may cache the same block.
        others = [each for name, each in self._blocks_by_model.items() if name != model]
        new = [pair for pair in stored if not any(pair[0] in other for other in others)]
        deleted = [digest for digest in removed if not any(digest in other for other in others)]
        blocks.update(stored)
        for digest in removed:
            blocks.pop(digest, None)
        if counts and (new or deleted):
            self.seq += 1
            self._append_batch(BlockBatch(self.incarnation, self.seq, new, deleted))
        self._wake_subscribers()

    def batches_after(self, incarnation: str, seq: int) -> list[BlockBatch]:
        """Return the batches of changes that follow batch number `seq`, which the subscriber read last.

        Return a snapshot if some of these batches are no longer kept, or if the engine process was restarted since, so
        that its incarnation has changed."""
        if not self.is_complete or (incarnation, seq) == (self.incarnation, self.seq):
            return []
        if incarnation == self.incarnation and self._batches and self._batches[0].seq <= seq + 1 <= self.seq:
            return [self._batches[at] for at in range(seq + 1 - self._batches[0].seq, len(self._batches))]
        return self._snapshot_batches()

    def make_heartbeat(self) -> BlockBatch:
        """Return a batch without changes, which shows subscribers the latest number and that the log is alive."""
        return BlockBatch(self.incarnation, self.seq)

    async def wait_for_change(self, timeout: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                await self._changed.wait()

    def _wake_subscribers(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    def _append_batch(self, batch: BlockBatch) -> None:
        self._batches.append(batch)
        self._num_logged += len(batch.stored) + len(batch.removed)
        while self._num_logged > MAX_LOGGED_CHANGES:
            old = self._batches.popleft()
            self._num_logged -= len(old.stored) + len(old.removed)

    def _snapshot_batches(self) -> list[BlockBatch]:
        pairs = list(dict(chain.from_iterable(blocks.items() for blocks in self._blocks_by_model.values())).items())
        parts = max(1, -(-len(pairs) // SNAPSHOT_PART_BLOCKS))
        return [
            BlockBatch(
                self.incarnation,
                self.seq,
                pairs[part * SNAPSHOT_PART_BLOCKS : (part + 1) * SNAPSHOT_PART_BLOCKS],
                [],
                part,
                parts,
            )
            for part in range(parts)
        ]
