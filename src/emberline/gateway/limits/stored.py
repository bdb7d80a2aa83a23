"""StoredLimiter: limits that are counted in this process and survive a restart.

The store keeps the counters of budgets and of long windows. A journal file keeps the changes since the last write to
the store.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import defaultdict
from collections.abc import Sequence
from typing import Protocol

import msgspec

from emberline.core.clock import Clock
from emberline.gateway.limits.bucket import LimitBucket
from emberline.gateway.limits.journal import CounterJournal
from emberline.gateway.limits.local import LocalLimiter
from emberline.gateway.limits.rule import Claim
from emberline.gateway.limits.window import LimitWindow
from emberline.gateway.store.base import LimitCounter

log = logging.getLogger("emberline.gateway.limits")

MIN_STORED_WINDOW_MS = 600_000  # shorter windows of requests and tokens are not stored: they end soon after a restart
CLOSE_TIMEOUT_S = 5.0

_CounterKey = tuple[str, str, int, int]  # gateway, bucket, slot, when the slot ends


class CounterStore(Protocol):
    async def list_counters(self, now: int) -> list[LimitCounter]: ...

    async def add_counters(self, batch_name: str, changes: Sequence[LimitCounter], now: int) -> None: ...


class StoredLimiter(LocalLimiter):
    def __init__(
        self, store: CounterStore, journal: CounterJournal, wall_clock: Clock, store_interval_s: float
    ) -> None:
        """Create the limiter. The counters are written to the store every `store_interval_s` seconds.

        `wall_clock` returns seconds since 1970.
        """
        super().__init__()
        self._store, self._journal, self._wall, self._store_interval_s = store, journal, wall_clock, store_interval_s
        self._restored: dict[tuple[str, str], dict[int, int]] = {}
        self._pending: defaultdict[_CounterKey, int] = defaultdict(int)  # not in the store yet
        # The batch that is being written to the store; kept until that succeeds.
        self._batch: tuple[str, list[LimitCounter]] | None = None
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Load the usage that earlier processes left in journal files and in the store.

        Raise StoreFailed if the store cannot be read or written.
        """
        for name, changes in self._journal.read_abandoned_batches():
            if changes:
                await self._store.add_counters(name, changes, self._now_ms())
            self._journal.delete_file(name)
        for each in await self._store.list_counters(self._now_ms()):
            self._restored.setdefault((each.gateway, each.bucket), {})[each.slot] = each.used
        self._task = asyncio.create_task(self._write_periodically())

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
        try:
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                await self._write_changes()
        except Exception as e:  # the journal keeps them for the next start
            log.warning(
                "Writing limit counters to the store failed, the journal keeps them: reason=%s: %s", type(e).__name__, e
            )
            self._journal.close()
        else:
            self._journal.delete_file(self._journal.close())

    def _get_bucket(self, claim: Claim) -> LimitBucket:
        key = (claim.gateway, claim.bucket)
        bucket = self._buckets.get(key)
        if bucket is None:
            bucket = self._buckets[key] = LimitBucket(claim.window)
            if _must_be_stored(claim):
                bucket.restore_usage(self._restored.pop(key, {}))
                bucket.on_change = _ChangeRecorder(key, claim.window, self._journal, self._pending).record_change
        return bucket

    async def _write_periodically(self) -> None:
        while True:
            await asyncio.sleep(self._store_interval_s)
            try:
                await self._write_changes()
            except Exception as e:  # the journal keeps the changes, and the write is retried
                log.warning(
                    "Writing limit counters to the store failed, the journal keeps them: reason=%s: %s",
                    type(e).__name__,
                    e,
                )

    async def _write_changes(self) -> None:
        if self._batch is not None:
            await self._write_batch(*self._batch)
        if self._pending:
            name = self._journal.start_new_file()
            changes = [LimitCounter(gw, bucket, slot, n, ends) for (gw, bucket, slot, ends), n in self._pending.items()]
            self._pending.clear()
            self._batch = name, changes
            await self._write_batch(*self._batch)

    async def _write_batch(self, batch_name: str, changes: list[LimitCounter]) -> None:
        await self._store.add_counters(batch_name, changes, self._now_ms())
        self._batch = None
        self._journal.delete_file(batch_name)

    def _now_ms(self) -> int:
        return round(self._wall.now() * 1000)


class _ChangeRecorder:
    """Records the changes of one bucket: each change in the journal, and their sums for the store."""

    __slots__ = ("_counter_key", "_journal", "_key", "_line_head", "_line_tail", "_pending", "_slot", "_window")

    def __init__(
        self, key: tuple[str, str], window: LimitWindow, journal: CounterJournal, pending: defaultdict[_CounterKey, int]
    ) -> None:
        self._key, self._window, self._journal, self._pending = key, window, journal, pending
        self._slot: int | None = None

    def record_change(self, slot: int, amount: int) -> None:
        if slot != self._slot:
            self._prepare_line(slot)
        self._journal.append_line(b"%b%d%b" % (self._line_head, amount, self._line_tail))
        self._pending[self._counter_key] += amount

    def _prepare_line(self, slot: int) -> None:
        """Prepare the journal line for a slot: the JSON of a LimitCounter without its amount."""
        ends = self._window.usage_end_ms(slot)
        self._slot, self._counter_key = slot, (*self._key, slot, ends)
        self._line_head, self._line_tail = b"%b,%d," % (msgspec.json.encode(self._key)[:-1], slot), b",%d]\n" % ends


def _must_be_stored(claim: Claim) -> bool:
    window = claim.window
    return (
        claim.rule.amount == "micros"
        or not window.slot_ms
        or window.slot_ms * window.live_slots >= MIN_STORED_WINDOW_MS
    )
