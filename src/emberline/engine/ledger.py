"""Ledger: what the caches of one engine process hold, kept beside it for whoever wants to follow that: the last batches
of changes, numbered, and a snapshot for those who have missed more."""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections import deque
from collections.abc import Iterable, Sequence
from itertools import chain

from emberline.core.blockbatch import BlockBatch

PIECE = 4096  # blocks in a part of a snapshot
KEPT = 1 << 16  # changes in the batches that are kept


class Ledger:
    def __init__(self, models: Iterable[str]) -> None:
        self._models = tuple(models)
        self._closed = False
        self._news = asyncio.Event()
        self.restart()

    def restart(self) -> None:
        """A new process, whose caches have told nothing yet."""
        self.incarnation = uuid.uuid4().hex
        self.seq = 0
        self._held: dict[str, dict[bytes, bytes]] = {}  # by model, hashes and their parents'
        self._kept: deque[BlockBatch] = deque()
        self._size = 0  # changes in these
        self._tell()

    @property
    def complete(self) -> bool:
        return len(self._held) == len(self._models)

    @property
    def closed(self) -> bool:
        return self._closed

    def close(self) -> None:
        """Who follows is to leave."""
        self._closed = True
        self._tell()

    def take(self, model: str, whole: bool, stored: Sequence[tuple[bytes, bytes]], removed: Sequence[bytes]) -> None:
        """From the engine, in order. `whole`: there is nothing else, whatever was before."""
        counts, held = self.complete, self._held.setdefault(model, {})
        if whole:
            now = dict(stored)
            stored = [pair for pair in stored if pair[0] not in held]
            removed = [digest for digest in held if digest not in now]
        others = [each for name, each in self._held.items() if name != model]  # one cache may hold what another does
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
        """For one who has come so far: what follows, or if that is not known any more, everything."""
        if not self.complete or (incarnation, seq) == (self.incarnation, self.seq):
            return []
        if incarnation == self.incarnation and self._kept and self._kept[0].seq <= seq + 1 <= self.seq:
            return [self._kept[at] for at in range(seq + 1 - self._kept[0].seq, len(self._kept))]
        return self._snapshot()

    def sign(self) -> BlockBatch:
        """That there is nothing new."""
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
