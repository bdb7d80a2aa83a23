"""Collector: where spans go, in batches, beside the requests. What it does not take in time is dropped and counted: no
request waits for it, and no memory grows while it is away."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Mapping
from types import TracebackType
from urllib.parse import urlsplit

import msgspec

from emberline.core.clock import Clock
from emberline.core.config import TraceConfig
from emberline.core.errors import EmberlineError
from emberline.net.notjson import NOT_JSON
from emberline.net.pool import Pool
from emberline.trace.span import About, Span, attributes

log = logging.getLogger("emberline.trace")

BATCH = 64  # to write more at once would hold up the requests
MOST_SPANS, MOST_BYTES = 4096, 16 << 20  # that wait
LINGER = 1.0  # seconds from the first span of a batch until it is sent
PAUSES = (0.5, 1.0, 2.0)  # seconds before it is asked again; then the batch is dropped
LONGEST_PAUSE = 10.0
GOODBYE = 2.0
SECONDS = 5.0  # for the collector to answer
LARGEST = 1 << 16  # bytes of its reply
BUSY = (408, 429, 502, 503, 504)


class Collector:
    """Use it as a context: leaving it sends what waits, as far as a short time allows."""

    def __init__(self, pool: Pool, config: TraceConfig, about: About, clock: Clock, wall: Clock) -> None:
        """`about`: the process. `wall` tells seconds since 1970."""
        self._pool = pool
        parts = urlsplit(config.url)
        self._origin, self._path = f"{parts.scheme}://{parts.netloc}", parts.path + (parts.query and f"?{parts.query}")
        self._headers = {**config.headers, "content-type": "application/json"}
        self._resource = {"attributes": attributes(about)}
        self._clock, self._wall = clock, wall
        self._queue: deque[Span] = deque()
        self._bytes = 0
        self._some, self._closing = asyncio.Event(), asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._away = False  # it was complained about
        self.sent = self.dropped = 0

    def put(self, span: Span) -> None:
        """Never waits."""
        if self._closing.is_set() or len(self._queue) >= MOST_SPANS or self._bytes + span.size > MOST_BYTES:
            self.dropped += 1
            return
        self._queue.append(span)
        self._bytes += span.size
        self._some.set()

    async def __aenter__(self) -> Collector:
        self._task = asyncio.create_task(self._run())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, e: BaseException | None, tb: TracebackType | None
    ) -> None:
        assert self._task is not None
        self._closing.set()
        self._some.set()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(GOODBYE):
                await self._task
        self.dropped += len(self._queue)

    async def _run(self) -> None:
        while not (self._closing.is_set() and not self._queue):
            await self._some.wait()
            self._some.clear()
            await self._pause(LINGER)
            while self._queue:
                batch = [self._queue.popleft() for _ in range(min(BATCH, len(self._queue)))]
                self._bytes -= sum(span.size for span in batch)
                taken = 0
                try:
                    taken = await self._send(batch)
                except Exception:
                    log.exception("spans were lost")  # and the next are not
                finally:  # also if there is no more time
                    self.sent += taken
                    self.dropped += len(batch) - taken

    async def _pause(self, seconds: float) -> None:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._closing.wait(), seconds)

    async def _send(self, batch: list[Span]) -> int:
        """How many of them were taken."""
        body, why = self._exported(batch), ""
        for pause in (*PAUSES, None):
            try:
                status, headers, said = await self._post(body)
                why = f"it answered {status}"
            except EmberlineError as e:
                status, headers, said, why = 0, {}, b"", str(e)
            if 200 <= status < 300:
                self._away = False
                return len(batch) - min(_rejected(said), len(batch))
            if (status and status not in BUSY) or pause is None:
                break
            await self._pause(min(max(_wanted(headers), pause), LONGEST_PAUSE))
        if not self._away:
            log.warning("spans cannot be exported: %s", why)
        self._away = True
        return 0

    async def _post(self, body: bytes) -> tuple[int, Mapping[str, str], bytes]:
        reply = await self._pool.ask(self._origin, "POST", self._path, self._headers, body, SECONDS)
        try:
            return reply.status, reply.headers, await reply.whole(SECONDS, LARGEST)
        finally:
            reply.close()

    def _exported(self, batch: list[Span]) -> bytes:
        """The body of an export."""
        epoch = self._wall.now() - self._clock.now()
        scoped = {"scope": {"name": "emberline"}, "spans": [span.told(epoch) for span in batch]}
        return msgspec.json.encode({"resourceSpans": [{"resource": self._resource, "scopeSpans": [scoped]}]})


def _wanted(headers: Mapping[str, str]) -> float:
    """Seconds that it wants to be left alone."""
    said = headers.get("retry-after", "")
    return float(said) if said.isascii() and said.isdigit() else 0.0


def _rejected(said: bytes) -> int:
    try:
        return max(0, int(msgspec.json.decode(said)["partialSuccess"]["rejectedSpans"]))
    except (*NOT_JSON, KeyError, TypeError, ValueError):
        return 0  # whatever it says besides its status
