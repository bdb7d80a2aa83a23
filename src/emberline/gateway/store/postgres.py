"""PostgresStore: a PostgreSQL database that replicas share.

Logs, labels and payloads are partitioned by day, and retention drops whole partitions. A record's id contains its time
and so determines the day. A batch of records and its rollups are written in one transaction.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from datetime import date, timedelta
from typing import TYPE_CHECKING, Any

import msgspec

from emberline.core.clock import Clock, SystemClock
from emberline.core.engine_packages import install_hint
from emberline.gateway.core.errors import Conflict, StoreBusy, StoreFailed
from emberline.gateway.core.log_record import LogPayload, LogRecord, utc_day
from emberline.gateway.store import base, sql, tables
from emberline.gateway.store.base import Document, DocumentKind
from emberline.gateway.store.compression import compress_payload, decompress_payload
from emberline.gateway.store.daily_users import MAX_USERS_PER_DAY, AccountDay, DailyUsers, merge_small_users
from emberline.gateway.store.filters import LogFilters
from emberline.gateway.store.postgres_partitions import PARTITIONED_TABLES, attach_partition, partition_name
from emberline.gateway.store.record_scan import day_start_ms, scan_records
from emberline.gateway.store.rollup import OTHER_USERS, UNIT_MS, CellKey, RollupCell, RollupQuery, count_records

if TYPE_CHECKING:
    from asyncpg import Connection, Pool

log = logging.getLogger("emberline.gateway.log")

COLUMN_TYPES = {
    "int": "BIGINT",
    "text": 'TEXT COLLATE "C"',
    "blob": "BYTEA",
    "serial": "BIGSERIAL PRIMARY KEY",
    "partitioned": "PARTITION BY RANGE (id)",
    "clustered": "",
}
QUERY_TIMEOUT_S = 10.0
_SCHEMA_LOCK = 0x456D6265726C  # advisory lock for schema changes
_MERGE_LOCK = 0x456D6265  # advisory lock for merging small users of an account
_ROLLUPS = ((True, sql.upsert_rollup("$", "all")), (False, sql.upsert_rollup("$", "key")))
_SELECT_SMALL, _DELETE_SMALL = (
    sql.select_small_users("$", MAX_USERS_PER_DAY),
    sql.delete_small_users("$", skip_locked=True),
)

_INVALID_INPUT_CLASSES = ("22", "23", "54")  # of SQLSTATE: invalid data, constraint violations, limits exceeded

_DELETE_LABEL = "DELETE FROM labels WHERE key = $1 AND value = $2 AND id = $3"

RecordBatch = Sequence[tuple[LogRecord, LogPayload | None]]


class PostgresStore:
    @classmethod
    async def open(cls, url: str, clock: Clock | None = None) -> PostgresStore:
        try:
            import asyncpg
        except ImportError as e:
            raise StoreFailed(
                "PostgreSQL cannot be used: the package asyncpg is not installed",
                hint=install_hint("gateway"),
            ) from e
        settings = {"jit": "off", "lock_timeout": "5000"}
        # asyncpg raises InternalClientError for a connection that is just being lost.
        failures = (asyncpg.PostgresError, asyncpg.InterfaceError, asyncpg.InternalClientError)
        try:
            # With a minimum size, asyncpg reconnects in the background and logs a traceback for each failure.
            pool = await asyncpg.create_pool(
                url, min_size=0, max_size=8, timeout=5.0, command_timeout=QUERY_TIMEOUT_S, server_settings=settings
            )
            async with pool.acquire():
                pass
        except (OSError, TimeoutError, *failures) as e:
            raise StoreFailed(
                f"PostgreSQL cannot be reached: {e or type(e).__name__}",
                hint="check the store URL and that the server is running",
            ) from e
        store = cls(pool, clock or SystemClock(), failures)
        await store._migrate_schema()
        return store

    def __init__(self, pool: Pool, clock: Clock, failures: tuple[type[Exception], ...]) -> None:
        self._pool = pool
        self._clock = clock
        self._failures: tuple[type[Exception], ...] = (OSError, TimeoutError, *failures)
        self._daily_users = DailyUsers()
        self._partitions: set[date] = set()  # known to exist

    async def close(self) -> None:
        try:
            async with asyncio.timeout(QUERY_TIMEOUT_S):
                await self._pool.close()
        except TimeoutError:
            self._pool.terminate()

    # Documents

    async def get(self, kind: DocumentKind, account: str, id: str) -> Document | None:
        found = await self.list_documents(kind, account, prefix=id, limit=1)
        return found[0] if found and found[0].id == id else None

    async def list_documents(
        self, kind: DocumentKind, account: str, *, prefix: str = "", after: tuple[str, str] = ("", ""), limit: int = 100
    ) -> list[Document]:
        rows = await self._read_rows(*sql.select_documents("$", kind, account, prefix, after, limit))
        return [Document(*found) for found in rows]

    async def version(self) -> int:
        return int((await self._read_rows("SELECT value FROM state WHERE name = 'version'", ()))[0][0])

    async def list_audit_entries(self, account: str, *, before: int = 0, limit: int = 100) -> list[base.AuditEntry]:
        return [
            base.AuditEntry(*found) for found in await self._read_rows(*sql.select_audits("$", account, before, limit))
        ]

    async def commit(self, change: base.StoreChange) -> int:
        async with self._transaction() as db:
            # First, because its row lock serialises commits: versions become visible in ascending order.
            increment = "UPDATE state SET value = value + 1 WHERE name = 'version' RETURNING value"
            version = int(await db.fetchval(increment))
            for document in change.put:
                await _put_document(db, document, change.audit.at)
            for document in change.delete:
                where = "kind = $1 AND account = $2 AND id = $3 AND version = $4"
                key = (document.kind, document.account, document.id, document.version)
                _check_one_row_changed(await db.execute(f"DELETE FROM documents WHERE {where}", *key), document)
            a = change.audit
            values = (a.at, a.account, a.actor, a.action, a.target, a.before, a.after)
            columns = "at, account, actor, action, target, before, after"
            await db.execute(f"INSERT INTO audits ({columns}) VALUES ({sql.make_placeholders('$', 7)})", *values)
        return version

    # Counters

    async def list_counters(self, now: int) -> list[base.LimitCounter]:
        return [base.LimitCounter(*found) for found in await self._read_rows(sql.SELECT_COUNTERS.format("$"), (now,))]

    async def add_counters(self, batch_name: str, changes: Sequence[base.LimitCounter], now: int) -> None:
        rows = sorted(map(msgspec.structs.astuple, changes))  # one order of locks, so that replicas cannot deadlock
        async with self._transaction() as db:
            if await db.execute(sql.INSERT_COUNTED.format("$"), batch_name, now) == "INSERT 0 1":
                await db.executemany(sql.UPSERT_COUNTER.format("$"), rows)
                await db.execute(sql.DELETE_COUNTERS.format("$"), now)
                await db.execute(sql.DELETE_COUNTED.format("$"), now - sql.APPLIED_BATCHES_KEPT_MS)

    # Logs

    async def append_records(self, records: RecordBatch) -> None:
        if not records:
            return
        days = {utc_day(each.created_ms) for each, _ in records}
        try:
            await self._create_partitions(days - self._partitions)
            cells = count_records(each for each, _ in records)
            async with self._transaction() as db:
                await self._append_records(db, records, cells)
        except StoreFailed:
            self._partitions -= days  # another replica may have dropped one
            raise
        for day in self._daily_users.add_users(cells):
            await self._merge_small_users(day)
        await self._create_next_day_partitions(max(days) + timedelta(days=1))

    async def _append_records(
        self, db: Connection, records: RecordBatch, cells: Mapping[CellKey, Sequence[int]]
    ) -> None:
        first = (bytes.fromhex(records[0][0].id), records[0][0].created_ms)
        if await db.execute("INSERT INTO batches VALUES ($1, $2) ON CONFLICT DO NOTHING", *first) != "INSERT 0 1":
            return
        await db.execute("DELETE FROM batches WHERE at < $1", first[1] - UNIT_MS["day"])
        await db.copy_records_to_table(
            "logs",
            records=[_replace_nul_characters(tables.record_to_row(r)) for r, _ in records],
            columns=tables.COLUMNS,
        )
        all_labels = [_replace_nul_characters(label) for r, _ in records for label in tables.metadata_label_rows(r)]
        if all_labels:
            await db.copy_records_to_table("labels", records=all_labels, columns=("key", "value", "id"))
        payloads = [(r.id, p) for r, p in records if p is not None]
        if payloads:
            rows = await asyncio.to_thread(_payload_rows, payloads)
            await db.copy_records_to_table("payloads", records=rows, columns=("id", "request", "response"))
        for wide, upsert in _ROLLUPS:  # last, because other replicas wait for the locks of these rows
            await db.executemany(upsert, map(_replace_nul_characters, sql.rollup_rows(cells, wide)))

    async def _merge_small_users(self, day: AccountDay) -> None:
        """Merge the rollup cells of the users with the lowest cost on a day.

        Only one replica at a time merges the cells of an account. Locked rows are skipped: waiting for them could
        deadlock with a replica that appends records.
        """
        async with self._transaction() as db:
            if not await db.fetchval("SELECT pg_try_advisory_xact_lock($1, hashtext($2))", _MERGE_LOCK, day[0]):
                return  # another replica does it
            small = await db.fetch(_SELECT_SMALL, *day, OTHER_USERS)
            if len(small) > MAX_USERS_PER_DAY:
                deleted = await db.fetch(_DELETE_SMALL, *day, OTHER_USERS, *small[0])
                await db.executemany(_ROLLUPS[1][1], merge_small_users(day, deleted))

    async def read_page(
        self, filters: LogFilters, *, before: str = "", limit: int = 50, timeout_s: float = base.PAGE_TIMEOUT_S
    ) -> base.RecordPage:
        days = await self._partition_days()
        return await scan_records(
            self._find_newest_id, self._select_records, days, filters, before, limit, timeout_s, self._clock
        )

    async def _find_newest_id(self, day: date, first_id: bytes, end_id: bytes) -> bytes | None:
        rows = await self._read_rows(sql.select_newest_id("$"), (first_id, end_id))
        return rows[0][0] if rows else None

    async def _select_records(
        self, day: date, filters: LogFilters, first_id: bytes, end_id: bytes, limit: int
    ) -> list[LogRecord]:
        return [
            tables.row_to_record(found)
            for found in await self._read_rows(*sql.select_logs("$", filters, first_id, end_id, limit))
        ]

    async def get_record(self, account: str, gateway: str, id: str) -> LogRecord | None:
        rows = await self._read_rows(*sql.select_log("$", account, gateway, id))
        return tables.row_to_record(rows[0]) if rows else None

    async def get_payload(self, account: str, gateway: str, id: str) -> LogPayload | None:
        if await self.get_record(account, gateway, id) is None:
            return None
        rows = await self._read_rows("SELECT request, response FROM payloads WHERE id = $1", (bytes.fromhex(id),))
        return LogPayload(*(decompress_payload(part) for part in rows[0])) if rows else None

    async def add_feedback(self, account: str, gateway: str, id: str, feedback: base.Feedback) -> LogRecord | None:
        text, parameters = sql.select_log("$", account, gateway, id)
        async with self._transaction() as db:
            found = await db.fetchrow(f"{text} FOR UPDATE", *parameters)
            if found is None:
                return None
            old = tables.row_to_record(found)
            new = feedback.apply_to(old)
            values = (new.feedback, new.score, msgspec.json.encode(new.metadata).decode(), bytes.fromhex(id))
            await db.execute("UPDATE logs SET feedback = $1, score = $2, metadata = $3 WHERE id = $4", *values)
            await db.executemany(_DELETE_LABEL, map(_replace_nul_characters, tables.metadata_label_rows(old)))
            await db.executemany(
                "INSERT INTO labels VALUES ($1, $2, $3)", map(_replace_nul_characters, tables.metadata_label_rows(new))
            )
            return new

    async def erase_records(self, records: Sequence[LogRecord]) -> None:
        ids = [bytes.fromhex(each.id) for each in records]
        async with self._transaction() as db:
            for table in ("payloads", "logs"):
                await db.execute(f"DELETE FROM {table} WHERE id = ANY($1::bytea[])", ids)
            await db.executemany(
                _DELETE_LABEL,
                [_replace_nul_characters(label) for each in records for label in tables.metadata_label_rows(each)],
            )

    async def read_rollups(self, query: RollupQuery) -> list[RollupCell]:
        rows = await self._read_rows(*sql.select_rollups("$", query))
        return [RollupCell(start, value, tuple(counts)) for start, value, *counts in rows]

    async def list_days(self) -> list[date]:
        found = await self._partition_days()
        while found and not await self._read_rows(f"SELECT 1 FROM {partition_name('logs', found[-1])} LIMIT 1", ()):
            found.pop()  # created in advance and still empty
        return found

    async def _partition_days(self) -> list[date]:
        """Return the days that have partitions, oldest first."""
        text = (
            "SELECT c.relname FROM pg_inherits i JOIN pg_class c ON c.oid = i.inhrelid"
            " WHERE i.inhparent = 'logs'::regclass"
        )
        return sorted(date.fromisoformat(name.removeprefix("logs_")) for (name,) in await self._read_rows(text, ()))

    async def delete_days_before(self, day: date) -> list[date]:
        dropped = [each for each in await self._partition_days() if each < day]
        self._partitions -= set(dropped)
        async with self._transaction() as db:
            await db.execute("SELECT pg_advisory_xact_lock($1)", _SCHEMA_LOCK)
            for table in (partition_name(parent, each) for each in dropped for parent in PARTITIONED_TABLES):
                await db.execute(f"DROP TABLE IF EXISTS {table}")
        async with self._transaction() as db:
            for table, unit, dimension, before in sql.list_cells_to_delete(day_start_ms(day)):
                next_account, account = sql.select_next_account("$", table), ""
                while account := await db.fetchval(next_account, unit, account):
                    await db.execute(sql.delete_cells("$", table), unit, account, dimension, before)
        return dropped

    # Schema

    async def _migrate_schema(self) -> None:
        async with self._transaction() as db:
            await db.execute("SELECT pg_advisory_xact_lock($1)", _SCHEMA_LOCK)
            await db.execute("CREATE TABLE IF NOT EXISTS migrations (family TEXT PRIMARY KEY, done BIGINT NOT NULL)")
            for family, steps in (
                ("main", tables.MAIN_MIGRATIONS),
                ("limits", tables.LIMIT_MIGRATIONS),
                ("logs", tables.LOG_MIGRATIONS),
                ("payloads", tables.PAYLOAD_MIGRATIONS),
            ):
                done = await db.fetchval("SELECT done FROM migrations WHERE family = $1", family) or 0
                for step in tables.pending_migrations(done, steps):
                    for text in step:
                        await db.execute(tables.render_migration(text, COLUMN_TYPES))
                save = "INSERT INTO migrations VALUES ($1, $2) ON CONFLICT (family) DO UPDATE SET done = $2"
                await db.execute(save, family, len(steps))

    async def _create_next_day_partitions(self, day: date) -> None:
        """Create the next day's partitions in advance. If that fails, it is tried again after the next batch."""
        if day > max(self._partitions):
            try:
                await self._create_partitions({day})
            except StoreFailed as e:
                log.warning("Creating log partitions failed, retrying with the next batch: day=%s error=%s", day, e)

    async def _create_partitions(self, days: set[date]) -> None:
        if not days:
            return
        async with self._transaction() as db:
            await db.execute("SELECT pg_advisory_xact_lock($1)", _SCHEMA_LOCK)
            for day in sorted(days):
                for parent in PARTITIONED_TABLES:
                    await attach_partition(db, parent, day)
        self._partitions |= days

    async def _read_rows(self, statement: str, values: Sequence[object]) -> list[Any]:
        try:
            async with self._pool.acquire(timeout=QUERY_TIMEOUT_S) as db:
                return list(await db.fetch(statement, *_replace_nul_characters(tuple(values))))
        except self._failures as e:
            raise _to_store_error(e) from e

    @asynccontextmanager
    async def _transaction(self) -> AsyncIterator[Connection]:
        try:
            async with self._pool.acquire(timeout=QUERY_TIMEOUT_S) as db, db.transaction():
                yield db
        except self._failures as e:
            raise _to_store_error(e) from e


