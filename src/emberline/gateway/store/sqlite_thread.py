"""SQLiteThread: one thread with its own connections to SQLite files. It runs one function at a time."""

from __future__ import annotations

import asyncio
import sqlite3
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Concatenate, ParamSpec, TypeVar

from emberline.gateway.core.errors import StoreBusy, StoreFailed

P = ParamSpec("P")
T = TypeVar("T")

QUERY_TIMEOUT_S = 10.0
MAX_OPEN_FILES = 40
_DEADLINE_CHECK_STEPS = 20_000  # instructions of SQLite's virtual machine: about a millisecond


class SQLiteThread:
    def __init__(self, name: str, *, writes: bool) -> None:
        self._writes = writes
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=f"sqlite-{name}")
        self._open: dict[Path, sqlite3.Connection] = {}  # ordered by last use
        self._deadline = 0.0

    async def run(self, operation: Callable[Concatenate[SQLiteThread, P], T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run `operation(self, ...)` in this thread and return its result. Raise StoreFailed on SQLite errors."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(
            self._thread, lambda: self._run_with_deadline(lambda: operation(self, *args, **kwargs))
        )

    def connection(self, path: Path) -> sqlite3.Connection:
        """Return the connection to a file. It is valid until the next call of this method.

        Call the method only inside `run`. A writing thread creates a missing file; for a reading thread the file must
        exist.
        """
        connection = self._open.pop(path, None)
        if connection is None:
            connection = self._connect(path)
            while len(self._open) >= MAX_OPEN_FILES:
                self._open.pop(next(iter(self._open))).close()
        self._open[path] = connection
        return connection

    def close_file(self, path: Path) -> None:
        """Close the connection to a file. Call it only inside `run`."""
        connection = self._open.pop(path, None)
        if connection is not None:
            connection.close()

    async def close(self) -> None:
        def release_all(thread: SQLiteThread) -> None:
            for path in list(thread._open):
                thread.close_file(path)

        await self.run(release_all)
        self._thread.shutdown()

    def _run_with_deadline(self, operation: Callable[[], T]) -> T:
        self._deadline = time.monotonic() + QUERY_TIMEOUT_S
        try:
            return operation()
        except sqlite3.Error as e:
            kind = StoreBusy if isinstance(e, sqlite3.OperationalError) else StoreFailed
            raise kind(
                f"SQLite query failed: {e}", hint="check that the disk is not full and no other program uses the file"
            ) from e

    def _connect(self, path: Path) -> sqlite3.Connection:
        mode = "rwc" if self._writes else "ro"
        connection = sqlite3.connect(
            f"{path.absolute().as_uri()}?mode={mode}", uri=True, isolation_level=None, timeout=5.0
        )
        if self._writes:
            connection.execute("PRAGMA journal_mode = WAL")
            connection.execute("PRAGMA synchronous = NORMAL")
            # pages; a batch changes many index pages, most of them again and again
            connection.execute("PRAGMA wal_autocheckpoint = 8000")
        else:
            connection.set_progress_handler(lambda: time.monotonic() > self._deadline, _DEADLINE_CHECK_STEPS)
        connection.execute("PRAGMA cache_size = -8192")  # 8 MiB
        return connection
