"""Span: an OpenTelemetry span: one operation of a request, with start, end and attributes.

Spans are exported in the JSON format of OTLP, in which integers are strings and ids are hexadecimal.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum
from typing import Any, NamedTuple, Protocol

from emberline.core.clock import Clock
from emberline.trace.context import TraceContext

AttributeValue = str | int | float | bool
Attributes = dict[str, AttributeValue | None]  # an attribute of None is not exported

STATUS_OK, STATUS_ERROR = 1, 2


class SpanKind(IntEnum):
    INTERNAL = 1
    SERVER = 2  # handles a request from another process
    CLIENT = 3  # sends a request to another process


class SpanEvent(NamedTuple):
    name: str
    time: float
    attributes: Mapping[str, AttributeValue | None]


class SpanSink(Protocol):
    """An object that receives each span when the span has ended."""

    def put(self, span: Span) -> None:
        """Queue a span for export, without waiting."""
        ...


class Span:
    """A span whose times come from `clock`.

    If its trace is not sampled, it is not exported and only carries the ids to pass on."""

    __slots__ = (
        "_clock",
        "_sink",
        "attributes",
        "context",
        "end_time",
        "error_code",
        "events",
        "kind",
        "name",
        "parent_id",
        "start_time",
    )

    def __init__(
        self,
        sink: SpanSink,
        clock: Clock,
        name: str,
        kind: SpanKind,
        parent: TraceContext,
        start_time: float | None = None,
    ) -> None:
        self._sink, self._clock = sink, clock
        self.name, self.kind = name, kind
        self.context, self.parent_id = parent.new_child(), parent.span_id
        self.start_time = clock.now() if start_time is None else start_time
        self.end_time: float | None = None
        self.error_code = ""
        self.attributes: Attributes = {}
        self.events: list[SpanEvent] = []

    def start_child(self, name: str, kind: SpanKind = SpanKind.INTERNAL, start_time: float | None = None) -> Span:
        """Return a new child span. If the trace is not sampled, return this span itself."""
        if not self.context.is_sampled:
            return self
        return Span(self._sink, self._clock, name, kind, self.context, start_time)

    def add_event(self, name: str, **attributes: AttributeValue | None) -> None:
        self.events.append(SpanEvent(name, self._clock.now(), attributes))

    def end(self, error_code: str = "", end_time: float | None = None) -> None:
        if not self.context.is_sampled:
            return
        assert self.end_time is None, "a span ends once"
        self.end_time = self._clock.now() if end_time is None else end_time
        self.error_code = error_code
        self._sink.put(self)

    @property
    def size_bytes(self) -> int:
        """An estimate of the span's memory: the total length of its text attributes."""
        return sum(len(value) for value in self.attributes.values() if isinstance(value, str))

    def to_otlp(self, epoch: float) -> dict[str, Any]:
        """Return the span as an OTLP JSON object. `epoch` is the Unix time at which the span's clock was zero."""
        assert self.end_time is not None
        return {
            "traceId": self.context.trace_id,
            "spanId": self.context.span_id,
            **({"parentSpanId": self.parent_id} if self.parent_id else {}),
            "name": self.name,
            "kind": int(self.kind),
            "startTimeUnixNano": _format_nanoseconds(self.start_time + epoch),
            "endTimeUnixNano": _format_nanoseconds(max(self.start_time, self.end_time) + epoch),
            "attributes": encode_attributes({**self.attributes, "error.type": self.error_code or None}),
            "events": [
                {
                    "name": name,
                    "timeUnixNano": _format_nanoseconds(time + epoch),
                    "attributes": encode_attributes(attributes),
                }
                for name, time, attributes in self.events
            ],
            "status": {"code": STATUS_ERROR, "message": self.error_code} if self.error_code else {"code": STATUS_OK},
        }


def encode_attributes(attributes: Mapping[str, AttributeValue | None]) -> list[dict[str, Any]]:
    return [{"key": name, "value": _encode_value(value)} for name, value in attributes.items() if value is not None]


def _encode_value(value: AttributeValue) -> dict[str, Any]:
    match value:
        case bool():
            return {"boolValue": value}
        case int():
            return {"intValue": str(value)}
        case float():
            return {"doubleValue": value}
    return {"stringValue": value}


def _format_nanoseconds(seconds: float) -> str:
    return str(round(seconds * 1e6) * 1000)
