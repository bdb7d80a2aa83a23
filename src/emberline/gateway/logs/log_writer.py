"""LogWriter: writes log records to the store in batches, in the background.

Requests never wait for the log. Records that do not fit into the queue are dropped and counted. A batch is retried
until the store is back.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from types import TracebackType

from emberline.gateway.core.errors import StoreBusy
from emberline.gateway.core.log_record import LogPayload, LogRecord
from emberline.gateway.store.base import GatewayStore

log = logging.getLogger("emberline.gateway.log")

MAX_BATCH_RECORDS = 1000
FIRST_RETRY_DELAY_S, MAX_RETRY_DELAY_S = 0.1, 2.0
MAX_APPEND_ATTEMPTS = 3  # of a batch while the store answers otherwise: then the batch itself is invalid

LogEntry = tuple[LogRecord, LogPayload | None]


class LogWriter:
    """An async context manager: leaving it writes the queued records, for up to `close_timeout_s`."""

    def __init__(
        self,
        store: GatewayStore,
        *,
        flush_delay_s: float = 0.2,
        max_records: int = 10_000,
        max_bytes: int = 64 << 20,
        close_timeout_s: float = 5.0,
    ) -> None:
        self._store = store
        self._flush_delay_s = flush_delay_s
        self._max_records, self._max_bytes = max_records, max_bytes
        self._close_timeout_s = close_timeout_s
        self._queue: deque[LogEntry] = deque()
        self._batch: list[LogEntry] = []  # taken from the queue and not written yet
        self._bytes = 0  # of queued payloads
        self._has_records = asyncio.Event()
        self._closing = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self.written = 0  # records
        self.dropped = 0  # records
        self.failures = 0  # failed appends

    @property
    def queue_length(self) -> int:
        """Return the number of queued records."""
        return len(self._queue)

    def put(self, record: LogRecord, payload: LogPayload | None = None) -> None:
        """Queue a record without waiting.

        If the queue has too many records, the record is dropped. If it has too many bytes, only the payload is dropped.
        """
        if self._closing.is_set() or len(self._queue) >= self._max_records:
            self.dropped += 1
            return
        size = len(payload) if payload is not None else 0
        if self._bytes + size > self._max_bytes:
            payload, size = None, 0
        self._queue.append((record, payload))
        self._bytes += size
        if not self._has_records.is_set():
            self._has_records.set()

    async def __aenter__(self) -> LogWriter:
        self._task = asyncio.create_task(self._run())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, e: BaseException | None, tb: TracebackType | None
    ) -> None:
        assert self._task is not None
        self._closing.set()
        self._has_records.set()
        try:
            async with asyncio.timeout(self._close_timeout_s):
                await self._task
        except TimeoutError:
            left = len(self._batch) + self.queue_length
            self.dropped += left
            log.warning(
                "Log records dropped at shutdown: records=%d reason=not written within %g s",
                left,
                self._close_timeout_s,
            )
        self._queue.clear()

    async def _run(self) -> None:
        """Write batches until closed. A delay fills them: many records take little longer than few."""
        while await self._has_records.wait() and self._queue:  # set with an empty queue: closed
            if len(self._queue) < MAX_BATCH_RECORDS:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._closing.wait(), self._flush_delay_s)
            self._batch = [self._queue.popleft() for _ in range(min(MAX_BATCH_RECORDS, len(self._queue)))]
            self._bytes -= sum(len(payload) for _, payload in self._batch if payload is not None)
            if not (self._queue or self._closing.is_set()):
                self._has_records.clear()
            await self._write(self._batch)
            self._batch = []

    async def _write(self, batch: list[LogEntry], max_attempts: int = MAX_APPEND_ATTEMPTS) -> None:
        """Return when every record is written, or dropped as invalid.

        An unavailable store is retried until it is back; after `max_attempts` failures of an available store, the
        batch is written record by record.
        """
        delay, attempts = FIRST_RETRY_DELAY_S, 0
        while True:
            try:
                await self._store.append_records(batch)
                self.written += len(batch)
                return
            except Exception as e:  # any error of a store or of an invalid record: the loop must continue
                self.failures += 1
                attempts += not isinstance(e, StoreBusy)
                log.warning(
                    "Writing log records failed, retrying: records=%d error=%s: %s", len(batch), type(e).__name__, e
                )
            if attempts >= max_attempts and await self._is_store_available():
                break
            await asyncio.sleep(delay)
            delay = min(delay * 2, MAX_RETRY_DELAY_S)
        if len(batch) > 1:
            for entry in batch:
                await self._write([entry], max_attempts=1)
        else:
            self.dropped += 1
            log.error("Log record dropped, the store rejects it: record=%s", batch[0][0].id)

    async def _is_store_available(self) -> bool:
        try:
            await self._store.version()
        except Exception:  # as above
            return False
        return True
