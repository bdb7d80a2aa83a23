"""SqliteCache: cache entries in an SQLite file.

The entries survive a restart, and their total size may exceed the machine's memory.
"""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from emberline.core.clock import Clock
from emberline.core.privatefile import make_private
from emberline.gateway.cache.base import MAX_ENTRY_BYTES

T = TypeVar("T")
DISK_TIMEOUT_S = 2.0  # after this time a request continues without the cache
USE_UPDATE_INTERVAL_S = 60.0  # an entry's time of last use is updated at most this often, to save writes
EVICTION_TARGET = 0.9  # fraction of the maximum size that an eviction leaves
RECOUNT_AFTER_PUTS = 256  # puts until the size is measured again, because other processes may write too

SCHEMA = """
PRAGMA journal_mode = WAL;
PRAGMA synchronous = OFF;
CREATE TABLE IF NOT EXISTS entries (
    key TEXT PRIMARY KEY, expires REAL NOT NULL, used REAL NOT NULL, size INTEGER NOT NULL, value BLOB NOT NULL);
CREATE INDEX IF NOT EXISTS entries_used ON entries (used);
"""


class SqliteCache:
    """A cache in one SQLite file. One thread does all database work.

    The file is opened with `synchronous = OFF`, which is fast; a crash of the machine may lose cache entries.
    """

    def __init__(
        self, path: Path, wall_clock: Clock, max_bytes: int = 1 << 30, max_entry_bytes: int = MAX_ENTRY_BYTES
    ) -> None:
        self._path, self._wall = path, wall_clock
        self._max_bytes, self._max_entry_bytes = max_bytes, min(max_bytes, max_entry_bytes)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="cache")
        self._database: sqlite3.Connection | None = None
        self._size_bytes = 0  # as last measured, plus what this process added
        self._puts_since_count = RECOUNT_AFTER_PUTS
        self.failures = 0

    async def get(self, key: str) -> bytes | None:
        return await self._run_in_thread(lambda database: self._select_entry(database, key))

    async def put(self, key: str, value: bytes, ttl_s: float) -> None:
        if len(value) <= self._max_entry_bytes:
            await self._run_in_thread(lambda database: self._insert_entry(database, key, value, ttl_s))

    async def close(self) -> None:
        await self._run_in_thread(lambda database: database.close())
        self._thread.shutdown(wait=False)

    async def _run_in_thread(self, operation: Callable[[sqlite3.Connection], T]) -> T | None:
        try:
            async with asyncio.timeout(DISK_TIMEOUT_S):
                return await asyncio.get_running_loop().run_in_executor(
                    self._thread, lambda: operation(self._open_database())
                )
        except (sqlite3.Error, OSError, TimeoutError):
            self.failures += 1
            return None

    def _open_database(self) -> sqlite3.Connection:
        if self._database is None:
            make_private(self._path)
            database = sqlite3.connect(self._path, timeout=DISK_TIMEOUT_S, isolation_level=None)
            database.executescript(SCHEMA)
            self._database = database
        return self._database

    def _select_entry(self, database: sqlite3.Connection, key: str) -> bytes | None:
        now = self._wall.now()
        row = database.execute("SELECT expires, used, value FROM entries WHERE key = ?", (key,)).fetchone()
        if row is None or row[0] <= now:
            return None
        if now - row[1] > USE_UPDATE_INTERVAL_S:
            database.execute("UPDATE entries SET used = ? WHERE key = ?", (now, key))
        return bytes(row[2])

    def _insert_entry(self, database: sqlite3.Connection, key: str, value: bytes, ttl_s: float) -> None:
        now = self._wall.now()
        row = (key, now + ttl_s, now, len(value), value)
        with database:
            database.execute("BEGIN IMMEDIATE")
            database.execute("INSERT OR REPLACE INTO entries VALUES (?, ?, ?, ?, ?)", row)
            self._size_bytes += len(value)
            self._puts_since_count += 1
            if self._puts_since_count > RECOUNT_AFTER_PUTS or self._size_bytes > self._max_bytes:
                self._measure_size(database)
            if self._size_bytes > self._max_bytes:
                database.execute("DELETE FROM entries WHERE expires <= ?", (now,))
                self._evict_oldest(database)
                self._measure_size(database)

    def _evict_oldest(self, database: sqlite3.Connection) -> None:
        self._measure_size(database)
        over = self._size_bytes - int(self._max_bytes * EVICTION_TARGET)
        if over <= int(self._max_bytes * (1 - EVICTION_TARGET)):
            return
        evicted = []
        for key, size in database.execute("SELECT key, size FROM entries ORDER BY used"):
            evicted.append((key,))
            over -= size
            if over <= 0:
                break
        database.executemany("DELETE FROM entries WHERE key = ?", evicted)

    def _measure_size(self, database: sqlite3.Connection) -> None:
        """Compute the total size of all entries, which reads the whole table."""
        self._size_bytes = int(database.execute("SELECT coalesce(sum(size), 0) FROM entries").fetchone()[0])
        self._puts_since_count = 0
