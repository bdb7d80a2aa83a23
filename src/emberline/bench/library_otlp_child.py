"""One span exporter in a process of its own, for `emberline.bench.library_otlp`: ours, or the OpenTelemetry SDK.

It records and exports spans from an event loop, as a server does, and prints what that took as a line of JSON.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import uvloop

SPANS_PER_PAUSE, PAUSE_S = 20, 0.005

RecordSpan = Callable[[int], None]  # takes the number of the span, and ends the span at once


def make_span_attributes(number: int, padding_chars: int) -> dict[str, Any]:
    """Return span attributes like those of a gateway request, plus a text of `padding_chars`."""
    return {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "openai",
        "gen_ai.request.model": "some-model",
        "gen_ai.usage.input_tokens": number,
        "gen_ai.usage.output_tokens": 17,
        "http.request.method": "POST",
        "http.route": "/v1/chat/completions" + "x" * padding_chars,
        "emberline.ttft": 0.125,
        "emberline.cached": False,
    }


@asynccontextmanager
async def running_our_exporter(url: str, padding_chars: int) -> AsyncIterator[RecordSpan]:
    from emberline.core.clock import SystemClock, WallClock
    from emberline.core.config import TraceConfig
    from emberline.net.connection_pool import HTTPConnectionPool
    from emberline.trace.otlp_exporter import OTLPSpanExporter
    from emberline.trace.span import SpanKind
    from emberline.trace.tracer import Tracer

    pool = HTTPConnectionPool(connect_timeout_s=2.0, idle_timeout_s=30.0)
    clock = SystemClock()
    async with OTLPSpanExporter(pool, TraceConfig(url), {"service.name": "bench"}, clock, WallClock()) as exporter:
        tracer = Tracer(exporter, clock)

        def record_span(number: int) -> None:
            span = tracer.start_span("chat", SpanKind.SERVER, None)
            span.attributes |= make_span_attributes(number, padding_chars)
            span.end()

        yield record_span
    pool.close()


@contextmanager
def running_sdk_exporter(url: str, padding_chars: int) -> Iterator[RecordSpan]:
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor
    from opentelemetry.trace import SpanKind

    provider = TracerProvider(resource=Resource({"service.name": "bench"}), shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(url)))
    tracer = provider.get_tracer("bench")

    def record_span(number: int) -> None:
        span = tracer.start_span("chat", kind=SpanKind.SERVER)
        span.set_attributes(make_span_attributes(number, padding_chars))
        span.end()

    yield record_span
    provider.shutdown()


async def record_spans(record_span: RecordSpan, num_spans: int) -> None:
    for number in range(num_spans):
        record_span(number)
        if number % SPANS_PER_PAUSE == 0:
            await asyncio.sleep(PAUSE_S)


async def measure(library: str, url: str, num_spans: int, padding_chars: int) -> dict[str, float]:
    """Record and export `num_spans` spans, and return the costs by name.

    `start_cpu_s` is the CPU time until the exporter was ready, `cpu_s` the CPU time to record and export the spans, and
    `shutdown_s` the time to stop the exporter. `memory_mb` and `threads` are counted after recording.
    """
    if library == "ours":
        async with running_our_exporter(url, padding_chars) as record_span:
            found = await _measure_recording(record_span, num_spans)
            closing = time.perf_counter()
    else:
        with running_sdk_exporter(url, padding_chars) as record_span:
            found = await _measure_recording(record_span, num_spans)
            closing = time.perf_counter()
    return found | {"shutdown_s": time.perf_counter() - closing, "cpu_s": time.process_time() - found["start_cpu_s"]}


async def _measure_recording(record_span: RecordSpan, num_spans: int) -> dict[str, float]:
    start_cpu_s = time.process_time()
    await record_spans(record_span, num_spans)
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    memory_mb = pages * os.sysconf("SC_PAGE_SIZE") / 1e6
    return {"start_cpu_s": start_cpu_s, "memory_mb": memory_mb, "threads": threading.active_count()}


def main() -> None:
    library, url, count, padding = sys.argv[1:]
    print(json.dumps(uvloop.run(measure(library, url, int(count), int(padding)))), flush=True)


if __name__ == "__main__":
    main()
