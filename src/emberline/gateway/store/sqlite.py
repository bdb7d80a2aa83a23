"""SQLiteStore: a store in a directory of SQLite files.

`gateway.db` contains documents, audit entries and rollups; `limits.db` contains counters. Every day has one file of log
records and one file of payloads, and retention deletes whole files. One thread writes and other threads read, without
waiting for each other.

Log records are committed before the rollups that count them. If the process is killed between the two, the rollups lack
that one batch.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterable, Sequence
from datetime import date
from itertools import cycle
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from emberline.core.clock import Clock, SystemClock
from emberline.core.privatefile import make_private
from emberline.gateway.core.errors import Conflict
from emberline.gateway.core.log_record import LogPayload, LogRecord, parse_created_ms, utc_day
from emberline.gateway.store import base, sql, tables
from emberline.gateway.store.base import Document, DocumentKind
from emberline.gateway.store.compression import compress_payload, decompress_payload
from emberline.gateway.store.daily_users import MAX_USERS_PER_DAY, AccountDay, DailyUsers, merge_small_users
from emberline.gateway.store.filters import LogFilters
from emberline.gateway.store.record_scan import day_start_ms, scan_records
from emberline.gateway.store.rollup import OTHER_USERS, UNIT_MS, RollupCell, RollupQuery, count_records
from emberline.gateway.store.sqlite_database import create_database_file, insert_rows, migrate, transaction
from emberline.gateway.store.sqlite_thread import SQLiteThread

READER_THREADS = 2
_INSERT_LOG = f"INSERT OR IGNORE INTO logs ({tables.quote_names(tables.COLUMNS)})"
_ROLLUPS = ((True, sql.upsert_rollup("?", "all")), (False, sql.upsert_rollup("?", "key")))
_SELECT_SMALL, _DELETE_SMALL = (
    sql.select_small_users("?", MAX_USERS_PER_DAY),
    sql.delete_small_users("?", skip_locked=False),
)

T = TypeVar("T")
RecordBatch = Sequence[tuple[LogRecord, LogPayload | None]]


class SQLiteStore:
    @classmethod
    async def open(cls, directory: Path, clock: Clock | None = None) -> SQLiteStore:
        store = cls(directory, clock or SystemClock())
        await store._writer.run(store._prepare_files)
        await store._counter.run(lambda thread: migrate(thread.connection(store._limits), tables.LIMIT_MIGRATIONS))
        return store

    def __init__(self, directory: Path, clock: Clock) -> None:
        self._directory = directory
        self._main = directory / "gateway.db"
        self._limits = directory / "limits.db"
        self._clock = clock
        self._daily_users = DailyUsers()
        self._writer = SQLiteThread("writer", writes=True)
        self._counter = SQLiteThread("limits", writes=True)
        self._readers = [SQLiteThread(f"reader-{i}", writes=False) for i in range(READER_THREADS)]
        self._next_reader = cycle(self._readers)

    async def close(self) -> None:
        for thread in (*self._readers, self._counter, self._writer):  # writers last: they checkpoint the WAL
            await thread.close()

    # Documents

    async def get(self, kind: DocumentKind, account: str, id: str) -> Document | None:
        found = await self.list_documents(kind, account, prefix=id, limit=1)
        return found[0] if found and found[0].id == id else None

    async def list_documents(
        self, kind: DocumentKind, account: str, *, prefix: str = "", after: tuple[str, str] = ("", ""), limit: int = 100
    ) -> list[Document]:
        rows = await self._read_rows(self._main, *sql.select_documents("?", kind, account, prefix, after, limit))
        return [Document(*found) for found in rows]

    async def version(self) -> int:
        return int((await self._read_rows(self._main, "SELECT value FROM state WHERE name = 'version'", ()))[0][0])

    async def list_audit_entries(self, account: str, *, before: int = 0, limit: int = 100) -> list[base.AuditEntry]:
        return [
            base.AuditEntry(*found)
            for found in await self._read_rows(self._main, *sql.select_audits("?", account, before, limit))
        ]

    async def commit(self, change: base.StoreChange) -> int:
        def commit_change(thread: SQLiteThread) -> int:
            with transaction(thread.connection(self._main)) as db:
                for document in change.put:
                    _put_document(db, document, change.audit.at)
                for document in change.delete:
                    where = "kind = ?1 AND account = ?2 AND id = ?3 AND version = ?4"
                    key = (document.kind, document.account, document.id, document.version)
                    _check_one_row_changed(db.execute(f"DELETE FROM documents WHERE {where}", key), document)
                a = change.audit
                values = (a.at, a.account, a.actor, a.action, a.target, a.before, a.after)
                columns = "at, account, actor, action, target, before, after"
                db.execute(f"INSERT INTO audits ({columns}) VALUES ({sql.make_placeholders('?', 7)})", values)
                increment = "UPDATE state SET value = value + 1 WHERE name = 'version' RETURNING value"
                return int(db.execute(increment).fetchall()[0][0])

        return await self._writer.run(commit_change)

    # Counters

    async def list_counters(self, now: int) -> list[base.LimitCounter]:
        def select_counters(thread: SQLiteThread) -> list[base.LimitCounter]:
            rows = thread.connection(self._limits).execute(sql.SELECT_COUNTERS.format("?"), (now,)).fetchall()
            return [base.LimitCounter(*found) for found in rows]

        return await self._counter.run(select_counters)

    async def add_counters(self, batch_name: str, changes: Sequence[base.LimitCounter], now: int) -> None:
        def upsert_counters(thread: SQLiteThread) -> None:
            with transaction(thread.connection(self._limits)) as db:
                if db.execute(sql.INSERT_COUNTED.format("?"), (batch_name, now)).rowcount:
                    db.executemany(sql.UPSERT_COUNTER.format("?"), map(msgspec.structs.astuple, changes))
                    db.execute(sql.DELETE_COUNTERS.format("?"), (now,))
                    db.execute(sql.DELETE_COUNTED.format("?"), (now - sql.APPLIED_BATCHES_KEPT_MS,))

        await self._counter.run(upsert_counters)

    # Logs

    async def append_records(self, records: RecordBatch) -> None:
        if records:
            await self._writer.run(self._append_records, records)

    def _append_records(self, thread: SQLiteThread, records: RecordBatch) -> None:
        first = bytes.fromhex(records[0][0].id)
        if thread.connection(self._main).execute("SELECT 1 FROM batches WHERE id = ?1", (first,)).fetchall():
            return
        for day, entries in _group_by_day(records, lambda entry: entry[0]).items():
            self._append_day_records(thread, day, entries)
        with transaction(thread.connection(self._main)) as main:
            main.execute("INSERT INTO batches VALUES (?1, ?2)", (first, records[0][0].created_ms))
            main.execute("DELETE FROM batches WHERE at < ?1", (records[0][0].created_ms - UNIT_MS["day"],))
            cells = count_records(r for r, _ in records)
            for wide, upsert in _ROLLUPS:
                main.executemany(upsert, sql.rollup_rows(cells, wide))
        for user_day in self._daily_users.add_users(cells):
            self._merge_small_users(thread, user_day)

    def _merge_small_users(self, thread: SQLiteThread, day: AccountDay) -> None:
        with transaction(thread.connection(self._main)) as db:
            small = db.execute(_SELECT_SMALL, (*day, OTHER_USERS)).fetchall()
            if len(small) > MAX_USERS_PER_DAY:
                deleted = db.execute(_DELETE_SMALL, (*day, OTHER_USERS, *small[0])).fetchall()
                db.executemany(_ROLLUPS[1][1], merge_small_users(day, deleted))

    def _append_day_records(self, thread: SQLiteThread, day: date, entries: RecordBatch) -> None:
        with transaction(self._open_day_file(thread, day)) as db:
            insert_rows(db, _INSERT_LOG, [tables.record_to_row(r) for r, _ in entries])
            db.executemany(
                _INSERT_LABEL, [label for r, _ in entries if r.metadata for label in tables.metadata_label_rows(r)]
            )
        payloads = [
            (bytes.fromhex(r.id), compress_payload(p.request), compress_payload(p.response))
            for r, p in entries
            if p is not None
        ]
        if payloads:
            with transaction(self._open_day_file(thread, day, payloads=True)) as db:
                insert_rows(db, "INSERT OR IGNORE INTO payloads", payloads)

    async def read_page(
        self, filters: LogFilters, *, before: str = "", limit: int = 50, timeout_s: float = base.PAGE_TIMEOUT_S
    ) -> base.RecordPage:
        days = await self.list_days()
        return await scan_records(
            self._find_newest_id, self._select_records, days, filters, before, limit, timeout_s, self._clock
        )

    async def _find_newest_id(self, day: date, first_id: bytes, end_id: bytes) -> bytes | None:
        rows = await self._read_rows(self._day_file_path("logs", day), sql.select_newest_id("?"), (first_id, end_id))
        return rows[0][0] if rows else None

    async def _select_records(
        self, day: date, filters: LogFilters, first_id: bytes, end_id: bytes, limit: int
    ) -> list[LogRecord]:
        rows = await self._read_rows(
            self._day_file_path("logs", day), *sql.select_logs("?", filters, first_id, end_id, limit)
        )
        return [tables.row_to_record(found) for found in rows]

    async def get_record(self, account: str, gateway: str, id: str) -> LogRecord | None:
        path = self._day_file_path("logs", utc_day(parse_created_ms(id)))
        rows = await self._read_rows(path, *sql.select_log("?", account, gateway, id))
        return tables.row_to_record(rows[0]) if rows else None

    async def get_payload(self, account: str, gateway: str, id: str) -> LogPayload | None:
        if await self.get_record(account, gateway, id) is None:
            return None
        text = "SELECT request, response FROM payloads WHERE id = ?1"
        rows = await self._read_rows(
            self._day_file_path("payloads", utc_day(parse_created_ms(id))), text, (bytes.fromhex(id),)
        )
        return LogPayload(*(decompress_payload(part) for part in rows[0])) if rows else None

    async def add_feedback(self, account: str, gateway: str, id: str, feedback: base.Feedback) -> LogRecord | None:
        day, query = utc_day(parse_created_ms(id)), sql.select_log("?", account, gateway, id)

        def update_record(thread: SQLiteThread) -> LogRecord | None:
            if not self._day_file_path("logs", day).exists():
                return None
            with transaction(self._open_day_file(thread, day)) as db:
                rows = db.execute(*query).fetchall()
                if not rows:
                    return None
                old = tables.row_to_record(rows[0])
                new = feedback.apply_to(old)
                values = (new.feedback, new.score, msgspec.json.encode(new.metadata).decode(), bytes.fromhex(id))
                db.execute("UPDATE logs SET feedback = ?1, score = ?2, metadata = ?3 WHERE id = ?4", values)
                db.executemany(_DELETE_LABEL, tables.metadata_label_rows(old))
                db.executemany(_INSERT_LABEL, tables.metadata_label_rows(new))
                return new

        return await self._writer.run(update_record)

    async def erase_records(self, records: Sequence[LogRecord]) -> None:
        def delete_records(thread: SQLiteThread, day: date, erased: Sequence[LogRecord]) -> None:
            ids = [(bytes.fromhex(each.id),) for each in erased]
            if self._day_file_path("payloads", day).exists():
                with transaction(self._open_day_file(thread, day, payloads=True)) as db:
                    db.executemany("DELETE FROM payloads WHERE id = ?1", ids)
            with transaction(self._open_day_file(thread, day)) as db:
                db.executemany(_DELETE_LABEL, [label for each in erased for label in tables.metadata_label_rows(each)])
                db.executemany("DELETE FROM logs WHERE id = ?1", ids)

        for day, erased in _group_by_day(records, lambda each: each).items():
            if self._day_file_path("logs", day).exists():
                await self._writer.run(delete_records, day, erased)

    async def read_rollups(self, query: RollupQuery) -> list[RollupCell]:
        rows = await self._read_rows(self._main, *sql.select_rollups("?", query))
        return [RollupCell(start, value, tuple(counts)) for start, value, *counts in rows]

    async def list_days(self) -> list[date]:
        def list_files(_: SQLiteThread) -> list[date]:
            return sorted(date.fromisoformat(path.stem[len("logs-") :]) for path in self._directory.glob("logs-*.db"))

        return await next(self._next_reader).run(list_files)

    async def delete_days_before(self, day: date) -> list[date]:
        dropped = [each for each in await self.list_days() if each < day]
        for path in (self._day_file_path(kind, each) for each in dropped for kind in ("payloads", "logs")):
            for thread in (*self._readers, self._writer):
                await thread.run(SQLiteThread.close_file, path)
            for suffix in ("-wal", "-shm", ""):  # the file itself last: it shows that the day is not deleted yet
                Path(f"{path}{suffix}").unlink(missing_ok=True)

        def delete_cells(thread: SQLiteThread) -> None:
            with transaction(thread.connection(self._main)) as db:
                for table, unit, dimension, before in sql.list_cells_to_delete(day_start_ms(day)):
                    next_account, account = sql.select_next_account("?", table), ""
                    while account := db.execute(next_account, (unit, account)).fetchall()[0][0]:
                        db.execute(sql.delete_cells("?", table), (unit, account, dimension, before))

        await self._writer.run(delete_cells)
        return dropped

    # Files

    def _prepare_files(self, thread: SQLiteThread) -> None:
        for path in (self._main, self._limits, *self._directory.glob("*.db")):
            make_private(path)
        migrate(thread.connection(self._main), tables.MAIN_MIGRATIONS)
        for kind, steps in (("logs", tables.LOG_MIGRATIONS), ("payloads", tables.PAYLOAD_MIGRATIONS)):
            for path in self._directory.glob(f"{kind}-*.db"):
                migrate(thread.connection(path), steps)

    def _day_file_path(self, kind: str, day: date) -> Path:
        return self._directory / f"{kind}-{day.isoformat()}.db"

    def _open_day_file(self, thread: SQLiteThread, day: date, *, payloads: bool = False) -> sqlite3.Connection:
        """Return a connection for writing to a day's file. The file is created if it does not exist."""
        path = self._day_file_path("payloads" if payloads else "logs", day)
        if not path.exists():
            create_database_file(path, tables.PAYLOAD_MIGRATIONS if payloads else tables.LOG_MIGRATIONS)
        return thread.connection(path)

    async def _read_rows(self, path: Path, statement: str, values: Sequence[object]) -> list[tuple[Any, ...]]:
        def fetch_rows(thread: SQLiteThread) -> list[tuple[Any, ...]]:
            if path != self._main and not path.exists():  # retention deleted the day
                thread.close_file(path)
                return []
            return thread.connection(path).execute(statement, values).fetchall()

        return await next(self._next_reader).run(fetch_rows)


