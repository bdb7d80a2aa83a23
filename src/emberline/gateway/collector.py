"""Collector: where spans go, in batches, beside the calls. What it does not take in time is dropped and counted: no
call waits for it, and no memory grows while it is away."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Mapping
from types import TracebackType
from urllib.parse import urlsplit

import msgspec

from emberline.core.errors import EmberlineError, InvalidRequest
from emberline.gateway.providers.base import Outgoing
from emberline.gateway.refusal import retry_after
from emberline.gateway.span import Span, exported
from emberline.gateway.upstream import Upstream

log = logging.getLogger("emberline.gateway.otlp")

BATCH = 256
MOST_SPANS, MOST_BYTES = 4096, 16 << 20  # that wait
LINGER = 1.0  # seconds from the first span of a batch until it is sent
SECONDS = 5.0  # for the collector to answer
PAUSES = (0.5, 1.0, 2.0)  # seconds before it is asked again; then the batch is dropped
LONGEST_PAUSE = 10.0
GOODBYE = 2.0
BUSY = (408, 429, 502, 503, 504)
LARGEST_REPLY = 1 << 16


class _Partial(msgspec.Struct, frozen=True, rename="camel"):
    rejected_spans: int | str = 0


class _Answer(msgspec.Struct, rename="camel"):
    partial_success: _Partial = _Partial()


class Collector:
    """Use it as a context: leaving it sends what waits, as far as a short time allows."""

    def __init__(self, upstream: Upstream, url: str, headers: Mapping[str, str], version: str) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.netloc:
            raise InvalidRequest(f"otlp is {url[:200]!r}, not a URL", param="otlp", hint="http://HOST:4318")
        self._url = url if parts.path.strip("/") else f"{url.rstrip('/')}/v1/traces"
        self._headers = {**headers, "content-type": "application/json"}
        self._upstream = upstream
        self._version = version
        self._queue: deque[Span] = deque()
        self._bytes = 0
        self._some, self._closing = asyncio.Event(), asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._away = False  # it was complained about
        self.sent = self.dropped = 0

    def put(self, span: Span) -> None:
        """Never waits."""
        if self._closing.is_set() or len(self._queue) >= MOST_SPANS or self._bytes + len(span) > MOST_BYTES:
            self.dropped += 1
            return
        self._queue.append(span)
        self._bytes += len(span)
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

    async def _run(self) -> None:
        while not (self._closing.is_set() and not self._queue):
            await self._some.wait()
            self._some.clear()
            await self._pause(LINGER)
            while self._queue:
                batch = [self._queue.popleft() for _ in range(min(BATCH, len(self._queue)))]
                self._bytes -= sum(map(len, batch))
                await self._send(batch)

    async def _pause(self, seconds: float) -> None:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._closing.wait(), seconds)

    async def _send(self, batch: list[Span]) -> None:
        body = exported(batch, self._version)
        for pause in (*PAUSES, None):
            try:
                status, wait, rejected = await self._post(body)
                why = f"it answered {status}"
            except EmberlineError as e:
                status, wait, rejected, why = 0, None, 0, str(e)
            if 200 <= status < 300:
                self.sent += len(batch) - rejected
                self.dropped += rejected
                self._away = False
                return
            if (status and status not in BUSY) or pause is None:
                break
            await self._pause(min(max(wait or 0.0, pause), LONGEST_PAUSE))
        self.dropped += len(batch)
        if not self._away:
            log.warning("spans cannot be exported: %s", why)
        self._away = True

    async def _post(self, body: bytes) -> tuple[int, float | None, int]:
        """The status, how long it wants to be left alone, and how many spans it did not want."""
        incoming = await self._upstream.send(Outgoing("POST", self._url, self._headers, body), SECONDS)
        try:
            said = await incoming.whole(SECONDS, LARGEST_REPLY)
        finally:
            incoming.close()
        return incoming.status, retry_after(incoming.headers), _rejected(said)


def _rejected(said: bytes) -> int:
    try:
        return int(msgspec.json.decode(said, type=_Answer).partial_success.rejected_spans)
    except (msgspec.MsgspecError, UnicodeDecodeError, ValueError):
        return 0  # whatever it says besides its status
