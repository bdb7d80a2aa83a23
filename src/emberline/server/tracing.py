"""Tracing of a server process: the exporter from start to stop, and a span for each exchange."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, closing
from dataclasses import dataclass

from emberline import __version__
from emberline.core.clock import SystemClock, WallClock
from emberline.core.config import TraceConfig
from emberline.core.errors import EmberlineError
from emberline.net.pool import Pool
from emberline.server.exchange import ClientGone, Exchange
from emberline.server.metrics import Family
from emberline.trace.collector import Collector
from emberline.trace.context import PARENT, STATE, Context
from emberline.trace.span import About, Kind, Span
from emberline.trace.tracer import Tracer

CONNECT, IDLE = 2.0, 15.0
OPERATIONS = {"/v1/chat/completions": "chat", "/v1/responses": "chat", "/v1/messages": "chat",
              "/v1/completions": "text_completion", "/v1/embeddings": "embeddings"}  # fmt: skip

Handler = Callable[[Exchange], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Tracing:
    tracer: Tracer
    collector: Collector

    def families(self) -> Iterator[Family]:
        for name, help_, count in (
            ("sent", "Spans that the collector accepted.", self.collector.sent),
            ("dropped", "Spans that the collector did not accept.", self.collector.dropped),
        ):
            full = f"emberline:spans_{name}_total"
            yield Family(full, help_, "counter", [f"{full} {count}"])

    def traced(self, handler: Handler) -> Handler:
        """Return a handler that records each exchange as a span, below the client's own span if any."""

        async def handle(x: Exchange) -> None:
            parent = Context.read(x.header(PARENT))
            if parent is None:
                x.headers.pop(STATE.encode(), None)  # tracestate has no meaning without traceparent
            span = x.span = self.tracer.begin(x.path, Kind.SERVER, parent)
            error = ""
            try:
                await handler(x)
                error = str(x.note.get("error", "")) or (str(x.status) if (x.status or 0) >= 400 else "")
            except (ClientGone, asyncio.CancelledError):
                error = "client_gone"
                raise
            except Exception as e:
                error = e.code if isinstance(e, EmberlineError) else EmberlineError.code
                raise
            finally:
                _tell(span, x)
                span.end(error)

        return handle


def _tell(span: Span, x: Exchange) -> None:
    operation = OPERATIONS.get(x.speaks)
    span.name = f"{operation or x.path} {span.about.get('gen_ai.request.model') or ''}".strip()
    span.about |= {
        "gen_ai.operation.name": operation,
        "gen_ai.provider.name": "emberline",
        "http.route": x.path,
        "http.response.status_code": x.status,
    }


@asynccontextmanager
async def tracing(config: TraceConfig | None, service: str, instance: str = "") -> AsyncIterator[Tracing | None]:
    """Yield the tracing of a process, or None if `config` is None."""
    if config is None:
        yield None
        return
    clock = SystemClock()
    about: About = {"service.name": service, "service.version": __version__, "service.instance.id": instance or None}
    with closing(Pool(connect=CONNECT, idle=IDLE, again=True)) as pool:
        async with Collector(pool, config, about, clock, WallClock()) as collector:
            yield Tracing(Tracer(collector, clock, config.share), collector)
