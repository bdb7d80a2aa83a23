"""TraceContext: the ids of a trace and a span, as in the W3C header `traceparent`."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass

TRACE_HEADERS = (TRACEPARENT_HEADER, TRACESTATE_HEADER) = ("traceparent", "tracestate")

_TRACEPARENT = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_SAMPLED = 1  # bit of the flags


@dataclass(frozen=True, slots=True)
class TraceContext:
    trace_id: str  # 32 hexadecimal digits
    span_id: str  # 16 hexadecimal digits; "": the trace has no span yet
    is_sampled: bool = True  # its spans are recorded

    @staticmethod
    def parse(header: str) -> TraceContext | None:
        """Return the context in a traceparent header; None if the header is invalid.

        Further fields at the end are accepted if the header has a later version.
        """
        found = _TRACEPARENT.fullmatch(header.strip())
        if found is None:
            return None
        version, trace, span, flags, more = found.groups()
        if version == "ff" or (version == "00" and more) or not int(trace, 16) or not int(span, 16):
            return None
        return TraceContext(trace, span, bool(int(flags, 16) & _SAMPLED))

    @staticmethod
    def start_trace(sample_rate: float) -> TraceContext:
        """Return the context of a new trace, which is sampled with the probability `sample_rate`."""
        trace = os.urandom(16).hex()
        return TraceContext(trace, "", int(trace[16:], 16) < sample_rate * 2.0**64)

    def new_child(self) -> TraceContext:
        """Return the context of a new span in the same trace."""
        return TraceContext(self.trace_id, os.urandom(8).hex(), self.is_sampled)

    def __str__(self) -> str:
        return f"00-{self.trace_id}-{self.span_id}-{_SAMPLED if self.is_sampled else 0:02x}"
