"""Tracer: where a process's spans begin, below those of who asks, or at the root of a new trace."""

from __future__ import annotations

from emberline.core.clock import Clock
from emberline.trace.context import Context
from emberline.trace.span import Kind, Span, Spans


class Tracer:
    def __init__(self, spans: Spans, clock: Clock, share: float = 1.0) -> None:
        """`share`: of new traces that are wanted; of others, who began them has decided."""
        self._spans = spans
        self._clock = clock
        self._share = share

    def begin(self, name: str, kind: Kind, parent: Context | None) -> Span:
        """`parent`: of who asks, if it says."""
        return Span(self._spans, self._clock, name, kind, parent or Context.new(self._share))
