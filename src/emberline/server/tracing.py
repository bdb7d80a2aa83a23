"""Starts and stops the trace exporter of a server process, and records a span for each HTTP request."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, closing
from dataclasses import dataclass

from emberline import __version__
from emberline.core.clock import SystemClock, WallClock
from emberline.core.config import TraceConfig
from emberline.core.errors import EmberlineError
from emberline.net.connection_pool import HTTPConnectionPool
from emberline.server.exchange import ClientDisconnected, Exchange
from emberline.server.metrics import MetricFamily
from emberline.trace.context import TRACEPARENT_HEADER, TRACESTATE_HEADER, TraceContext
from emberline.trace.otlp_exporter import OTLPSpanExporter
from emberline.trace.span import Attributes, Span, SpanKind
from emberline.trace.tracer import Tracer

COLLECTOR_CONNECT_TIMEOUT_S, COLLECTOR_IDLE_TIMEOUT_S = 2.0, 15.0
OPERATION_BY_PATH = {"/v1/chat/completions": "chat", "/v1/responses": "chat", "/v1/messages": "chat",
              "/v1/completions": "text_completion", "/v1/embeddings": "embeddings",
              "/api/chat": "chat", "/api/generate": "text_completion",
              "/api/embed": "embeddings", "/api/embeddings": "embeddings"}  # fmt: skip

Handler = Callable[[Exchange], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class RequestTracing:
    tracer: Tracer
    collector: OTLPSpanExporter

    def families(self) -> Iterator[MetricFamily]:
        for name, help_, count in (
            ("sent", "Spans that the collector accepted.", self.collector.sent_count),
            ("dropped", "Spans that the collector did not accept.", self.collector.dropped_count),
        ):
            full = f"emberline:spans_{name}_total"
            yield MetricFamily(full, help_, "counter", [f"{full} {count}"])

    def trace_handler(self, handler: Handler) -> Handler:
        """Return a handler that records a span for each request. The client's span, if any, is the parent."""

        async def handle(exchange: Exchange) -> None:
            parent = TraceContext.parse(exchange.header(TRACEPARENT_HEADER))
            if parent is None:
                exchange.headers.pop(TRACESTATE_HEADER.encode(), None)  # tracestate has no meaning without traceparent
            span = exchange.span = self.tracer.start_span(exchange.path, SpanKind.SERVER, parent)
            error = ""
            try:
                await handler(exchange)
                error = str(exchange.log_fields.get("error", "")) or (
                    str(exchange.status) if (exchange.status or 0) >= 400 else ""
                )
            except (ClientDisconnected, asyncio.CancelledError):
                error = "client_gone"
                raise
            except Exception as e:
                error = e.code if isinstance(e, EmberlineError) else EmberlineError.code
                raise
            finally:
                _set_span_attributes(span, exchange)
                span.end(error)

        return handle


def _set_span_attributes(span: Span, exchange: Exchange) -> None:
    operation = OPERATION_BY_PATH.get(exchange.protocol_path)
    span.name = f"{operation or exchange.path} {span.attributes.get('gen_ai.request.model') or ''}".strip()
    span.attributes |= {
        "gen_ai.operation.name": operation,
        "gen_ai.provider.name": "emberline",
        "http.route": exchange.path,
        "http.response.status_code": exchange.status,
    }


@asynccontextmanager
async def open_tracing(
    config: TraceConfig | None, service: str, instance: str = ""
) -> AsyncIterator[RequestTracing | None]:
    """Yield a RequestTracing that exports spans as `config` says; None if `config` is None."""
    if config is None:
        yield None
        return
    clock = SystemClock()
    about: Attributes = {
        "service.name": service,
        "service.version": __version__,
        "service.instance.id": instance or None,
    }
    with closing(
        HTTPConnectionPool(
            connect_timeout_s=COLLECTOR_CONNECT_TIMEOUT_S, idle_timeout_s=COLLECTOR_IDLE_TIMEOUT_S, retries_stale=True
        )
    ) as pool:
        async with OTLPSpanExporter(pool, config, about, clock, WallClock()) as collector:
            yield RequestTracing(Tracer(collector, clock, config.traced_share), collector)
