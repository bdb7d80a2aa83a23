"""SQLite failures: locked, failing and deleted files raise errors, and later writes succeed."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from gateway_records import NOON, make_record

from emberline.gateway.core.errors import StoreFailed
from emberline.gateway.logs.log_writer import LogWriter
from emberline.gateway.store.base import AuditEntry, StoreChange
from emberline.gateway.store.filters import LogFilters
from emberline.gateway.store.sqlite import SQLiteStore
from emberline.gateway.store.sqlite_database import transaction
from emberline.gateway.store.sqlite_thread import SQLiteThread

AUDIT = AuditEntry(0, "acme", "t", "t", "t")


def run_async(home: Path, play: Callable[[SQLiteStore], Awaitable[None]]) -> None:
    async def run() -> None:
        store = await SQLiteStore.open(home)
        try:
            await asyncio.wait_for(play(store), 30)
        finally:
            await store.close()

    asyncio.run(run())


async def pragma(store: SQLiteStore, text: str) -> None:
    """Read a pragma on the writing connection."""

    def do(lane: SQLiteThread) -> None:
        lane.connection(store._main).execute(f"PRAGMA {text}").fetchall()

    await store._writer.run(do)


def test_log_writer_retries_while_database_is_locked(tmp_path: Path) -> None:
    async def play(store: SQLiteStore) -> None:
        await pragma(store, "busy_timeout = 0")
        other = sqlite3.connect(tmp_path / "gateway.db", isolation_level=None)
        async with LogWriter(store, flush_delay_s=0.0) as writer:
            other.execute("BEGIN IMMEDIATE")
            for i in range(3):
                writer.put(make_record(NOON + i))
            while writer.failures < 4:  # more often than an invalid record is retried
                await asyncio.sleep(0.01)
            other.execute("ROLLBACK")
        other.close()
        assert (writer.written_count, writer.dropped_count) == (3, 0)
        assert len((await store.read_page(LogFilters("acme"))).records) == 3

    run_async(tmp_path, play)


def test_failed_transaction_is_rolled_back(tmp_path: Path) -> None:
    async def play(store: SQLiteStore) -> None:
        def promise(lane: SQLiteThread) -> None:
            db = lane.connection(store._main)
            db.execute("PRAGMA foreign_keys = ON")
            db.execute("CREATE TABLE known (id TEXT PRIMARY KEY)")
            db.execute("CREATE TABLE owed (id TEXT REFERENCES known (id) DEFERRABLE INITIALLY DEFERRED)")
            db.execute("CREATE TRIGGER owes AFTER INSERT ON audits BEGIN INSERT INTO owed VALUES ('nobody'); END")

        await store._writer.run(promise)
        for _ in range(2):
            with pytest.raises(StoreFailed, match="FOREIGN KEY"):
                await store.commit(StoreChange(AUDIT))

    run_async(tmp_path, play)


def test_error_that_ended_the_transaction_is_raised() -> None:
    db = sqlite3.connect(":memory:", isolation_level=None)
    with pytest.raises(sqlite3.OperationalError, match="full"), transaction(db):
        db.execute("ROLLBACK")  # as SQLite does if it cannot write
        raise sqlite3.OperationalError("database or disk is full")
    db.close()


def test_deleted_file_raises_clear_error(tmp_path: Path) -> None:
    async def play(store: SQLiteStore) -> None:
        for _ in store._readers:
            assert await store.version() == 0
        (tmp_path / "gateway.db").rename(tmp_path / "elsewhere")
        for _ in store._readers:
            assert await store.version() == 0, "the file is open"
            await store._readers[0].run(SQLiteThread.close_file, store._main)
        with pytest.raises(StoreFailed, match="unable to open"):
            for _ in store._readers:
                await store.version()
        (tmp_path / "elsewhere").rename(tmp_path / "gateway.db")

    run_async(tmp_path, play)
