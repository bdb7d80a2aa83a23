"""Tracer: starts a process's spans, below the client's span or as the root of a new trace."""

from __future__ import annotations

from emberline.core.clock import Clock
from emberline.trace.context import Context
from emberline.trace.span import Kind, Span, Spans


class Tracer:
    def __init__(self, spans: Spans, clock: Clock, share: float = 1.0) -> None:
        """`sample_rate`: share of new traces to record; for others the process that started the trace has decided."""
        self._spans = spans
        self._clock = clock
        self._share = share

    def begin(self, name: str, kind: Kind, parent: Context | None) -> Span:
        """Start a span; `parent`: the client's context, or None for a new trace."""
        return Span(self._spans, self._clock, name, kind, parent or Context.new(self._share))
