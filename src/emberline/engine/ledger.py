"""BlockEventLog: the recent changes to the KV caches of one engine process, for subscribers.

It keeps the latest numbered batches, and a snapshot for subscribers that have missed more."""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections import deque
from collections.abc import Iterable, Sequence
from itertools import chain

from emberline.core.blockbatch import BlockBatch

PIECE = 4096
KEPT = 1 << 16  # changes in all batches that are kept


class Ledger:
    def __init__(self, models: Iterable[str]) -> None:
        self._models = tuple(models)
        self._closed = False
        self._news = asyncio.Event()
        self.restart()

    def restart(self) -> None:
        """Start again with an empty log, for a new engine process."""
        self.incarnation = uuid.uuid4().hex
        self.seq = 0
        self._held: dict[str, dict[bytes, bytes]] = {}  # by model: block hash, hash of the block before it
        self._kept: deque[BlockBatch] = deque()
        self._size = 0  # changes in these batches
        self._tell()

    @property
    def complete(self) -> bool:
        """Whether every model has reported its blocks at least once."""
        return len(self._held) == len(self._models)

    @property
    def closed(self) -> bool:
        return self._closed

    def close(self) -> None:
        """Mark the log as closed, so that subscribers disconnect."""
        self._closed = True
        self._tell()

    def take(self, model: str, whole: bool, stored: Sequence[tuple[bytes, bytes]], removed: Sequence[bytes]) -> None:
        """Record changes in the order in which the engine reports them.

        `is_snapshot`: `stored` lists all blocks of the model, and replaces the earlier ones."""
        counts, held = self.complete, self._held.setdefault(model, {})
        if whole:
            now = dict(stored)
            stored = [pair for pair in stored if pair[0] not in held]
            removed = [digest for digest in held if digest not in now]
        others = [each for name, each in self._held.items() if name != model]  # two models may cache the same block
        new = [pair for pair in stored if not any(pair[0] in other for other in others)]
        gone = [digest for digest in removed if not any(digest in other for other in others)]
        held.update(stored)
        for digest in removed:
            held.pop(digest, None)
        if counts and (new or gone):
            self.seq += 1
            self._keep(BlockBatch(self.incarnation, self.seq, new, gone))
        self._tell()

    def after(self, incarnation: str, seq: int) -> list[BlockBatch]:
        """Return the batches after this one, or a snapshot if some of them are no longer kept."""
        if not self.complete or (incarnation, seq) == (self.incarnation, self.seq):
            return []
        if incarnation == self.incarnation and self._kept and self._kept[0].seq <= seq + 1 <= self.seq:
            return [self._kept[at] for at in range(seq + 1 - self._kept[0].seq, len(self._kept))]
        return self._snapshot()

    def sign(self) -> BlockBatch:
        """Return an empty batch, which shows subscribers that the log is alive and what the latest number is."""
        return BlockBatch(self.incarnation, self.seq)

    async def news(self, patience: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(patience):
                await self._news.wait()

    def _tell(self) -> None:
        self._news.set()
        self._news = asyncio.Event()

    def _keep(self, batch: BlockBatch) -> None:
        self._kept.append(batch)
        self._size += len(batch.stored) + len(batch.removed)
        while self._size > KEPT:
            old = self._kept.popleft()
            self._size -= len(old.stored) + len(old.removed)

    def _snapshot(self) -> list[BlockBatch]:
        pairs = list(dict(chain.from_iterable(held.items() for held in self._held.values())).items())
        parts = max(1, -(-len(pairs) // PIECE))
        return [
            BlockBatch(self.incarnation, self.seq, pairs[part * PIECE : (part + 1) * PIECE], [], part, parts)
            for part in range(parts)
        ]
