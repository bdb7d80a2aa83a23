"""LogWriter: between requests, which never wait for the log, and the store, which wants batches. What does not fit into
the queue is dropped and counted; a store that is away is asked again until it is back."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from types import TracebackType

from emberline.gateway.errors import StoreBusy
from emberline.gateway.logs.record import Payload, Record
from emberline.gateway.store.base import Store

log = logging.getLogger("emberline.gateway.log")

BATCH = 1000
FIRST_PAUSE, LONGEST_PAUSE = 0.1, 2.0  # seconds between two tries at a store that fails
TRIES = 3  # with a batch, at a store that answers otherwise: then the batch is at fault

Entry = tuple[Record, Payload | None]


class LogWriter:
    """Use it as a context: leaving it writes what is queued, as far as `goodbye` seconds allow."""

    def __init__(
        self,
        store: Store,
        *,
        linger: float = 0.2,
        most_records: int = 10_000,
        most_bytes: int = 64 << 20,
        goodbye: float = 5.0,
    ) -> None:
        self._store = store
        self._linger = linger
        self._most_records, self._most_bytes = most_records, most_bytes
        self._goodbye = goodbye
        self._queue: deque[Entry] = deque()
        self._hand: list[Entry] = []  # taken from it, and not written yet
        self._bytes = 0  # of payloads that are queued
        self._some = asyncio.Event()
        self._closing = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self.written = 0
        self.dropped = 0
        self.failures = 0  # of appends

    @property
    def queued(self) -> int:
        return len(self._queue)

    def put(self, record: Record, payload: Payload | None = None) -> None:
        """Never waits: what there is no room for is dropped. Of a payload without room the record is kept."""
        if self._closing.is_set() or len(self._queue) >= self._most_records:
            self.dropped += 1
            return
        size = len(payload) if payload is not None else 0
        if self._bytes + size > self._most_bytes:
            payload, size = None, 0
        self._queue.append((record, payload))
        self._bytes += size
        if not self._some.is_set():
            self._some.set()

    async def __aenter__(self) -> LogWriter:
        self._task = asyncio.create_task(self._run())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, e: BaseException | None, tb: TracebackType | None
    ) -> None:
        assert self._task is not None
        self._closing.set()
        self._some.set()
        try:
            async with asyncio.timeout(self._goodbye):
                await self._task
        except TimeoutError:
            left = len(self._hand) + self.queued
            self.dropped += left
            log.warning("%d records of the log could not be written in %g s", left, self._goodbye)
        self._queue.clear()

    async def _run(self) -> None:
        """While a batch waits to be full others join it: a store takes many hardly slower than a few."""
        while await self._some.wait() and self._queue:  # woken without any: it is left
            if len(self._queue) < BATCH:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._closing.wait(), self._linger)
            self._hand = [self._queue.popleft() for _ in range(min(BATCH, len(self._queue)))]
            self._bytes -= sum(len(payload) for _, payload in self._hand if payload is not None)
            if not (self._queue or self._closing.is_set()):
                self._some.clear()
            await self._write(self._hand)
            self._hand = []

    async def _write(self, batch: list[Entry], most: int = TRIES) -> None:
        """Ends when all of it is written but what is at fault itself. A store that can write nothing now is asked until
        it can; `most`: tries at one that fails otherwise."""
        pause, tries = FIRST_PAUSE, 0
        while True:
            try:
                await self._store.append(batch)
                self.written += len(batch)
                return
            except Exception as e:  # whatever a store or a strange record can cause: the loop goes on
                self.failures += 1
                tries += not isinstance(e, StoreBusy)
                log.warning("%d records of the log were not written: %s: %s", len(batch), type(e).__name__, e)
            if tries >= most and await self._answers():
                break
            await asyncio.sleep(pause)
            pause = min(pause * 2, LONGEST_PAUSE)
        if len(batch) > 1:
            for entry in batch:
                await self._write([entry], most=1)
        else:
            self.dropped += 1
            log.error("record %s cannot be written", batch[0][0].id)

    async def _answers(self) -> bool:
        try:
            await self._store.version()
        except Exception:  # as above
            return False
        return True
