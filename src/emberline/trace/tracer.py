"""Tracer: starts the spans of a process, as children of the client's span or as roots of new traces."""

from __future__ import annotations

from emberline.core.clock import Clock
from emberline.trace.context import TraceContext
from emberline.trace.span import Span, SpanKind, SpanSink


class Tracer:
    def __init__(self, sink: SpanSink, clock: Clock, sample_rate: float = 1.0) -> None:
        """`sample_rate`: share of new traces that are recorded.

        For a trace that the client started, the flag in the client's traceparent header decides."""
        self._spans = sink
        self._clock = clock
        self._share = sample_rate

    def start_span(self, name: str, kind: SpanKind, parent: TraceContext | None) -> Span:
        """Return a new span. `parent` is the context that the client sent, or None for a new trace."""
        return Span(self._spans, self._clock, name, kind, parent or TraceContext.start_trace(self._share))
