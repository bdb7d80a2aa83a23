"""A PostgreSQL outage: known keys keep working, no log record is lost, and waits time out."""

from __future__ import annotations

import asyncio
from uuid import uuid4

import asyncpg
import msgspec
import pytest
from gateway_records import NOON, make_record
from postgres_server import Postgres

from emberline.core.clock import ManualClock, SystemClock
from emberline.gateway.core.errors import StoreBusy, StoreFailed
from emberline.gateway.keys.key_store import KeyStore, StoredKey, hash_secret, new_secret, visible_prefix
from emberline.gateway.logs.log_writer import LogWriter
from emberline.gateway.store import postgres as postgres_store
from emberline.gateway.store.base import AuditEntry, Document, StoreChange
from emberline.gateway.store.factory import open_store
from emberline.gateway.store.filters import LogFilters
from emberline.gateway.store.postgres import PostgresStore
from emberline.gateway.store.version_watch import StoreVersionWatch


def test_store_outage_and_recovery(postgres: Postgres, caplog: pytest.LogCaptureFixture) -> None:
    async def do() -> None:
        name = f"t{uuid4().hex}"
        connection = await asyncpg.connect(postgres.url("postgres"))
        await connection.execute(f"CREATE DATABASE {name}")
        await connection.close()
        store = await open_store(postgres.url(name))
        secret = new_secret("virtual")
        key = StoredKey(
            hash=hash_secret(secret), shown=visible_prefix(secret), name="k", kind="virtual", account="acme", created=0
        )
        document = Document("key", "acme", key.id, msgspec.json.encode(key))
        await store.commit(StoreChange(AuditEntry(0, "acme", "t", "t", "t"), put=[document]))
        clock = ManualClock()
        keys = KeyStore(store, StoreVersionWatch(store, clock), SystemClock())
        assert await keys.identify(secret) is not None
        async with LogWriter(store, flush_delay_s=0.01) as writer:
            writer.put(make_record(NOON))
            while not writer.written_count:
                await asyncio.sleep(0.01)
            await asyncio.to_thread(postgres.stop)
            try:
                clock.advance(1.0)
                assert await keys.identify(secret) is not None  # within the grace
                with pytest.raises(StoreFailed):
                    await store.list_documents("key", "acme")
                with pytest.raises(StoreFailed):
                    await store.commit(StoreChange(AuditEntry(0, "acme", "t", "t", "t")))
                with pytest.raises(StoreFailed):
                    await open_store(postgres.url(name))
                for i in range(1, 50):
                    writer.put(make_record(NOON + i))
                while not writer.failures:
                    await asyncio.sleep(0.01)
            finally:
                await asyncio.to_thread(postgres.start)
        assert (writer.written_count, writer.dropped_count) == (50, 0)
        assert len((await store.read_page(LogFilters("acme"), limit=100)).records) == 50
        await store.close()

    asyncio.run(asyncio.wait_for(do(), 60))
    assert not [record for record in caplog.records if record.exc_info], "no tracebacks of asyncpg"


def test_query_during_connection_loss_raises_store_error(postgres: Postgres) -> None:
    """The server's last message has arrived but not the end of the connection: asyncpg raises an internal error."""

    class Lost:
        def acquire(self, timeout: float) -> None:
            raise asyncpg.InternalClientError("cannot switch to state 11; another operation (2) is in progress")

    async def do() -> None:
        store = await PostgresStore.open(postgres.url("postgres"))
        pool, store._pool = store._pool, Lost()  # type: ignore[assignment]
        for ask in (store.version(), store.commit(StoreChange(AuditEntry(0, "acme", "t", "t", "t")))):
            with pytest.raises(StoreBusy):
                await ask
        store._pool = pool
        await store.close()

    asyncio.run(asyncio.wait_for(do(), 30))


def test_waiting_for_a_connection_times_out(postgres: Postgres, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(postgres_store, "QUERY_TIMEOUT_S", 0.1)

    async def do() -> None:
        store = await PostgresStore.open(postgres.url("postgres"))
        taken = [await store._pool.acquire() for _ in range(store._pool.get_max_size())]
        for ask in (store.version, store.list_days):
            with pytest.raises(StoreFailed):
                await ask()
        for each in taken:
            await store._pool.release(each)
        assert await store.version() == 0
        await store.close()

    asyncio.run(asyncio.wait_for(do(), 30))
