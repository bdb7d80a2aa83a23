"""copy_day: copies one day of a gateway's request log in SQLite to a different day.

Whole tables are copied with SQL in the order of their keys, and indexes are created last. This is faster than appending
rows. No gateway may have the store open.
"""

from __future__ import annotations

import sqlite3
from contextlib import closing
from datetime import date
from pathlib import Path

from emberline.gateway.store.record_scan import day_start_ms
from emberline.gateway.store.rollup import UNIT_MS


def shift_record_id(record_id: str, shift_ms: int) -> str:
    """Return the id of a log record, which begins with its time, with this time shifted by `shift_ms`."""
    return f"{int(record_id[:12], 16) + shift_ms:012x}{record_id[12:]}"


def copy_day(directory: Path, source: date, target: date) -> None:
    ms = day_start_ms(target) - day_start_ms(source)
    for kind in ("logs", "payloads"):
        old, new = (directory / f"{kind}-{day.isoformat()}.db" for day in (source, target))
        _copy_log_file(old, new, ms)
    _copy_rollups(directory / "gateway.db", day_start_ms(source), ms)


def _copy_log_file(source: Path, target: Path, shift_ms: int) -> None:
    with closing(sqlite3.connect(target, isolation_level=None)) as db:
        db.create_function(
            "moved", 1, lambda id: bytes.fromhex(shift_record_id(id.hex(), shift_ms)), deterministic=True
        )
        for pragma in ("journal_mode = OFF", "synchronous = OFF", "cache_size = -200000"):
            db.execute(f"PRAGMA {pragma}")
        db.execute("ATTACH ? AS source", (str(source),))
        parts = db.execute("SELECT type, name, sql FROM source.sqlite_master WHERE sql IS NOT NULL ORDER BY type DESC")
        for kind, name, text in parts.fetchall():  # tables first, filled before their indexes exist
            db.execute(text)
            if kind == "table":
                columns = [f'"{column[1]}"' for column in db.execute(f"PRAGMA source.table_info({name})").fetchall()]
                values = ["moved(id)" if column == '"id"' else column for column in columns]
                db.execute(f"INSERT INTO {name} SELECT {', '.join(values)} FROM source.{name}")
        version = db.execute("PRAGMA source.user_version").fetchall()[0][0]
        db.execute(f"PRAGMA user_version = {version}")
        db.execute("DETACH source")
        db.execute("PRAGMA journal_mode = WAL")


def _copy_rollups(database: Path, start_ms: int, shift_ms: int) -> None:
    with closing(sqlite3.connect(database)) as db, db:
        for table in ("rollups", "spends"):
            columns = [column[1] for column in db.execute(f"PRAGMA table_info({table})").fetchall()]
            values = ["start + ?3" if column == "start" else column for column in columns]
            where = "start >= ?1 AND start < ?2"
            db.execute(
                f"INSERT INTO {table} SELECT {', '.join(values)} FROM {table} WHERE {where}",
                (start_ms, start_ms + UNIT_MS["day"], shift_ms),
            )
