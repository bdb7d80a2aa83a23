"""OTLPSpanExporter: sends spans to an OpenTelemetry (OTLP) collector, in batches and in the background.

Spans that the collector does not accept in time are dropped and counted. So no request waits for the collector, and the
memory for spans is bounded while the collector is unavailable.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from types import TracebackType
from urllib.parse import urlsplit

import msgspec

from emberline.core.background_batcher import BackgroundBatcher
from emberline.core.clock import Clock
from emberline.core.config import TraceConfig
from emberline.core.errors import EmberlineError
from emberline.net.connection_pool import HTTPConnectionPool
from emberline.net.json_errors import JSON_DECODE_ERRORS
from emberline.trace.span import Attributes, Span, encode_attributes

log = logging.getLogger("emberline.trace")

MAX_BATCH_SPANS = 64  # encoding more at once would delay requests
MAX_QUEUED_SPANS, MAX_QUEUED_BYTES = 4096, 16 << 20
BATCH_DELAY_S = 1.0  # from the first span of a batch until the batch is sent
RETRY_DELAYS_S = (0.5, 1.0, 2.0)  # before each retry; after the last the batch is dropped
MAX_RETRY_DELAY_S = 10.0
SHUTDOWN_TIMEOUT_S = 2.0
EXPORT_TIMEOUT_S = 5.0  # for the collector's reply
MAX_REPLY_BYTES = 1 << 16
RETRYABLE_STATUSES = (408, 429, 502, 503, 504)


class OTLPSpanExporter:
    """An async context manager. At its exit the queued spans are sent, for up to SHUTDOWN_TIMEOUT_S."""

    def __init__(
        self, pool: HTTPConnectionPool, config: TraceConfig, resource: Attributes, clock: Clock, wall_clock: Clock
    ) -> None:
        """`resource`: the attributes of this process. `clock`: the clock that spans use.

        `wall_clock` returns Unix time."""
        self._pool = pool
        parts = urlsplit(config.collector_url)
        self._origin, self._path = f"{parts.scheme}://{parts.netloc}", parts.path + (parts.query and f"?{parts.query}")
        self._headers = {**config.collector_headers, "content-type": "application/json"}
        self._resource = {"attributes": encode_attributes(resource)}
        self._clock, self._wall = clock, wall_clock
        self._batcher: BackgroundBatcher[Span] = BackgroundBatcher(
            self._send_batch,
            max_batch_items=MAX_BATCH_SPANS,
            delay_s=BATCH_DELAY_S,
            max_queued_items=MAX_QUEUED_SPANS,
            max_queued_bytes=MAX_QUEUED_BYTES,
            close_timeout_s=SHUTDOWN_TIMEOUT_S,
        )
        self._is_failing = False  # the collector fails, and this was logged

    @property
    def sent_count(self) -> int:
        """Return the number of spans that the collector accepted."""
        return self._batcher.written

    @property
    def dropped_count(self) -> int:
        """Return the number of dropped spans."""
        return self._batcher.dropped

    def put(self, span: Span) -> None:
        """Queue a span for export without waiting. The span is dropped if the queue is full."""
        self._batcher.put(span, span.size_bytes)

    async def __aenter__(self) -> OTLPSpanExporter:
        await self._batcher.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, e: BaseException | None, tb: TracebackType | None
    ) -> None:
        await self._batcher.__aexit__(kind, e, tb)

    async def _send_batch(self, batch: list[Span]) -> int:
        """Send a batch, with retries, and return the number of spans that the collector accepted."""
        body, reason = self._encode_batch(batch), ""
        for pause in (*RETRY_DELAYS_S, None):
            try:
                status, headers, reply = await self._post_batch(body)
                reason = f"status {status}"
            except EmberlineError as e:
                status, headers, reply, reason = 0, {}, b"", str(e)
            if 200 <= status < 300:
                self._is_failing = False
                return len(batch) - min(_count_rejected_spans(reply), len(batch))
            if (status and status not in RETRYABLE_STATUSES) or pause is None:
                break
            await self._batcher.sleep(min(max(_retry_after_seconds(headers), pause), MAX_RETRY_DELAY_S))
        if not self._is_failing:
            log.warning("Span export failed, dropping spans: collector=%s reason=%s", self._origin, reason)
        self._is_failing = True
        return 0

    async def _post_batch(self, body: bytes) -> tuple[int, Mapping[str, str], bytes]:
        reply = await self._pool.request(self._origin, "POST", self._path, self._headers, body, EXPORT_TIMEOUT_S)
        try:
            return reply.status, reply.headers, await reply.read_all(EXPORT_TIMEOUT_S, MAX_REPLY_BYTES)
        finally:
            reply.close()

    def _encode_batch(self, batch: list[Span]) -> bytes:
        """Return the spans as the JSON body of an OTLP export request."""
        epoch = self._wall.now() - self._clock.now()
        scoped = {"scope": {"name": "emberline"}, "spans": [span.to_otlp(epoch) for span in batch]}
        return msgspec.json.encode({"resourceSpans": [{"resource": self._resource, "scopeSpans": [scoped]}]})


def _retry_after_seconds(headers: Mapping[str, str]) -> float:
    """Return the seconds in the Retry-After header; 0 if there is no such header."""
    value = headers.get("retry-after", "")
    return float(value) if value.isascii() and value.isdigit() else 0.0


def _count_rejected_spans(reply: bytes) -> int:
    try:
        return max(0, int(msgspec.json.decode(reply)["partialSuccess"]["rejectedSpans"]))
    except (*JSON_DECODE_ERRORS, KeyError, TypeError, ValueError):
        return 0  # the status was a success
