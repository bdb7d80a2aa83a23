"""StoredLimiter: limits counted in this process, whose usage survives a restart.

The store has the counters of long windows and of budgets; a journal has the changes since the last write to it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import defaultdict
from collections.abc import Sequence
from typing import Protocol

import msgspec

from emberline.core.clock import Clock
from emberline.gateway.limits.bucket import Bucket
from emberline.gateway.limits.journal import CounterJournal
from emberline.gateway.limits.local import LocalLimiter
from emberline.gateway.limits.rule import Claim
from emberline.gateway.limits.window import Window
from emberline.gateway.store.base import Counter

log = logging.getLogger("emberline.gateway.limits")

MIN_STORED_WINDOW_MS = 600_000  # shorter windows of requests and tokens are not stored: they end soon after a restart
CLOSE_TIMEOUT_S = 5.0

_Place = tuple[str, str, int, int]  # gateway, bucket, slot, when the slot ends


class CounterStore(Protocol):
    async def counters(self, now: int) -> list[Counter]: ...

    async def count(self, batch: str, changes: Sequence[Counter], now: int) -> None: ...


class StoredLimiter(LocalLimiter):
    def __init__(self, store: CounterStore, journal: CounterJournal, wall: Clock, interval: float) -> None:
        """`store_interval_s` is the time between two writes; `wall` is in seconds since the epoch."""
        super().__init__()
        self._store, self._journal, self._wall, self._interval = store, journal, wall, interval
        self._restored: dict[tuple[str, str], dict[int, int]] = {}
        self._pending: defaultdict[_Place, int] = defaultdict(int)  # not in the store yet
        self._batch: tuple[str, list[Counter]] | None = None  # being written to the store; kept until that succeeds
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Load the usage that earlier processes left in journals and in the store. Raises StoreFailed."""
        for name, changes in self._journal.abandoned():
            if changes:
                await self._store.count(name, changes, self._now())
            self._journal.discard(name)
        for each in await self._store.counters(self._now()):
            self._restored.setdefault((each.gateway, each.bucket), {})[each.slot] = each.used
        self._task = asyncio.create_task(self._run())

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
        try:
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                await self._write()
        except Exception as e:  # the journal keeps them for the next start
            log.warning(
                "limit counters not written to the store, journal keeps them: reason=%s: %s", type(e).__name__, e
            )
            self._journal.close()
        else:
            self._journal.discard(self._journal.close())

    def _bucket(self, claim: Claim) -> Bucket:
        key = (claim.gateway, claim.bucket)
        bucket = self._buckets.get(key)
        if bucket is None:
            bucket = self._buckets[key] = Bucket(claim.window)
            if _is_stored(claim):
                bucket.restore(self._restored.pop(key, {}))
                bucket.changed = _Changes(key, claim.window, self._journal, self._pending).add
        return bucket

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(self._interval)
            try:
                await self._write()
            except Exception as e:  # the journal keeps the changes, and the write is retried
                log.warning(
                    "limit counters not written to the store, journal keeps them: reason=%s: %s", type(e).__name__, e
                )

    async def _write(self) -> None:
        if self._batch is not None:
            await self._apply(*self._batch)
        if self._pending:
            name = self._journal.rotate()
            changes = [Counter(gw, bucket, slot, n, ends) for (gw, bucket, slot, ends), n in self._pending.items()]
            self._pending.clear()
            self._batch = name, changes
            await self._apply(*self._batch)

    async def _apply(self, name: str, changes: list[Counter]) -> None:
        await self._store.count(name, changes, self._now())
        self._batch = None
        self._journal.discard(name)

    def _now(self) -> int:
        return round(self._wall.now() * 1000)


class _Changes:
    """Records changes of one bucket: writes them to the journal and sums them up for the store."""

    __slots__ = ("_head", "_journal", "_key", "_pending", "_place", "_slot", "_tail", "_window")

    def __init__(
        self, key: tuple[str, str], window: Window, journal: CounterJournal, pending: defaultdict[_Place, int]
    ) -> None:
        self._key, self._window, self._journal, self._pending = key, window, journal, pending
        self._slot: int | None = None

    def add(self, slot: int, amount: int) -> None:
        if slot != self._slot:
            self._begin(slot)
        self._journal.write(b"%b%d%b" % (self._head, amount, self._tail))
        self._pending[self._place] += amount

    def _begin(self, slot: int) -> None:
        """Prepare the line of a slot, a Counter as JSON, except for its amount."""
        ends = self._window.ends(slot)
        self._slot, self._place = slot, (*self._key, slot, ends)
        self._head, self._tail = b"%b,%d," % (msgspec.json.encode(self._key)[:-1], slot), b",%d]\n" % ends


def _is_stored(claim: Claim) -> bool:
    window = claim.window
    return claim.rule.amount == "micros" or not window.length or window.length * window.live >= MIN_STORED_WINDOW_MS
