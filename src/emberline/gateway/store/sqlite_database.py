"""Functions on one SQLite database: transactions, creation, migrations and inserts of many rows."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any

from emberline.core.privatefile import make_private
from emberline.gateway.store.tables import pending_migrations, render_migration

COLUMN_TYPES = {
    "int": "INTEGER",
    "text": "TEXT",
    "blob": "BLOB",
    "serial": "INTEGER PRIMARY KEY AUTOINCREMENT",
    "partitioned": "WITHOUT ROWID",
    "clustered": "WITHOUT ROWID",
}

_ROWS_PER_STATEMENT = (24, 4, 1)  # 40 columns of 24 rows stay below SQLite's oldest limit of 999 parameters


def insert_rows(db: sqlite3.Connection, insert_clause: str, rows: Sequence[tuple[Any, ...]]) -> None:
    """Insert rows with as few statements as possible.

    Each statement releases Python's GIL, and taking it again interrupts the event loop's thread.
    """
    at = 0
    for count in _ROWS_PER_STATEMENT:
        while len(rows) - at >= count:
            db.execute(
                _insert_statement(insert_clause, len(rows[0]), count), list(chain.from_iterable(rows[at : at + count]))
            )
            at += count


@cache
def _insert_statement(insert_clause: str, column_count: int, row_count: int) -> str:
    marks = f"({', '.join('?' * column_count)})"
    return f"{insert_clause} VALUES {', '.join([marks] * row_count)}"


@contextmanager
def transaction(db: sqlite3.Connection) -> Iterator[sqlite3.Connection]:
    db.execute("BEGIN IMMEDIATE")
    try:
        yield db
        db.execute("COMMIT")
    except BaseException:
        if db.in_transaction:  # SQLite rolls back by itself if the disk is full
            db.execute("ROLLBACK")
        raise


def create_database_file(path: Path, migrations: Sequence[tuple[str, ...]]) -> None:
    """Create a database file with its tables. Other processes never see the file without the tables.

    If two processes create the same file at the same time, the first file is kept.
    """
    draft = path.with_suffix(f".{os.urandom(8).hex()}")
    make_private(draft)
    with closing(sqlite3.connect(draft, isolation_level=None)) as db:
        db.execute("PRAGMA journal_mode = WAL")
        migrate(db, migrations)
    with suppress(FileExistsError):
        os.link(draft, path)
    draft.unlink()


def migrate(db: sqlite3.Connection, migrations: Sequence[tuple[str, ...]]) -> None:
    with transaction(db):
        done = int(db.execute("PRAGMA user_version").fetchall()[0][0])
        for step in pending_migrations(done, migrations):
            for text in step:
                db.execute(render_migration(text, COLUMN_TYPES))
        db.execute(f"PRAGMA user_version = {len(migrations)}")
