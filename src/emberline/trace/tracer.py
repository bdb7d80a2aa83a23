"""Tracer: starts a process's spans, below the client's span or as the root of a new trace."""

from __future__ import annotations

from emberline.core.clock import Clock
from emberline.trace.context import TraceContext
from emberline.trace.span import Span, SpanKind, SpanSink


class Tracer:
    def __init__(self, sink: SpanSink, clock: Clock, sample_rate: float = 1.0) -> None:
        """`sample_rate`: share of new traces to record; for others the process that started the trace has decided."""
        self._spans = sink
        self._clock = clock
        self._share = sample_rate

    def start_span(self, name: str, kind: SpanKind, parent: TraceContext | None) -> Span:
        """Start a span; `parent`: the client's context, or None for a new trace."""
        return Span(self._spans, self._clock, name, kind, parent or TraceContext.start_trace(self._share))