def _to_store_error(error: Exception) -> StoreFailed:
    """Return StoreFailed if the input is invalid, else StoreBusy, because a retry may succeed."""
    is_invalid_input = (
        isinstance(error, ValueError) or (getattr(error, "sqlstate", None) or "")[:2] in _INVALID_INPUT_CLASSES
    )
    kind = StoreFailed if is_invalid_input else StoreBusy
    return kind(
        f"PostgreSQL query failed: {error or type(error).__name__}",
        hint="check that the server is running and its disk is not full",
    )


async def _put_document(db: Connection, document: Document, updated_ms: int) -> None:
    values = (document.kind, document.account, document.id, document.body, updated_ms)
    if document.version:
        where = "kind = $1 AND account = $2 AND id = $3 AND version = $6"
        text = f"UPDATE documents SET body = $4, updated = $5, version = version + 1 WHERE {where}"
        _check_one_row_changed(await db.execute(text, *values, document.version), document)
    else:
        text = "INSERT INTO documents VALUES ($1, $2, $3, $4, 1, $5) ON CONFLICT DO NOTHING"
        _check_one_row_changed(await db.execute(text, *values), document)


def _check_one_row_changed(command_tag: str, document: Document) -> None:
    """Raise Conflict unless the statement changed one row."""
    if not command_tag.endswith(" 1"):
        raise Conflict.for_document(document.kind, document.id, is_new=not document.version)


def _replace_nul_characters(row: tuple[Any, ...]) -> tuple[Any, ...]:
    """Replace NUL characters in texts of a row or query: clients can send them, and PostgreSQL's TEXT rejects them."""
    return tuple(each.replace("\0", "\ufffd") if isinstance(each, str) else each for each in row)


def _payload_rows(payloads: Sequence[tuple[str, LogPayload]]) -> list[tuple[bytes, bytes, bytes]]:
    return [(bytes.fromhex(id), compress_payload(p.request), compress_payload(p.response)) for id, p in payloads]
