"""Limits over restarts: usage is restored from the store after a stop and after a kill, with SQLite and PostgreSQL."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from emberline.core.clock import ManualClock
from emberline.gateway.core.errors import LimitExceeded, StoreBusy
from emberline.gateway.limits.journal import GROWTH_BYTES, CounterJournal
from emberline.gateway.limits.rule import Claim, LimitRule
from emberline.gateway.limits.stored import StoredLimiter
from emberline.gateway.store.base import GatewayStore, LimitCounter
from emberline.gateway.store.factory import open_store

NOW = 1_800_000_000.0
DAILY = LimitRule(name="daily", limit=100, amount="requests", per="day")
MONEY = LimitRule(name="money", limit=1000, amount="micros", per="month", split=("user",))
MINUTE = LimitRule(name="minute", limit=100, amount="requests", per="minute")
NEVER_S = 1e6  # between writes to the store: only the journal has the usage


def claim(rule: LimitRule, amount: int = 1, user: str = "ann") -> Claim:
    return rule.make_claim({"gateway": "default/default", "user": user}, amount)


@dataclass(frozen=True)
class StorageLocation:
    """Where a gateway stores its counters."""

    store: str
    journals: Path


@pytest.fixture
def location(store_url: str, tmp_path: Path) -> StorageLocation:
    return StorageLocation(store_url, tmp_path / "store")


class GatewayProcess:
    """One run of a gateway process. A kill flushes nothing; the file lock of a dead process is released."""

    def __init__(self, location: StorageLocation, wall: ManualClock, interval: float = NEVER_S) -> None:
        self.location, self.wall, self.interval = location, wall, interval

    async def __aenter__(self) -> GatewayProcess:
        self.store: GatewayStore = await open_store(self.location.store)
        self.journal = CounterJournal(self.location.journals)
        self.limiter = StoredLimiter(self.store, self.journal, self.wall, self.interval)
        await self.limiter.start()
        return self

    async def kill(self) -> None:
        assert self.limiter._task is not None
        self.limiter._task.cancel()
        self.journal.close()
        await self.store.close()

    async def stop(self) -> None:
        await self.limiter.close()
        await self.store.close()

    async def __aexit__(self, *_: object) -> None:
        pass

    async def used(self, *claims: Claim) -> list[int]:
        return [each.used for each in await self.limiter.read_bucket_usage(claims, self.wall.now())]

    async def use(self, one: Claim, actual: int) -> None:
        reservation = await self.limiter.reserve([one], self.wall.now(), 60.0)
        self.limiter.settle(reservation, {one.rule.amount: actual})


@pytest.mark.parametrize("end", ["stop", "kill"])
def test_usage_is_restored_after_restart(end: str, location: StorageLocation) -> None:
    async def run() -> None:
        wall = ManualClock(NOW)
        async with GatewayProcess(location, wall) as one:
            for _ in range(7):
                await one.use(claim(DAILY), 1)
            await one.use(claim(MONEY, 500), 123)
            await one.use(claim(MONEY, 500, "bob"), 45)
            await getattr(one, end)()
        async with GatewayProcess(location, wall) as two:
            assert await two.used(claim(DAILY), claim(MONEY), claim(MONEY, user="bob")) == [7, 123, 45]
            for _ in range(93):
                await two.use(claim(DAILY), 1)
            with pytest.raises(LimitExceeded):
                await two.use(claim(DAILY), 1)
            await getattr(two, end)()
        async with GatewayProcess(location, wall) as three:
            assert await three.used(claim(DAILY)) == [100]
            await three.stop()
        assert not list(location.journals.glob("*.journal"))

    asyncio.run(run())


def test_reservations_stay_counted_after_a_kill(location: StorageLocation) -> None:
    async def run() -> None:
        wall = ManualClock(NOW)
        async with GatewayProcess(location, wall) as one:
            await one.limiter.reserve([claim(MONEY, 300)], NOW, 60.0)
            await one.kill()
        async with GatewayProcess(location, wall) as two:
            assert await two.used(claim(MONEY)) == [300]
            await two.stop()

    asyncio.run(run())


def test_ended_and_short_windows_are_not_restored(location: StorageLocation) -> None:
    async def run() -> None:
        wall = ManualClock(NOW)
        async with GatewayProcess(location, wall) as one:
            await one.use(claim(DAILY), 1)
            await one.use(claim(MINUTE), 1)
            await one.stop()
        async with GatewayProcess(location, wall) as two:
            assert await two.used(claim(DAILY), claim(MINUTE)) == [1, 0]
            wall.advance(86_400)
            await two.use(claim(MONEY), 1)
            await two.stop()
        async with GatewayProcess(location, wall) as three:
            assert await three.used(claim(DAILY), claim(MONEY)) == [0, 1]
            assert [each.bucket.split(":")[0] for each in await three.store.list_counters(0)] == ["money"]
            await three.stop()

    asyncio.run(run())


class LostReplyStore:
    """A store that applies a batch and then fails before it confirms it."""

    def __init__(self, store: GatewayStore) -> None:
        self.store, self.failing = store, True

    async def list_counters(self, now: int) -> list[LimitCounter]:
        return list(await self.store.list_counters(now))

    async def add_counters(self, batch_name: str, changes: Sequence[LimitCounter], now: int) -> None:
        await self.store.add_counters(batch_name, changes, now)
        if self.failing:
            raise StoreBusy("the connection broke")


def test_batch_with_lost_reply_counts_once(location: StorageLocation) -> None:
    async def run() -> None:
        wall = ManualClock(NOW)
        async with GatewayProcess(location, wall) as one:
            lost_reply_store = LostReplyStore(one.store)
            one.limiter._store = lost_reply_store
            await one.use(claim(DAILY), 1)
            with pytest.raises(StoreBusy):
                await one.limiter._write_changes()
            await one.use(claim(DAILY), 1)
            with pytest.raises(StoreBusy):
                await one.limiter._write_changes()
            await one.kill()
        async with GatewayProcess(location, wall) as two:
            assert await two.used(claim(DAILY)) == [2]
            await two.stop()

    asyncio.run(run())


def test_live_journals_are_kept_and_damaged_lines_skipped(location: StorageLocation) -> None:
    async def run() -> None:
        wall = ManualClock(NOW)
        async with GatewayProcess(location, wall) as one, GatewayProcess(location, wall) as other:
            await one.use(claim(DAILY), 1)
            assert not list(other.journal.read_abandoned_batches())
            one.journal.append_line(b'["default/default","daily",1,\0\0,3]\n')  # a page was not written
            one.journal.append_line(b'["default/default","daily')
            await one.kill()
            assert [[each.used for each in changes] for _, changes in other.journal.read_abandoned_batches()] == [[1]]
            await other.stop()

    asyncio.run(run())


def test_usage_is_written_to_the_store_periodically(location: StorageLocation) -> None:
    async def run() -> None:
        async with GatewayProcess(location, ManualClock(NOW), interval=0.01) as one:
            await one.use(claim(DAILY), 1)
            async with asyncio.timeout(30):
                while not await one.store.list_counters(0):
                    await asyncio.sleep(0.01)
            await one.stop()

    asyncio.run(run())


def test_journal_file_grows_and_ends_with_zeros(tmp_path: Path) -> None:
    journal = CounterJournal(tmp_path)
    line = b'["default/default","daily",1,2,3]\n'
    count = 2 * GROWTH_BYTES // len(line) + 1
    for _ in range(count):
        journal.append_line(line)
    name = journal.close()
    journal.append_line(line)  # a call that ends late: the write neither fails nor is stored
    size = (tmp_path / f"{name}.journal").stat().st_size
    assert size == 3 * GROWTH_BYTES
    [(found, changes)] = CounterJournal(tmp_path).read_abandoned_batches()
    assert (
        found == name and len(changes) == count and set(changes) == {LimitCounter("default/default", "daily", 1, 2, 3)}
    )


def test_limits_work_while_the_disk_is_full(location: StorageLocation, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    async def run() -> None:
        async with GatewayProcess(location, ManualClock(NOW)) as one:
            await one.use(claim(DAILY), 1)
            with monkeypatch.context() as patched:
                patched.setattr("emberline.gateway.limits.journal.os.pwrite", full)
                with pytest.raises(OSError, match="No space"):
                    await one.limiter._write_changes()
                for _ in range(50):
                    await one.use(claim(DAILY), 1)
            assert await one.used(claim(DAILY)) == [51]
            await one.stop()
        async with GatewayProcess(location, ManualClock(NOW)) as two:
            assert await two.used(claim(DAILY)) == [51]
            await two.stop()
        assert not list(location.journals.glob("*.journal"))

    asyncio.run(run())
