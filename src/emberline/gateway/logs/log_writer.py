"""LogWriter: writes log records to the store in batches, in the background.

Requests never wait for the log. Records that do not fit into the queue are dropped and counted. A batch is written
again and again until the store is available.
"""

from __future__ import annotations

import asyncio
import logging
from types import TracebackType

from emberline.core.background_batcher import BackgroundBatcher
from emberline.gateway.core.errors import StoreBusy
from emberline.gateway.core.log_record import LogPayload, LogRecord
from emberline.gateway.store.base import GatewayStore

log = logging.getLogger("emberline.gateway.log")

MAX_BATCH_RECORDS = 1000
FIRST_RETRY_DELAY_S, MAX_RETRY_DELAY_S = 0.1, 2.0
MAX_APPEND_ATTEMPTS = 3  # to write a batch that an available store rejects; then its records are written one by one

LogEntry = tuple[LogRecord, LogPayload | None]


class LogWriter:
    """An async context manager. Leaving it writes the queued records, for at most `close_timeout_s`."""

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
        self._close_timeout_s = close_timeout_s
        self._batcher: BackgroundBatcher[LogEntry] = BackgroundBatcher(
            self._write_batch,
            max_batch_items=MAX_BATCH_RECORDS,
            delay_s=flush_delay_s,  # many records take little longer to write than few
            max_queued_items=max_records,
            max_queued_bytes=max_bytes,
            close_timeout_s=close_timeout_s,
        )
        self.failures = 0  # failed appends
        self._last_error = ""  # of the last append; "": it succeeded

    @property
    def written_count(self) -> int:
        """Return the number of written records."""
        return self._batcher.written

    @property
    def dropped_count(self) -> int:
        """Return the number of dropped records."""
        return self._batcher.dropped

    @property
    def queue_length(self) -> int:
        """Return the number of queued records."""
        return self._batcher.queue_length

    def check_store(self) -> None:
        """Raise StoreBusy if the store could not be written at the last attempt, for example because it is full."""
        if self._last_error:
            raise StoreBusy(
                f"log records cannot be written to the store: {self._last_error}",
                hint="check that the store runs and its disk is not full; the records are written once it works again",
            )

    def put(self, record: LogRecord, payload: LogPayload | None = None) -> None:
        """Queue a record without waiting.

        If the queue has too many records, the record is dropped. If it has too many bytes, only the payload is dropped.
        """
        size_bytes = len(payload) if payload is not None else 0
        if not self._batcher.has_room_for(size_bytes):
            payload, size_bytes = None, 0
        self._batcher.put((record, payload), size_bytes)

    async def __aenter__(self) -> LogWriter:
        await self._batcher.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, e: BaseException | None, tb: TracebackType | None
    ) -> None:
        dropped = self.dropped_count
        await self._batcher.__aexit__(kind, e, tb)
        if self.dropped_count > dropped:
            log.warning(
                "Log records dropped at shutdown: records=%d timeout_s=%g",
                self.dropped_count - dropped,
                self._close_timeout_s,
            )

    async def _write_batch(self, batch: list[LogEntry], max_attempts: int = MAX_APPEND_ATTEMPTS) -> int:
        """Write all records of a batch except invalid ones. Return how many records were written.

        While the store is unavailable, the batch is retried. If an available store rejects the batch `max_attempts`
        times, the records are written one by one.
        """
        delay, attempts = FIRST_RETRY_DELAY_S, 0
        while True:
            try:
                await self._store.append_records(batch)
                self._last_error = ""
                return len(batch)
            except Exception as e:  # any error of a store or of an invalid record: the loop must continue
                self.failures += 1
                self._last_error = f"{type(e).__name__}: {e}"
                attempts += not isinstance(e, StoreBusy)
                log.warning(
                    "Writing log records failed, retrying: records=%d error=%s: %s", len(batch), type(e).__name__, e
                )
            if attempts >= max_attempts and await self._is_store_available():
                break
            await asyncio.sleep(delay)
            delay = min(delay * 2, MAX_RETRY_DELAY_S)
        if len(batch) > 1:
            return sum([await self._write_batch([entry], max_attempts=1) for entry in batch])
        self._last_error = ""  # the store works: this record is invalid
        log.error("Log record dropped because the store rejects it: record=%s", batch[0][0].id)
        return 0

    async def _is_store_available(self) -> bool:
        try:
            await self._store.version()
        except Exception:  # as above
            return False
        return True
