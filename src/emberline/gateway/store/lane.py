"""Lane: a thread with its own connections to SQLite files. What is run in a lane runs one after the other."""

from __future__ import annotations

import asyncio
import sqlite3
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Concatenate, ParamSpec, TypeVar

from emberline.gateway.errors import StoreBusy, StoreFailed

P = ParamSpec("P")
T = TypeVar("T")

LONGEST = 10.0  # seconds of one query
OPEN_FILES = 40
_CHECK_EVERY = 20_000  # steps of SQLite's machine: about a millisecond


class Lane:
    def __init__(self, name: str, *, writes: bool) -> None:
        self._writes = writes
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=f"sqlite-{name}")
        self._open: dict[Path, sqlite3.Connection] = {}  # the one used last is last
        self._deadline = 0.0

    async def run(self, do: Callable[Concatenate[Lane, P], T], *args: P.args, **kwargs: P.kwargs) -> T:
        """`do(lane, ...)` in this lane's thread."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._thread, lambda: self._timed(lambda: do(self, *args, **kwargs)))

    def connection(self, path: Path) -> sqlite3.Connection:
        """Only from inside `run`, and only until the next one is asked for. A reader's file must be there."""
        connection = self._open.pop(path, None)
        if connection is None:
            connection = self._connect(path)
            while len(self._open) >= OPEN_FILES:
                self._open.pop(next(iter(self._open))).close()
        self._open[path] = connection
        return connection

    def release(self, path: Path) -> None:
        """Only from inside `run`."""
        connection = self._open.pop(path, None)
        if connection is not None:
            connection.close()

    async def close(self) -> None:
        def release_all(lane: Lane) -> None:
            for path in list(lane._open):
                lane.release(path)

        await self.run(release_all)
        self._thread.shutdown()

    def _timed(self, do: Callable[[], T]) -> T:
        self._deadline = time.monotonic() + LONGEST
        try:
            return do()
        except sqlite3.Error as e:
            kind = StoreBusy if isinstance(e, sqlite3.OperationalError) else StoreFailed
            raise kind(f"SQLite: {e}", hint="is the disk full, or the file in use by another program?") from e

    def _connect(self, path: Path) -> sqlite3.Connection:
        mode = "rwc" if self._writes else "ro"
        connection = sqlite3.connect(
            f"{path.absolute().as_uri()}?mode={mode}", uri=True, isolation_level=None, timeout=5.0
        )
        if self._writes:
            connection.execute("PRAGMA journal_mode = WAL")
            connection.execute("PRAGMA synchronous = NORMAL")
            connection.execute("PRAGMA wal_autocheckpoint = 8000")  # pages: indexes touch many, most of them again
        else:
            connection.set_progress_handler(lambda: time.monotonic() > self._deadline, _CHECK_EVERY)
        connection.execute("PRAGMA cache_size = -8192")  # 8 MiB
        return connection
