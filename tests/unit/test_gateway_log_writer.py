"""LogWriter: batches, counted drops, and recovery after store failures."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from unittest.mock import AsyncMock

import pytest
from gateway_records import NOON, make_record

from emberline.gateway.core.errors import StoreBusy, StoreFailed
from emberline.gateway.core.log_record import LogPayload, LogRecord
from emberline.gateway.logs import log_writer
from emberline.gateway.logs.log_writer import LogWriter


class ScriptedStore:
    """Fails on request; a record of the model `poison` cannot be written."""

    def __init__(self) -> None:
        self.batches: list[list[tuple[LogRecord, LogPayload | None]]] = []
        self.is_down = False
        self.says: Exception = StoreFailed("down")  # of calls to version()
        self.asked = asyncio.Event()
        self.meanwhile: Callable[[], None] = lambda: None  # called while the first batch is written

    async def append_records(self, batch: Sequence[tuple[LogRecord, LogPayload | None]]) -> None:
        self.asked.set()
        if not self.batches:
            self.meanwhile()
        if self.is_down:
            raise StoreFailed("down")
        if any(record.model == "poison" for record, _ in batch):
            raise UnicodeError("cannot be encoded")
        self.batches.append(list(batch))

    async def version(self) -> int:
        if self.is_down:
            raise self.says
        return 0

    @property
    def records(self) -> list[LogRecord]:
        return [record for batch in self.batches for record, _ in batch]


def test_records_are_written_in_batches() -> None:
    async def do() -> None:
        store = ScriptedStore()
        records = [make_record(NOON + i) for i in range(2500)]
        async with LogWriter(store, flush_delay_s=0.01) as writer:  # type: ignore[arg-type]
            for each in records:
                writer.put(each)
        assert store.records == records
        assert [len(batch) for batch in store.batches] == [1000, 1000, 500]
        assert (writer.written_count, writer.dropped_count, writer.queue_length) == (2500, 0, 0)

    asyncio.run(do())


def test_records_during_a_write_form_the_next_batch() -> None:
    async def do() -> None:
        store = ScriptedStore()
        records = [make_record(NOON + i) for i in range(3)]
        async with LogWriter(store, flush_delay_s=0.05) as writer:  # type: ignore[arg-type]
            store.meanwhile = lambda: writer.put(records[1])
            writer.put(records[0])
            await store.asked.wait()
            await asyncio.sleep(0)
            writer.put(records[2])
        assert [[record for record, _ in batch] for batch in store.batches] == [records[:1], records[1:]]

    asyncio.run(do())


def test_full_queue_drops_records_and_counts_them() -> None:
    async def do() -> None:
        store = ScriptedStore()
        async with LogWriter(store, max_records=10) as writer:  # type: ignore[arg-type]
            for i in range(25):
                writer.put(make_record(NOON + i))
            assert (writer.queue_length, writer.dropped_count) == (10, 15)
        writer.put(make_record())  # closed
        assert (writer.written_count, writer.dropped_count) == (10, 16)

    asyncio.run(do())


def test_large_payloads_are_dropped_and_records_kept() -> None:
    async def do() -> None:
        store = ScriptedStore()
        async with LogWriter(store, max_bytes=25, flush_delay_s=0.0) as writer:  # type: ignore[arg-type]
            for i in range(3):
                writer.put(make_record(NOON + i), LogPayload(b"1234567890", b""))
            while not store.batches:
                await asyncio.sleep(0.001)
            writer.put(make_record(NOON + 3), LogPayload(b"1234567890", b""))  # the queue has room again
        kept = [payload is not None for batch in store.batches for _, payload in batch]
        assert kept == [True, True, False, True] and writer.dropped_count == 0

    asyncio.run(do())


def test_all_records_are_written_after_store_outage() -> None:
    async def do() -> None:
        store = ScriptedStore()
        store.is_down = True
        async with LogWriter(store, flush_delay_s=0.0) as writer:  # type: ignore[arg-type]
            writer.put(make_record())
            await asyncio.wait_for(store.asked.wait(), 5)
            writer.put(make_record(NOON + 1))
            store.is_down = False
        assert len(store.records) == 2 and writer.failures >= 1 and writer.dropped_count == 0

    asyncio.run(do())


def test_store_that_can_be_read_but_not_written_is_reported_until_it_works() -> None:
    async def do() -> None:
        store = ScriptedStore()
        store.is_down, store.version = True, AsyncMock(return_value=0)  # type: ignore[method-assign]
        async with LogWriter(store, flush_delay_s=0.0) as writer:  # type: ignore[arg-type]
            writer.check_store()
            writer.put(make_record())
            while not writer.failures:
                await asyncio.sleep(0)
            with pytest.raises(StoreBusy, match="StoreFailed: down"):
                writer.check_store()
            store.is_down = False
            while not writer.written_count:
                await asyncio.sleep(0.001)
            writer.check_store()

    asyncio.run(asyncio.wait_for(do(), 20))


def test_close_during_store_outage_times_out_and_counts() -> None:
    async def do() -> None:
        store = ScriptedStore()
        store.is_down = True
        async with LogWriter(store, flush_delay_s=0.0, close_timeout_s=0.05) as writer:  # type: ignore[arg-type]
            writer.put(make_record())
            await asyncio.wait_for(store.asked.wait(), 5)
            writer.put(make_record(NOON + 1))
        assert (writer.written_count, writer.dropped_count) == (0, 2)

    asyncio.run(do())


def test_invalid_record_is_dropped_alone() -> None:
    async def do() -> None:
        store = ScriptedStore()
        async with LogWriter(store, flush_delay_s=0.0) as writer:  # type: ignore[arg-type]
            for i, model in enumerate(("a", "poison", "b")):
                writer.put(make_record(NOON + i, model=model))
        assert [record.model for record in store.records] == ["a", "b"]
        assert (writer.written_count, writer.dropped_count) == (2, 1)

    asyncio.run(do())


def test_unexpected_store_error_is_retried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_writer, "FIRST_RETRY_DELAY_S", 0.0)

    async def do() -> None:
        store = ScriptedStore()
        store.is_down, store.says = True, IndexError("no such row")
        async with LogWriter(store, flush_delay_s=0.0) as writer:  # type: ignore[arg-type]
            writer.put(make_record())
            while writer.failures < 5:
                await asyncio.sleep(0.001)
            store.is_down = False
        assert (writer.written_count, writer.dropped_count) == (1, 0)

    asyncio.run(asyncio.wait_for(do(), 10))
