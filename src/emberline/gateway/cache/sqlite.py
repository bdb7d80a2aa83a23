"""SqliteCache: cache entries in a file, which survive a restart and may exceed the memory."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from emberline.core.clock import Clock
from emberline.core.privatefile import make_private
from emberline.gateway.cache.base import LARGEST

T = TypeVar("T")
WAIT = 2.0  # after it the call continues without the cache
REMEMBERED = 60.0  # a use is recorded only if the last one is older, to save writes
ROOM = 0.9  # fraction of the maximum size that an eviction leaves
COUNTED = 256  # the size is measured again, because other processes may write too

SCHEMA = """
PRAGMA journal_mode = WAL;
PRAGMA synchronous = OFF;
CREATE TABLE IF NOT EXISTS entries (
    key TEXT PRIMARY KEY, expires REAL NOT NULL, used REAL NOT NULL, size INTEGER NOT NULL, value BLOB NOT NULL);
CREATE INDEX IF NOT EXISTS entries_used ON entries (used);
"""


class SqliteCache:
    """A cache in one SQLite file; one thread does all database work.

    `synchronous = OFF`: a crash of the machine may lose cache entries.
    """

    def __init__(self, path: Path, wall: Clock, most: int = 1 << 30, largest: int = LARGEST) -> None:
        self._path, self._wall, self._most, self._largest = path, wall, most, min(most, largest)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="cache")
        self._base: sqlite3.Connection | None = None
        self._bytes = 0  # as last measured, plus what this process added
        self._put_since = COUNTED
        self.failures = 0

    async def get(self, key: str) -> bytes | None:
        return await self._do(lambda base: self._get(base, key))

    async def put(self, key: str, value: bytes, seconds: float) -> None:
        if len(value) <= self._largest:
            await self._do(lambda base: self._put(base, key, value, seconds))

    async def close(self) -> None:
        await self._do(lambda base: base.close())
        self._thread.shutdown(wait=False)

    async def _do(self, what: Callable[[sqlite3.Connection], T]) -> T | None:
        try:
            async with asyncio.timeout(WAIT):
                return await asyncio.get_running_loop().run_in_executor(self._thread, lambda: what(self._opened()))
        except (sqlite3.Error, OSError, TimeoutError):
            self.failures += 1
            return None

    def _opened(self) -> sqlite3.Connection:
        if self._base is None:
            make_private(self._path)
            base = sqlite3.connect(self._path, timeout=WAIT, isolation_level=None)
            base.executescript(SCHEMA)
            self._base = base
        return self._base

    def _get(self, base: sqlite3.Connection, key: str) -> bytes | None:
        now = self._wall.now()
        row = base.execute("SELECT expires, used, value FROM entries WHERE key = ?", (key,)).fetchone()
        if row is None or row[0] <= now:
            return None
        if now - row[1] > REMEMBERED:
            base.execute("UPDATE entries SET used = ? WHERE key = ?", (now, key))
        return bytes(row[2])

    def _put(self, base: sqlite3.Connection, key: str, value: bytes, seconds: float) -> None:
        now = self._wall.now()
        row = (key, now + seconds, now, len(value), value)
        with base:
            base.execute("BEGIN IMMEDIATE")
            base.execute("INSERT OR REPLACE INTO entries VALUES (?, ?, ?, ?, ?)", row)
            self._bytes += len(value)
            self._put_since += 1
            if self._put_since > COUNTED or self._bytes > self._most:
                self._count(base)
            if self._bytes > self._most:
                base.execute("DELETE FROM entries WHERE expires <= ?", (now,))
                self._make_room(base)
                self._count(base)

    def _make_room(self, base: sqlite3.Connection) -> None:
        self._count(base)
        over = self._bytes - int(self._most * ROOM)
        if over <= int(self._most * (1 - ROOM)):
            return
        evicted = []
        for key, size in base.execute("SELECT key, size FROM entries ORDER BY used"):
            evicted.append((key,))
            over -= size
            if over <= 0:
                break
        base.executemany("DELETE FROM entries WHERE key = ?", evicted)

    def _count(self, base: sqlite3.Connection) -> None:
        """Measure the size of all entries, which reads the whole table."""
        self._bytes = int(base.execute("SELECT coalesce(sum(size), 0) FROM entries").fetchone()[0])
        self._put_since = 0