_INSERT_LABEL = "INSERT OR IGNORE INTO labels VALUES (?1, ?2, ?3)"
_DELETE_LABEL = "DELETE FROM labels WHERE key = ?1 AND value = ?2 AND id = ?3"


def _group_by_day(entries: Iterable[T], record_of: Callable[[T], LogRecord]) -> dict[date, list[T]]:
    days: dict[int, list[T]] = {}
    for entry in entries:
        days.setdefault(record_of(entry).created_ms // UNIT_MS["day"], []).append(entry)
    return {utc_day(day * UNIT_MS["day"]): of_day for day, of_day in days.items()}


def _put_document(db: sqlite3.Connection, document: Document, updated_ms: int) -> None:
    values = (document.kind, document.account, document.id, document.body, updated_ms, document.version)
    if document.version:
        where = "kind = ?1 AND account = ?2 AND id = ?3 AND version = ?6"
        text = f"UPDATE documents SET body = ?4, updated = ?5, version = version + 1 WHERE {where}"
    else:
        text = "INSERT INTO documents VALUES (?1, ?2, ?3, ?4, ?6 + 1, ?5) ON CONFLICT DO NOTHING"
    _check_one_row_changed(db.execute(text, values), document)


def _check_one_row_changed(cursor: sqlite3.Cursor, document: Document) -> None:
    """Raise Conflict unless the statement changed one row."""
    if cursor.rowcount != 1:
        raise Conflict.for_document(document.kind, document.id, is_new=not document.version)
