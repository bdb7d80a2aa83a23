"""Partitions of PostgreSQL tables, one for each day."""

from __future__ import annotations

from datetime import date, timedelta
from typing import Any

from emberline.gateway.store.record_scan import day_start_ms, lowest_id_at

PARTITIONED_TABLES = ("logs", "labels", "payloads")


def partition_name(parent_table: str, day: date) -> str:
    return f"{parent_table}_{day:%Y%m%d}"


async def attach_partition(db: Any, parent_table: str, day: date) -> None:
    """Create a day's partition as a separate table, then attach it to its parent table.

    CREATE TABLE ... PARTITION OF would wait for all readers of the parent table, and block new readers meanwhile.
    """
    name = partition_name(parent_table, day)
    if await db.fetchval("SELECT to_regclass($1)", name) is None:
        low, high = (lowest_id_at(day_start_ms(each)).hex() for each in (day, day + timedelta(days=1)))
        await db.execute(f"CREATE TABLE {name} (LIKE {parent_table} INCLUDING ALL)")
        bounds = rf"FROM ('\x{low}') TO ('\x{high}')"
        await db.execute(f"ALTER TABLE {parent_table} ATTACH PARTITION {name} FOR VALUES {bounds}")
